"""What vllm-router does and does not do: the front that users deploy, characterised with fake servers behind it.

Nothing here is a wish: when a test fails after an update of vllm-router, its claim has changed, and with it what
`tuner.serving.front_argv` and a measurement through a front rest on.
"""

import http.client
import json
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deployment_data import wait_until
from front_data import (
    CHAT,
    TEXT,
    Canned,
    Group,
    ask,
    front,
    member,
    metrics,
    needs_router,
    pd_pair,
    replicas,
    stream,
)
from replay_data import FakeServer, evenly, play

from tuner.serving import Role

pytestmark = [pytest.mark.once, needs_router]

POLICIES = ("round_robin", "random", "power_of_two", "cache_aware", "consistent_hash", "sticky_least_loaded")
SLOW = {"first_token": 0.1, "gap": 0.1}
LATE = {"first_token": 20}
STATUSES = [400, 429, 500, 503]


def failing(*statuses: int) -> dict[str, Any]:
    """Let every request fail, in turn with these."""
    return {"http_status": {"every": 1, "status": list(statuses)}}


def received(group: Group) -> list[int]:
    """Return how many requests each server has ended."""
    return [len(outcomes(server)) for server in group.servers]


def outcomes(server: FakeServer) -> list[str]:
    return [entry["outcome"] for entry in server.log()] if server.log_path.exists() else []


# --- Failures: which status the client sees ---------------------------------------------------------------


def test_a_decoders_status_reaches_the_client(tmp_path: Path) -> None:
    """Status and body as the decoder gave them, after one try at each server, though retries are not switched off."""
    with pd_pair(tmp_path, {}, failing(*STATUSES * 2), as_shipped=True) as group:
        answers = [send(group.url) for send in (ask, stream) for _ in STATUSES]

        assert [answer.status for answer in answers] == STATUSES * 2
        assert [answer.json["error"]["code"] for answer in answers] == STATUSES * 2
        assert received(group) == [8, 8]


def test_a_prefillers_refusal_reaches_the_client(tmp_path: Path) -> None:
    """400 and 429, with their bodies; the decoder is not asked."""
    with pd_pair(tmp_path, failing(400, 429, 400, 429)) as group:
        answers = [send(group.url) for send in (ask, ask, stream, stream)]

        assert [answer.status for answer in answers] == [400, 429, 400, 429]
        assert [answer.json["error"]["code"] for answer in answers] == [400, 429, 400, 429]
        assert received(group) == [4, 0]


def test_a_prefillers_failure_is_a_500_in_prose(tmp_path: Path) -> None:
    """503 becomes 500 as well; the body is text that names the prefiller and the status it gave."""
    with pd_pair(tmp_path, failing(500, 503, 500, 503), as_shipped=True) as group:
        answers = [send(group.url) for send in (ask, ask, stream, stream)]

        assert [answer.status for answer in answers] == [500] * 4
        said = [answer.body.decode().partition(f"{group.servers[0].url}{TEXT} returned ")[2][:3] for answer in answers]
        assert said == ["500", "503", "500", "503"]
        assert received(group) == [4, 0]


@pytest.mark.parametrize("dead", [0, 1], ids=["prefiller", "decoder"])
def test_a_dead_member_of_a_pair_is_a_500(tmp_path: Path, dead: int) -> None:
    """At once, in text that says which leg it was."""
    with pd_pair(tmp_path) as group:
        group.servers[dead].process.kill()
        group.servers[dead].process.wait()
        answer = stream(group.url)

    assert answer.status == 500
    assert (b"Prefill request to", b"Decode request failed")[dead] in answer.body


@pytest.mark.parametrize("fault", ["reset", "early_close"])
@pytest.mark.parametrize("topology", ["pair", "replica"])
def test_a_stream_that_breaks_off_is_broken_for_the_client_too(tmp_path: Path, topology: str, fault: str) -> None:
    """The chunked body does not end, so it cannot be taken for a whole answer."""
    broken = {"first_token": 0.2, "gap": 0.2, fault: {"every": 1, "after": 2}}
    with pd_pair(tmp_path, {}, broken) if topology == "pair" else replicas(tmp_path, broken) as group:
        with pytest.raises(http.client.IncompleteRead) as read:
            stream(group.url)

        assert read.value.partial.count(b"data: ") == 2


