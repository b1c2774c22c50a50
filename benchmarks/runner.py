"""Runs the suites, each in a process of its own, and writes the report.

Two suites run at a time, each bound to its own processor. Suites that measure memory run alone afterwards. Results are
appended to ``speed.jsonl`` and ``overhead.jsonl`` at once, so that stopping loses nothing. ``suites.jsonl`` says how
each suite ended. A suite that fails, hangs or lacks its peer is reported, and the others still run.
"""

from __future__ import annotations

import datetime
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.records import Records

from benchmarks import machine, report
from benchmarks.suites import SUITES
from benchmarks.worker import OVERHEAD, SPEED
from probhard.errors import check_choice

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "speed"
ATONCE = 2  # suites
LONGEST = 1800  # seconds per suite
QUICK_SECONDS = "0.3"  # per comparison
SINGLE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")

Command = Callable[[str, Path, bool], Sequence[str]]


def command(name: str, folder: Path, quick: bool) -> list[str]:
    """Return the command line of a suite."""
    suite = SUITES[name]
    python = [sys.executable, "-m"]
    if suite.reports:
        return [*python, f"benchmarks.{suite.module}"]
    return [*python, "benchmarks.worker", name, str(folder), *(["--quick"] if quick else [])]


def chosen(names: Sequence[str], quick: bool = False) -> list[str]:
    """Return the named suites, by default all; a quick run leaves out suites with reports of their own."""
    for name in names:
        check_choice("suite", name, tuple(SUITES))
    return list(names) or [name for name, suite in SUITES.items() if not (quick and suite.reports)]


def run(names: Sequence[str], folder: Path = FOLDER, quick: bool = False, command: Command = command) -> list[Path]:
    """Run the named suites, by default all, and write the report; returns its files."""
    ends = Records(folder / "suites.jsonl", ("suite",))
    processors: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in machine.processors()[::-1][:ATONCE]:
        processors.put(number)

    def one(name: str) -> None:
        processor = processors.get()
        try:
            ends.append({"suite": name, **_ended(name, command(name, folder.resolve(), quick), quick, processor)})
        finally:
            processors.put(processor)

    alone = [name for name in chosen(names, quick) if name in SUITES and SUITES[name].reports]
    with ThreadPoolExecutor(processors.qsize()) as pool:
        list(pool.map(one, [name for name in chosen(names, quick) if name not in alone]))
    for name in alone:
        one(name)
    return render(folder)


def render(folder: Path = FOLDER) -> list[Path]:
    """Write the report of the lines in a folder, and drop superseded lines; returns its files."""
    files = [
        Records(folder / f"{name}.jsonl", keys)
        for name, keys in (("speed", SPEED), ("overhead", OVERHEAD), ("suites", ("suite",)))
    ]
    return report.write(folder, *(records.compact() for records in files))


def _ended(name: str, arguments: Sequence[str], quick: bool, processor: int = 0) -> dict[str, Any]:
    """Run a suite and return how it ended; its output is printed in one piece."""
    suite = SUITES.get(name)
    if suite is not None and not (ROOT / "benchmarks" / f"{suite.module}.py").exists():
        return _end("missing", f"benchmarks/{suite.module}.py is not there yet")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment |= dict.fromkeys(SINGLE, str(suite.threads if suite else 1)) | {"BENCH_PROCESSOR": str(processor)}
    if quick:
        environment["BENCH_SECONDS"] = QUICK_SECONDS
    start = time.perf_counter()
    try:
        print(f"{name} ...", flush=True)
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=LONGEST)
        print(done.stdout.decode(errors="replace"), flush=True)
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
        print(error.stdout.decode(errors="replace"), flush=True)
        print(f"{name} failed:", *said[-15:], sep="\n", file=sys.stderr, flush=True)
        reason = said[-1].strip() if said else f"exit status {error.returncode}"
        return _end("missing" if "is not installed" in reason else "failed", reason, start)
    except subprocess.TimeoutExpired:
        return _end("failed", f"not done after {LONGEST} s", start)
    return _end("done", "", start)


def _end(status: str, reason: str, start: float | None = None) -> dict[str, Any]:
    seconds = 0.0 if start is None else round(time.perf_counter() - start, 1)
    today = datetime.date.today().isoformat()
    return {"status": status, "reason": reason, "seconds": seconds, "load": machine.load(), "date": today}
