"""Which conversation a request belongs to, and which answer it waited for.

A chat is stateless: each turn sends all that was said before. A request whose messages begin with an earlier
request's messages and the answer to it is its next turn. Two conversations that are equal up to there cannot be
told apart; the one that was answered last is taken.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tuner.proxy.asked import Message
from tuner.proxy.hashing import Salt

MOST_REMEMBERED = 100_000  # the ones answered longest ago are forgotten first


@dataclass(frozen=True, slots=True)
class Turn:
    """An answered request: its row's id, its conversation, when its answer ended (perf_counter)."""

    id: str
    session: str | None
    ended: float


@dataclass(slots=True)
class Turns:
    """The answered requests that a later one may go on from."""

    salt: Salt
    _known: OrderedDict[bytes, Turn] = field(default_factory=OrderedDict)

    def remember(self, keys: Sequence[bytes], turn: Turn) -> None:
        """Keep a turn under what a request that goes on from it will show."""
        for key in keys:
            self._known[key] = turn
            self._known.move_to_end(key)
        while len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)

    def before(self, keys: Sequence[bytes]) -> Turn | None:
        """Return the turn of the last key that is known."""
        return next((self._known[key] for key in reversed(keys) if key in self._known), None)

    def of_messages(self, messages: Sequence[Message]) -> list[bytes]:
        """Return the key of each leading part of a conversation, the shortest first."""
        return list(self.salt.chain(message.encoded() for message in messages))

    def of_name(self, kind: str, name: str) -> bytes:
        """Return the key of something that has a name: an answer, or a session."""
        return self.salt.digest(kind.encode(), name.encode(errors="surrogatepass"))
