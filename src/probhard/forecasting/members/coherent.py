"""From base forecasts to coherent paths: the law of a member, its scales, and its learned projection.

    law:     x_h ~ N(mean_h, D_h C D_h),          D_h: base deviations, C: shrunk correlation of one-step errors
    scales:  D_h -> c_level D_h,                  one factor for the top, the middle and the bottom of the hierarchy
    metric:  (g, r, s) of ``learned``,            by the CRPS of the projected law on past windows
    steps:   cov(x_h, x_k) ~ rho^|h-k|,           by the CRPS of sums over the horizon (``members.steps``)
    paths:   P_h x_h,                             coherent

All numbers are fitted on past windows only, in this order, and shrunk as windows get few: scales to 1, the metric to
the middle of its family, rho to what deviations and one-step errors imply. rho changes no forecast of a single step.
The scale of the top rests on one series in K windows that do not overlap. It is uncertain, so the top gets
1 + 1 / (1 + K) times its scale, as Student's t is wider than a normal law.
Paths of members that draw jointly are coherent already; they get one factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard.calibration import best_factor
from probhard.constraints import Hierarchy
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import MemberForecast
from probhard.forecasting.members.steps import fit_steps
from probhard.forecasting.models import spread
from probhard.forecasting.models.classical import BaseForecast
from probhard.forecasting.reconciliation.family import MetricWeights, project_law
from probhard.forecasting.reconciliation.joint_law import PathLaw
from probhard.forecasting.reconciliation.learned import PastForecast, learn_metric
from probhard.laws import Diagonal, LocationScale
from probhard.score import crps

FEW = 3.0  # windows at which scales are halfway between 1 and their best
UNSURE = 1.0  # excess of the top's scale, one series in few windows, over windows plus one
RECENT, FEWEST, SMALLEST = 60, 8, 0.1  # rows of recent errors, least number of them, and least factor


@dataclass(frozen=True)
class Tuned:
    """What was learned of a member on past windows.

    Args:
        scales: Factors on the deviations of the top, middle and bottom levels; of all, for paths drawn jointly.
        metric: The metric of its projection; None for paths drawn jointly.
        rho: Correlation of successive steps, of what series do together; None takes what the member's deviations and
            errors imply.
        own_rho: The same for what each series does alone.
    """

    scales: tuple[float, ...]
    metric: MetricWeights | None
    rho: float | None = None
    own_rho: float | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Tuned:
        """The numbers of a record of plain values."""
        metric = record["metric"]
        known = {name: record.get(name) for name in ("rho", "own_rho")}
        return cls(tuple(record["scales"]), None if metric is None else MetricWeights(**metric), **known)

    def sentence(self, name: str) -> str:
        """Explain the numbers in a sentence."""
        if self.metric is None:
            return f"{name}: paths drawn jointly, deviations times {self.scales[0]:.2f}."
        top, middle, bottom = self.scales
        metric = self.metric
        return (
            f"{name}: deviations times {top:.2f} (top), {middle:.2f} (middle), {bottom:.2f} (bottom); projected with "
            f"weights spread^{2 * metric.exponent:.2g} (0 is OLS, 2 is MinT), correlation of errors "
            f"{metric.correlation:.2g} of 1, structural weights {metric.structural:.2g} of 1"
            f"{self._steps()}."
        )

    def _steps(self) -> str:
        if self.rho is None:
            return ""
        own = "" if self.own_rho is None else f" where series move together, by {self.own_rho:.2g} alone"
        return f"; successive steps correlated by {self.rho:.2g}{own}"


@dataclass(frozen=True)
class Recipe:
    """Which parts are used; all of them by default, fewer in ablations.

    Args:
        metric: A metric that is not learned; None learns it.
        correlation: Whether errors of different series are dependent.
        scales: Whether scales are fitted.
        steps: Whether the correlation of steps is fitted.
    """

    metric: MetricWeights | None = None
    correlation: bool = True
    scales: bool = True
    steps: bool = True


def groups(data: HierarchicalData) -> np.ndarray:
    """Return 0 for nodes of the top level, 1 for those of middle levels and 2 for bottom nodes, (n,)."""
    labels = np.ones(len(data.names), dtype=int)
    levels = list(data.levels.values())
    labels[levels[0]] = 0
    labels[data.hierarchy.aggregates :] = 2
    return labels


def law_of(base: BaseForecast, scales: Sequence[float] = (1.0, 1.0, 1.0), correlation: bool = True) -> PathLaw:
    """The law of a base forecast, with scaled deviations."""
    past = base.data.observed - base.fitted
    factor = np.asarray(scales)[groups(base.data)] * robust_factor(past, base.data.season)
    errors = torch.from_numpy(past) if correlation else None
    return PathLaw.of_errors(torch.from_numpy(base.mean), torch.from_numpy(base.stddev * factor), errors)


def robust_factor(errors: np.ndarray, season: int) -> np.ndarray:
    """Ratio of a deviation by absolute errors to one by squared errors, (n,), at most 1.

    It is 1 for normal errors. A few bursts inflate squares, and with them the deviations of models; the CRPS is
    smallest for a spread that follows absolute errors. Bursts long ago count less: recent rows are taken.

    Args:
        errors: One-step errors, (T, n); NaN where missing.
        season: Season length in rows.
    """
    size = np.sqrt(_nanmean(errors**2))
    recent = errors[-max(RECENT, 3 * season) :]
    absolute = np.sqrt(np.pi / 2) * _nanmean(np.abs(recent))
    known = (~np.isnan(recent)).sum(0)
    ratio = np.where((size > 0) & (known >= FEWEST), absolute / np.where(size > 0, size, 1.0), 1.0)
    return np.clip(ratio, SMALLEST, 1.0)


def _nanmean(values: np.ndarray) -> np.ndarray:
    """Means of columns over known values; 0 where none is known."""
    known = ~np.isnan(values)
    return np.where(known, values, 0.0).sum(0) / np.maximum(1, known.sum(0))


def fit_scales(laws: Sequence[PathLaw], targets: Sequence[np.ndarray], labels: np.ndarray) -> tuple[float, ...]:
    """Fit one factor for each group of nodes by the CRPS of the base laws.

    Args:
        laws: Base laws of past windows.
        targets: What was observed there, (H, n) each.
        labels: Group of each node, (n,), from 0 to 2.

    Returns:
        Three factors; 1 for a group without nodes or observations.
    """
    share = len(laws) / (len(laws) + FEW)
    y = torch.from_numpy(np.concatenate(targets))
    mean, stddev = torch.cat([law.mean for law in laws]), torch.cat([law.stddev for law in laws])
    factors = []
    for group in range(3):
        seen = ~y.isnan() & torch.from_numpy(labels == group)
        best = best_factor(partial(_loss, mean[seen], stddev[seen], y[seen])) if bool(seen.any()) else 1.0
        factors.append(math.exp(share * math.log(best)))
    return tuple(factors)


def _loss(mean: Tensor, stddev: Tensor, y: Tensor, factor: float) -> float:
    return float(crps(LocationScale(mean, Diagonal.from_stddev(factor * stddev), validate_args=False), y).sum())


def tune(made: MemberForecast, targets: Sequence[np.ndarray], recipe: Recipe) -> Tuned:
    """Learn a member's scales and metric on past windows.

    Args:
        made: The member's forecasts at past origins, and at the end.
        targets: What was observed in the windows, (H, n) each; empty for a history without windows.
        recipe: Which parts are learned.
    """
    count = len(targets)
    if made.draws is not None:
        past = [torch.from_numpy(draws) for draws in made.draws[:count]]
        factor = spread.factor(past, [torch.from_numpy(y) for y in targets]) if recipe.scales else 1.0
        return Tuned((factor,), None)
    scales: tuple[float, ...] = (1.0, 1.0, 1.0)
    laws = [law_of(base, correlation=recipe.correlation) for base in made.bases[:count]]
    if recipe.scales and count:
        labels = groups(made.bases[0].data)
        top, *others = fit_scales(laws, targets, labels)
        scales = (top * (1 + UNSURE / (1 + _separate(made.bases[:count]))), *others)
        of_nodes = torch.from_numpy(np.asarray(scales)[labels])
        laws = [replace(law, stddev=law.stddev * of_nodes) for law in laws]
    metric = recipe.metric
    if metric is None:
        windows = [PastForecast(law, torch.from_numpy(y)) for law, y in zip(laws, targets)]
        metric = learn_metric(windows, made.bases[-1].data.hierarchy)
    steps = None
    if recipe.steps and count and len(targets[0]) > 1:
        data = made.bases[-1].data
        steps = fit_steps(laws, targets, metric, data.hierarchy, groups(data))
    return Tuned(scales, metric, *(steps or (None, None)))


def _separate(bases: Sequence[BaseForecast]) -> float:
    """Number of windows, or of those that would fit without overlap."""
    ends = [len(base.data.index) for base in bases]
    return min(len(ends), 1 + (ends[-1] - ends[0]) / len(bases[0].mean))


def coherent_draws(
    made: MemberForecast, at: int, tuned: Tuned, hierarchy: Hierarchy, samples: int, seed: int, recipe: Recipe
) -> np.ndarray:
    """Draw coherent paths of a member.

    Args:
        made: Its forecasts.
        at: Which origin; -1 is the end of the history.
        tuned: Its scales and metric.
        hierarchy: The sums.
        samples: Number of paths S.
        seed: Seed of the noise.
        recipe: As in ``tune``.

    Returns:
        Paths, (S, H, n).
    """
    if made.draws is not None:
        draws = made.draws[at]
        chosen = np.random.default_rng(seed).choice(len(draws), samples, replace=samples > len(draws))
        return spread.widened(draws, tuned.scales[0])[chosen]
    law = law_of(made.bases[at], tuned.scales, recipe.correlation)
    law = law if tuned.rho is None else replace(law, rho=tuned.rho, own_rho=tuned.own_rho)
    drawn: Tensor = project_law(law, tuned.metric or MetricWeights(), hierarchy, samples, seed)
    return drawn.numpy()
