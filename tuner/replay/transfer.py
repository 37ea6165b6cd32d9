"""Was it PD? What the servers' own counters say of the KV cache that went from prefillers to decoders.

A decoder that is not told where a prompt's KV cache lies computes it itself, and answers all the same: only its
counters tell. vLLM counts prompt tokens by where they came from (`v1/metrics/stats.py`, PromptTokenStats), and its
NIXL connector counts transfers, their time and bytes, on the side that reads, once a tensor-parallel rank, and
leases that ran out on the side that waits to be read (`kv_connector/v1/nixl/stats.py`).
"""

from collections.abc import Callable, Iterable, Sequence

from tuner.errors import FailureKind, InvalidReplay
from tuner.records import Records
from tuner.replay.counters import by_source
from tuner.seams import Replay, Tally
from tuner.serving import Role

LEAST_SHARE = 0.99

_TIME, _BYTES = "vllm:nixl_xfer_time_seconds", "vllm:nixl_bytes_transferred"
_EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
_FAILED = "vllm:nixl_num_failed_transfers_total"
_PROMPTS = "vllm:prompt_tokens_by_source_total"
_COMPUTED, _TRANSFERRED = by_source(_PROMPTS, "local_compute"), by_source(_PROMPTS, "external_kv_transfer")


def numbers(records: Records, tallies: Sequence[Tally]) -> dict[str, float]:
    """Return what a PD replay's transfers were; what cannot be told is not there, nor is anything without PD.

    kv_transfer_share: requests whose KV cache was transferred, of the completed ones.
    kv_transfer_time_mean: seconds that a transfer took.
    kv_transfer_bytes_mean: bytes moved for a request.
    kv_leases_expired: prefilled requests that nobody fetched in time.
    decoder_computed_tokens: prompt tokens that decoders computed themselves.
    """
    decoders = [tally for tally in tallies if tally.member.role is Role.DECODER]
    if not decoders:
        return {}
    found: dict[str, float] = {}
    completed = int(records.is_completed.sum())
    requests = _sum(decoders, f"{_TIME}_count", lambda tally: 1 / tally.member.ranks)
    transfers, spent, moved = (_sum(decoders, name) for name in (f"{_TIME}_count", f"{_TIME}_sum", f"{_BYTES}_sum"))
    if requests is not None and completed:
        found["kv_transfer_share"] = min(1.0, requests / completed)
    if transfers and requests and spent is not None and moved is not None:
        found["kv_transfer_time_mean"] = spent / transfers
        found["kv_transfer_bytes_mean"] = moved / requests
    if (expired := _sum(tallies, _EXPIRED)) is not None:
        found["kv_leases_expired"] = expired
    if (computed := _sum(decoders, _COMPUTED)) is not None:
        found["decoder_computed_tokens"] = computed
    return found


def judge(seen: Replay) -> None:
    """Refuse a replay of a PD group that was not PD.

    Raises:
        InvalidReplay: kind no_transfer: prompts were computed on a decoder, too few were transferred, a lease
            ran out before its pull, or the counters do not tell.
    """
    if complaint := _complaint(seen):
        raise InvalidReplay(
            FailureKind.NO_TRANSFER,
            f"this was not PD: {complaint}",
            hint="see the logs of front and decoders: does the front pass kv_transfer_params on, and is the side "
            "channel of each prefiller reachable?",
        )


def _complaint(seen: Replay) -> str | None:
    """Return why it was not PD.

    Prompts within one block are no exception: vLLM 0.26 to 0.32 transfers them like others. An allowance for them
    could not be told from long prompts that were computed, since counters are sums.
    """
    found = seen.server
    decoders = [tally for tally in seen.tallies if tally.member.role is Role.DECODER]
    if not decoders or "decoder_computed_tokens" not in found:
        return "the servers' counters of transfers could not be read"
    if computed := found["decoder_computed_tokens"]:
        moved = _sum(decoders, _TRANSFERRED) or 0.0
        return f"the decoders computed {computed:,.0f} of {computed + moved:,.0f} prompt tokens themselves"
    # A request whose transfer failed may be answered all the same, recomputed (kv_load_failure_policy).
    if failed := _sum(decoders, _FAILED):
        return f"{failed:.0f} transfers failed"
    share = found.get("kv_transfer_share")
    if share is None or share < LEAST_SHARE:
        return "no transfer was counted" if share is None else f"{share:.1%} of the requests were transferred"
    if expired := found.get("kv_leases_expired"):
        words = f"{expired:.0f} of the prefillers' leases ran out before the KV cache was fetched"
        return f"{words}: it may have been overwritten by then"
    return None


def _sum(tallies: Iterable[Tally], name: str, weight: Callable[[Tally], float] = lambda _: 1.0) -> float | None:
    """Return a counter's growth over members, None when none of them has it."""
    values = [tally.grown[name] * weight(tally) for tally in tallies if name in tally.grown]
    return sum(values) if values else None
