"""What becomes of each request: a row, or a reason why not; in memory the counts, on disk the lines.

Everything here happens in one thread, after an answer was handed on, so that no client waits for JSON or a disk.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace as changed

from tuner import __version__
from tuner.proxy import asked
from tuner.proxy.answered import Told
from tuner.proxy.asked import Asked, Unreplayable
from tuner.proxy.exchange import Exchange
from tuner.proxy.hashing import BLOCK_SIZE, Salt, blocks_of_text, blocks_of_tokens
from tuner.proxy.recording import Identity, Parts, Summary, write_summary
from tuner.proxy.turns import Turn, Turns
from tuner.workload import Request, encoded

ANOTHER_PATH = "another endpoint than completions, chat and responses"
NEVER_ANSWERED = "never answered"
NO_ROOM = "the recording could not be written"
NO_FORM = "the prompt is put together inside the server"
NOT_EQUAL = "the tokenizer counts other tokens than the answer"
TOKENS, TEXT = "tokens", "text"
SAVED_EVERY = 5.0  # seconds between two summaries

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Question:
    """A row that is written and lacks its block ids.

    Attributes:
        form: what to POST to /tokenize; None where the prompt's tokens are known or cannot be asked for.
        tokens: the prompt's, where they are known.
        keys: headers for the question.
        size: bytes of the request, which it keeps in memory.
    """

    id: str
    input_len: int
    text: str | None
    is_completion: bool
    form: asked.Json | None
    tokens: tuple[int, ...] | None
    keys: dict[str, str] = field(repr=False)
    size: int


@dataclass(slots=True)
class Ledger:
    """Settles requests one after the other.

    Attributes:
        summary: of the recording; its counts are those of `counted`.
        warn: told once when the disk does not take the rows.
    """

    folder: Path
    summary: Summary
    parts: Parts
    warn: Callable[[str], None]
    salt: Salt = field(default_factory=Salt)
    is_broken: bool = False
    _turns: Turns = field(init=False)
    _start: float | None = None
    _rows: int = 0
    _unwritten: Counter[str] = field(default_factory=Counter)
    _unidentified: Counter[str] = field(default_factory=Counter)
    _saved: float = 0.0

    def __post_init__(self) -> None:
        self._turns = Turns(self.salt)

    def settle(self, exchange: Exchange) -> Question | None:
        """Write a request's row, or count why it has none; return what its block ids need."""
        try:
            told, said = self._read(exchange)
            row = self._row(exchange, said, told)
            self._write(encoded(row))
        except Unreplayable as reason:
            self._unwritten[str(reason)] += 1
            return None
        finally:
            self._save_now_and_then()
        self._rows += 1
        self._remember(exchange, said, told, Turn(str(exchange.number), row.session, exchange.ended))
        return _question(exchange, said, told)

    def _read(self, exchange: Exchange) -> tuple[Told, Asked]:
        """Return what was answered and what was asked.

        Raises:
            Unreplayable: a row cannot stand for it.
        """
        if exchange.endpoint is None:
            raise Unreplayable(ANOTHER_PATH)
        if exchange.failure is not None or exchange.reader is None:
            raise Unreplayable(exchange.failure or NEVER_ANSWERED)
        return exchange.reader.end(), asked.read(exchange.endpoint, exchange.body)

    def _row(self, exchange: Exchange, said: Asked, told: Told) -> Request:
        before = self._before(exchange, said)
        row = Request(
            arrival=self._since_start(exchange.arrival), input_len=told.input_len, output_len=told.output_len,
            id=str(exchange.number), session=self._session(exchange, said, before), model=said.model,
            endpoint=said.endpoint,
        )  # fmt: skip
        if before is None or exchange.arrival < before.ended:  # one session's requests may overlap
            return row
        return changed(row, parent=before.id, think_time=round(exchange.arrival - before.ended, 6))

    def _since_start(self, arrival: float) -> float:
        """Return seconds since the recording began: since the first request for tokens arrived."""
        return round(max(arrival - (arrival if self._start is None else self._start), 0.0), 6)

    def _before(self, exchange: Exchange, said: Asked) -> Turn | None:
        """Return the turn whose answer this one waited for, where it shows."""
        if said.previous is not None:
            return self._turns.before([self._turns.of_name("answer", said.previous)])
        if (turn := self._turns.before(self._turns.of_messages(said.messages)[:-1])) is not None:
            return turn
        if exchange.session is not None:
            return self._turns.before([self._turns.of_name("session", exchange.session)])
        return None

    def _session(self, exchange: Exchange, said: Asked, before: Turn | None) -> str | None:
        if exchange.session is not None:
            return self.salt.name(exchange.session)
        if before is not None:
            return before.session
        return self.salt.name(f"conversation {exchange.number}") if said.messages else None

    def _remember(self, exchange: Exchange, said: Asked, told: Told, turn: Turn) -> None:
        keys = []
        if said.messages and told.reply is not None:
            keys.append(self._turns.of_messages([*said.messages, told.reply])[-1])
        if told.id is not None:
            keys.append(self._turns.of_name("answer", told.id))
        if exchange.session is not None:
            keys.append(self._turns.of_name("session", exchange.session))
        self._turns.remember(keys, turn)

    def identify(self, question: Question, tokens: Sequence[int] | None, why_not: str | None = None) -> None:
        """Write a row's block ids: of these tokens, or of its text where the recording is one of text."""
        prompt: str | tuple[int, ...] | None = None
        if tokens is not None and len(tokens) == question.input_len:
            blocks, prompt = blocks_of_tokens(self.salt, tokens), tuple(tokens)
        elif tokens is None and self.summary.hashed == TEXT and question.text is not None:
            blocks = blocks_of_text(self.salt, question.text.encode(errors="surrogatepass"), question.input_len)
            prompt = question.text if question.is_completion else None
        else:
            self._unidentified[why_not or (NO_FORM if tokens is None else NOT_EQUAL)] += 1
            return
        kept = prompt if self.summary.keeps_prompts else None
        try:
            self._write(_ENCODER.encode(Identity(question.id, blocks, BLOCK_SIZE, kept)) + b"\n")
        except Unreplayable as reason:
            self._unidentified[str(reason)] += 1

    def _write(self, line: bytes) -> None:
        """Write a line; the first time that fails the user is told.

        Raises:
            Unreplayable: it could not be written.
        """
        try:
            self.parts.append(line)
        except OSError as error:
            self._broke(error)
            raise Unreplayable(NO_ROOM) from error

    def _broke(self, error: OSError) -> None:
        if not self.is_broken:
            self.is_broken = True
            self.warn(f"{self.folder}: cannot be written: {error.strerror}; requests still pass, "
                      "and those that cannot be recorded are counted")  # fmt: skip

    def counted(self) -> Summary:
        """Return the summary with the counts as they are."""
        return changed(
            self.summary, rows=self._rows, requests=self._rows + self._unwritten.total(),
            not_written=dict(self._unwritten.most_common()), without_block_ids=dict(self._unidentified.most_common()),
        )  # fmt: skip

    def begin(self, arrival: float) -> None:
        """Note when the first request arrived: the recording's zero."""
        wall = datetime.fromtimestamp(time.time() - (time.perf_counter() - arrival), UTC)
        self._start = arrival
        self.summary = changed(self.summary, started=wall.isoformat(timespec="microseconds"))

    def _save_now_and_then(self) -> None:
        now = time.perf_counter()
        if now - self._saved >= SAVED_EVERY:
            self._saved = now
            self.save()

    def save(self) -> None:
        """Write the counts, so that a kill leaves those of a moment ago."""
        try:
            write_summary(self.folder, self.counted())
        except OSError as error:
            self._broke(error)


def _question(exchange: Exchange, said: Asked, told: Told) -> Question:
    return Question(
        id=str(exchange.number), input_len=told.input_len, text=said.text, form=said.form,
        is_completion=said.endpoint == asked.COMPLETIONS,
        tokens=said.tokens if said.tokens is not None else told.prompt_ids,
        keys=exchange.keys, size=len(exchange.body),
    )  # fmt: skip


def opening(upstream: str, *, hashed: str, keeps_prompts: bool) -> Summary:
    """Return the summary that a recording begins with."""
    return Summary(
        tune=__version__, upstream=upstream, hashed=hashed, block_size=BLOCK_SIZE, keeps_prompts=keeps_prompts,
        ended=False,
    )  # fmt: skip
