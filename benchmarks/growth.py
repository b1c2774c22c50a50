"""How cost grows with the variables n, the batch and the rows q: ``python -m benchmarks.growth [--quick]``.

    seconds ~ size^exponent,

fitted by least squares of log seconds (forward and backward) on log size over the upper two decades. Each size is
measured a few times in one thread, in processor time, and the least counts: the machine may be busy with other things.
Freed memory is kept for the next step, as allocators for servers do. The lines go to ``results/speed/growth.jsonl``, a
table and plots beside them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from experiments.records import Records
from torch import Tensor

import probhard as ph
from benchmarks import machine
from benchmarks.bandwidth import CLOCK, FOLDER, mass, slices
from benchmarks.hierarchies import tree
from probhard._util import memory

KEYS = ("case", "axis", "size")
AXES = {"n": "variables", "batch": "batch elements of 100 variables", "q": "rows"}
SLOW = 20.0  # seconds after which a case gets no larger size
DECADES = 2.0  # over which exponents are fitted
ROOM = 0.15  # by which an exponent may exceed the one that the structure allows

Build = Callable[[int], ph.Constraint]


@dataclass(frozen=True)
class Case:
    """One constraint in a growing size.

    Args:
        name: What is projected on what.
        axis: What grows: ``"n"``, ``"batch"`` or ``"q"``.
        sizes: From small to large.
        build: The constraint of a size.
        variables: Their number, where the constraint does not say.
        law: Whether mean and variances are projected, else points.
        metric: Of the layer.
        allowed: The exponent that the structure allows.
    """

    name: str
    axis: str
    sizes: tuple[int, ...]
    build: Build
    variables: int | None = None
    law: bool = True
    metric: str = "oblique"
    allowed: float = 1.0

    def data(self, constraint: ph.Constraint, size: int) -> tuple[Tensor, Tensor]:
        """Points near feasible ones, and their standard deviations."""
        count = constraint.variables or self.variables or size
        shape = (size, count) if self.axis == "batch" else (count,)
        linear = getattr(constraint, "linear", constraint)
        if isinstance(linear, ph.Hierarchy):
            truth = linear.aggregate(torch.rand(*shape[:-1], linear.bottoms, dtype=torch.float64) + 0.2)
            stddev = 0.5 * truth.sqrt()
        else:
            place = torch.linspace(0, 1, count, dtype=torch.float64)
            truth, stddev = 0.5 + 0.3 * torch.sin(9 * place), 0.2 + 0.2 * torch.rand(shape, dtype=torch.float64)
        return (truth + stddev * torch.randn_like(stddev)).requires_grad_(), stddev.requires_grad_()


@dataclass(frozen=True)
class Point:
    """What one size of a case took."""

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


def summing(*keys: np.ndarray) -> sp.csr_array:
    """The summation matrix of levels, each given by the node that every bottom series belongs to; bottoms last."""
    bottoms = len(keys[0])
    nodes = [*keys, np.arange(bottoms)]
    blocks = [
        sp.csr_array((np.ones(bottoms), (key, np.arange(bottoms))), shape=(key.max() + 1, bottoms)) for key in nodes
    ]
    return sp.csr_array(sp.vstack(blocks))


def tens(size: int) -> ph.Hierarchy:
    """A tree of ten children per node."""
    return tree((10,) * round(math.log10(size)))


def crossed(size: int, places: int = 10) -> ph.Hierarchy:
    """Places x products: totals of each place, of each product, and of all."""
    product = np.arange(size) % (size // places)
    return ph.Hierarchy(summing(np.zeros(size, dtype=np.int64), np.arange(size) // (size // places), product))


def groups(rows: int, size: int = 100_000) -> ph.Hierarchy:
    """A total and rows - 1 groups of as many series."""
    keys = [np.zeros(size, dtype=np.int64)]
    if rows > 1:
        keys.append(np.arange(size) * (rows - 1) // size)
    return ph.Hierarchy(summing(*keys))


def dense(rows: int, size: int = 2000) -> ph.Constraint:
    matrix = torch.randn(rows, size, dtype=torch.float64)
    return ph.LinearEquality(matrix, matrix @ torch.full((size,), 0.5, dtype=torch.float64))


def cases(quick: bool = False) -> tuple[Case, ...]:
    """All cases; with ``quick``, in sizes of a second."""
    n = tuple(10**k for k in range(2, 4 if quick else 7))
    batch = tuple(10**k for k in range(3 if quick else 5))
    q = (1, 3, 10, 30) if quick else (1, 3, 10, 30, 100, 300, 1000)
    positive = ph.NonNegative()
    return (
        Case("tree, oblique", "n", n, tens),
        Case("tree, orthogonal", "n", n, tens, metric="orthogonal"),
        Case("tree, non-negative, points", "n", n, lambda k: tens(k) & positive, law=False),
        Case("crossed, oblique", "n", n, crossed),
        Case("crossed, orthogonal", "n", n, crossed, metric="orthogonal"),
        Case("crossed, non-negative, points", "n", n, lambda k: crossed(k) & positive, law=False),
        Case("one mass row, oblique", "n", n, mass),
        Case("one mass row, orthogonal", "n", n, mass, metric="orthogonal"),
        Case("a mass row per 100, oblique", "n", n, lambda k: slices(k // 100, 100)),
        Case("box and mass, points", "n", n, lambda k: mass(k) & ph.Box(0.0, 1.0), law=False),
        Case("TV penalty, points", "n", n, lambda _: ph.TotalVariationPenalty(1.0), law=False),
        Case("monotone, points", "n", n, lambda _: ph.Monotone("increasing"), law=False),
        Case("tree, oblique", "batch", batch, lambda _: tens(100)),
        Case("tree, non-negative, points", "batch", batch, lambda _: tens(100) & positive, law=False),
        Case("crossed, oblique", "batch", batch, lambda _: crossed(100)),
        Case("one mass row, oblique", "batch", batch, lambda _: mass(100)),
        Case("box and mass, points", "batch", batch, lambda _: mass(100) & ph.Box(0.0, 1.0), law=False),
        Case("TV penalty, points", "batch", batch, lambda _: ph.TotalVariationPenalty(1.0), 100, law=False),
        Case("monotone, points", "batch", batch, lambda _: ph.Monotone("increasing"), 100, law=False),
        Case("dense rows, n = 2,000", "q", q, dense, allowed=2.0),
        Case("mass rows, n = 100,000", "q", q, lambda k: slices(k, 100_000 // k), allowed=0.0),
        Case("groups, n = 100,000", "q", q, groups, allowed=0.0),
    )


def measure(case: Case, size: int, seconds: float = 0.3) -> Point:
    """Repeat one size for at least so many seconds and three times, or once if it is slow."""
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
        found = forward()
        second = CLOCK()
        torch.autograd.backward(found, [torch.ones_like(x) for x in found])
        return found[0].detach(), second - first, CLOCK() - second

    begun = CLOCK()
    forward()
    setup = built + CLOCK() - begun
    (value, *times), memory = machine.peak(whole)
    runs, end = [times], CLOCK() + seconds
    while sum(times) < SLOW and (len(runs) < 3 or CLOCK() < end):
        runs.append(whole()[1:])
    ahead, back = (min(column) for column in zip(*runs))
    violation = float(constraint.relative_violation(value).max())
    return Point(case.name, case.axis, size, ahead, back, memory, violation, max(0.0, setup - ahead))


def run(quick: bool = False, only: str = "") -> Iterator[Point]:
    """Measure all cases, or those whose names hold ``only``, each up to the first size that is slow."""
    for case in cases(quick):
        if only not in case.name:
            continue
        measure(case, case.sizes[0], 0.0)  # what is compiled or loaded once belongs to no size
        for size in case.sizes:
            found = measure(case, size, 0.05 if quick else 0.3)
            yield found
            if found.seconds + found.seconds_backward > SLOW:
                break


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of log seconds over log size in the upper two decades; NaN below three sizes."""
    upper = [(math.log(n), math.log(s)) for n, s in zip(sizes, seconds) if n * 10**DECADES >= max(sizes) * 0.999]
    if len(upper) < 3:
        return math.nan
    return float(np.polyfit(*zip(*upper), 1)[0])


