"""The metric of reconciliation that scores best on past forecasts, or on one-step errors.

Over past windows k = 1, ..., K, ``learn_metric`` minimises over the family (``family``)

    1 / K sum_k L_k(g, r, s) / L_k(prior) + strength / K |(g, r, s) - prior|^2,      L_k: sum of CRPS in window k,

with the CRPS of the projected marginals in closed form. Windows count alike: one of large errors does not decide.
Few windows leave the metric near the prior.

A history alone has one-step errors ``e_t = y_t - f_t``. The y_t add up, so the error of a projected forecast is P e_t.
``learn_from_errors`` scores the metric on them as on one window, with a strong pull to the prior.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from math import exp, log

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from probhard.constraints import Hierarchy
from probhard.errors import ShapeError
from probhard.forecasting.reconciliation.family import (
    LONG,
    MetricWeights,
    law_numbers,
    middle,
    projected_moments,
    zeros,
)
from probhard.forecasting.reconciliation.joint_law import LARGE, PathLaw, floored
from probhard.laws import Diagonal, LocationScale, LowRank
from probhard.score import crps
from probhard.tangent import tangent_of

STRENGTH = 0.1  # of the pull to the prior, chosen on windows before those of the published tables
NEAR_STRENGTH = 4.0  # the same where one forecast is reconciled and nothing is pooled
ERROR_STRENGTH, ERROR_ROWS = 2.0, 60  # the same for one-step errors, and how many of them count, the latest
STEPS = (0.25, 0.125)  # of the search
CORNERS = ((0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (1.0, 1.0, 0.0), (0.5, 0.0, 0.0))  # where it starts
LARGEST_SCALE, PRIOR_WINDOWS = log(4.0), 2  # of a factor of deviations: its range, and windows that ask for 1
LEARNED_NUMBERS, LARGE_NUMBERS = 8_000_000, 500_000  # of learning (many series), which looks at fewer steps above

Point = tuple[float, float, float]


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
    starts = [_loss(window, prior, hierarchy) for window in seen]
    known = [(window, start) for window, start in zip(seen, starts) if start > 0]
    if not known:
        return prior

    def loss(weights: MetricWeights) -> float:
        return sum(_loss(window, weights, hierarchy) / start for window, start in known) / len(known)

    correlated = any(isinstance(window.law.correlation, LowRank) for window, _ in known)
    return _best(loss, prior, strength / len(known), correlated)


def learn_from_errors(
    errors: Tensor,  # (T, n), NaN where missing
    correlation: LowRank | None,  # (n,)
    hierarchy: Hierarchy,
    prior: MetricWeights | None = None,
) -> MetricWeights:
    """Choose the metric by the CRPS of one-step forecasts, where there are no past windows.

    Args:
        errors: One-step errors; rows with missing ones are left out.
        correlation: Their shrunk correlation; None for independent series.
        hierarchy: The sums.
        prior: The metric that they are drawn to; by default ``middle`` of their number.

    Returns:
        The metric; the prior for short histories and very many series.
    """
    prior = middle(len(errors)) if prior is None else prior
    errors = errors[errors.isfinite().all(-1)][-ERROR_ROWS:].double()
    if len(errors) < ERROR_ROWS or hierarchy.nodes > LARGE:
        return prior
    size = errors.abs().amax(0)
    stddev = floored(size, errors.square().mean(0).sqrt())
    law = Diagonal.from_stddev(stddev) if correlation is None else correlation.scaled(stddev)

    def total(weights: MetricWeights) -> float:
        tangent = tangent_of(hierarchy.system, weights.weight(stddev, correlation, hierarchy.sizes)).check()
        mean = tangent.project(errors, zeros(hierarchy))
        spread = tangent.variance(law).clamp(min=0).sqrt().expand_as(mean)
        return _score(mean, spread, torch.zeros_like(mean))

    start = total(prior)
    if not start > 0:
        return prior
    return _best(lambda weights: total(weights) / start, prior, ERROR_STRENGTH, correlation is not None)


def learn_reconciliation(
    windows: Sequence[PastForecast], hierarchy: Hierarchy, prior: MetricWeights | None = None
) -> tuple[MetricWeights, float]:
    """Learn the metric and a factor of the deviations: the factor under the prior, the metric, the factor again.

    Args:
        windows: Past forecasts.
        hierarchy: The sums.
        prior: The metric that few windows are drawn to; by default ``middle`` of a long history.
    """
    prior = middle(LONG) if prior is None else prior
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


def _best(loss: Callable[[MetricWeights], float], prior: MetricWeights, pull: float, correlated: bool) -> MetricWeights:
    """Minimise a loss, 1 at the prior, plus the pull to the prior."""
    center = astuple(prior)

    @cache
    def score(point: tuple[float, ...]) -> float:
        return loss(MetricWeights(*point)) + pull * sum((a - b) ** 2 for a, b in zip(point, center))

    corners = [center, *(corner for corner in CORNERS if correlated or not corner[1])]
    return MetricWeights(*_search(score, corners, (0, 1, 2) if correlated else (0, 2)))


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


def _loss(window: PastForecast, weights: MetricWeights, hierarchy: Hierarchy) -> float:
    """The summed CRPS of the projected marginals of a window, where something was observed."""
    return _score(*projected_moments(window.law, weights, hierarchy), window.target)


def _score(mean: Tensor, stddev: Tensor, target: Tensor) -> float:
    """The summed CRPS of normal marginals, where something was observed."""
    observed = ~target.isnan()
    law = LocationScale(mean, Diagonal.from_stddev(stddev), validate_args=False)
    return float(crps(law, torch.where(observed, target, mean))[observed].sum())


def _thinned(window: PastForecast) -> PastForecast:
    """The window at evenly spaced steps, where all of them would be too much work."""
    steps, nodes = window.target.shape
    kept = max(1, (LARGE_NUMBERS if nodes > LARGE else LEARNED_NUMBERS) // law_numbers(window.law))
    if kept >= steps:
        return window
    chosen = torch.linspace(0, steps - 1, kept).round().long() if kept > 1 else torch.tensor([steps // 2])
    return PastForecast(window.law.at(chosen), window.target[chosen])
