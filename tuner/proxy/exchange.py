"""One request and its answer on their way through the tap: what is kept of them until they are settled."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.proxy.answered import COMPRESSED, TOO_LARGE, Reader

CROWDED = "more was under way than is kept"
MOST_OF_A_REQUEST = 32 << 20  # bytes
MOST_AT_ONCE = 256 << 20

# Read only, and only their digest is written.
SESSION_HEADERS = ("X-Session-Id", "X-LiteLLM-Session-Id")
# Sent along when the server's tokenizer is asked, for servers that want a key there too; never written.
KEY_HEADERS = ("Authorization", "X-API-Key", "API-Key")


@dataclass(slots=True)
class Allowance:
    """How many more bytes may be kept, of all requests together."""

    left: int = MOST_AT_ONCE

    def take(self, size: int) -> bool:
        """Return whether so much more may be kept."""
        if size > self.left:
            return False
        self.left -= size
        return True


@dataclass(slots=True, eq=False)
class Exchange:
    """A request that passes; times are perf_counter's.

    Attributes:
        endpoint: completions, chat or responses; None: one that makes no tokens, of which nothing is kept.
        failure: why it will have no row, the first reason there was.
        ended: when the last of its answer was handed on.
    """

    number: int
    endpoint: str | None
    arrival: float
    headers: Mapping[str, str]
    allowance: Allowance
    failure: str | None = None
    ended: float = 0.0
    reader: Reader | None = None
    _body: list[bytes] = field(default_factory=list)
    _kept: int = 0

    def fail(self, why: str) -> None:
        """Say why it will have no row; nothing of it is needed any more."""
        self.failure = self.failure or why
        self.release()

    def left(self, why: str) -> None:
        """Say that the client has gone; many do so at [DONE], before the end of the connection's framing."""
        if self.reader is None or not self.reader.is_over:
            self.fail(why)

    def asked(self, data: bytes) -> None:
        """Keep a part of the request."""
        if self.endpoint is None or self.failure is not None:
            return
        if self._kept + len(data) > MOST_OF_A_REQUEST:
            self.fail(TOO_LARGE)
        elif self._has_room(data):
            self._body.append(data)

    def _has_room(self, data: bytes) -> bool:
        if not self.allowance.take(len(data)):
            self.fail(CROWDED)
            return False
        self._kept += len(data)
        return True

    def answering(self, status: int, headers: Mapping[str, str]) -> None:
        """Look at how an answer begins."""
        if status != 200:
            self.fail(f"answered with status {status}")
        elif any(said.get("Content-Encoding", "identity") != "identity" for said in (headers, self.headers)):
            self.fail(COMPRESSED)
        elif self.endpoint is not None and self.failure is None:
            self.reader = Reader(headers.get("Content-Type", "").lower().startswith("text/event-stream"))

    def answered(self, data: bytes) -> None:
        """Read a part of the answer."""
        if self.reader is not None and (self.reader.is_stream or self._has_room(data)):
            self.reader.feed(data)

    @property
    def body(self) -> bytes:
        """The request's body."""
        return b"".join(self._body)

    @property
    def session(self) -> str | None:
        """What the client calls its conversation."""
        return next((self.headers[name] for name in SESSION_HEADERS if self.headers.get(name)), None)

    @property
    def keys(self) -> dict[str, str]:
        """The headers that let the client in."""
        return {name: self.headers[name] for name in KEY_HEADERS if name in self.headers}

    def release(self) -> None:
        """Keep nothing of it any more."""
        self.allowance.left += self._kept
        self._kept = 0
        self._body.clear()
        self.reader = None
