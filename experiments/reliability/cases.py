"""Random cases, each from one number: a feasible point, constraints around it, a law to project and a metric."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import probhard as ph
from experiments.reliability.parts import Maker, Part

ORDINARY = 6  # decades of variances within which failures must be rare
FREE = ("box", "mass", "equalities", "inequalities", "ball", "l1_ball", "variation", "sphere")
MORE = {"positive": ("nonnegative", "simplex"), "rising": ("monotone",), "sums": ("hierarchy",), "any": ()}
BATCHES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 3), (0,))
CURVED, LIFTED = ("ball", "sphere"), ("l1_ball", "variation")
MEMBERS = {"diagonal": 0.7, "low rank": 0.2, "dense": 0.1}


@dataclass(frozen=True, eq=False)
class Case:
    """A law, a constraint and what is known of them.

    Args:
        number: What the case is made from.
        parts: The constraints; all of them hold.
        law: The law that is projected.
        metric: ``"oblique"`` or ``"orthogonal"``.
        decades: Largest decimal exponent of variances and scales, without sign.
        feasible: A point of the set, (*batch, n).
    """

    number: int
    parts: list[Part]
    law: ph.LocationScale
    metric: str
    decades: float
    feasible: np.ndarray

    @property
    def constraint(self) -> ph.Constraint:
        """All parts."""
        joined = self.parts[0].constraint
        for part in self.parts[1:]:
            joined = joined & part.constraint
        return joined

    @property
    def ordinary(self) -> bool:
        """Whether variances and scales lie within six decades of 1."""
        return self.decades <= ORDINARY

    @property
    def convex(self) -> bool:
        """Whether cvxpy can describe the set."""
        return self.feasible.ndim == 1 and all(part.terms is not None for part in self.parts)

    def violation(self, u: np.ndarray) -> np.ndarray:
        """Largest relative violation of points (..., n) in float64."""
        return np.max([part.violation(u) for part in self.parts], axis=0)

    def __str__(self) -> str:
        names = " & ".join(part.name for part in self.parts)
        dtype = str(self.law.loc.dtype).removeprefix("torch.")
        return f"case {self.number}: {names}, {tuple(self.law.loc.shape)}, {self.metric}, {dtype}, 1e{self.decades:.1f}"


def case(number: int) -> Case:
    """Make a case.

    Args:
        number: Any number from 0 on; the same number always gives the same case.
    """
    random = np.random.default_rng(number)
    n, batch = int(random.integers(1, 13)), BATCHES[random.choice(len(BATCHES), p=[0.4, 0.1, 0.25, 0.2, 0.05])]
    decades = float(random.choice([0.0, random.uniform(0, 6), random.uniform(6, 12)], p=[0.4, 0.4, 0.2]))
    scale = 10 ** random.uniform(-decades / 2, decades / 2)
    point, kind, summing = _point(random, n, batch, scale)
    maker = Maker(random, point, scale, bool(random.uniform() < 0.2), summing)
    chosen = list(dict.fromkeys(random.choice([*FREE, *MORE[kind] * 3], size=int(random.integers(1, 4)))))
    if curved := [name for name in chosen if name in CURVED]:  # no solver joins these with auxiliary variables
        chosen = [name for name in chosen if name not in LIFTED][:2] or curved
    parts = [getattr(maker, name)() for name in chosen]
    law = _law(random, point, scale, decades, coupled=not curved)
    if random.uniform() < 0.25:
        law = ph.LocationScale(law.loc.float(), law.cov.to(torch.float32))
    return Case(number, parts, law, str(random.choice(["oblique", "orthogonal"])), decades, point)


def _point(
    random: np.random.Generator, n: int, batch: tuple[int, ...], scale: float
) -> tuple[np.ndarray, str, np.ndarray | None]:
    """A point (*batch, n) of a kind that some constraints need, and the summation matrix of one that adds up."""
    kind = str(random.choice(list(MORE)))
    if kind == "sums":
        bottoms = max(2, n - 2)
        groups = (random.uniform(size=(int(random.integers(0, 3)), bottoms)) < 0.5).astype(float)
        groups = np.unique(groups[(groups.sum(1) > 1) & (groups.sum(1) < bottoms)], axis=0).reshape(-1, bottoms)
        summing = np.vstack([np.ones((1, bottoms)), groups, np.eye(bottoms)])
        return scale * random.uniform(0, 2, (*batch, bottoms)) @ summing.T, kind, summing
    point = scale * random.normal(size=(*batch, n))
    if kind == "positive":
        point = np.abs(point) * (random.uniform(size=point.shape) < 0.8)
    elif kind == "rising":
        point = np.sort(point, -1)
    return point, kind, None


def _law(
    random: np.random.Generator, point: np.ndarray, scale: float, decades: float, coupled: bool
) -> ph.LocationScale:
    """A law near or far from the point, with variances over some decades, some of them 0."""
    distance = random.choice([0.0, 0.1, 1.0, 30.0])
    loc = torch.from_numpy(point + distance * scale * random.normal(size=point.shape))
    variance = scale**2 * 10 ** random.uniform(-decades / 2, decades / 2, point.shape)
    if random.uniform() < 0.1:
        variance = np.where(random.uniform(size=point.shape) < 0.2, 0.0, variance)
    own = torch.from_numpy(variance)
    form = str(random.choice(list(MEMBERS), p=list(MEMBERS.values())))
    n = point.shape[-1]
    if form == "low rank" and coupled:
        factor = torch.from_numpy(random.normal(size=(*point.shape, 2))) * own.sqrt().unsqueeze(-1)
        return ph.LocationScale(loc, ph.LowRank(factor, own))
    if form == "dense" and coupled and bool((own > 0).all()):
        root = torch.from_numpy(np.tril(random.normal(size=(*point.shape[:-1], n, n)) / n, -1) + np.eye(n))
        return ph.LocationScale(loc, ph.Dense(own.sqrt().unsqueeze(-1) * root))
    return ph.LocationScale(loc, ph.Diagonal(own))
