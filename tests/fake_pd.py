"""PD disaggregation for the stand-in of `vllm serve`: what NixlConnector adds to a server.

As in vLLM, the request and not the server's role decides. One with `do_remote_decode` is a prefill: its answer
tells where its KV blocks lie, and they are kept until they were pulled or the lease has run out. One with
`do_remote_prefill` has such blocks pulled before it runs. A pull really reaches the other server: a TCP exchange
of a line each way on its side channel, kept open as long as the transfer takes.

    decoder     {"engine_id": ..., "request_id": ...}
    prefiller   {"engine_id": ...}                       then nothing, until the decoder says "done"
"""

import asyncio
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fake_metrics import Histogram, counter

LEASE = 30.0
BYTES_PER_TOKEN = 2048
XFER_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
XFER_BYTES = tuple(2.0 ** (10 + i) for i in range(1, 25, 2))


class PullError(Exception):
    """The blocks cannot be had."""


@dataclass(frozen=True)
class Sabotage:
    """What goes wrong with transfers; durations in seconds."""

    seconds: float = 0.0  # that a transfer takes
    patience: float = 0.0  # before a pull that cannot be is given up
    port_shift: int = 0  # the side channel listens so far from the port that is announced


class KvTransfer:
    """One server's end of the side channel, the leases that it gave, and its share of /metrics."""

    def __init__(self, config: dict[str, Any], sabotage: Sabotage, block: int) -> None:
        self.sabotage, self.block = sabotage, block
        self.engine_id = config.get("engine_id") or str(uuid.uuid4())
        self.lease = float((config.get("kv_connector_extra_config") or {}).get("kv_lease_duration", LEASE))
        self.host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
        self.port = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"))
        self.leases: dict[str, asyncio.TimerHandle] = {}
        self.failed = self.expired = 0
        self.seconds = Histogram("nixl_xfer_time_seconds", "Histogram of transfer duration.", XFER_SECONDS)
        self.bytes = Histogram("nixl_bytes_transferred", "Histogram of bytes transferred.", XFER_BYTES)

    async def listen(self) -> None:
        """Open the side channel.

        Raises:
            OSError: its port is taken.
        """
        await asyncio.start_server(self._serve, self.host, self.port + self.sabotage.port_shift)

    # --- Prefiller ---

    def hand_over(self, request_id: str, prompt_len: int) -> dict[str, Any]:
        """Keep a request's blocks; return what a decoder needs in order to pull them."""
        timer = asyncio.get_running_loop().call_later(self.lease, self._expire, request_id)
        self.leases[request_id] = timer
        return {
            "do_remote_prefill": True, "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 1 + self.blocks(prompt_len)))],
            "remote_engine_id": self.engine_id, "remote_request_id": request_id,
            "remote_host": self.host, "remote_port": self.port, "tp_size": 1, "remote_num_tokens": prompt_len,
            "remote_blocks_expiry_time": None,
        }  # fmt: skip

    def blocks(self, tokens: int) -> int:
        """Return how many blocks these tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block)

    def _expire(self, request_id: str) -> None:
        del self.leases[request_id]
        self.expired += 1
        print(f"WARNING [base_worker.py:2036] Releasing expired KV blocks for request {request_id} which were "
              "retrieved by 0 remote worker(s) before lease expired.", flush=True)  # fmt: skip

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            wanted = json.loads(await reader.readline() or "{}")
            writer.write(json.dumps({"engine_id": self.engine_id}).encode() + b"\n")
            if await reader.readline() == b"done\n":
                self._release(wanted["request_id"])
        except (ConnectionError, KeyError, ValueError):
            pass  # somebody else's bytes, or a decoder that went away: the lease runs on
        finally:
            writer.close()

    def _release(self, request_id: str) -> None:
        """Free blocks; as on the real server, those that are gone already were "pulled" all the same."""
        if (timer := self.leases.pop(request_id, None)) is not None:
            timer.cancel()
            return
        print(f"ERROR [pull_worker.py:380] Potentially invalid KV blocks for unrecognized request {request_id} "
              "were retrieved by a decode worker. They may have expired.", flush=True)  # fmt: skip

    # --- Decoder ---

    async def pull(self, params: dict[str, Any], blocks: int) -> None:
        """Fetch a prompt's blocks from where it was prefilled.

        Raises:
            PullError: the server is not there, is another one, or went away meanwhile.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await self._exchange(params)
        except (OSError, KeyError, ValueError, PullError) as failure:
            self.failed += 1
            await asyncio.sleep(began + self.sabotage.patience - loop.time())
            raise PullError(str(failure)) from failure
        self.seconds.observe(loop.time() - began)
        self.bytes.observe(blocks * self.block * BYTES_PER_TOKEN)

    async def _exchange(self, params: dict[str, Any]) -> None:
        reader, writer = await asyncio.open_connection(params["remote_host"], params["remote_port"])
        try:
            asked = {"engine_id": params["remote_engine_id"], "request_id": params["remote_request_id"]}
            writer.write(json.dumps(asked).encode() + b"\n")
            if json.loads(await reader.readline() or "{}").get("engine_id") != params["remote_engine_id"]:
                raise PullError("another engine, or none")
            try:
                await asyncio.wait_for(reader.read(1), self.sabotage.seconds)
            except TimeoutError:
                writer.write(b"done\n")
                await writer.drain()
            else:
                raise PullError("the prefiller went away")
        finally:
            writer.close()

    # --- Both ---

    def metrics(self, labels: str) -> Iterator[str]:
        """Yield what the connector adds to /metrics."""
        yield from self.seconds.lines(labels)
        yield from self.bytes.lines(labels)
        yield from counter("nixl_num_failed_transfers", (labels, self.failed))
        yield from counter("nixl_num_kv_expired_reqs", (labels, self.expired))


def from_argument(text: str | None, sabotage: Sabotage, block: int) -> KvTransfer | None:
    """Return what `--kv-transfer-config` asks for."""
    config = json.loads(text) if text else {}
    return KvTransfer(config, sabotage, block) if config.get("kv_connector") == "NixlConnector" else None
