"""Polyhedra with shared dense rows, against active sets over all rows and against OSQP point by point.

    min |u - z|_Q^2    s.t.   A u = b_i,   G u <= d,     100 variables, 50 equalities, 50 inequalities,

by the recipe of DC3 (Donti, Rolnick and Kolter 2021): normal rows, uniform right-hand sides b, and
``d = sum |G A^+|``, so that ``A^+ b`` is always feasible. Points are normal with a small and a large spread. The former
route factors all 100 rows with their slacks anew for every element and step. OSQP keeps one factor for all points. The
oblique metric has other weights for every point, so it is compared with the orthogonal one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import probhard as ph
from benchmarks.timing import Comparison, Overhead, measured, worst
from probhard.projection.base import Options
from probhard.projection.parts import parts_of
from probhard.projection.polyhedral import FaceProjector

VARIABLES, EQUALITIES, INEQUALITIES, SEED = 100, 50, 50, 17
SPREADS = (0.3, 3.0)
GOALS = {200: 8.0, 833: 10.0}  # how many times faster than the former route
OBLIQUE_GOAL = 4.0  # longest time of per-element weights, in times of the orthogonal metric
TIGHT = {"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iter": 100_000, "polishing": True, "verbose": False}


@dataclass(frozen=True)
class Rows:
    """The rows of all elements and the right-hand sides of each."""

    equal: np.ndarray  # A, (50, 100)
    right: np.ndarray  # b, (batch, 50)
    unequal: np.ndarray  # G, (50, 100)
    most: np.ndarray  # d, (50,)

    @classmethod
    def of(cls, batch: int) -> Rows:
        """DC3's rows for a batch."""
        random = np.random.RandomState(SEED)
        random.random_sample(VARIABLES), random.random_sample(VARIABLES)  # its objective, which is not used
        equal = random.normal(size=(EQUALITIES, VARIABLES))
        right = random.uniform(-1, 1, size=(10_000, EQUALITIES))[:batch]
        unequal = random.normal(size=(INEQUALITIES, VARIABLES))
        return cls(equal, right, unequal, np.abs(unequal @ np.linalg.pinv(equal)).sum(1))

    def constraint(self) -> ph.Constraint:
        """The set."""
        tensors = (torch.from_numpy(x) for x in (self.equal, self.right, self.unequal, self.most))
        equal, right, unequal, most = tensors
        return ph.LinearEquality(equal, right) & ph.LinearInequality(unequal, most)


def run(quick: bool = False) -> Iterator[Comparison | Overhead]:
    """Compare in float64."""
    for batch in (20,) if quick else tuple(GOALS):
        rows = Rows.of(batch)
        for spread in SPREADS:
            generator = torch.Generator().manual_seed(1)
            z = spread * torch.randn(batch, VARIABLES, generator=generator, dtype=torch.float64)
            weight = torch.rand(batch, VARIABLES, generator=generator, dtype=torch.float64) + 0.1
            yield from _compared(rows, z, weight, spread, quick)


def _compared(rows: Rows, z: Tensor, weight: Tensor, spread: float, quick: bool) -> Iterator[Comparison | Overhead]:
    batch, constraint = len(z), rows.constraint()
    case = f"{batch} points of {VARIABLES}, {EQUALITIES} + {INEQUALITIES} rows, spread {spread:g}"
    orthogonal, oblique = ph.DPPL("orthogonal"), ph.DPPL("oblique")
    law = ph.LocationScale(z, ph.Diagonal(weight))

    def ours() -> Tensor:
        return orthogonal.project(z, constraint).value

    def ours_oblique() -> Tensor:
        return oblique.project(z, constraint, dist=law).value

    def judge(value: Tensor) -> float:
        return worst(constraint, value)

    goal = GOALS.get(batch)
    units = torch.ones(VARIABLES, dtype=torch.float64)
    former, new, others = measured(_former(constraint, units, z), ours, ours_oblique)
    apart = float((former.value - new.value).abs().max())
    agreed = f"The points of both agree within {apart:.0e}."
    yield Comparison.of(
        f"orthogonal, {case}", "active sets of all rows", former, new, judge, goal=goal, explanation=agreed
    )
    factor = f"per-element weights over one weight, {case}"
    yield Overhead(factor, new.seconds, others.seconds, OBLIQUE_GOAL, "One Cholesky factor for each element.")
    slow, fast = measured(_former(constraint, weight, z), ours_oblique)
    yield Comparison.of(f"oblique, {case}", "active sets of all rows", slow, fast, judge)
    peer, new = measured(_osqp(rows, z[:5] if quick else z), ours)
    yield Comparison.of(f"orthogonal, {case}", "OSQP, one factor", peer, new, judge if not quick else _unjudged)


def _unjudged(value: Tensor) -> None:
    """The quick form gives OSQP fewer points."""


def _former(constraint: ph.Constraint, weight: Tensor, z: Tensor) -> Callable[[], Tensor]:
    """The route of shapes and sparse rows, for the same set."""
    projector = FaceProjector(parts_of(constraint, VARIABLES), ph.Diagonal(weight), Options())
    return lambda: projector.solve(z).value


def _osqp(rows: Rows, z: Tensor) -> Callable[[], Tensor]:
    """OSQP, set up once; each point updates its vectors."""
    import osqp
    import scipy.sparse as sp

    matrix = sp.csc_matrix(np.vstack([rows.equal, rows.unequal]))
    free = np.full(INEQUALITIES, -np.inf)
    lower, upper = (np.hstack([rows.right, np.tile(x, (len(rows.right), 1))]) for x in (free, rows.most))
    points = z.numpy()
    solver = osqp.OSQP()
    solver.setup(sp.eye(VARIABLES, format="csc"), -points[0], matrix, lower[0], upper[0], **TIGHT)

    def solve() -> Tensor:
        found = []
        for point, low, high in zip(points, lower, upper):
            solver.update(q=-point, l=low, u=high)
            found.append(solver.solve().x)
        return torch.from_numpy(np.stack(found))

    return solve
