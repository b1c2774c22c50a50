"""How cost grows with the variables n, the batch and the rows q: ``python -m benchmarks.growth [--quick]``.

Each size is measured a few times in one thread, in processor time. The least time counts, because the machine may be
busy with other work. Freed memory is kept for the next step, as server allocators do. The lines go to
``results/speed/growth.jsonl``; ``growth_report`` fits exponents to them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from experiments.records import Records
from torch import Tensor

import probhard as ph
from benchmarks import growth_report, machine
from benchmarks.bandwidth import CLOCK, FOLDER
from benchmarks.growth_cases import KEYS, Case, cases
from probhard._util import memory

SLOW = 20.0  # seconds after which a case gets no larger size


@dataclass(frozen=True)
class Point:
    """Time and memory of one size of a case."""

    case: str
    axis: str
    size: int
    seconds: float
    seconds_backward: float
    memory: int | None
    violation: float
    setup_seconds: float

    def record(self) -> dict[str, Any]:
        """The result line."""
        return {**asdict(self), "load": machine.load()}

    def line(self) -> str:
        """A row to print."""
        memory = "-" if self.memory is None else f"{self.memory / 1e6:.1f}"
        return (
            f"{self.case:<32} {self.axis:<6} {self.size:>9,} {self.seconds * 1e3:>11.2f} "
            f"{self.seconds_backward * 1e3:>11.2f} {self.setup_seconds * 1e3:>11.2f} {memory:>9} {self.violation:>9.1e}"
        )


HEADER = (
    f"{'case':<32} {'axis':<6} {'size':>9} {'forward ms':>11} {'backward ms':>11} {'setup ms':>11} "
    f"{'peak MB':>9} {'violation':>9}"
)


def measure(case: Case, size: int, seconds: float = 0.3) -> Point:
    """Measure one size, at least three times unless it is slow.

    Args:
        case: The constraint and its sizes.
        size: Along the axis of the case.
        seconds: For how long to repeat it at least.
    """
    torch.manual_seed(0)
    start = CLOCK()
    constraint = case.build(size)
    built = CLOCK() - start
    point, stddev = case.data(constraint, size)
    layer = ph.DPPL(case.metric)

    def forward() -> tuple[Tensor, ...]:
        if case.law:
            law = layer((point, stddev), constraint)
            return law.mean, law.variance
        return (layer.project(point, constraint, dist=(point.detach(), stddev)).value,)

    def whole() -> tuple[Tensor, float, float]:
        first = CLOCK()
        outputs = forward()
        second = CLOCK()
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return outputs[0].detach(), second - first, CLOCK() - second

    begun = CLOCK()
    forward()
    setup = built + CLOCK() - begun
    (value, *times), memory = machine.peak(whole)
    runs, end = [tuple(times)], CLOCK() + seconds
    while sum(times) < SLOW and (len(runs) < 3 or CLOCK() < end):
        runs.append(whole()[1:])
    ahead, back = (min(column) for column in zip(*runs))
    violation = float(constraint.relative_violation(value).max())
    return Point(case.name, case.axis, size, ahead, back, memory, violation, max(0.0, setup - ahead))


def run(quick: bool = False, only: str = "") -> Iterator[Point]:
    """Measure every case up to the first size that is slow.

    Args:
        quick: Small sizes.
        only: Text that the names of the cases must contain.
    """
    for case in cases(quick):
        if only not in case.name:
            continue
        measure(case, case.sizes[0], 0.0)  # warm-up: compiling and loading belong to no size
        for size in case.sizes:
            point = measure(case, size, 0.05 if quick else 0.3)
            yield point
            if point.seconds + point.seconds_backward > SLOW:
                break


def main() -> None:
    """Measure, append the lines, and write page and picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, which are only printed")
    parser.add_argument("--render", action="store_true", help="only write page and picture of existing lines")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep_freed()
    records = Records(FOLDER / "growth.jsonl", KEYS)
    if not given.render:
        print(HEADER)
        for point in run(given.quick, given.only):
            print(point.line(), flush=True)
            if not given.quick:
                records.append(point.record())
    if not given.quick:
        growth_report.write(FOLDER)


if __name__ == "__main__":
    main()