def test_an_error_inside_a_stream_stays_inside(tmp_path: Path) -> None:
    """A transfer that failed is how a decoder would say it: 200, an error event, the end."""
    with pd_pair(tmp_path, {"side_channel_shift": 1}) as group:
        answer = stream(group.url)

    assert answer.status == 200
    assert answer.events[0]["error"]["code"] == 500


# --- Failures: retries and the circuit breaker ------------------------------------------------------------


def test_as_shipped_a_failed_request_is_sent_to_another_replica(tmp_path: Path) -> None:
    """One server answers 429, 500 and 503 in turn, and every request 200: by the other."""
    with replicas(tmp_path, failing(*[429, 500, 503] * 3), {}, as_shipped=True) as group:
        statuses = [send(group.url).status for send in (ask, stream) for _ in range(4)]

        assert statuses == [200] * 8
        assert len(outcomes(group.servers[0])) >= 7
        assert outcomes(group.servers[1]) == ["completed"] * 8


def test_as_shipped_a_lone_replica_is_asked_again_and_again(tmp_path: Path) -> None:
    """Five times in all."""
    with replicas(tmp_path, failing(503), as_shipped=True) as group:
        assert stream(group.url).status == 503
        assert received(group) == [5]


def test_as_shipped_a_dead_replica_is_not_noticed(tmp_path: Path) -> None:
    """Every request is answered by the other."""
    with replicas(tmp_path, {}, {}, as_shipped=True) as group:
        group.servers[0].process.kill()
        group.servers[0].process.wait()

        assert {stream(group.url).status for _ in range(4)} == {200}


def test_with_retries_off_a_failure_is_the_clients(tmp_path: Path) -> None:
    """As `tune` starts it: every second request fails with the server's status, and each was sent once."""
    with replicas(tmp_path, failing(*STATUSES * 2), {}) as group:
        statuses = [send(group.url).status for send in (ask, stream) for _ in range(8)]

        assert sorted(statuses) == sorted([200] * 8 + STATUSES * 2)
        assert received(group) == [8, 8]


def test_with_retries_off_a_dead_replica_is_a_500(tmp_path: Path) -> None:
    """Every second request."""
    with replicas(tmp_path, {}, {}) as group:
        group.servers[0].process.kill()
        group.servers[0].process.wait()

        assert sorted(stream(group.url).status for _ in range(4)) == [200, 200, 500, 500]


@pytest.mark.parametrize(("as_shipped", "more"), [(True, 0), (False, 15)])
def test_ten_failures_take_a_server_out_unless_that_is_off(tmp_path: Path, *, as_shipped: bool, more: int) -> None:
    """As shipped, a replica that failed ten times in a row gets none of the next thirty requests."""
    with replicas(tmp_path, failing(500), {}, as_shipped=as_shipped) as group:
        for _ in range(20):
            ask(group.url)
        before = received(group)[0]
        for _ in range(30):
            ask(group.url)

        assert before == 10
        assert received(group)[0] - before == more


def test_a_pair_is_not_tried_again(tmp_path: Path) -> None:
    """Of two prefillers one fails: every second request fails, as shipped too."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(member(tmp_path / "bad", Role.PREFILLER, failing(500))),
            stack.enter_context(member(tmp_path / "good", Role.PREFILLER)),
            stack.enter_context(member(tmp_path / "decoder", Role.DECODER)),
        ]
        urls = {Role.PREFILLER: [server.url for server in servers[:2]], Role.DECODER: [servers[2].url]}
        router = stack.enter_context(front(tmp_path, urls, as_shipped=True))

        assert sorted(stream(router.url).status for _ in range(4)) == [200, 200, 500, 500]


# --- A client that goes away ------------------------------------------------------------------------------


def leave(url: str, *, after_bytes: bool, stream: bool = True) -> None:
    """Ask for a hundred tokens, wait for the first ones or half a second, and close."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "m", "prompt": [5] * 40, "max_tokens": 100, "stream": stream}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        if after_bytes:
            connection.recv(1000)
        time.sleep(0.5)


