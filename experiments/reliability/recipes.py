"""Recipes of random cases: what a case is made of, each from one number or from a strategy of hypothesis.

A recipe holds choices only, so that it can be kept in a file; ``cases.build`` makes the numbers from its seed. Parts
that no solver joins are never chosen together; see the dispatch table of the library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

ORDINARY = 6.0  # decades of variances within which failures must be rare
FREE = ("box", "mass", "equalities", "inequalities", "ball", "l1_ball", "variation", "sphere", "cone", "exponential")
KINDS: dict[str, tuple[str, ...]] = {  # kinds of feasible points, and the parts that only they obey
    "any": (),
    "positive": ("nonnegative", "simplex", "standard_cone"),
    "rising": ("monotone",),
    "bent": ("convex",),
    "sums": ("hierarchy",),
    "matrix": ("semidefinite",),
    "correlation": ("correlation", "semidefinite"),
    "lots": ("lots",),
    "fading": ("fading",),
    "program": ("program",),
}
SHARES = {"any": 4, "positive": 4, "rising": 3, "bent": 2, "sums": 4, "matrix": 1, "correlation": 1, "lots": 1}
SHARES |= {"fading": 1, "program": 0.5}
CONES = ("cone", "standard_cone", "semidefinite", "correlation")
TORCH = ("ball", "sphere", "exponential")  # functions of torch, solved under diagonal metrics
LIFTED = ("l1_ball", "variation")  # shapes with auxiliary variables
ALONE = {"lots": (), "fading": ("nonnegative",), "program": ("mass", "nonnegative", "inequalities")}
BATCHES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 3), (0,), (500,))
COVARIANCES, METRICS = ("diagonal", "low rank", "dense"), ("oblique", "orthogonal", "diagonal", "dense")
DISTANCES = (0.0, 0.1, 1.0, 30.0)


@dataclass(frozen=True)
class Recipe:
    """Choices that a case is made from.

    Args:
        seed: Of the numbers.
        kind: Of the feasible point, a key of ``KINDS``.
        n: Number of variables; kinds with a structure take the nearest number that they can have.
        batch: Batch shape.
        parts: Names of the constraints.
        size: Decimal exponent of the scale of the points.
        decades: Largest decimal exponent of variances in units of that scale, without sign.
        flat: Whether sets may be degenerate: equal bounds, balls of radius 0.
        covariance: Of the law, one of ``COVARIANCES``.
        certain: Whether some variances are 0.
        distance: Of the location from the feasible point, in its scale.
        metric: One of ``METRICS``.
        dtype: ``"float64"`` or ``"float32"``.
    """

    seed: int
    kind: str = "any"
    n: int = 4
    batch: tuple[int, ...] = ()
    parts: tuple[str, ...] = ("box",)
    size: float = 0.0
    decades: float = 0.0
    flat: bool = False
    covariance: str = "diagonal"
    certain: bool = False
    distance: float = 1.0
    metric: str = "oblique"
    dtype: str = "float64"

    @property
    def ordinary(self) -> bool:
        """Whether variances lie within six decades of 1 and none is 0."""
        return 2 * abs(self.size) + self.decades <= ORDINARY and not self.certain

    @property
    def stored(self) -> dict[str, Any]:
        """The fields, for a file."""
        return asdict(self)

    @classmethod
    def restored(cls, fields: dict[str, Any]) -> Self:
        """The recipe of stored fields."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    def solvable(self) -> Recipe:
        """The recipe without what no solver joins: parts, coupled weights, large batches of slow sets."""
        parts = joined(self.parts)
        coupled = (self.covariance != "diagonal" and self.metric == "oblique") or self.metric == "dense"
        if coupled and not _couples(parts):
            parts = tuple(name for name in parts if name not in TORCH) or parts
        covariance, metric = self.covariance, self.metric
        if not _couples(parts):
            covariance, metric = "diagonal", "diagonal" if metric == "dense" else metric
        fast = set(parts) <= {"box", "nonnegative", "mass", "simplex", "equalities", "hierarchy", "ball"}
        batch = self.batch if fast or len(self.batch) != 1 or self.batch[0] < 100 else (4,)
        return replace(self, parts=parts, covariance=covariance, metric=metric, batch=batch)


def joined(names: Iterable[str]) -> tuple[str, ...]:
    """The names without repetition and without parts that no solver joins with those before them."""
    kept: list[str] = []
    for name in dict.fromkeys(names):
        if all(_join(name, other) and _join(other, name) for other in kept):
            kept.append(name)
    return tuple(kept)


def _join(name: str, other: str) -> bool:
    if name in ALONE:
        return other in ALONE[name]
    if name in CONES:
        return other not in (*LIFTED, "sphere", "exponential")
    return name not in TORCH or other not in LIFTED


def _couples(parts: tuple[str, ...]) -> bool:
    """Whether the parts are solved under metrics that couple variables."""
    cones = any(name in CONES for name in parts)
    smooth = set(parts) <= {"sphere", "mass", "equalities", "hierarchy"}  # nonlinear equalities alone
    return smooth or cones or not any(name in (*TORCH, "lots", "fading") for name in parts)


def numbered(number: int) -> Recipe:
    """The recipe of a number: any from 0 on; the same number always gives the same recipe."""
    random = np.random.default_rng([number, 26])
    shares = np.array([float(SHARES[kind]) for kind in KINDS])
    kind = str(random.choice(list(KINDS), p=shares / shares.sum()))
    names = random.choice([*FREE, *KINDS[kind] * 6], size=int(random.integers(1, 4)))
    if kind in ALONE:
        names = [kind, *random.choice(ALONE[kind] or [kind], size=1)]
    size, decades = _magnitudes(random)
    return Recipe(
        seed=number,
        kind=kind,
        n=int(random.integers(1, 13)),
        batch=BATCHES[random.choice(len(BATCHES), p=[0.4, 0.1, 0.25, 0.18, 0.05, 0.02])],
        parts=tuple(str(name) for name in names),
        size=size,
        decades=decades,
        flat=bool(random.uniform() < 0.2),
        covariance=str(random.choice(COVARIANCES, p=[0.7, 0.2, 0.1])),
        certain=bool(random.uniform() < 0.1),
        distance=float(random.choice(DISTANCES)),
        metric=str(random.choice(METRICS, p=[0.5, 0.35, 0.1, 0.05])),
        dtype=str(random.choice(["float64", "float32"], p=[0.75, 0.25])),
    ).solvable()


def _magnitudes(random: np.random.Generator) -> tuple[float, float]:
    """Decimal exponents of the scale and of the spread of variances: none, ordinary, or up to 12."""
    choice = random.choice(3, p=[0.35, 0.4, 0.25])
    if choice == 2:
        return float(random.uniform(-12, 12)), float(random.uniform(0, 12))
    total, share = choice * random.uniform(0, ORDINARY), random.uniform()
    return float(random.choice([-0.5, 0.5]) * share * total), float((1 - share) * total)
