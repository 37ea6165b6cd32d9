"""Let each prefiller meet each decoder before the clock starts.

The first transfer between two servers pays for NIXL's handshake, half a second and more, which no user of a
running group would see. The pairs are driven directly, past the front, as a front does it: prefill with one token,
hand what the prefiller answers to the decoder.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np

from tuner.errors import FailureKind, InvalidReplay
from tuner.outside import blotted
from tuner.replay.client import finish
from tuner.replay.connection import authorization
from tuner.replay.prompts import ordinary_tokens
from tuner.replay.stream import LONGEST_MESSAGE, MOST_OF_AN_ERROR
from tuner.seams import Member
from tuner.serving import Json, Role

DEADLINE = 60.0
OK = 200
MOST_BYTES = 1 << 22
# Longer than any block: 16 tokens on GPUs, 128 on a CPU.
PROMPT = 272

ASK: dict[str, Json] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def warm(members: Sequence[Member], model: str, *, seed: int, vocab_size: int, check_alive: Callable[[], None]) -> None:
    """Hand one made-up request from each prefiller to each decoder.

    Raises:
        InvalidReplay: kind no_transfer: a pair cannot; says which.
        ServerDied: from `check_alive`.
    """
    rng, tokens = np.random.default_rng([seed, vocab_size]), ordinary_tokens(vocab_size)
    prefillers, decoders = ([m for m in members if m.role is role] for role in (Role.PREFILLER, Role.DECODER))
    for p, prefiller in enumerate(prefillers):
        for d, decoder in enumerate(decoders):
            prompt = [int(token) for token in rng.integers(tokens.start, tokens.stop, PROMPT)]
            said = finish(_hand_over(prefiller, decoder, {"model": model, "prompt": prompt, "ignore_eos": True}))
            if said is None:
                continue
            check_alive()
            raise InvalidReplay(
                FailureKind.NO_TRANSFER,
                f"decoder {d} cannot fetch from prefiller {p}: {said}",
                hint="is VLLM_NIXL_SIDE_CHANNEL_HOST an address the decoder reaches, and kv_buffer_device one "
                "that this host can move?",
            )


async def _hand_over(prefiller: Member, decoder: Member, body: dict[str, Any]) -> str | None:
    """Take one request from a prefiller to a decoder; return what went wrong, in words."""
    said: str | None = None
    try:
        async with (
            asyncio.timeout(DEADLINE),
            aiohttp.ClientSession(trust_env=False, headers=authorization()) as http,
        ):
            first = await _ask(http, prefiller, body | {"max_tokens": 1, "kv_transfer_params": ASK})
            there = first.get("kv_transfer_params") if isinstance(first, dict) else None
            if not isinstance(there, dict) or not there.get("remote_block_ids"):
                return "the prefiller names no KV cache to fetch"
            await _ask(http, decoder, body | {"max_tokens": 2, "kv_transfer_params": there})
    except TimeoutError:
        said = f"no answer within {DEADLINE:g} s"
    except _RefusedError as error:
        said = str(error)
    except (aiohttp.ClientError, OSError) as error:
        said = f"no whole answer: {error or type(error).__name__}"
    except (ValueError, RecursionError):
        said = "an answer is not JSON"
    return said


async def _ask(http: aiohttp.ClientSession, member: Member, body: dict[str, Any]) -> Any:
    async with http.post(f"{member.url}/v1/completions", json=body) as answer:
        if answer.status == OK:
            body_read = b""
            async for part in answer.content.iter_any():  # one read brings what has arrived, not the whole
                body_read += part
                if len(body_read) > MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES} bytes")
            return json.loads(body_read)
        head = await answer.content.read(MOST_OF_AN_ERROR)
        words = blotted(" ".join(head.decode(errors="replace").split()))[:LONGEST_MESSAGE]
        raise _RefusedError(f"the {member.role} answers {answer.status}: {words}")


class _RefusedError(Exception):
    """A server answered with an error."""
