"""The fake prefiller and decoder: what is handed over is pulled and not computed, and that can fail in several ways."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deployment_data import wait_until
from front_data import Answer, ask, member, metrics, needs_router, pd_pair, stream
from replay_data import FakeServer, serving

from tuner.serving import Role

pytestmark = pytest.mark.once

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def prefill(server: FakeServer, **more: Any) -> dict[str, Any]:
    """Have the prompt prefilled; return what the decoder is to be given."""
    params: dict[str, Any] = ask(server.url, max_tokens=1, kv_transfer_params=PREFILL, **more).json[
        "kv_transfer_params"
    ]
    return params


def sources(server: FakeServer) -> list[float]:
    """Return where prompt tokens came from: computed, cached, transferred."""
    seen = metrics(server)
    return [seen[source] for source in SOURCES]


def failure(answer: Answer) -> tuple[int, str]:
    error = answer.json["error"]
    return answer.status, error["type"]


def test_a_prefill_says_where_its_blocks_lie(tmp_path: Path) -> None:
    """40 tokens are three blocks of 16, under vLLM's names; without the question there is no answer."""
    with member(tmp_path, Role.PREFILLER) as server:
        params = prefill(server)
        plain = ask(server.url).json

    assert len(params["remote_block_ids"][0]) == 3
    assert params["remote_host"] == "127.0.0.1"
    assert {name: params[name] for name in ("do_remote_prefill", "do_remote_decode", "tp_size")} == {
        "do_remote_prefill": True, "do_remote_decode": False, "tp_size": 1,
    }  # fmt: skip
    assert params["remote_num_tokens"] == 40
    assert {"remote_engine_id", "remote_request_id", "remote_port"} <= params.keys()
    assert plain["kv_transfer_params"] is None


@pytest.mark.parametrize("send", [ask, stream])
def test_a_decoder_pulls_what_it_is_handed(tmp_path: Path, send: Any) -> None:
    """All 40 tokens are external there and computed here; one transfer of three blocks, seen by the reader only."""
    with member(tmp_path / "p", Role.PREFILLER) as prefiller, member(tmp_path / "d", Role.DECODER) as decoder:
        answer = send(decoder.url, kv_transfer_params=prefill(prefiller))
        at_prefiller, at_decoder = metrics(prefiller), metrics(decoder)

        assert answer.status == 200
        assert sources(prefiller) == [40, 0, 0]
        assert sources(decoder) == [0, 0, 40]
    assert at_decoder["nixl_xfer_time_seconds_count"] == 1
    assert at_decoder["nixl_bytes_transferred_sum"] == 3 * 16 * 2048
    assert at_prefiller["nixl_xfer_time_seconds_count"] == 0
    assert at_decoder["prompt_tokens_total"] == 40


def test_a_decoder_that_is_handed_nothing_computes(tmp_path: Path) -> None:
    """The second time from its prefix cache, all but what is left of the last block."""
    with member(tmp_path, Role.DECODER) as decoder:
        ask(decoder.url)
        ask(decoder.url)

        assert sources(decoder) == [40 + 8, 32, 0]
        assert metrics(decoder)["nixl_xfer_time_seconds_count"] == 0


def test_blocks_that_the_decoder_has_are_not_pulled_again(tmp_path: Path) -> None:
    """Two of three blocks are in its cache, so one is transferred."""
    with member(tmp_path / "p", Role.PREFILLER) as prefiller, member(tmp_path / "d", Role.DECODER) as decoder:
        for _ in range(2):
            ask(decoder.url, kv_transfer_params=prefill(prefiller))

        assert sources(decoder) == [0, 32, 48]
        assert metrics(decoder)["nixl_bytes_transferred_sum"] == (3 + 1) * 16 * 2048


def test_a_decoder_may_ignore_what_it_is_handed(tmp_path: Path) -> None:
    """It answers like the others, and only its counters tell."""
    with (
        member(tmp_path / "p", Role.PREFILLER, lease=0.1) as prefiller,
        member(tmp_path / "d", Role.DECODER, {"ignore_kv": True}) as decoder,
    ):
        assert ask(decoder.url, kv_transfer_params=prefill(prefiller)).status == 200
        assert sources(decoder) == [40, 0, 0]
        assert wait_until(lambda: metrics(prefiller)["nixl_num_kv_expired_reqs_total"]) == 1


def test_a_lease_ends_with_the_pull(tmp_path: Path) -> None:
    """Pulled in time it does not expire; pulled after it, the blocks go over all the same, as on the real server."""
    with (
        member(tmp_path / "p", Role.PREFILLER, lease=0.2) as prefiller,
        member(tmp_path / "d", Role.DECODER) as decoder,
    ):
        ask(decoder.url, kv_transfer_params=prefill(prefiller))
        late = prefill(prefiller, prompt=[6] * 40)
        expired = wait_until(lambda: metrics(prefiller)["nixl_num_kv_expired_reqs_total"])
        assert ask(decoder.url, prompt=[6] * 40, kv_transfer_params=late).status == 200
        assert sources(decoder) == [0, 0, 80]
        log = tmp_path / "p" / "server.log"
        assert wait_until(lambda: "Potentially invalid KV blocks" in log.read_text())
    assert expired == 1
    assert "Releasing expired KV blocks" in log.read_text()


