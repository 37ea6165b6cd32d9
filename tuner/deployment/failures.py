"""Say why a server ended: a kind for the study, and for the user the telling lines of its log.

vLLM is several processes that write into one log. The last line is seldom the cause: when an engine cannot
start, the API server closes with "Engine core initialization failed. See root cause above", so the cause is
looked for in the lines of the Worker first, then of the EngineCore, then of the rest.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import FailureKind
from tuner.outside import blotted

TAIL_BYTES = 256 * 1024
MARGIN = 4096
TAIL_LINES = 20
MOST_LINES = 6

OOM = FailureKind.OOM
BAD_ARGUMENT = FailureKind.BAD_ARGUMENT
PORT = FailureKind.PORT

LESS_MEMORY = "lower gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or max_model_len"
LESS_KV = "raise gpu_memory_utilization or lower max_model_len"
NO_MODEL = (
    "give a folder that holds a model, or a name on the Hugging Face hub; "
    "for a private model export HF_TOKEN; to let vLLM download unset HF_HUB_OFFLINE"
)
NO_MODEL_SAYS = (
    r"is not a local folder and is not a valid model identifier|Repo id must be|Repository Not Found"
    r"|Can't load the configuration of|couldn't connect to .* and couldn't find"
    r"|does not appear to have a file named|Invalid repository ID or local directory"
    r"|(?:HFValidation|RepositoryNotFound|LocalEntryNotFound|GatedRepo)Error:|OfflineModeIsEnabled:"
)

# (kind, what the line says, hint): the first rule that matches a line wins.
RULES: tuple[tuple[FailureKind, str, str | None], ...] = (
    (PORT, r"(?i)address already in use|EADDRINUSE", None),
    (
        OOM,
        r"Free memory on device .* less than desired GPU memory utilization",
        "end what else uses the GPU, or lower gpu_memory_utilization",
    ),
    (OOM, r"OutOfMemoryError|(?:CUDA|HIP) out of memory|CUDA error: out of memory", LESS_MEMORY),
    (OOM, r"No available memory for the cache blocks", LESS_KV),
    (OOM, r"KV cache is needed, which is larger than the available KV cache memory", LESS_KV),
    (
        OOM,
        r"less than desired CPU memory utilization",
        'set env: {VLLM_CPU_KVCACHE_SPACE: "1"} (GiB), or lower gpu_memory_utilization',
    ),
    (OOM, r"less than requested memory for kv", "lower VLLM_CPU_KVCACHE_SPACE or kv_cache_memory_bytes"),
    (OOM, r"^MemoryError|Cannot allocate memory|DefaultCPUAllocator: can't allocate memory", LESS_MEMORY),
    (BAD_ARGUMENT, NO_MODEL_SAYS, NO_MODEL),
    (BAD_ARGUMENT, r"^[\w./ -]+: error: ", None),
    (BAD_ARGUMENT, r"ValidationError: \d+ validation errors? for ", None),
    (BAD_ARGUMENT, r"NotImplementedError: Concurrent Partial Prefill", None),
    (BAD_ARGUMENT, r"kv_buffer is not supported|Unsupported connector type", None),
    (BAD_ARGUMENT, r"FileNotFoundError: .*\.ya?ml'", None),
)

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PROCESS = re.compile(r"^\((?P<process>[A-Za-z][\w-]*) pid=\d+\) ?")
_LOGGER = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]*\] ?")
_LEVEL = re.compile(r"^(DEBUG|INFO|WARNING)\b")
# "ValueError: ...", "torch.OutOfMemoryError: ...", "vllm: error: ..."; not a line that only mentions one.
_ERROR = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|IsEnabled)(?:: .|:?$)"
    r"|^[\w./ -]+: error: |^ERROR:\s+\[Errno "
)
_NOT_THE_CAUSE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|Worker failed with error"
    r"|EngineCore encountered an issue|EngineDeadError|^(?:\w+\.)*CancelledError"
)
_CORE_KILLED = re.compile(rf"Failed core proc\(s\): \{{.*: -{int(signal.SIGKILL)}\b")
_CORE_VANISHED = re.compile(r"engine core exited unexpectedly")
_PYDANTIC_TAIL = re.compile(r" \[type=\w+, input_value=.*$")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a server ended.

    Attributes:
        kind: for the study.
        message: the cause in one line.
        log: the lines of the log that tell it, without prefixes.
        hint: what the user can do, if that is known.
    """

    kind: FailureKind
    message: str
    log: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the log: who wrote it, and what remains without prefixes."""

    process: str
    text: str
    is_routine: bool

    @property
    def depth(self) -> int:
        """How near to the cause its writer is."""
        return 2 if self.process.startswith("Worker") else 1 if self.process.startswith("EngineCore") else 0


def diagnose(log: str, exit_code: int | None, *, otherwise: FailureKind = FailureKind.CRASH) -> Diagnosis:
    """Return why a server with this log ended; `otherwise` is the kind when nothing tells."""
    lines = [read_line(text) for text in log.splitlines()]
    causes = [index for index, line in enumerate(lines) if _is_cause(line)]
    for kind, pattern, hint in RULES:
        for index in _deepest_first(lines, causes):
            if re.search(pattern, lines[index].text):
                telling = _with_what_follows(lines, index)
                return Diagnosis(kind, in_one_line(telling), telling, hint)
    if exit_code == -signal.SIGKILL or _CORE_KILLED.search(log):
        return Diagnosis(OOM, "killed by SIGKILL, as the kernel does when memory runs out", tail(lines), LESS_MEMORY)
    if causes:
        telling = _with_what_follows(lines, _deepest_first(lines, causes)[0])
        kind = BAD_ARGUMENT if exit_code == 2 else otherwise  # argparse's exit code
        return Diagnosis(kind, in_one_line(telling), telling)
    if _CORE_VANISHED.search(log):
        message = "its engine core was gone without a word, as when the kernel kills it for memory (SIGKILL)"
        return Diagnosis(otherwise, message, tail(lines), LESS_MEMORY)
    return Diagnosis(otherwise, f"ended with {describe_exit(exit_code)}", tail(lines))


def in_one_line(lines: Sequence[str]) -> str:
    """Return an error as one line, without the addresses and inputs that pydantic adds."""
    kept = [_PYDANTIC_TAIL.sub("", line.strip()) for line in lines]
    text = " ".join(line for line in kept if line and not line.startswith("For further information"))
    text = re.sub(r"^(?:\w+\.)+(?=\w+(?:Error|Exception):)", "", text)
    return re.sub(r"^(?:ValidationError: )?1 validation error for (\w+) Value error, ", r"\1: ", text)


def describe_exit(exit_code: int | None) -> str:
    """Return an exit code in words: "exit code 1", "SIGSEGV"."""
    if exit_code is None:
        return "no exit code"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        return f"signal {-exit_code}"


def read_tail(path: Path, size: int = TAIL_BYTES) -> str:
    """Return the end of a log file, without secrets; nothing when there is none."""
    try:
        with path.open("rb") as file:
            # From a little before: of a secret that is cut in two, the second half would not be known.
            file.seek(max(path.stat().st_size - size - MARGIN, 0))
            return blotted(file.read().decode(errors="replace"))[-size:]
    except FileNotFoundError:
        return ""


def tail(lines: Sequence[Line], n: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last lines that say anything."""
    return tuple(line.text for line in lines if line.text.strip())[-n:]


def read_line(text: str) -> Line:
    """Return a raw line without colours, process name, level and time."""
    text = _ANSI.sub("", text).rstrip()
    match = _PROCESS.match(text)
    process = match["process"] if match else ""
    text = _PROCESS.sub("", text)
    return Line(process, _LOGGER.sub("", text), is_routine=_LEVEL.match(text) is not None)


def _is_cause(line: Line) -> bool:
    return not line.is_routine and bool(_ERROR.match(line.text)) and not _NOT_THE_CAUSE.search(line.text)


def _deepest_first(lines: Sequence[Line], causes: Sequence[int]) -> list[int]:
    """Order causes by how near their writer is to the engine, then by when they were written."""
    return sorted(causes, key=lambda index: (-lines[index].depth, index))


def _with_what_follows(lines: Sequence[Line], index: int) -> tuple[str, ...]:
    """Return an error line with the indented lines that belong to it (pydantic writes the reason there)."""
    telling = [lines[index].text.strip()]
    for line in lines[index + 1 :]:
        if not line.text.startswith("  ") or len(telling) == MOST_LINES:
            break
        telling.append(line.text.strip())
    return tuple(telling)
