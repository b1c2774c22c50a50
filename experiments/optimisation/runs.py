"""The units of the optimisation table: families of programs, and power networks.

A unit whose lines are there is not run again; loads of power networks are kept in the folder of checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm import tqdm

from experiments.optimisation import power_runs, program_runs
from experiments.optimisation.power_runs import PLANS
from experiments.optimisation.programs import PROGRAMS
from experiments.records import Records

CASES = (*PROGRAMS, *PLANS)


def run(records: Records, names: Sequence[str], quick: bool = False) -> None:
    """Run the named units in one thread, unless their lines are there, and append their lines.

    Args:
        records: The file of result lines.
        names: Some of ``CASES``; empty for all.
        quick: Few instances and epochs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    done = {line["case"] for line in records.read()}
    try:
        for name in tqdm([name for name in names or CASES if name not in done], unit="case"):
            with records.claim(name) as free:
                if free and name in PROGRAMS:
                    records.append(*program_runs.lines(name, quick))
                elif free:
                    plan = power_runs.QUICK if quick else PLANS[name]
                    records.append(*power_runs.lines(name, records.folder("loads"), plan))
    finally:
        torch.set_num_threads(threads)