def series(lines: list[dict[str, Any]], axis: str) -> Iterator[tuple[Case, list[dict[str, Any]]]]:
    """Each case of an axis with its lines, in the order of their sizes."""
    for case in cases():
        found = [line for line in lines if (line["case"], line["axis"]) == (case.name, case.axis) and axis == case.axis]
        if found:
            yield case, sorted(found, key=lambda line: line["size"])


def total(line: Mapping[str, Any]) -> float:
    """Seconds forward and backward."""
    return float(line["seconds"] + line["seconds_backward"])


def table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table for each axis: the largest size, the exponents, and whether they are as they should be."""
    head = "| case | largest | forward s | backward s | setup s | peak MB | violation | exponent | of setup | verdict |"
    text = ["# How cost grows", "", f"Seconds ~ size^exponent over the upper {DECADES:g} decades; one thread, float64."]
    for axis, what in AXES.items():
        text += ["", f"## With the {what}", "", head, "|---|" + "---:|" * 8 + "---|"]
        for case, found in series(lines, axis):
            last, sizes = found[-1], [line["size"] for line in found]
            slope = exponent(sizes, [total(line) for line in found])
            setup = exponent(sizes, [max(1e-6, line["setup_seconds"]) for line in found])
            verdict = "in order" if slope <= case.allowed + ROOM else f"above {case.allowed:g}"
            if sizes[-1] < case.sizes[-1]:
                verdict += f"; stopped, {total(last):.0f} s"
            memory = "-" if last["memory"] is None else f"{last['memory'] / 1e6:.0f}"
            numbers = f"{last['seconds']:.3g} | {last['seconds_backward']:.3g} | {last['setup_seconds']:.3g} | {memory}"
            slopes = f"{last['violation']:.1e} | {slope:.2f} | {setup:.2f}"
            text.append(f"| {case.name} | {last['size']:,} | {numbers} | {slopes} | {verdict} |")
    return "\n".join(text) + "\n"


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Seconds over size, one panel per axis, with lines of slope 1, and 2 for rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6.4), layout="constrained")
    for axes, (axis, what) in zip(figure.subplots(1, len(AXES)), AXES.items()):
        axes.set(xlabel=what, title=f"Cost against {what}", ylabel="processor seconds, forward and backward")
        axes.grid(alpha=0.25)
        shown = list(series(lines, axis))
        for k, (case, found) in enumerate(shown):
            style = {"marker": "osD^vP*X"[k % 8], "linestyle": ("-", "--")[k // 8 % 2], "color": f"C{k % 10}"}
            axes.loglog([x["size"] for x in found], [total(x) for x in found], label=case.name, markersize=5, **style)
        if not shown:
            continue
        low, high = axes.get_xlim()
        ends = np.array([(low * high**3) ** 0.25, high / 1.5])
        for slope in (1, 2) if axis == "q" else (1,):
            height = axes.get_ylim()[0] * 2
            axes.loglog(ends, height * (ends / ends[0]) ** slope, color="0.6", linewidth=3, alpha=0.6, zorder=0)
            axes.annotate(f"slope {slope}", (ends[1], height * (ends[1] / ends[0]) ** slope), ha="right", va="bottom")
        axes.legend(fontsize=8, loc="upper left", framealpha=0.9)
        axes.set_ylim(top=axes.get_ylim()[1] * 30)  # room for the legend
    figure.savefig(path, dpi=110)


def write(folder: Path) -> None:
    """Table and plots of the lines that are there."""
    lines = Records(folder / "growth.jsonl", KEYS).read()
    (folder / "growth.md").write_text(table(lines))
    plot(lines, folder / "growth.png")


def main() -> None:
    """Measure, keep the lines, and write table and plots."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, which are only printed")
    parser.add_argument("--render", action="store_true", help="only write table and plots of the lines that are there")
    parser.add_argument("--only", default="", help="cases whose names hold this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep_freed()
    records = Records(FOLDER / "growth.jsonl", KEYS)
    if not given.render:
        print(HEADER)
        for found in run(given.quick, given.only):
            print(found.line(), flush=True)
            if not given.quick:
                records.append(found.record())
    if not given.quick:
        write(FOLDER)


if __name__ == "__main__":
    main()
