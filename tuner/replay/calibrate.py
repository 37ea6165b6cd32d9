"""Measure how a chat endpoint counts text, so that made-up text has the recorded number of tokens.

Two requests, each word once and each word four times: the difference is what a word costs, the rest is the
template's. No tokenizer is needed.
"""

from collections.abc import Mapping

from tuner.errors import HostError, SpecError
from tuner.replay import remote
from tuner.replay.prompts import CHAT, PATHS, WORDS, Scale, chat_messages, merged
from tuner.serving import Json
from tuner.workload import Workload

DEADLINE = 60.0
ROUNDS = (1, 4)


def scale_of(base: str, model: str, extra_body: Mapping[str, Json], *, deadline: float = DEADLINE) -> Scale:
    """Return how the server counts text.

    Raises:
        HostError: it does not answer a chat request, or does not say how long the prompt was.
    """
    few, many = (_prompt_tokens(base, model, rounds, extra_body, deadline) for rounds in ROUNDS)
    n_few, n_many = (len(WORDS) * rounds for rounds in ROUNDS)
    per_word = (many - few) / (n_many - n_few)
    if per_word <= 0:
        raise HostError(f"{base}: {few} tokens for {n_few} words and {many} for {n_many}: not a count of tokens",
                        hint="replay with --endpoint completions")  # fmt: skip
    return Scale(template=few - per_word * n_few, per_word=per_word)


def _prompt_tokens(base: str, model: str, rounds: int, extra_body: Mapping[str, Json], deadline: float) -> int:
    fields: dict[str, Json] = {"model": model, "messages": chat_messages(" ".join(WORDS * rounds)), "temperature": 0}
    own = {name: value for name, value in extra_body.items() if name != "stream_options"}
    answer = remote.ask(f"{base}{PATHS[CHAT]}", merged(fields, own) | {"max_tokens": 1}, deadline=deadline)
    try:
        return int(answer["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError):
        raise HostError(f"{base}: the server does not say how many tokens a chat prompt has (usage.prompt_tokens)",
                        hint="replay with --endpoint completions") from None  # fmt: skip


def check_fits(workload: Workload, scale: Scale) -> None:
    """Refuse a workload with prompts shorter than the template.

    Raises:
        SpecError: names the shortest.
    """
    made = [row for row in workload.requests if not isinstance(row.prompt, str)]
    least = round(scale.template + scale.per_word)
    short = [row.input_len for row in made if row.input_len < least]
    if short:
        raise SpecError(
            f"workload {workload.name}: {len(short)} prompts are shorter than {least} tokens, which the chat "
            f"template and one word take; the shortest has {min(short)}",
            hint="replay with --endpoint completions",
        )
