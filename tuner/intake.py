"""Make a workload of a trace that somebody else recorded: read it once, decide, write what is kept.

Rows go through a file without a name between the two passes, so that of a long trace only
columns stay in memory (32 bytes a row, and as much again while they are sorted).
Order of what is done to them: shrink, length limit, spreading, time scale, rate, window.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed

from tuner import units
from tuner.errors import HostError, SpecError
from tuner.outside import legible
from tuner.readers import formats
from tuner.readers.changes import Changes, Plan, plan, shrunk
from tuner.readers.format import Format, Options, Tokenize
from tuner.readers.lengths import UNCOUNTED
from tuner.readers.source import Source, Tally
from tuner.readers.spool import Spool
from tuner.sinks import provenance
from tuner.sinks.provenance import Provenance
from tuner.sinks.words import plain
from tuner.workload import BESIDE, Fingerprint, encoded, moved, trusted

SOURCE = "source.json"
ROWS = "workload.jsonl"
OWN, OPEN = 0o600, 0o666  # modes of files with prompts, as a recording's are, and without; less the umask
NO_SHRUNK_PROMPT = "prompts left out, and what they share: a text cannot be divided (--shrink)"
LARGEST_SCALE = 1e6


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to make of which trace.

    Attributes:
        source: the trace's file.
        format: of the file.
        out: the workload's folder, which is not there yet.
        options: what the trace does not say itself.
        skip_damaged: drop and count damaged rows instead of refusing the file.
        changes: what is done to its rows.
    """

    source: Path
    format: Format
    out: Path
    options: Options = field(default_factory=Options)
    skip_damaged: bool = False
    changes: Changes = field(default_factory=Changes)


@dataclass(frozen=True, slots=True)
class Imported:
    """What was made of a trace.

    Attributes:
        folder: the workload's.
        format: the trace's.
        read: rows that the trace has; each was kept or dropped.
        dropped: how many were, by reason.
        transforms: what was done to those kept, in words, in order.
        notes: what a reader of results must know.
        files: rows of each file that was written.
        fingerprint: of what is replayed (see `workload.Fingerprint`).
        source_sha256: of the trace's file.
    """

    folder: Path
    format: str
    read: int
    dropped: Mapping[str, int]
    transforms: tuple[str, ...]
    notes: tuple[str, ...]
    files: Mapping[str, int]
    fingerprint: str
    source_sha256: str

    def to_json(self, source: str) -> dict[str, Any]:
        """Return what `source.json` holds."""
        return {
            "source": legible(source), "format": self.format, "source_sha256": self.source_sha256,
            "rows_read": self.read, "rows_kept": self.read - sum(self.dropped.values()), "dropped": dict(self.dropped),
            "transforms": list(self.transforms), "notes": list(self.notes), "files": dict(self.files),
            "fingerprint": self.fingerprint,
        }  # fmt: skip


# --- Flags ------------------------------------------------------------------------------------------------


