"""A family of metrics for reconciliation, and its member that scores best on past forecasts.

The weight ``W = Q^-1`` of the projection of step h is

    W_h = D_h^g C(r) D_h^g,      D_h^g = diag(s_h^g |S|^(s/2)),      C(r) = (1 - r) I + r C,

with the deviations s_h of the base law, the correlation C of its errors and the number of bottoms |S| of each node:

| g, r, s | metric                                                      |
|---------|-------------------------------------------------------------|
| 0, 0, 0 | orthogonal, MinT's ols                                      |
| 0, 0, 1 | structural, MinT's wls_struct                               |
| 1, 0, 0 | variances of the base law (oblique for independent nodes)   |
| 1, 1, 0 | covariance of the base law, MinT's mint_shrink              |

Metric and law are separate: the base law N(mean_h, Sigma_h) becomes N(P_h mean_h, P_h Sigma_h P_h^T) under any of them.
``learn_metric`` minimises, over past windows k = 1, ..., K,

    L(g, r, s) / L(prior) + strength / K |(g, r, s) - prior|^2,      L = sum of CRPS / sum |y|,

with the CRPS of the projected marginals in closed form: few windows leave the metric near the prior.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from math import exp, log

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError
from probhard.forecasting.reconciliation.joint_law import LARGE, PathLaw
from probhard.laws import Diagonal, LocationScale, LowRank
from probhard.laws.base import Covariance
from probhard.laws.covariance import Identity
from probhard.score import crps
from probhard.tangent.linear import Tangent, tangent_of

STRENGTH = 0.1  # of the pull to the prior, chosen on windows before those of the published tables
NEAR_STRENGTH = 4.0  # the same where one forecast is reconciled and nothing is pooled
STEPS = (0.25, 0.125)  # of the search
CORNERS = ((0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (1.0, 1.0, 0.0), (0.5, 0.0, 0.0))  # where it starts
LARGEST_SCALE, PRIOR_WINDOWS = log(4.0), 2  # of a factor of deviations: its range, and windows that ask for 1
CHUNK = 10_000_000  # numbers of a factor over some steps, to bound the memory
LEARNED_NUMBERS, LARGE_NUMBERS = 8_000_000, 500_000  # of learning (many series), which looks at fewer steps above

Point = tuple[float, float, float]


@dataclass(frozen=True)
class MetricWeights:
    """A member of the family.

    Args:
        exponent: g, of the deviations, in [0, 1].
        correlation: r, the weight of the correlation of errors, in [0, 1].
        structural: s, of the number of bottoms, in [0, 1].

    Raises:
        ParameterError: If a number is outside [0, 1].
    """

    exponent: float = 0.5
    correlation: float = 0.5
    structural: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= number <= 1 for number in astuple(self)):
            raise ParameterError(
                f"The metric has exponent {self.exponent}, correlation {self.correlation} and structural "
                f"{self.structural}.",
                "The family lies between the metrics of ols, wls_struct and MinT.",
                "Pass numbers from 0 to 1.",
            )

    def weight(self, stddev: Tensor, correlation: LowRank | None, sizes: Tensor) -> Covariance:
        """The weight W.

        Args:
            stddev: Deviations of the base law, (*batch, n), above 0.
            correlation: Correlation C of errors, (n,); None for the identity.
            sizes: Number of bottoms of each node, (n,).

        Returns:
            W, (*batch, n), or (n,) where it does not depend on the deviations.
        """
        scale = sizes.to(stddev) ** (self.structural / 2)
        if self.exponent:
            scale = scale * stddev**self.exponent
        r = self.correlation
        if correlation is not None and r:
            mixed = LowRank(r**0.5 * correlation.factor, (1 - r) + r * correlation.diagonal_part)
            return mixed.scaled(scale)
        if self.exponent or self.structural:
            return Diagonal(scale.square())
        return Identity.like(stddev)


NEAR = MetricWeights(1.0, 0.75)  # the best fixed metric on those windows


@dataclass(frozen=True, eq=False)
class PastForecast:
    """A forecast whose window is over.

    Args:
        law: The base law at the origin of the window, (H, n).
        target: What was observed, (H, n); NaN where missing.

    Raises:
        ShapeError: If the shapes differ.
    """

    law: PathLaw
    target: Tensor

    def __post_init__(self) -> None:
        target = torch.as_tensor(self.target, dtype=torch.float64)
        if target.shape != self.law.mean.shape:
            raise ShapeError(
                f"The forecast has shape {tuple(self.law.mean.shape)}, what was observed {tuple(target.shape)}.",
                "A past forecast is scored at every step and node.",
                "Pass (H, n) for both, NaN where nothing was observed.",
            )
        object.__setattr__(self, "target", target)


def project_law(law: PathLaw, weights: MetricWeights, hierarchy: Hierarchy, samples: int, seed: int) -> Tensor:
    """Draw coherent paths from a base law, (S, H, n), in float64.

    Args:
        law: The base law, (H, n).
        weights: The metric.
        hierarchy: The sums.
        samples: Number of paths S.
        seed: Seed of the noise.
    """
    draws = law.draws(samples, seed)
    for steps, tangent in tangents(law, weights, hierarchy):
        draws[:, steps] = tangent.project(draws[:, steps], _right(hierarchy))
    return draws


def projected_moments(law: PathLaw, weights: MetricWeights, hierarchy: Hierarchy) -> tuple[Tensor, Tensor]:
    """Means ``P_h mean_h`` and deviations, roots of ``diag(P_h Sigma_h P_h^T)``, of the projected law, (H, n) each.

    Args:
        law: The base law, (H, n).
        weights: The metric.
        hierarchy: The sums.
    """
    mean, variance = torch.empty_like(law.mean), torch.empty_like(law.mean)
    for steps, tangent in tangents(law, weights, hierarchy):
        part = law.at(steps)
        mean[steps] = tangent.project(part.mean, _right(hierarchy))
        variance[steps] = tangent.variance(part.covariance)
    return mean, variance.clamp(min=0).sqrt()


def learn_metric(
    windows: Sequence[PastForecast],
    hierarchy: Hierarchy,
    prior: MetricWeights | None = None,
    strength: float = STRENGTH,
) -> MetricWeights:
    """Choose the metric by the CRPS of past forecasts.

    Args:
        windows: Past forecasts; none returns the prior.
        hierarchy: The sums.
        prior: The metric that few windows are drawn to; by default the middle of the family.
        strength: Of the pull to the prior, >= 0.

    Returns:
        The metric; its correlation is that of the prior if no law has one.
    """
    prior = MetricWeights() if prior is None else prior
    seen = [_thinned(window) for window in windows if bool((~window.target.isnan()).any())]
    start = _loss(seen, prior, hierarchy)
    if not start > 0:
        return prior
    correlated = any(isinstance(window.law.correlation, LowRank) for window in seen)
    center = astuple(prior)

    @cache
    def score(point: tuple[float, ...]) -> float:
        distance = sum((a - b) ** 2 for a, b in zip(point, center))
        return _loss(seen, MetricWeights(*point), hierarchy) / start + strength / len(seen) * distance

    corners = [center, *(corner for corner in CORNERS if correlated or not corner[1])]
    return MetricWeights(*_search(score, corners, (0, 1, 2) if correlated else (0, 2)))


def learn_reconciliation(
    windows: Sequence[PastForecast], hierarchy: Hierarchy, prior: MetricWeights | None = None
) -> tuple[MetricWeights, float]:
    """Learn the metric and a factor of the deviations: the factor under the prior, the metric, the factor again.

    Args:
        windows: Past forecasts.
        hierarchy: The sums.
        prior: The metric that few windows are drawn to; by default ``NEAR``.
    """
    prior = NEAR if prior is None else prior
    start = learn_scale(windows, prior, hierarchy)
    scaled = [replace(window, law=replace(window.law, stddev=start * window.law.stddev)) for window in windows]
    weights = learn_metric(scaled, hierarchy, prior, NEAR_STRENGTH)
    return weights, learn_scale(windows, weights, hierarchy)


def learn_scale(windows: Sequence[PastForecast], weights: MetricWeights, hierarchy: Hierarchy) -> float:
    """Choose a factor c of all deviations by the CRPS of past forecasts, drawn to 1 as windows get few.

    Args:
        windows: Past forecasts; none returns 1.
        weights: The metric.
        hierarchy: The sums.

    Returns:
        ``c^(K / (K + 2))`` for K windows, with c between 1/4 and 4.
    """
    seen = [_thinned(window) for window in windows if bool((~window.target.isnan()).any())]
    if not seen:
        return 1.0
    moments = [projected_moments(window.law, weights, hierarchy) for window in seen]

    def loss(log_scale: float) -> float:
        scale = exp(log_scale)
        return sum(_score(mean, scale * stddev, window.target) for (mean, stddev), window in zip(moments, seen))

    best = minimize_scalar(loss, bounds=(-LARGEST_SCALE, LARGEST_SCALE), method="bounded").x
    return float(exp(best * len(seen) / (len(seen) + PRIOR_WINDOWS)))


def _search(score: Callable[[tuple[float, ...]], float], starts: Sequence[Point], free: Sequence[int]) -> Point:
    """Minimise over the cube [0, 1]^3 from the best start, one coordinate at a time with shrinking steps."""
    best = min(starts, key=score)
    for step in STEPS:
        improved = True
        while improved:
            near = [_moved(best, axis, sign * step) for axis in free for sign in (-1, 1)]
            candidate = min(near, key=score)
            improved = score(candidate) < score(best)
            best = candidate if improved else best
    return best


def _moved(point: Point, axis: int, step: float) -> Point:
    """The point with one coordinate moved, within [0, 1]."""
    moved = list(point)
    moved[axis] = min(1.0, max(0.0, point[axis] + step))
    return moved[0], moved[1], moved[2]


def _loss(windows: Sequence[PastForecast], weights: MetricWeights, hierarchy: Hierarchy) -> float:
    """The summed CRPS of the projected marginals over windows, where something was observed."""
    return sum(_score(*projected_moments(window.law, weights, hierarchy), window.target) for window in windows)


def _score(mean: Tensor, stddev: Tensor, target: Tensor) -> float:
    """The summed CRPS of normal marginals, where something was observed."""
    observed = ~target.isnan()
    law = LocationScale(mean, Diagonal.from_stddev(stddev), validate_args=False)
    return float(crps(law, torch.where(observed, target, mean))[observed].sum())


def _thinned(window: PastForecast) -> PastForecast:
    """The window at evenly spaced steps, where all of them would be too much work."""
    steps, nodes = window.target.shape
    kept = max(1, (LARGE_NUMBERS if nodes > LARGE else LEARNED_NUMBERS) // _numbers(window.law))
    if kept >= steps:
        return window
    chosen = torch.linspace(0, steps - 1, kept).round().long() if kept > 1 else torch.tensor([steps // 2])
    return PastForecast(window.law.at(chosen), window.target[chosen])


def _numbers(law: PathLaw) -> int:
    """Numbers that the projection of one step's factor takes."""
    return law.mean.shape[-1] * (1 if law.correlation is None else 1 + law.correlation.factor_size)


def tangents(law: PathLaw, weights: MetricWeights, hierarchy: Hierarchy) -> Iterator[tuple[slice, Tangent]]:
    """The tangents P_h of groups of steps."""
    count = len(law.mean)
    correlation = law.correlation if isinstance(law.correlation, LowRank) else None  # of errors
    size = max(1, CHUNK // _numbers(law))
    for first in range(0, count, size):
        steps = slice(first, min(count, first + size))
        weight = weights.weight(law.stddev[steps], correlation, hierarchy.sizes)
        yield steps, tangent_of(hierarchy.system, weight).check()


def _right(hierarchy: Hierarchy) -> Tensor:
    return torch.zeros(hierarchy.aggregates, dtype=torch.float64)
