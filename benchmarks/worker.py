"""Runs one suite in this process and appends its result lines: ``python -m benchmarks.worker SUITE FOLDER``.

A one-thread suite is bound to one processor, which limits every library whatever its settings.
"""

from __future__ import annotations

import datetime
import os
import sys
from importlib import import_module, metadata
from pathlib import Path

import torch
from experiments.records import Records

from benchmarks import machine
from benchmarks.suites import SUITES
from benchmarks.timing import HEADER, Comparison, Overhead
from probhard.errors import ParameterError

SPEED, OVERHEAD = ("case", "peer"), ("case",)


def versions(*packages: str) -> dict[str, str]:
    """Return installed versions; a missing package ends the process with the reason."""
    try:
        return {name: metadata.version(name) for name in packages}
    except metadata.PackageNotFoundError as error:
        sys.exit(f'{error.name} is not installed: pip install "probhard[peers]"')


def main(name: str, folder: Path, quick: bool = False) -> None:
    """Run a suite and append its lines."""
    suite = SUITES[name]
    about = {"family": name, "versions": versions("torch", "numpy", *suite.packages)}
    if suite.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(os.environ.get("BENCH_PROCESSOR", machine.processors()[-1]))})
    torch.set_num_threads(suite.threads)
    files = {
        Comparison: Records(folder / "speed.jsonl", SPEED),
        Overhead: Records(folder / "overhead.jsonl", OVERHEAD),
    }
    refused = []
    print(f"\n{suite.title}\n{HEADER}", flush=True)
    for result in import_module(f"benchmarks.{suite.module}").run(quick):
        print(result.line(), flush=True)
        when = {"date": datetime.date.today().isoformat(), "load": machine.load()}
        try:
            files[type(result)].append({**result.record(), **about, **when})
        except ParameterError as error:
            refused.append(str(error))
    if refused:
        sys.exit("\n".join(refused))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--quick" in sys.argv[3:])
