"""The distance to the hardware: O(n) projections against a plain pass over memory, ``python -m benchmarks.bandwidth``.

    factor = seconds of the projection / seconds of z * w + b for as many bytes.

The bytes of a projection are its inputs once and its outputs once. Both are timed in turn, in processor time of one
thread. The data do not fit the cache, and the allocator keeps freed memory. The least time of each counts. The goal is
a factor of at most 5. The lines go to ``results/speed/bandwidth.jsonl``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from experiments.records import Records

import probhard as ph
from benchmarks import machine
from benchmarks.hierarchies import tree
from probhard._util import memory

FOLDER = Path(__file__).parents[1] / "results" / "speed"
CLOCK = time.process_time  # of one thread, unaffected by other work on the machine
GOAL = 5.0
HEADER = f"{'case':<44} {'n':>11} {'ms':>9} {'pass ms':>9} {'factor':>7} {'pass GB/s':>9}"


@dataclass(frozen=True)
class Distance:
    """One projection and the pass that moves as many bytes."""

    case: str
    size: int
    seconds: float
    pass_seconds: float
    bandwidth: float  # bytes per second of the pass
    dtype: str

    @property
    def factor(self) -> float:
        """How many times longer the projection takes."""
        return self.seconds / self.pass_seconds

    def record(self) -> dict[str, Any]:
        """The result line."""
        return {**asdict(self), "factor": self.factor, "goal": GOAL, "load": machine.load()}

    def line(self) -> str:
        """A row to print."""
        return (
            f"{self.case:<44} {self.size:>11,} {self.seconds * 1e3:>9.1f} {self.pass_seconds * 1e3:>9.1f} "
            f"{self.factor:>7.2f} {self.bandwidth / 1e9:>9.2f}"
        )


def mass(size: int, total: float = 0.5) -> ph.Constraint:
    return ph.Conservation(torch.full((size,), 1 / size, dtype=torch.float64), total)


def slices(rows: int, width: int) -> ph.Constraint:
    return ph.per_slice(mass(width), (rows, width))


def least(*work: Callable[[], object], repeats: int) -> list[float]:
    """Return the least seconds of each piece of work, run in turn."""
    seconds = [float("inf")] * len(work)
    for _ in range(repeats):
        for k, piece in enumerate(work):
            start = CLOCK()
            piece()
            seconds[k] = min(seconds[k], CLOCK() - start)
    return seconds


def distance(
    case: str, constraint: ph.Constraint, metric: str, law: bool, size: int, dtype: torch.dtype, repeats: int
) -> Distance:
    """Time a projection of a law (mean and scale in, mean and scale out) or of points against the pass."""
    size = constraint.variables or size
    z, stddev, shift = (torch.rand(size, dtype=dtype) + 0.1 for _ in range(3))
    layer = ph.DPPL(metric)
    given = stddev if metric == "oblique" else torch.ones((), dtype=dtype)
    arrays = 4 if law else 3 if metric == "oblique" and not isinstance(constraint, ph.Box) else 2

    def project() -> object:
        if law:
            projected = layer((z, stddev), constraint)
            return projected.mean, projected.scale
        return layer.project(z, constraint, dist=(z, given.expand(size))).value

    with torch.no_grad():
        ours, plain = least(project, lambda: torch.addcmul(shift, z, stddev), repeats=repeats)
    moved = z.numel() * z.element_size()
    return Distance(case, size, ours, plain * arrays / 4, 4 * moved / plain, str(dtype).removeprefix("torch."))


def run(quick: bool = False) -> Iterator[Distance]:
    """Each O(n) projection in float32 and float64."""
    size, fan_out = (100_000, (10, 10, 10, 10)) if quick else (10_000_000, (10, 10, 100, 100))
    hierarchy = tree(fan_out)
    cases: list[tuple[str, ph.Constraint, str, bool]] = [
        ("mass row, oblique, mean and scale", mass(size), "oblique", True),
        ("mass row per 1,000, oblique, mean and scale", slices(size // 1000, 1000), "oblique", True),
        ("mass row, orthogonal, mean and scale", mass(size), "orthogonal", True),
        ("mass row, oblique, points", mass(size), "oblique", False),
        ("box, points", ph.Box(0.2, 0.8), "orthogonal", False),
        ("tree, oblique, mean and scale", hierarchy, "oblique", True),
        ("tree, oblique, points", hierarchy, "oblique", False),
        ("tree, orthogonal, points", hierarchy, "orthogonal", False),
    ]
    for dtype in (torch.float64, torch.float32):
        for name, constraint, metric, law in cases:
            yield distance(name, constraint, metric, law, size, dtype, 3 if quick else 7)


def main() -> None:
    """Measure and append the lines."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bandwidth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, which are only printed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep_freed()
    records = Records(FOLDER / "bandwidth.jsonl", ("case", "dtype"))
    print(HEADER)
    for result in run(given.quick):
        print(f"{result.line()} {result.dtype}", flush=True)
        if not given.quick:
            records.append(result.record())


if __name__ == "__main__":
    main()
