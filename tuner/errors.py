"""Every error a user can meet, drawn as a tree.

TunerError                 message + hint + exit code
|-- SpecError        2     a file, flag or SLO is wrong; says where
|-- HostError        4     this host cannot do it: vLLM missing, GPU busy, clean-up not proven
|-- Interrupted    130     the user stopped the study; everything measured so far is kept
`-- TrialError       4     this trial gave no measurement; a study goes on, a lone replay ends
    |-- StartError         the server exited or never became ready
    |-- ServerDied         the server ended while requests were running
    `-- InvalidReplay      the replay says nothing about the configuration

Errors are raised where the fact is known, with their kind. They are caught in two places only:
study/loop.py turns a TrialError into a Failure, cli.py turns any TunerError into a line, a hint and
an exit code. Anything else is a bug and shows its traceback.
"""

from enum import StrEnum

from tuner.outside import blotted, legible


class ExitCode:
    """What `tune` exits with."""

    OK = 0
    BUG = 1
    USAGE = 2
    SLO_NOT_MET = 3
    HOST = 4
    INTERRUPTED = 130


class FailureKind(StrEnum):
    """Why a trial gave no measurement."""

    OOM = "oom"
    BAD_ARGUMENT = "bad_argument"
    TIMEOUT = "timeout"
    PORT = "port"
    CRASH = "crash"
    DIED = "died"
    CLIENT_LAG = "client_lag"
    LENGTHS_OFF = "lengths_off"
    NO_TRANSFER = "no_transfer"
    NOTHING_COMPLETED = "nothing_completed"
    INTERRUPTED = "interrupted"

    @property
    def is_configurations_fault(self) -> bool:
        """True when another try of the same configuration would fail again."""
        return self not in {
            FailureKind.PORT,
            FailureKind.CLIENT_LAG,
            FailureKind.LENGTHS_OFF,
            FailureKind.INTERRUPTED,
        }


class TunerError(Exception):
    """Something the user can act on; in what it says of others there are no secrets and no control characters."""

    exit_code = ExitCode.BUG

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = legible(blotted(message))
        self.hint = None if hint is None else legible(blotted(hint))
        super().__init__(self.message)


class SpecError(TunerError):
    """A file, a flag or an SLO is wrong; the message starts with where."""

    exit_code = ExitCode.USAGE


class HostError(TunerError):
    """This host cannot run the study as it stands."""

    exit_code = ExitCode.HOST


class Interrupted(TunerError):  # noqa: N818 (an interruption is not an error)
    """The user stopped the study."""

    exit_code = ExitCode.INTERRUPTED


class TrialError(TunerError):
    """One trial gave no measurement."""

    exit_code = ExitCode.HOST

    def __init__(self, kind: FailureKind, message: str, *, hint: str | None = None, log: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.log = tuple(legible(blotted(line)) for line in log)


class StartError(TrialError):
    """The server exited before it was ready, or was not ready in time."""


class ServerDied(TrialError):  # noqa: N818 (reads as what happened)
    """The server ended while requests were running."""


class InvalidReplay(TrialError):  # noqa: N818 (reads as what happened)
    """The replay was not what the workload says, so its numbers say nothing."""
