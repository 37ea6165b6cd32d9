"""Inject faults into small studies and see that every one is survived.

    python -m tests.faults --n 100 --seed 1                 a fifth of them on real vLLM servers, where there is one
    python -m tests.faults --only kill-tune --seed 17        one fault alone, as the line of a failed one says

The last line is RESULT injected=... survived=... lost_trials=... leaked=...
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.checks import Verdict
from tests.faults.kinds import KINDS, REAL, Kind, missing
from tests.faults.project import TRIALS, BrokenError, MissedError

TRIES = 4
SAYING = threading.Lock()


def inject(kind: Kind, seed: int, root: Path, trials: int = TRIALS) -> Verdict | None:
    """Inject one fault; a moment that was missed is tried for again. None: it never hit."""
    for attempt in range(TRIES):
        verdict = Verdict(kind.name, seed, folder=root / f"{kind.name}-{seed}-{attempt}")
        assert verdict.folder is not None
        with kind.project(verdict.folder, random.Random(f"{kind.name}/{seed}/{attempt}"), trials) as project:
            try:
                kind.inject(project, verdict)
            except MissedError as error:
                say(f"      {kind.name} seed {seed}: missed ({verdict.moment or error}: {error}), again")
                continue
            except BrokenError as error:
                verdict.wrong.append(str(error))
            except Exception:  # noqa: BLE001 (a check that fails in its own way is a failed check)
                verdict.wrong.append(traceback.format_exc())
            finally:
                project.destroy()
        return verdict
    return None


def plan(kinds: Sequence[Kind], n: int, seed: int) -> list[tuple[Kind, int]]:
    """Return kinds and seeds: every kind once, in a seeded order, before any comes again."""
    rng = random.Random(seed)
    chosen: list[Kind] = []
    while len(chosen) < n:
        chosen += rng.sample(kinds, len(kinds))
    return [(kind, seed + index) for index, kind in enumerate(chosen[:n])]


def say(text: str) -> None:
    """Print one line whole."""
    with SAYING:
        print(text, flush=True)


def tell(number: int, verdict: Verdict, seconds: float, again: str) -> None:
    """Print what became of a fault, and how a failed one is run alone."""
    state = "survived" if verdict.survived else "FAILED"
    lines = [
        f"{number:4} seed {verdict.seed} {verdict.kind}: {verdict.moment or 'at start'}: {state} ({seconds:.0f} s)"
    ]
    lines += [f"      {line}" for complaint in verdict.complaints() for line in complaint.splitlines()]
    if not verdict.survived:
        lines += [f"      again: {again}", f"      folder: {verdict.folder}"]
    say("\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return 0 when every fault hit and was survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--n", type=int, help="faults in all (100; with --only 1)")
    parser.add_argument("--real", type=int, help="how many of them on real servers (a fifth, where there is a vLLM)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[kind.name for kind in (*KINDS, *REAL)], help="this kind alone")
    parser.add_argument("--jobs", type=int, default=2, help="faults on fake servers at a time")
    parser.add_argument("--keep", action="store_true", help="keep the folders of survived faults too")
    asked = parser.parse_args(arguments)
    # A shell that starts this with & has it ignored, and what is ignored stays so in every child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = Path(tempfile.mkdtemp(prefix="tune-faults-"))
    n = asked.n if asked.n is not None else 1 if asked.only else 100
    n_real = asked.real
    if n_real is None:
        n_real = 0 if asked.only or missing(REAL[0]) else n // 5
    n -= n_real
    pool = [kind for kind in (*KINDS, *REAL) if kind.name == asked.only] or list(KINDS)
    for kind in [kind for kind in pool if missing(kind)]:
        say(f"skipped: {kind.name}: {missing(kind)}")
        pool.remove(kind)
    todo = plan(pool, n, asked.seed) if pool else []
    real = plan(REAL, n_real, asked.seed + n) if n_real else []
    found: list[Verdict | None] = []

    def one(number: int, kind: Kind, seed: int) -> None:
        began = time.monotonic()
        verdict = inject(kind, seed, root)
        found.append(verdict)
        if verdict is None:
            say(f"{number:4} seed {seed} {kind.name}: NOT INJECTED in {TRIES} tries")
            return
        tell(number, verdict, time.monotonic() - began, f"python -m tests.faults --only {kind.name} --seed {seed}")
        if verdict.survived and not asked.keep and verdict.folder is not None:
            shutil.rmtree(verdict.folder, ignore_errors=True)

    with ThreadPoolExecutor(asked.jobs) as workers:
        try:
            for task in [workers.submit(one, number, *job) for number, job in enumerate(todo, start=1)]:
                task.result()
        except BaseException:  # Ctrl-C or SIGTERM: what is under way ends itself, nothing more begins
            workers.shutdown(wait=False, cancel_futures=True)
            raise
    for number, job in enumerate(real, start=len(todo) + 1):
        one(number, *job)
    injected = [verdict for verdict in found if verdict is not None]
    survived = [verdict for verdict in injected if verdict.survived]
    lost, leaked = (sum(len(v.lost) for v in injected), sum(len(v.leaked) for v in injected))
    say(f"RESULT injected={len(injected)} survived={len(survived)} lost_trials={lost} leaked={leaked}")
    return 0 if len(survived) == len(todo) + len(real) else 1


def _leave(_number: int, _frame: object) -> None:
    sys.exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