@pytest.mark.timing
@pytest.mark.parametrize(
    ("topology", "after_bytes", "streamed"),
    [("pair", True, True), ("pair", False, False), ("replica", True, True), ("replica", False, False)],
)
def test_a_server_sees_that_the_client_has_left(
    tmp_path: Path, *, topology: str, after_bytes: bool, streamed: bool
) -> None:
    """In the middle of a stream and before a whole answer: its request is aborted within a second."""
    with pd_pair(tmp_path, {}, SLOW) if topology == "pair" else replicas(tmp_path, SLOW) as group:
        leave(group.url, after_bytes=after_bytes, stream=streamed)

        assert wait_until(lambda: outcomes(group.servers[-1]), timeout=1) == ["client_left"]


@pytest.mark.timing
@pytest.mark.parametrize("topology", ["pair", "replica"])
def test_a_client_that_leaves_before_the_first_token_ends_the_prefill(tmp_path: Path, topology: str) -> None:
    """The prefiller's request, or the replica's, is aborted, and no decoder is asked."""
    with pd_pair(tmp_path, LATE) if topology == "pair" else replicas(tmp_path, LATE) as group:
        leave(group.url, after_bytes=False)

        assert wait_until(lambda: outcomes(group.servers[0]), timeout=1) == ["client_left"]
        assert received(group)[1:] in ([], [0])


# --- Who gets what ----------------------------------------------------------------------------------------


def test_a_prompt_within_one_block_takes_both_legs(tmp_path: Path) -> None:
    """Three tokens of a block of 16 are computed by the prefiller and pulled by the decoder."""
    with pd_pair(tmp_path) as group:
        assert stream(group.url, prompt=[1, 2, 3]).status == 200
        prefiller, decoder = map(metrics, group.servers)

    assert (prefiller["local_compute"], decoder["local_compute"], decoder["external_kv_transfer"]) == (3, 0, 3)


def ids(number: int) -> list[int]:
    """Return 36 token ids that no other number's prompt begins with."""
    return [number + 1, number + 2, number + 3] * 12


def at_once(url: str, prompts: Sequence[Any]) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert {answer.status for answer in pool.map(lambda prompt: stream(url, prompt=prompt), prompts)} == {200}


# The splits seen of 64 concurrent and of 16 sequential prompts: token ids; text, where that differs.
# round_robin 32:32, 8:8; random 31:33, 9:7; power_of_two 33:31, 7:9; cache_aware 32:32, 0:16;
# consistent_hash 64:0, 0:16 (text 31:33); sticky_least_loaded 64:0, 16:0 (text 35:29).
@pytest.mark.timing
@pytest.mark.parametrize("policy", POLICIES)
def test_two_policies_send_every_prompt_of_token_ids_to_one_replica(tmp_path: Path, policy: str) -> None:
    """64 different prompts at once: consistent_hash and sticky_least_loaded see no text in them, and one key in all."""
    behaviour = {"first_token": 0.4, "gap": 0.02}
    with replicas(tmp_path, behaviour, behaviour, policy=policy) as group:
        at_once(group.url, [ids(number) for number in range(64)])
        split = received(group)

    assert sum(split) == 64
    if policy in {"consistent_hash", "sticky_least_loaded"}:
        assert min(split) == 0
    elif policy == "round_robin":
        assert split == [32, 32]
    else:
        assert min(split) >= 12


@pytest.mark.timing
@pytest.mark.parametrize("policy", ["consistent_hash", "sticky_least_loaded"])
def test_the_two_spread_prompts_of_text(tmp_path: Path, policy: str) -> None:
    """The same policies and 64 different texts."""
    with replicas(tmp_path, {}, {}, policy=policy) as group:
        at_once(group.url, [f"prompt {number} " * 12 for number in range(64)])

        assert min(received(group)) >= 12


@pytest.mark.parametrize("prompts", [[ids(number) for number in range(16)], [f"{n} prompt" * 12 for n in range(16)]])
def test_cache_aware_sends_one_after_another_to_one_replica(tmp_path: Path, prompts: list[Any]) -> None:
    """With nothing in flight all prompts that it has not seen go to the same server, ids and text alike."""
    with replicas(tmp_path, {}, {}, policy="cache_aware") as group:
        for prompt in prompts:
            stream(group.url, prompt=prompt)

        assert min(received(group)) == 0


