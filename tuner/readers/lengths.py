"""Lengths and block ids of prompts that a log holds as text, by the tokenizer that the user named."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from tuner.readers.blocks import Blocks
from tuner.readers.chat import Prompt
from tuner.readers.format import NO_PROMPT, Options
from tuner.readers.source import Damaged, Dropped, Tally
from tuner.workload import MOST_TOKENS

UNCOUNTED = "no token counts (a tokenizer would count them)"
NOTHING_TO_COUNT = "no token counts and no text to count"
TOOLS = "no token counts, and tool calls in the prompt, whose tokens depend on the template"
NO_TEMPLATE = "chats counted without their template's tokens (--template-tokens)"
FITTED = "the tokenizer's count is not the recorded length: block ids are cut or filled to what was recorded"
NOT_KEPT = "not kept as prompts, block ids stand for them: chats, and text of another count than recorded"
NOT_HASHED = "text is there, and --tokenizer would make block ids of it: without, no prefix is shared"
FILLER = -1  # no token


class Measured(NamedTuple):
    """What a row says of its prompt."""

    input_len: int
    block_ids: tuple[int, ...] | None = None
    block_size: int | None = None
    prompt: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ruler:
    """Measures the prompts of one trace.

    Attributes:
        options: its tokenizer, the template's tokens, the block size, whether prompts are kept.
        tally: is told what is odd.
        blocks: those of the prompts so far.
    """

    options: Options
    tally: Tally
    blocks: Blocks = field(default_factory=Blocks)

    @classmethod
    def of(cls, options: Options, tally: Tally) -> Self:
        """Return the ruler for a trace that begins."""
        return cls(options, tally, Blocks(options.block_size) if options.block_size else Blocks())

    @classmethod
    def counting(cls, options: Options, tally: Tally) -> Self:
        """Return the ruler for a trace without lengths.

        Raises:
            SpecError: no tokenizer was named.
        """
        if options.tokenize is None:
            raise tally.source.refused(
                None,
                "prompts are text, whose tokens are to be counted",
                "name the model's tokenizer: --tokenizer FOLDER or MODEL",
            )
        return cls.of(options, tally)

    def prompt(self, prompt: Prompt | None, recorded: int | None, number: int) -> Measured:
        """Return a prompt's length, as recorded or else counted, and its blocks where there is text to make them of.

        Raises:
            Dropped: there is neither a recorded length nor a way to count, or nothing was asked.
            Damaged: more tokens were counted than a row may have.
        """
        found = self._measured(prompt, recorded, number)
        if not found.input_len:
            raise Dropped(NO_PROMPT)
        return found

    def _measured(self, prompt: Prompt | None, recorded: int | None, number: int) -> Measured:
        tokens = self._tokens(prompt)
        if tokens is None or prompt is None:
            if recorded is None:
                raise Dropped(UNCOUNTED if prompt is not None else NOTHING_TO_COUNT)
            if prompt is not None and self.options.tokenize is None:
                self.tally.note(NOT_HASHED, number)
            return Measured(recorded)
        if recorded is None:
            recorded = _limited(len(tokens) + self._template(prompt, number))
        elif len(tokens) > recorded or (len(tokens) < recorded and not prompt.is_chat):
            self.tally.note(FITTED, number)
        if self.options.keep_prompts:
            if len(tokens) == recorded and not prompt.is_chat:
                return Measured(recorded, prompt=tuple(tokens))
            self.tally.note(NOT_KEPT, number)
        # What a template adds stands at the end here: a chat that goes on shares its texts, and no more.
        fitted = [*tokens[:recorded], *[FILLER] * (recorded - len(tokens))]
        return Measured(recorded, self.blocks.of(fitted), self.blocks.size)

    def output(self, text: Prompt | None, recorded: int | None) -> int:
        """Return an answer's length, as recorded or else counted.

        Raises:
            Dropped: there is neither.
            Damaged: more tokens were counted than a row may have.
        """
        if recorded is not None:
            return recorded
        tokens = self._tokens(text)
        if tokens is None:
            raise Dropped(UNCOUNTED if text is not None else NOTHING_TO_COUNT)
        return _limited(len(tokens))

    def _tokens(self, prompt: Prompt | None) -> Sequence[int] | None:
        if prompt is None or prompt.ids:
            return None if prompt is None else prompt.ids
        tokenize = self.options.tokenize
        return None if tokenize is None else [token for text in prompt.texts for token in tokenize(text)]

    def _template(self, prompt: Prompt, number: int) -> int:
        if prompt.has_tools:
            raise Dropped(TOOLS)
        if prompt.is_chat and not self.options.template:
            self.tally.note(NO_TEMPLATE, number)
        return self.options.template if prompt.is_chat else 0


def _limited(count: int) -> int:
    if count > MOST_TOKENS:
        raise Damaged(f"{count:,} tokens, where {MOST_TOKENS:,} are the most")
    return count
