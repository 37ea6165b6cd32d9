"""Let each prefiller meet each decoder before the clock starts.

The first transfer between two servers pays for NIXL's handshake, half a second and more, which no user of a
running group would see. The pairs are driven directly, past the front, as a front does it: prefill with one token,
hand what the prefiller answers to the decoder.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tuner.errors import FailureKind, HostError, InvalidReplay
from tuner.replay import remote
from tuner.replay.prompts import ordinary_tokens
from tuner.seams import Member
from tuner.serving import Json, Role

DEADLINE = 60.0
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
            try:
                _hand_over(prefiller, decoder, {"model": model, "prompt": prompt, "ignore_eos": True})
            except (HostError, LookupError, TypeError) as error:
                check_alive()
                said = error.message if isinstance(error, HostError) else "the prefiller names no KV cache to fetch"
                raise InvalidReplay(
                    FailureKind.NO_TRANSFER,
                    f"decoder {d} cannot fetch from prefiller {p}: {said}",
                    hint="is VLLM_NIXL_SIDE_CHANNEL_HOST an address the decoder reaches, and kv_buffer_device one "
                    "that this host can move?",
                ) from error


def _hand_over(prefiller: Member, decoder: Member, body: dict[str, Any]) -> None:
    first = remote.ask(
        f"{prefiller.url}/v1/completions", body | {"max_tokens": 1, "kv_transfer_params": ASK}, deadline=DEADLINE
    )
    there = first["kv_transfer_params"]
    if not there["remote_block_ids"]:
        raise LookupError(there)
    remote.ask(
        f"{decoder.url}/v1/completions", body | {"max_tokens": 2, "kv_transfer_params": there}, deadline=DEADLINE
    )