def test_a_transfer_takes_its_time(tmp_path: Path) -> None:
    """200 ms more before the first token."""
    with (
        member(tmp_path / "p", Role.PREFILLER) as prefiller,
        member(tmp_path / "d", Role.DECODER, {"transfer": 0.2}) as decoder,
    ):
        stream(decoder.url, kv_transfer_params=prefill(prefiller))
        entry, seen = decoder.log()[0], metrics(decoder)

    assert entry["writes"][0][0] - entry["arrived"] >= 0.2
    assert seen["nixl_xfer_time_seconds_sum"] >= 0.2


def test_a_pull_that_cannot_be_is_a_500(tmp_path: Path) -> None:
    """Another engine's blocks, and a side channel that is not where it is said to be, after a while."""
    with (
        member(tmp_path / "p", Role.PREFILLER, {"side_channel_shift": 1}) as hidden,
        member(tmp_path / "q", Role.PREFILLER) as prefiller,
        member(tmp_path / "d", Role.DECODER, {"transfer_patience": 0.3}) as decoder,
    ):
        foreign = prefill(prefiller) | {"remote_engine_id": "another"}
        began = time.monotonic()
        assert failure(ask(decoder.url, kv_transfer_params=prefill(hidden))) == (500, "InternalServerError")
        assert time.monotonic() - began >= 0.3
        assert failure(ask(decoder.url, kv_transfer_params=foreign)) == (500, "InternalServerError")
        assert metrics(decoder)["nixl_num_failed_transfers_total"] == 2
        assert sources(decoder) == [0, 0, 0]
        outcomes = [entry["outcome"] for entry in decoder.log()]

    assert outcomes == ["transfer_failed"] * 2


def test_a_stream_that_cannot_be_pulled_has_the_error_in_it(tmp_path: Path) -> None:
    """As in vLLM, the stream begins before this is known, so the status is 200 and the first event is the error."""
    with (
        member(tmp_path / "p", Role.PREFILLER, {"side_channel_shift": 1}) as prefiller,
        member(tmp_path / "d", Role.DECODER) as decoder,
    ):
        answer = stream(decoder.url, kv_transfer_params=prefill(prefiller))

    first, done = answer.body.strip().split(b"\n\n")
    assert answer.status == 200
    assert json.loads(first.removeprefix(b"data: "))["error"]["code"] == 500
    assert done == b"data: [DONE]"


def test_a_prefiller_may_die_after_its_answer(tmp_path: Path) -> None:
    """The second answer still goes out; its blocks are gone with it."""
    with (
        member(tmp_path / "p", Role.PREFILLER, {"die_after": 2}) as prefiller,
        member(tmp_path / "d", Role.DECODER) as decoder,
    ):
        assert ask(decoder.url, kv_transfer_params=prefill(prefiller)).status == 200
        params = prefill(prefiller)
        assert prefiller.process.wait(5) == 1
        assert failure(ask(decoder.url, kv_transfer_params=params)) == (500, "InternalServerError")


@pytest.mark.timing
def test_a_prefiller_may_die_during_a_transfer(tmp_path: Path) -> None:
    """The decoder sees it at once; the transfer would have taken 20 s."""
    with (
        member(tmp_path / "p", Role.PREFILLER) as prefiller,
        member(tmp_path / "d", Role.DECODER, {"transfer": 20}) as decoder,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(ask, decoder.url, kv_transfer_params=prefill(prefiller))
        time.sleep(0.3)
        prefiller.process.kill()

        assert failure(answer.result(timeout=5)) == (500, "InternalServerError")


@pytest.mark.timing
def test_a_side_channel_port_that_is_taken_hangs_the_start(tmp_path: Path) -> None:
    """As in vLLM 0.26: a line in the log, and never ready."""
    with member(tmp_path / "p", Role.PREFILLER) as first:
        port = prefill(first)["remote_port"]
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        config = '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'
        (tmp_path / "d").mkdir()
        second = serving(tmp_path / "d", None, "--kv-transfer-config", config, env=env, start_timeout=1.5)
        with pytest.raises(AssertionError, match="no answer"), second:
            pass

    assert "ZMQError: Address already in use" in (tmp_path / "d" / "server.log").read_text()


def test_a_server_without_a_connector_says_where_tokens_came_from(tmp_path: Path) -> None:
    """As every vLLM; it has no word of transfers, and its block size is in the usual place."""
    with serving(tmp_path) as server:
        ask(server.url)
        seen = metrics(server)

    assert [seen[source] for source in SOURCES] == [40, 0, 0]
    assert not any("nixl" in name for name in seen)
    assert seen["cache_config_info"] == 1


@needs_router
def test_a_router_hands_over(tmp_path: Path) -> None:
    """A stream through vllm-router: the prefiller computes, the decoder's external tokens grow."""
    with pd_pair(tmp_path) as group:
        answer = stream(group.url)
        prefiller, decoder = group.servers

        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert sources(prefiller) == [40, 0, 0]
        assert sources(decoder) == [0, 0, 40]
