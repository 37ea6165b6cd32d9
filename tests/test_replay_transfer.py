"""What the servers' counters say about a transfer of KV cache, and when a replay of a PD group was none."""

from dataclasses import replace

import pytest
from replay_data import Row, records

from tuner.errors import FailureKind, InvalidReplay
from tuner.records import Records
from tuner.replay import counters, transfer
from tuner.seams import Member, Replay, Tally
from tuner.serving import Role

# As vLLM 0.26's decoder wrote them after one request of 400 tokens came from a prefiller.
DECODER = """\
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="tiny"} 1.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="tiny"} 0.002
vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 1.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="tiny"} 3.145728e+06
vllm:nixl_num_failed_transfers_total{engine="0",model_name="tiny"} 0.0
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="tiny"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 400.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 0.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 0.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 400.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",mamba_block_size="None"} 1.0
"""
COMPUTED = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
TRANSFERRED = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


def three(*more: Row) -> Records:
    """Return records of three prompts of 400 tokens that completed, and more."""
    return records(*(Row([1.0, 1.1], input_len=400, due=float(i)) for i in range(3)), *more)


def counted(
    *,
    computed: float = 0,
    transferred: float = 1200,
    transfers: float = 3,
    expired: float = 0,
    ranks: int = 1,
    failed: float = 0,
) -> tuple[Tally, Tally]:
    """Return what a prefiller and a decoder counted of three transfers: 2 ms and 1 MB each."""
    prefiller = Tally(Member(Role.PREFILLER, "p"), {COMPUTED: 1200, EXPIRED: expired})
    grown = {
        COMPUTED: computed,
        TRANSFERRED: transferred,
        "vllm:nixl_xfer_time_seconds_count": transfers,
        "vllm:nixl_xfer_time_seconds_sum": 0.002 * transfers,
        "vllm:nixl_bytes_transferred_sum": 1e6 * transfers,
        "vllm:nixl_num_failed_transfers_total": failed,
    }
    return prefiller, Tally(Member(Role.DECODER, "d", ranks), grown)


def seen(rows: Records, tallies: tuple[Tally, ...]) -> Replay:
    """Return a replay of these records."""
    return Replay(rows, 3.0, {}, {}, (), server=transfer.numbers(rows, tallies), tallies=tallies)


def complaint(rows: Records, tallies: tuple[Tally, ...]) -> str:
    """Return why a replay is refused."""
    with pytest.raises(InvalidReplay) as caught:
        transfer.judge(seen(rows, tallies))
    assert caught.value.kind is FailureKind.NO_TRANSFER
    return caught.value.message


def test_sources_are_read() -> None:
    """A counter with a label `source` is told by source too."""
    found = counters.read(DECODER)

    assert found[TRANSFERRED] == 400
    assert found[COMPUTED] == 0
    assert found["vllm:prompt_tokens_by_source_total"] == 400
    assert counters.read("") == {}


def test_what_a_member_counted_is_the_difference() -> None:
    """Each member's own growth, in order."""
    before, after = counters.read("a_total 1\n"), counters.read("a_total 4\nb_total 2\n")
    members = [Member(Role.PREFILLER, "p"), Member(Role.DECODER, "d")]
    first, second = counters.tallies(members, (before, before), (after, before))

    assert (first.member.role, dict(first.grown)) == (Role.PREFILLER, {"a_total": 3, "b_total": 2})
    assert (second.member.role, dict(second.grown)) == (Role.DECODER, {"a_total": 0})


def test_time_and_bytes_are_those_of_a_transfer() -> None:
    """Three transfers of three requests: 2 ms and 1 MB each, and all were transferred."""
    found = transfer.numbers(three(), counted())

    assert found == pytest.approx(
        {
            "kv_transfer_share": 1.0,
            "kv_transfer_time_mean": 0.002,
            "kv_transfer_bytes_mean": 1e6,
            "kv_leases_expired": 0.0,
            "decoder_computed_tokens": 0.0,
        }
    )
    transfer.judge(seen(three(), counted()))


def test_two_ranks_move_a_request_together() -> None:
    """With a tensor-parallel size of 2, six transfers are three requests of 2 MB."""
    found = transfer.numbers(three(), counted(transfers=6, ranks=2))

    assert found["kv_transfer_bytes_mean"] == 2e6
    assert found["kv_transfer_share"] == 1.0
    assert transfer.numbers(three(), counted(transfers=3, ranks=2))["kv_transfer_share"] == 0.5


def test_replicas_have_no_transfers() -> None:
    """Nothing is said, and nothing is 0."""
    assert transfer.numbers(three(), (Tally(Member(Role.ANY, "a"), {COMPUTED: 1200}),)) == {}


def test_prompts_computed_on_a_decoder_were_not_pd() -> None:
    """A front that forgets kv_transfer_params: answers are right, and only the counters tell."""
    words = complaint(three(), counted(computed=400, transferred=800, transfers=2))

    assert words == "this was not PD: the decoders computed 400 of 1,200 prompt tokens themselves"


def test_short_prompts_that_were_transferred_excuse_no_long_one() -> None:
    """Nine of ten are within a block and were transferred, the tenth was computed: sums alone would balance."""
    rows = records(*(Row([1.0, 1.1], input_len=100, due=float(i)) for i in range(9)), Row([1.0, 1.1], input_len=400))

    assert "computed 400 of 1,300" in complaint(rows, counted(computed=400, transferred=900, transfers=9))


def test_a_failed_transfer_is_no_pd_even_where_it_was_made_up_for() -> None:
    """With kv_load_failure_policy recompute the prompt is computed, and still counted as transferred."""
    assert complaint(three(), counted(failed=1)) == "this was not PD: 1 transfers failed"


def test_too_few_transfers_were_not_pd() -> None:
    """Two of three is less than 99 %."""
    assert "66.7% of the requests" in complaint(three(), counted(transfers=2))


def test_failed_requests_need_no_transfer() -> None:
    """What did not complete is not held against the group a second time."""
    transfer.judge(seen(three(Row(error="http_500", input_len=400, output_len=2)), counted()))


def test_a_lease_that_ran_out_makes_the_replay_invalid() -> None:
    """The decoder may have read blocks that held something else by then, and says nothing."""
    assert "1 of the prefillers' leases ran out" in complaint(three(), counted(expired=1))


def test_counters_that_cannot_be_read_prove_nothing() -> None:
    """No counters, no proof."""
    assert "could not be read" in complaint(three(), ())
    prefiller, decoder = counted()
    silent = replace(decoder, grown={"vllm:nixl_xfer_time_seconds_count": 3})
    assert "could not be read" in complaint(three(), (prefiller, silent))
