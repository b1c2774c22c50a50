"""The units of the optimisation table: families of programs, and power networks.

A unit whose lines are there is not run again; loads of power networks are kept in the folder of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from experiments.optimisation import power_runs, program_runs
from experiments.optimisation.power_runs import PLANS
from experiments.optimisation.programs import PROGRAMS
from experiments.records import Records
from experiments.table import Lines

CASES = (*PROGRAMS, *PLANS)


def pieces(records: Records, names: Sequence[str], quick: bool = False) -> Iterator[Callable[[], Lines]]:
    """The named units whose lines are not there, each as a function that returns them.

    Args:
        records: The file of result lines.
        names: Some of ``CASES``; empty for all.
        quick: Few instances and epochs.
    """
    done = {line["case"] for line in records.read()}
    for name in names or CASES:
        if name in done:
            continue
        with records.claim(name) as free:  # held while the unit runs
            if free and name in PROGRAMS:
                yield partial(program_runs.lines, name, quick)
            elif free:
                plan = power_runs.QUICK if quick else PLANS[name]
                yield partial(power_runs.lines, name, records.folder("loads"), plan)
