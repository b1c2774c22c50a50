"""Laws, constraints and exact draws behind the page on first order: curvature or corners times spread.

| case      | constraint                               | mean                             | spread                   |
|-----------|------------------------------------------|----------------------------------|--------------------------|
| sphere    | ``|u| = 1`` in 3 and in 10 dimensions    | at the radius 1, 1.2 or 1.5      | sd of every variable     |
| pme       | flux law of a porous medium, 4 x 20      | exact field plus one sd of noise | sd of every point        |
| simplex   | 10 shares                                | inside, at a face, at a vertex   | sd of every variable     |
| hierarchy | binary tree of 15 nodes, ``u >= 0``      | half the bottoms near 0          | their distance in sds    |
| flow      | balance, 20 lines both ways, box, n = 30 | 10 of the flows near a limit     | their distance in sds    |
| rows      | 15 random rows, n = 10                   | near 8 of the rows               | their distance in sds    |
| portfolio | 10 shares, ``|u - 0.1|_1 <= 0.4``        | at a turnover of 0.2, 0.4, 0.8   | sd of every variable     |

Exact laws are 10^5 projected draws. Draws are projected on spheres by ``z / |z|``, by the library elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import probhard as ph
from probhard.constraints.base import Constraint
from probhard.pde.laws import porous_medium_law
from probhard.pde.problems import PorousMedium

GROUPS = ("sphere", "pme", "simplex", "hierarchy", "flow", "rows", "portfolio")
CHUNK = 10_000  # draws that are projected at once
NARROW, WIDE = (0.05, 0.2), (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
NEAR = (-1.0, 0.0, 1.0, 2.0)  # distances from a limit in sds


@dataclass(frozen=True)
class Case:
    """A law and its constraint.

    Args:
        group: One of ``GROUPS``.
        setting: What distinguishes the case in its group, besides the spread.
        spread: The number of the table's first column.
        mean: Mean of the law, (n,).
        stddev: Standard deviations, (n,).
        constraint: What the law is projected on.
        direct: Projects draws (S, n) without the library; None if there is no such formula.
    """

    group: str
    setting: str
    spread: float
    mean: Tensor
    stddev: Tensor
    constraint: Constraint
    direct: Callable[[Tensor], Tensor] | None = None

    def exact(self, draws: int) -> Tensor:
        """Draws (draws, n) of the exact law; those that did not converge, a few in 10^5, are left out."""
        generator = torch.Generator().manual_seed(1)
        law = ph.DPPL(on_failure="flag")((self.mean, self.stddev), self.constraint)
        kept = []
        for begin in range(0, draws, CHUNK):
            count = (min(CHUNK, draws - begin),)
            if self.direct is not None:
                kept.append(self.direct(law.base.sample(count, generator)))
                continue
            with torch.no_grad():
                solution = law.draw(count, generator)
            kept.append(solution.value[solution.stats.converged])
        return torch.cat(kept)


def cases(groups: Sequence[str], quick: bool = False) -> Iterator[Case]:
    """Yield the cases of some groups; with ``quick``, those of the first and the last spread.

    Args:
        groups: Some of ``GROUPS``.
        quick: Leave out spreads in between.
    """
    for group in groups:
        every = list(MAKERS[group]())
        ends = {every[0].spread, every[-1].spread}
        yield from (case for case in every if not quick or case.spread in ends)


def _spheres() -> Iterator[Case]:
    constraint = ph.NonlinearEquality(_sphere)
    for n in (3, 10):
        direction = torch.zeros(n, dtype=torch.float64)
        direction[:2] = torch.tensor([0.8, 0.6])
        for radius in (1.0, 1.2, 1.5):
            for spread in WIDE if radius == 1 else NARROW:
                stddev = torch.full_like(direction, spread)
                setting = f"n = {n}, mean at radius {radius:g}"
                yield Case("sphere", setting, spread, radius * direction, stddev, constraint, _normalised)


def _sphere(u: Tensor) -> Tensor:
    return u.square().sum(-1, keepdim=True) - 1


def _normalised(z: Tensor) -> Tensor:
    return z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)


def _fields() -> Iterator[Case]:
    problem, m = PorousMedium(slices=4, points=20, dtype=torch.float64), 2.5
    field, constraint = problem.solution(m).flatten(), porous_medium_law(problem, m)
    noise = torch.randn(field.shape, dtype=field.dtype, generator=torch.Generator().manual_seed(0))
    for spread in (0.02, 0.05, 0.1, 0.2):
        stddev = torch.full_like(field, spread)
        yield Case("pme", "mean one sd off", spread, field + spread * noise, stddev, constraint)


def _simplices() -> Iterator[Case]:
    inside = torch.full((10,), 0.1, dtype=torch.float64)
    face = torch.full((10,), 1 / 9, dtype=torch.float64)
    face[0] = 0
    vertex = torch.zeros(10, dtype=torch.float64)
    vertex[0] = 1
    for setting, mean in (("mean inside", inside), ("mean at a face", face), ("mean at a vertex", vertex)):
        for spread in (0.01, 0.03, 0.1, 0.3):
            yield Case("simplex", setting, spread, mean, torch.full_like(mean, spread), ph.Simplex())


def _trees() -> Iterator[Case]:
    eye = torch.eye(8, dtype=torch.float64)
    structure = torch.cat([eye.unflatten(0, (parts, -1)).sum(1) for parts in (1, 2, 4, 8)])  # (15, 8)
    constraint = ph.Hierarchy(structure) & ph.NonNegative()
    for distance in (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0):
        bottoms = torch.full((8,), 3.0, dtype=torch.float64)  # three sds from the bound
        bottoms[:4] = distance
        yield Case("hierarchy", "", distance, structure @ bottoms, structure.sum(-1).sqrt(), constraint)


def _flows() -> Iterator[Case]:
    """A grid with 30 generators: what enters a line is a random share of every generator."""
    n, lines = 30, 20
    shares = torch.randn(lines, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / n**0.5
    mean = torch.full((n,), 0.5, dtype=torch.float64)
    balance = ph.LinearEquality(torch.ones(1, n, dtype=torch.float64), mean.sum()[None])
    for spread, name in ((0.05, "box 10 sds away"), (0.25, "box 2 sds away")):
        size, flow = spread * shares.norm(dim=-1), shares @ mean
        for distance in NEAR:
            room = torch.full((lines,), 3.0, dtype=torch.float64)
            room[:10] = distance
            forth, back = flow + room * size, -flow + 3 * size
            limits = ph.LinearInequality(torch.cat([shares, -shares]), torch.cat([forth, back]))
            constraint = balance & limits & ph.Box(0.0, 1.0)
            yield Case("flow", name, distance, mean, torch.full_like(mean, spread), constraint)


def _rows() -> Iterator[Case]:
    n, count = 10, 15
    rows = torch.randn(count, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mean = torch.zeros(n, dtype=torch.float64)
    for distance in NEAR:
        room = torch.full((count,), 3.0, dtype=torch.float64)
        room[:8] = distance
        constraint = ph.LinearInequality(rows, room * rows.norm(dim=-1))
        yield Case("rows", "", distance, mean, torch.ones_like(mean), constraint)


def _portfolios() -> Iterator[Case]:
    held = torch.full((10,), 0.1, dtype=torch.float64)
    moved = torch.linspace(-1, 1, 10, dtype=torch.float64)
    for turnover in (0.2, 0.4, 0.8):
        mean = held + turnover * moved / moved.abs().sum()
        for spread in (0.01, 0.05):
            constraint = ph.Simplex() & ph.L1Ball(0.4, center=held)
            yield Case("portfolio", f"turnover {turnover:g}", spread, mean, torch.full_like(mean, spread), constraint)


MAKERS = {
    "sphere": _spheres,
    "pme": _fields,
    "simplex": _simplices,
    "hierarchy": _trees,
    "flow": _flows,
    "rows": _rows,
    "portfolio": _portfolios,
}
