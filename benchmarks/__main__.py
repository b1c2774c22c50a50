"""Run the comparisons and print one line each: ``python -m benchmarks [suite ...]``, all of them by default."""

from __future__ import annotations

import sys

import torch

from benchmarks import conservation, hierarchies, inequalities, nonlinear, operators, porous_medium
from benchmarks.timing import HEADER

SUITES = {
    "conservation": conservation.run,
    "hierarchies": hierarchies.run,
    "nonlinear": nonlinear.run,
    "porous-medium": porous_medium.run,
    "inequalities": inequalities.run,
    "operators": operators.run,
}


def main(names: list[str]) -> None:
    """Run the named suites, or all."""
    torch.set_num_threads(1)
    print(HEADER)
    for name in names or list(SUITES):
        for comparison in SUITES[name]():
            print(comparison.line(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
