"""What a feasible draw costs, and how the cost grows with the variables and with the number of draws.

A draw of the projected law is a draw of the base law and its projection. Both are timed, in CPU time of one thread, in
the same run; the least of several rounds counts. The prose is in ``pages/``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch

import probhard as ph
from experiments import pictures, templates
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, measured
from experiments.templates import MissingFigureError
from probhard.errors import check_choices
from probhard.pde.laws import porous_medium_law
from probhard.pde.problems import PorousMedium

NAME = "inference"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
KEYS = ("set", "variables", "draws")
SIZES, COUNT = (100, 1000, 10_000, 100_000), 100
COUNTS, MIDDLE = (1, 10, 100, 1000), 1000  # numbers of draws, at this many variables
MOST = 10_000_000  # numbers in all draws at once
SECONDS, ROUNDS = 0.5, 3


@dataclass(frozen=True)
class Case:
    """A constraint of any size, and a feasible point of it, near which the law lies.

    Args:
        build: The constraint of a number of variables.
        center: A feasible point, or nearly so.
        sizes: Numbers of variables.
        metric: Of the projection.
    """

    build: Callable[[int], ph.Constraint]
    center: Callable[[int], torch.Tensor]
    sizes: tuple[int, ...] = SIZES
    metric: str = "oblique"


def _wave(n: int) -> torch.Tensor:
    return 0.5 + 0.3 * torch.sin(9 * torch.linspace(0, 1, n, dtype=torch.float64))


def _mass(n: int) -> ph.Conservation:
    return ph.Conservation(torch.full((n,), 1 / n, dtype=torch.float64), _wave(n).mean())


def _total(n: int) -> ph.Hierarchy:
    """A total, groups of ten, and bottoms: about n nodes."""
    groups = max(1, round((n - 1) / 11))
    tens = sp.kron(sp.eye_array(groups), np.ones((1, 10)))
    return ph.Hierarchy(sp.csr_array(sp.vstack([np.ones((1, 10 * groups)), tens, sp.eye_array(10 * groups)])))


def _coherent(n: int) -> torch.Tensor:
    tree = _total(n)
    return tree.aggregate(torch.linspace(0.2, 1.5, tree.bottoms, dtype=torch.float64))


def _medium(n: int) -> tuple[PorousMedium, torch.Tensor]:
    problem = PorousMedium(2.0, 3.0, slices=max(8, n // 100), points=min(100, n // 8), dtype=torch.float64)
    return problem, torch.tensor([2.5], dtype=torch.float64)


CASES = {
    "one mass row": Case(_mass, _wave),
    "mass, 0 <= u <= 1": Case(lambda n: _mass(n) & ph.Box(0.0, 1.0), _wave),
    "hierarchy": Case(_total, _coherent),
    "hierarchy, u >= 0": Case(lambda n: _total(n) & ph.NonNegative(), _coherent),
    "simplex": Case(lambda n: ph.Simplex(1.0), lambda n: torch.full((n,), 1 / n, dtype=torch.float64)),
    "monotone": Case(lambda n: ph.Monotone("increasing"), lambda n: torch.linspace(0, 1, n, dtype=torch.float64)),
    "total variation penalty": Case(lambda n: ph.TotalVariationPenalty(1.0), _wave),
    "sphere": Case(
        lambda n: ph.NonlinearEquality(lambda u: u.square().sum(-1, keepdim=True) - 1.0),
        lambda n: torch.full((n,), n**-0.5, dtype=torch.float64),
        (100, 1000),
        "orthogonal",
    ),
    "porous medium law, u >= 0": Case(
        lambda n: porous_medium_law(*_medium(n)) & ph.NonNegative(),
        lambda n: _medium(n)[0].solution(_medium(n)[1])[0].flatten(),
        (320, 1000, 3200),
        "orthogonal",
    ),
}


def measure(name: str, variables: int, draws: int, seconds: float = SECONDS) -> Lines:
    """Return the line of a case: microseconds of a draw before and after the projection.

    Args:
        name: In ``CASES``.
        variables: About their number; the line has the exact one.
        draws: Number of draws at once.
        seconds: For how long to repeat it at least.
    """
    case = CASES[name]
    center, constraint = case.center(variables), case.build(variables)
    n = len(center)
    spread = 0.1 * center.abs().mean() * (0.5 + torch.linspace(0, 1, n, dtype=torch.float64))
    law = ph.as_location_scale((center, spread))
    layer = ph.DPPL(case.metric, on_failure="flag")
    free = _least(lambda: law.sample((draws,)), seconds)
    solutions: list[ph.Solution] = []

    def ours() -> None:
        solutions[:] = [layer(law, constraint).draw((draws,))]

    with torch.no_grad():
        projected = _least(ours, seconds)
    (solution,) = solutions
    good = solution.stats.converged
    return [
        {
            "set": name,
            "variables": n,
            "draws": draws,
            "free": 1e6 * free / draws,
            "ours": 1e6 * projected / draws,
            "violation": float(constraint.relative_violation(solution.value)[good].max()),
            "flagged": float((~good).double().mean()),
        }
    ]


def _least(work: Callable[[], object], seconds: float) -> float:
    """The least CPU seconds of several rounds, after one to warm up."""
    work()
    times: list[float] = []
    begun = time.process_time()
    while len(times) < ROUNDS or (time.process_time() - begun < seconds and len(times) < 100):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
        if times[-1] > 10 * seconds:
            break
    return min(times)


def table(request: Request) -> Table:
    """The table: all sets, or those that are named."""
    names = request.names("problems")
    check_choices("problem", [name for name in names if name not in CASES], tuple(CASES))

    def pieces(_: Records) -> list[Callable[[], Lines]]:
        seconds = 0.01 if request.quick else SECONDS
        work: list[Callable[[], Lines]] = []
        for name, case in CASES.items():
            if names and name not in names:
                continue
            sizes = case.sizes[:2] if request.quick else case.sizes
            settings = [(size, max(1, min(COUNT, MOST // size))) for size in sizes]
            settings += [] if request.quick else [(MIDDLE, count) for count in COUNTS if count != COUNT]
            work += [partial(measure, name, size, count, seconds) for size, count in settings]
        return work

    return Table(NAME, KEYS, measured(pieces), render, plot)


def _growing(lines: Lines, name: str) -> list[Line]:
    """Lines of a set with the usual number of draws, small to large."""
    return sorted(
        (line for line in lines if line["set"] == name and line["draws"] == COUNT), key=lambda line: line["variables"]
    )


def render(lines: Lines) -> str:
    """Return the page."""
    growth, batches = [], []
    for name in CASES:
        own = _growing(lines, name)
        if not own:
            continue
        for line in own:
            ratio = f"{line['ours'] / line['free']:.1f}"
            cells = [f"{line['variables']:,}", f"{line['free']:.3g}", f"{line['ours']:.3g}", ratio]
            growth.append([name, *cells, f"{line['violation']:.0e}", f"{100 * line['flagged']:.2g} %"])
        growth[-1].append(_exponent(own))
        middle = own[min(range(len(own)), key=lambda k: abs(own[k]["variables"] - MIDDLE))]["variables"]
        counts = {x["draws"]: x for x in lines if x["set"] == name and x["variables"] == middle}
        if len(counts) > 1:
            batches.append([name, *(f"{counts[c]['ours']:.3g}" if c in counts else "" for c in COUNTS)])
    growth = [[*row, *[""] * (8 - len(row))] for row in growth]
    columns = ["set", "variables", "free draw, µs", "feasible draw, µs", "ratio", "worst violation", "flagged"]
    values = {
        "growth": templates.table([*columns, "exponent"], growth),
        "batches": templates.table(["set", *(f"{count:,} at once" for count in COUNTS)], batches) if batches else "",
        "count": COUNT,
        "dearest": _dearest(lines),
    }
    return templates.fill(PAGE, values)


def _exponent(own: list[Line]) -> str:
    """Of the time in the variables, between the two largest sizes."""
    if len(own) < 2:
        return ""
    small, large = own[-2], own[-1]
    return f"{math.log(large['ours'] / small['ours']) / math.log(large['variables'] / small['variables']):.2f}"


def _dearest(lines: Lines) -> str:
    """The largest ratio of a feasible to a free draw, and where."""
    own = [line for line in lines if line["draws"] == COUNT]
    if not own:
        raise MissingFigureError("draws")
    worst = max(own, key=lambda line: line["ours"] / line["free"])
    return f"{worst['ours'] / worst['free']:.0f} ({worst['set']}, {worst['variables']:,} variables)"


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: time of a draw over the variables."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for name in CASES:
        own = _growing(lines, name)
        if own:
            axes.plot([line["variables"] for line in own], [line["ours"] for line in own], "o-", ms=4, label=name)
    free = _growing(lines, next(iter(CASES)))
    axes.plot([line["variables"] for line in free], [line["free"] for line in free], "k--", lw=1, label="free draw")
    axes.set(xscale="log", yscale="log", xlabel="variables", ylabel="CPU microseconds per draw, one thread")
    figure.legend(frameon=False, loc="outside right upper", fontsize=8)
    pictures.save(figure, path)