@pytest.mark.timing
def test_cache_aware_keeps_equal_token_ids_together(tmp_path: Path) -> None:
    """The same prompt 32 times at once is one server's."""
    with replicas(tmp_path, SLOW, SLOW, policy="cache_aware") as group:
        stream(group.url)
        at_once(group.url, [[5] * 40] * 32)

        assert min(received(group)) == 0


@pytest.mark.timing
@pytest.mark.parametrize("policy", POLICIES)
def test_in_a_pd_group_every_policy_spreads_token_ids(tmp_path: Path, policy: str) -> None:
    """64 different prompts at once over two prefillers and two decoders."""
    with ExitStack() as stack:
        roles = [(Role.PREFILLER, 0), (Role.PREFILLER, 1), (Role.DECODER, 0), (Role.DECODER, 1)]
        servers = [
            stack.enter_context(member(tmp_path / f"{role}{number}", role, {"first_token": 0.2, "gap": 0.02}))
            for role, number in roles
        ]
        urls = {
            Role.PREFILLER: [server.url for server in servers[:2]],
            Role.DECODER: [server.url for server in servers[2:]],
        }
        router = stack.enter_context(front(tmp_path, urls, policy))
        at_once(router.url, [ids(number) for number in range(64)])
        split = [len(outcomes(server)) for server in servers]

    assert (sum(split[:2]), sum(split[2:])) == (64, 64)
    assert min(split) >= 12


# --- What passes through ----------------------------------------------------------------------------------

UNKNOWN = {
    "ignore_eos": True,
    "return_token_ids": True,
    "priority": 3,
    "no_field_of_anybodys": {"deep": [1, {"x": None}]},
    "temperature": 0,
    "seed": 7,
}


