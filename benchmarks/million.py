"""A million series made coherent and non-negative in bounded memory: ``python -m benchmarks.million [--draws 200]``.

The hierarchies are a tree of 1,010,111 series and a crossed one (10 places x 100,000 products) of 1,100,011. One step
of the horizon is projected: mean and variances of the coherent law, those of the coherent and non-negative law, and
draws of it, a few at a time. Every draw is checked against S itself:

    |u_aggregate - S u_bottom| <= 1e-12 S |u_bottom|,      u >= 0.

A dense method would hold n^2 numbers. The lines go to ``results/speed/growth.jsonl``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from experiments.records import Records
from torch import Tensor

import probhard as ph
from benchmarks import machine
from benchmarks.bandwidth import FOLDER
from benchmarks.growth_cases import KEYS, crossed
from benchmarks.hierarchies import tree
from probhard._util import memory

TOLERANCE = 1e-12
HEADER = (
    f"{'case':<48} {'series':>10} {'seconds':>9} {'each':>8} {'CPU each':>8} {'peak GB':>8} {'dense GB':>9} "
    f"{'violation':>9}"
)


@dataclass(frozen=True)
class Step:
    """One step of the work."""

    case: str
    size: int
    seconds: float
    processor_seconds: float  # of this thread, unaffected by other work on the machine
    violation: float
    setup_seconds: float
    count: int = 1
    seconds_backward: float = 0.0
    axis: str = "n"

    def record(self) -> dict[str, Any]:
        """The result line."""
        more = {"memory": machine.largest(), "dense_memory": 8 * self.size**2, "load": machine.load()}
        return {**asdict(self), "seconds_each": self.seconds / self.count, **more}

    def line(self) -> str:
        """A row to print."""
        largest = machine.largest()
        memory = "-" if largest is None else f"{largest / 1e9:.2f}"
        return (
            f"{self.case:<48} {self.size:>10,} {self.seconds:>9.2f} {self.seconds / self.count:>8.3f} "
            f"{self.processor_seconds / self.count:>8.3f} {memory:>8} {8 * self.size**2 / 1e9:>9,.0f} "
            f"{self.violation:>9.1e}"
        )


def check(summation: sp.csr_array, draws: Tensor) -> float:
    """Return the worst relative incoherence of draws ``(count, n)``.

    Raises:
        ConvergenceError: If it is above 1e-12, or a value is negative or NaN.
    """
    bottoms = summation.shape[1]
    values = draws.numpy()
    upper, bottom = values[:, :-bottoms], values[:, -bottoms:]
    sums = (summation[:-bottoms] @ bottom.T).T
    worst = float((np.abs(upper - sums) / np.maximum(np.abs(sums), 1e-300)).max())
    least = float(values.min())
    if not (worst <= TOLERANCE and least >= 0):
        raise ph.ConvergenceError(
            f"A draw is incoherent by {worst:.3g} (relative), the least value is {least:.3g}.",
            f"Every draw must add up to {TOLERANCE:g} and be non-negative.",
            "Look at the statistics of the projection.",
        )
    return worst


def timed(work: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """Return the result of a piece of work, and its seconds by the clock and of the processor."""
    start = np.array([time.perf_counter(), time.process_time()])
    return work(), np.array([time.perf_counter(), time.process_time()]) - start


@torch.no_grad()
def steps(name: str, build: Callable[[], ph.Hierarchy], draws: int, together: int) -> Iterator[Step]:
    """Build a hierarchy, project a law on it, and draw."""
    hierarchy, setup = timed(build)
    torch.manual_seed(0)
    bottom = torch.distributions.Gamma(0.5, 0.5).sample((hierarchy.bottoms,)).double()
    truth = hierarchy.aggregate(bottom + 0.01)
    stddev = 0.5 * truth.sqrt()
    given = truth + stddev * torch.randn_like(truth), stddev
    layer, size = ph.DPPL("oblique"), hierarchy.variables

    def moments(constraint: ph.Constraint) -> tuple[Any, Tensor, Tensor]:
        law = layer(given, constraint)
        return law, law.mean, law.variance

    def step(what: str, seconds: np.ndarray, violation: float, count: int = 1) -> Step:
        return Step(
            f"million, {name}: {what}", size, float(seconds[0]), float(seconds[1]), violation, float(setup[0]), count
        )

    (_, mean, _), seconds = timed(lambda: moments(hierarchy))
    yield step("mean and variances", seconds, float(hierarchy.relative_violation(mean)))
    (law, mean, _), seconds = timed(lambda: moments(hierarchy & ph.NonNegative()))
    yield step("non-negative mean and variances", seconds, check(hierarchy.summation, mean.unsqueeze(0)))
    seconds, worst = np.zeros(2), 0.0
    for done in range(0, draws, together):
        count = min(together, draws - done)
        batch, spent = timed(partial(law.sample, (count,)))
        seconds, worst = seconds + spent, max(worst, check(hierarchy.summation, batch))
    yield step("non-negative draws", seconds, worst, draws)


def run(quick: bool = False, draws: int = 200) -> Iterator[Step]:
    """The tree with all draws, and the crossed hierarchy with a twentieth of them."""
    if quick:
        yield from steps("tree", lambda: tree((10, 10, 10)), 20, 8)
        yield from steps("crossed", lambda: crossed(1000), 5, 4)
        return
    yield from steps("tree", lambda: tree((10, 10, 100, 100)), draws, 4)
    yield from steps("crossed", lambda: crossed(1_000_000), max(1, draws // 20), 4)


def main() -> None:
    """Measure and append the lines."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.million", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a thousand series, which are only printed")
    parser.add_argument("--draws", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep_freed()
    records = Records(FOLDER / "growth.jsonl", KEYS)
    print(HEADER)
    for step in run(given.quick, given.draws):
        print(step.line(), flush=True)
        if not given.quick:
            records.append(step.record())


if __name__ == "__main__":
    main()
