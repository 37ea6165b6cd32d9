"""Measure how a chat endpoint counts text, so that made-up text has the recorded number of tokens.

Two requests, each word once and each word four times: the difference is what a word costs, the rest is the
template's. Where words cost more than a token, some cost more than others, and text of so many words would not be of
so many tokens: then digits are taken, which all cost the same. No tokenizer is needed.
"""

from collections.abc import Mapping, Sequence

from tuner.errors import HostError, SpecError
from tuner.replay import remote
from tuner.replay.prompts import CHAT, DIGITS, PATHS, WORDS, Scale, chat_messages, merged
from tuner.serving import Json
from tuner.workload import Workload

DEADLINE = 60.0
ROUNDS = (1, 4)


def scale_of(base: str, model: str, extra_body: Mapping[str, Json], *, deadline: float = DEADLINE) -> Scale:
    """Return how the server counts text.

    Raises:
        HostError: it does not answer a chat request, or does not say how long the prompt was.
    """

    def measured(alphabet: Sequence[str]) -> Scale:
        few, many = (_prompt_tokens(base, model, alphabet, n, extra_body, deadline) for n in ROUNDS)
        n_few, n_many = (len(alphabet) * rounds for rounds in ROUNDS)
        if many <= few:
            raise HostError(
                f"{base}: {few} tokens for {n_few} words and {many} for {n_many}: not a count of tokens",
                hint="replay with --endpoint completions",
            )
        per_word = (many - few) / (n_many - n_few)
        return Scale(few - per_word * n_few, per_word, tuple(alphabet))

    scale = measured(WORDS)
    return scale if scale.per_word == 1 else measured(DIGITS)


def _prompt_tokens(  # noqa: PLR0917 (what to ask, and how)
    base: str, model: str, alphabet: Sequence[str], rounds: int, extra_body: Mapping[str, Json], deadline: float
) -> int:
    messages = chat_messages(" ".join([*alphabet] * rounds))
    fields: dict[str, Json] = {"model": model, "messages": messages, "temperature": 0}
    own = {name: value for name, value in extra_body.items() if name != "stream_options"}
    answer = remote.ask(f"{base}{PATHS[CHAT]}", merged(fields, own) | {"max_tokens": 1}, deadline=deadline)
    try:
        return int(answer["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError):
        raise HostError(
            f"{base}: the server does not say how many tokens a chat prompt has (usage.prompt_tokens)",
            hint="replay with --endpoint completions",
        ) from None


def check_fits(workload: Workload, scale: Scale) -> None:
    """Refuse a workload with prompts shorter than the template.

    Raises:
        SpecError: says how many, and the shortest.
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