def passed(said: dict[str, Any], sent: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that were sent, as they arrived."""
    return {name: said[name] for name in sent if name in said}


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_fields_that_the_front_does_not_know_reach_every_server(tmp_path: Path, path: str) -> None:
    """Replicas get kv_transfer_params of the client's own too; a pair's are the front's business."""
    with Canned() as replica, Canned() as prefiller, Canned() as decoder:
        with front(tmp_path / "r", {Role.ANY: [replica.url]}) as router:
            stream(router.url, path, **UNKNOWN, kv_transfer_params={"mine": 1})
        with front(tmp_path / "pd", {Role.PREFILLER: [prefiller.url], Role.DECODER: [decoder.url]}) as router:
            stream(router.url, path, **UNKNOWN, kv_transfer_params={"mine": 1})

    for server in (replica, prefiller, decoder):
        (request,) = server.received
        assert passed(request.body, UNKNOWN) == UNKNOWN
    assert replica.received[0].body["kv_transfer_params"] == {"mine": 1}
    assert "mine" not in decoder.received[0].body["kv_transfer_params"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_the_prefill_is_one_whole_token_and_its_answer_is_passed_on(tmp_path: Path, path: str) -> None:
    """With max_tokens, and max_completion_tokens where the client said that; what it tells the decoder is unchanged."""
    with Canned() as prefiller, Canned() as decoder:
        with front(tmp_path, {Role.PREFILLER: [prefiller.url], Role.DECODER: [decoder.url]}) as router:
            stream(router.url, path, **({"max_completion_tokens": 9} if path == CHAT else {}))
        first, second = prefiller.received[0].body, decoder.received[0].body

    assert (first["max_tokens"], first["min_tokens"], first["stream"]) == (1, 1, False)
    assert "stream_options" not in first
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert first.get("max_completion_tokens", 1) == 1
    assert (second["max_tokens"], second["stream"]) == (5, True)
    assert second["kv_transfer_params"] == {
        "do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e", "unknown": [7],
    }  # fmt: skip


def test_continuous_usage_is_not_asked_for(tmp_path: Path) -> None:
    """The front knows only include_usage of stream_options: no chunk but the last says how many tokens there are."""
    with replicas(tmp_path / "r", {}) as group:
        for answer in (stream(group.url), stream(group.url, CHAT)):
            assert ["usage" in event for event in answer.events][-2:] == [False, True]
    with pd_pair(tmp_path / "pd") as group:
        assert ["usage" in event for event in stream(group.url).events] == [False] * 5 + [True]


def test_servers_that_count_unasked_are_counted_through_the_front(tmp_path: Path) -> None:
    """--enable-force-include-usage of vLLM gives every chunk its count, behind either front."""
    flag = ["--enable-force-include-usage"]
    with replicas(tmp_path / "r", {}, server_flags=flag) as group:
        single = stream(group.url).events
    with pd_pair(tmp_path / "pd", server_flags=flag) as group:
        pair = stream(group.url).events

    for events in (single, pair):
        assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize(("flags", "is_counted"), [([], False), (["--enable-force-include-usage"], True)])
def test_a_replay_knows_the_tokens_of_a_chunk_only_where_servers_count_unasked(
    tmp_path: Path, flags: list[str], *, is_counted: bool
) -> None:
    """Requests complete either way; without counts how many tokens a chunk has is unknown."""
    with replicas(tmp_path, {"tokens_per_chunk": 3}, server_flags=flags) as group:
        records = play(group.url, evenly(2, 0.05, output_len=6)).records

    assert records.is_completed.all()
    assert list(records.completion_tokens) == [6, 6]
    assert [float(n) for n in records.chunk_tokens if not np.isnan(n)] == ([3] * 4 if is_counted else [])


def test_the_closing_events_usage_and_metrics_pass(tmp_path: Path) -> None:
    """What --enable-per-request-metrics adds, from the replica or the decoder."""
    flag = ["--enable-per-request-metrics"]
    with replicas(tmp_path / "r", {}, server_flags=flag) as group:
        single = stream(group.url).events[-1]
    with pd_pair(tmp_path / "pd", server_flags=flag) as group:
        pair = stream(group.url).events[-1]

    for closing in (single, pair):
        assert closing["usage"]["completion_tokens"] == 5
        assert closing["metrics"]["time_to_first_token_ms"] > 0


@pytest.mark.parametrize("topology", ["pair", "replica"])
def test_a_stream_passes_byte_for_byte(tmp_path: Path, topology: str) -> None:
    """Comments, odd line ends, broken JSON, text beyond ASCII and bytes after the end too."""
    said = ': note\r\n\r\ndata: {"é": "中😀"}\r\rdata: {broken\n\nevent: x\ndata:  [DONE]\n\ndata: more'.encode()
    with Canned(said) as server, Canned() as prefiller:
        pair = {Role.PREFILLER: [prefiller.url], Role.DECODER: [server.url]}
        with front(tmp_path, pair if topology == "pair" else {Role.ANY: [server.url]}) as router:
            answer = stream(router.url)

    assert answer.body == said


def test_a_pairs_front_has_a_key_of_its_own(tmp_path: Path) -> None:
    """Replicas get the client's Authorization; a pair gets OPENAI_API_KEY of the front's environment instead."""
    mine = {"authorization": "Bearer mine", "x-other": "1"}
    with Canned() as replica, Canned() as prefiller, Canned() as decoder:
        pair = {Role.PREFILLER: [prefiller.url], Role.DECODER: [decoder.url]}
        with front(tmp_path / "r", {Role.ANY: [replica.url]}) as router:
            stream(router.url, headers=mine)
        with front(tmp_path / "pd", pair, env={"OPENAI_API_KEY": "the-fronts"}) as router:
            stream(router.url, headers=mine)

    assert passed(dict(replica.received[0].headers), mine) == mine
    for server in (prefiller, decoder):
        assert server.received[0].headers["authorization"] == "Bearer the-fronts"
        assert "x-other" not in server.received[0].headers


def test_a_pairs_request_id_names_both_addresses(tmp_path: Path) -> None:
    """Whatever id the client gave."""
    with Canned() as prefiller, Canned() as decoder:
        with front(tmp_path, {Role.PREFILLER: [prefiller.url], Role.DECODER: [decoder.url]}) as router:
            stream(router.url, headers={"x-request-id": "mine"})
        addresses = [server.url.removeprefix("http://") for server in (prefiller, decoder)]
        request_id = decoder.received[0].headers["x-request-id"]

    assert request_id.startswith("___prefill_addr_{}___decode_addr_{}_".format(*addresses))
    assert prefiller.received[0].headers["x-request-id"] == request_id