def wanted(source: Path, out: Path | None, **flags: Any) -> Wanted:
    """Return what flags of the command line ask for, as text or numbers, None where they were not given.

    Raises:
        SpecError: names the flag that is wrong, or says that the file's format is not certain.
    """
    given = {name: value for name, value in flags.items() if value is not None and value is not False}
    for name in ("max_len", "shrink", "shrink_output", "block_size", "template_tokens"):
        if given.get(name, 1) < 1:
            raise SpecError(f"--{name.replace('_', '-')} {given[name]}: must be at least 1")
    for name in ("rate_scale", "time_scale"):
        if not 0 < given.get(name, 1) < LARGEST_SCALE:
            raise SpecError(f"--{name.replace('_', '-')} {given[name]:g}: must be above 0 and below {LARGEST_SCALE:g}")
    file = formats.at(source)
    kind = formats.named(given["format"]) if "format" in given else formats.recognise(file)
    for name, (option, _) in OPTIONS.items():
        if name in given and option not in kind.takes:
            flag = f"--{name.replace('_', '-')}"
            raise SpecError(f"{flag}: means nothing for {kind.name}", hint=f"{kind.name}: {kind.title}")
        if name in OF_A_TOKENIZER and name in given and "tokenize" in kind.takes and "tokenizer" not in given:
            raise SpecError(f"--{name.replace('_', '-')}: means nothing for {kind.name} without --tokenizer",
                            hint="name the model's tokenizer: --tokenizer FOLDER or MODEL")  # fmt: skip
    changes = {name: given[name] for name in CHANGES if name in given}
    if "window" in given:
        changes["window"] = _duration("--window", given["window"])
    if "shrink" in given:
        changes.setdefault("shrink_output", given["shrink"])
    options = Options(**{OPTIONS[name][0]: OPTIONS[name][1](given[name]) for name in OPTIONS if name in given},
                      seed=given.get("seed", 0))  # fmt: skip
    name = source.name.removesuffix(".gz")
    folder = out if out is not None else Path("workloads") / plain(name.rpartition(".")[0] or name)
    return Wanted(file.path, kind, folder, options, "skip_damaged" in given, Changes(**changes))


def _duration(flag: str, text: str) -> float:
    try:
        seconds = units.parse_duration(text)
    except ValueError as error:
        raise SpecError(f"{flag} {text}: {error}") from None
    if not seconds:
        raise SpecError(f"{flag} {text}: must be above zero")
    return seconds


def _unit(text: str) -> float:
    if text not in {"s", "ms", "us"}:
        raise SpecError(f"--time-unit {text}: no unit of a trace's clock", hint="one of: s, ms, us")
    return units.SECONDS_PER_UNIT[text]


def _per_second(text: str) -> float:
    number = text.removesuffix("/s")
    try:
        rate = float(number)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf") or number == text:
        raise SpecError(f"--rate {text}: not a rate such as 2/s")
    return rate


def _tokenizer(name: str) -> Tokenize:
    from tuner.readers import tokenizer  # noqa: PLC0415 (only where one is named)

    return tokenizer.load(name)


CHANGES = ("shrink", "shrink_output", "max_len", "rate_scale", "time_scale", "spread_steps", "seed")
OF_A_TOKENIZER = frozenset({"template_tokens", "keep_prompts", "block_size"})  # where text is counted
# Flag -> the option of a reader, and what makes it of the flag's value.
OPTIONS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "tokenizer": ("tokenize", _tokenizer),
    "template_tokens": ("template", int),
    "block_size": ("block_size", int),
    "time_unit": ("time_unit", _unit),
    "rate": ("rate", _per_second),
    "keep_prompts": ("keep_prompts", bool),
}


# --- The import -------------------------------------------------------------------------------------------


def run(wanted: Wanted) -> Imported:
    """Write the workload's folder, whole or not at all, and return what is in it.

    Raises:
        SpecError: the trace cannot be read so, or nothing is left of it; names file and line.
        HostError: the folder cannot be written.
    """
    _refuse_existing(wanted.out)
    before = _before(wanted)
    tally = Tally(Source(wanted.source), skip_damaged=wanted.skip_damaged)
    with _beside(wanted.out) as folder, tempfile.TemporaryFile(dir=folder) as file:
        spool = Spool(file)
        _fill(spool, tally, wanted)
        found = plan(wanted.changes, spool)
        tally.dropped.update(found.dropped)
        files, fingerprint = _write(folder, spool, found, wanted.changes.time_scale)
        imported = Imported(
            folder=wanted.out, format=wanted.format.name, read=tally.read, dropped=dict(sorted(tally.dropped.items())),
            transforms=(*before.transforms, *found.transforms),
            notes=(*before.notes, *_left_behind(wanted), *tally.noted, *found.notes), files=files,
            fingerprint=fingerprint, source_sha256=_sha256(wanted.source),
        )  # fmt: skip
        (folder / SOURCE).write_text(json.dumps(imported.to_json(wanted.source.name), indent=1) + "\n")
        folder.rename(wanted.out)
    return imported


