"""One writer a study: a claim that lives in the Optuna storage itself, wherever it is.

A run folder's own lock keeps two tunes apart that share the folder. A storage may be shared by hosts that do not:
so who writes puts a claim among the study's attributes and renews it. A claim is dead when its process is
known to be gone (same boot, same process namespace), or when it was not renewed for `SILENCE` seconds of the
observer's own clock; no two wall clocks are compared, since they may differ or be set.

A claim is made in two steps, "asking" and "holding", with a look at all others in between: of two that ask at
the same time each sees the other, both withdraw, and ask again after a pause of random length.
"""

import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import optuna

from tuner.errors import HostError
from tuner.study import storage

PREFIX, REVOKED = "tune.writer.", ".revoked"  # the second is written by others only, so that it stays
BEAT = 5.0
SILENCE = 30.0
TRIES = 5
ASKING, HOLDING = "asking", "holding"

Claim = dict[str, Any]


class Writer:
    """The right to write to a study, from entering until leaving.

    Args:
        study: of Optuna.
        url: of its storage, for errors.
        say: is told why it takes long.
    """

    def __init__(self, study: optuna.Study, url: str, say: Callable[[str], None] = lambda _: None) -> None:
        self._study, self._url, self._say = study, url, say
        self._key = PREFIX + uuid.uuid4().hex[:12]
        self._where, self._beats = _where(), 0
        self._state: str | None = None
        self._putting = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="storage-claim", daemon=True)

    def __enter__(self) -> Self:
        """Claim the study.

        Raises:
            HostError: another tune writes to it.
        """
        self._thread.start()
        with ExitStack() as unless_claimed:
            unless_claimed.callback(self._leave)
            with storage.answering(self._url):
                self._claim()
            unless_claimed.pop_all()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._leave()

    def _claim(self) -> None:
        for attempt in range(TRIES):
            self._put(ASKING)
            others = self._living()
            if not others:
                self._put(HOLDING)
                self.check()  # while this one waited for a sign of another, the other may have waited for one of this
                return
            self._put(None)
            if attempt == TRIES - 1 or any(claim["state"] == HOLDING for claim in others):
                raise HostError(
                    f"another tune is at work on study {self._study.study_name!r} of this storage: process "
                    f"{others[0]['pid']} on {others[0]['host']}", hint="wait for it or stop it",
                )  # fmt: skip
            time.sleep(random.uniform(0.1, 1.0))  # noqa: S311 (no secret)

    def _leave(self) -> None:
        self._ended.set()
        self._thread.join(BEAT)
        with suppress(HostError), storage.answering(self._url):  # one that cannot be taken back dies with this process
            self._put(None)

    def check(self) -> None:
        """Make sure that the study is still ours.

        Raises:
            HostError: another tune took it over while this one was suspended or cut off from the storage.
        """
        if self._is_revoked():
            raise HostError(
                f"another tune has taken this study over: this one was not heard of for {SILENCE:g} s",
                hint="what it measured until then is in the run folder; go on with the other one",
            )

    def _put(self, state: str | None) -> None:
        """Write the claim down, or take it back."""
        with self._putting:
            self._state = state
            self._beats += 1
            pid = os.getpid()
            claim = {"state": state, "host": socket.gethostname(), "pid": pid, "born": _born(pid), "where": self._where,
                     "beats": self._beats}  # fmt: skip
            self._study.set_user_attr(self._key, claim if state is not None else None)

    def _renew(self) -> None:
        while not self._ended.wait(BEAT):
            # The study's own next write tells what is wrong with the storage.
            with suppress(HostError), storage.answering(self._url):
                if self._state is not None and not self._is_revoked():
                    self._put(self._state)

    def _is_revoked(self) -> bool:
        return self._key + REVOKED in self._study.user_attrs

    def _claims(self) -> dict[str, Claim]:
        attrs = self._study.user_attrs
        gone = {self._key, *(name.removesuffix(REVOKED) for name in attrs if name.endswith(REVOKED))}
        return {k: v for k, v in attrs.items() if k.startswith(PREFIX) and k not in gone and _is_claim(v)}

    def _living(self) -> list[Claim]:
        """Return the claims of others that live; dead ones are taken away."""
        doubtful: dict[str, Claim] = {}
        for key, claim in self._claims().items():
            match self._is_alive(claim):
                case True:
                    return [claim]
                case False:
                    self._study.set_user_attr(key + REVOKED, True)
                case None:
                    doubtful[key] = claim
        if not doubtful:
            return []
        hosts = ", ".join(sorted({str(claim["host"]) for claim in doubtful.values()}))
        self._say(f"a tune on {hosts} had this study; waiting up to {SILENCE:g} s for a sign of it")
        deadline = time.monotonic() + SILENCE
        while doubtful and time.monotonic() < deadline:
            time.sleep(min(1.0, BEAT))
            now = self._claims()
            doubtful = {key: claim for key, claim in doubtful.items() if key in now}
            if moved := [now[key] for key, claim in doubtful.items() if now[key]["beats"] != claim["beats"]]:
                return moved
        for key in doubtful:
            self._study.set_user_attr(key + REVOKED, True)
        return []

    def _is_alive(self, claim: Claim) -> bool | None:
        """Whether the claim's process lives; None when that cannot be seen from here."""
        if not claim["where"] or claim["where"] != self._where:
            return None
        return claim["born"] is not None and _born(claim["pid"]) == claim["born"]


def _born(pid: int) -> int | None:
    """Return when a living process started, in clock ticks since the boot, which no setting of the clock changes."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The second field is the program's name in brackets and may hold anything.
        state, *rest = text.rpartition(")")[2].split()
        return None if state == "Z" else int(rest[18])
    except (OSError, ValueError, IndexError):
        return None


def _where() -> str:
    """Return what two processes share that see each other: boot and process namespace; "" where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _is_claim(value: object) -> bool:
    return isinstance(value, dict) and {"state", "host", "pid", "born", "where", "beats"} <= set(value)