def _before(wanted: Wanted) -> Provenance:
    """Return what is written beside the rows of a workload of ours: it is as true of those made of them."""
    is_ours = wanted.format is formats.FORMATS["tune"] and wanted.source.name == ROWS
    found = (provenance.read(wanted.source.parent) if is_ours else None) or Provenance({}, {})
    return replace(found, transforms=tuple(words for words in found.transforms if not words.startswith("confirm: ")))


def _left_behind(wanted: Wanted) -> Iterator[str]:
    """Say which rows of a workload of ours were not read."""
    beside = [name for name in BESIDE if wanted.source.name == ROWS and wanted.source.with_name(name).is_file()]
    if beside:
        yield f"only {ROWS} was read of the source: its {', '.join(beside)} stay behind"


def told(found: Imported) -> Iterator[str]:
    """Yield what became of the rows, in words."""
    dropped = sum(found.dropped.values())
    why = f" ({_reasons(found.dropped)})" if dropped else ""
    rows = f"{found.read:,} rows read = {found.read - dropped:,} kept + {dropped:,} dropped{why}"
    yield f"{plain(found.folder)}: {found.format}, {rows}"
    yield "  " + ", ".join(f"{name}.jsonl {rows:,} rows" for name, rows in found.files.items())


# --- First pass: every row once ---------------------------------------------------------------------------


def _fill(spool: Spool, tally: Tally, wanted: Wanted) -> None:
    """Read the trace into the spool."""
    changes = wanted.changes
    for row in wanted.format.read(tally.source, wanted.options, tally):
        kept = shrunk(row, changes)
        if row.prompt is not None and kept.prompt is None:
            tally.note(NO_SHRUNK_PROMPT, row.source_line or tally.read)
        if changes.max_len is not None and kept.input_len + kept.output_len > changes.max_len:
            tally.drop(f"input + output above {changes.max_len:,} tokens")
        else:
            spool.add(kept)
    if not len(spool):
        raise SpecError(
            f"{wanted.source}: none of {tally.read:,} rows is left: {_reasons(tally.dropped) or 'it is empty'}",
            hint="name the model's tokenizer: --tokenizer FOLDER or MODEL" if UNCOUNTED in tally.dropped else None,
        )


# --- Second pass: what is kept ----------------------------------------------------------------------------


def _write(folder: Path, spool: Spool, plan: Plan, time_scale: float) -> tuple[dict[str, int], str]:
    """Write a file a part; return the rows of each, and the fingerprint of the workload."""
    fingerprint = Fingerprint()
    opener = partial(os.open, mode=OWN if spool.has_prompts else OPEN)
    for name, part in plan.parts.items():
        with open(folder / f"{name}.jsonl", "wb", opener=opener) as file:
            lines = spool.lines(part.row, part.copy)
            for line, arrival in zip(lines, part.arrival.tolist(), strict=True):
                placed = moved(line if time_scale == 1 else _scaled(line, time_scale), arrival)
                file.write(placed)
                if name == "workload":
                    fingerprint.add(placed)
    return {name: len(part.row) for name, part in plan.parts.items()}, fingerprint.hexdigest()


def _scaled(line: bytes, time_scale: float) -> bytes:
    row = trusted(line)
    if row.think_time is None:
        return line
    return encoded(changed(row, think_time=round(row.think_time * time_scale, 6)))


def _refuse_existing(out: Path) -> None:
    if out.name in ("", ".."):
        raise SpecError(f"-o {out}: is a folder that somebody is in", hint="name the folder that is to be made")
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise SpecError(f"-o {out}: is there already", hint="give another folder, or remove this one")


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Make a folder next to the one that is wanted; it is gone afterwards unless it was renamed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        folder.chmod(0o755)
    except OSError as error:
        raise HostError(f"{out}: cannot be made: {error.strerror}", hint="give another folder: -o") from error
    try:
        yield folder
    except OSError as error:
        raise HostError(f"{out}: cannot be written: {error.strerror}", hint="is the disk full?") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(dropped.items()))
