"""Scores of draws (S, H, n), with the benchmark's definitions.

    QL_q = sum over steps and series of 2 |(x_q - y) (1[y <= x_q] - q)|,      q = 0.05, ..., 0.95,
    CRPS = mean over q of QL_q / sum |y|,

pooled over all steps and series. A point forecast, (1, H, n), scores ``sum |x - y| / sum |y|``. Incoherence is the
largest over all draws: ``||A y||``, and ``|A y|_i / |y_i|`` of any aggregate i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard import score
from probhard._util.numerics import TINY
from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError
from probhard.forecasting.data.table import HierarchicalData

CHUNK = 2**24  # numbers per step, to bound the memory


@dataclass(frozen=True)
class Incoherence:
    """How far draws are from adding up.

    Args:
        largest: Largest norm of the residual of a draw.
        relative: Largest residual of an aggregate, relative to its value.
        smallest_draw: Smallest value of any draw.
    """

    largest: float
    relative: float
    smallest_draw: float

    def worst(self, other: Incoherence) -> Incoherence:
        """The incoherence of the draws of both."""
        smallest = min(self.smallest_draw, other.smallest_draw)
        return Incoherence(max(self.largest, other.largest), max(self.relative, other.relative), smallest)


@dataclass(frozen=True)
class Evaluation:
    """Scores of one forecast.

    Args:
        crps: CRPS pooled over all series.
        crps_levels: Pooled CRPS by level.
        incoherence, incoherence_relative, smallest_draw: As in ``Incoherence``.
    """

    crps: float
    crps_levels: dict[str, float]
    incoherence: float
    incoherence_relative: float
    smallest_draw: float

    def record(self) -> dict[str, Any]:
        """Return the fields as a dictionary for JSON."""
        return asdict(self)


def evaluate(samples: Any, test: HierarchicalData) -> Evaluation:
    """Score a forecast on a test window.

    Args:
        samples: Draws, (S, H, n).
        test: The H observed rows of n series.

    Raises:
        ProbhardError: If shapes do not fit, draws are not finite, or no observed value differs from 0.
    """
    coherence = incoherence(samples, test.hierarchy)
    return Evaluation(
        crps=pooled_crps(samples, test.values),
        crps_levels=crps_levels(samples, test.values, test.levels),
        incoherence=coherence.largest,
        incoherence_relative=coherence.relative,
        smallest_draw=coherence.smallest_draw,
    )


def pooled_crps(
    samples: Any,  # (S, H, n); S = 1 for a point forecast
    target: Any,  # (H, n)
    mask: Any = None,  # (H, n) bool, True where observed; by default where the target is not NaN
) -> float:
    """Compute the CRPS pooled over steps and series, relative to the summed ``|y|``.

    Args:
        samples: Draws, (S, H, n); S = 1 is a point forecast.
        target: Observed values, (H, n); NaN where missing.
        mask: True where observed, (H, n); by default where the target is not NaN.

    Raises:
        ProbhardError: If shapes do not fit, draws are not finite, or no observed value differs from 0.
    """
    draws, y, observed = _prepared(samples, target, mask)
    if not bool(((y != 0) & observed).any()):
        raise ParameterError(
            "The observed targets are all zero." if bool(observed.any()) else "No target is observed.",
            "The score is relative to their sum.",
            "Choose a window with observations, or score with probhard.crps_ensemble.",
        )
    return float(score.weighted_quantile_loss(draws, y, mask=observed))


def crps_levels(samples: Any, target: Any, levels: Mapping[str, np.ndarray], mask: Any = None) -> dict[str, float]:
    """Compute the pooled CRPS of every level.

    Args:
        samples: Draws, (S, H, n).
        target: Observed values, (H, n); NaN where missing.
        levels: Positions of each level's series.
        mask: True where observed, (H, n).

    Returns:
        CRPS by level; NaN for a level whose observed values are all 0.

    Raises:
        ProbhardError: If shapes do not fit or draws are not finite.
    """
    draws, y, observed = _prepared(samples, target, mask)
    scores = {}
    for level, positions in levels.items():
        nodes = torch.as_tensor(np.asarray(positions))
        if not bool(((y[..., nodes] != 0) & observed[..., nodes]).any()):
            scores[level] = float("nan")
            continue
        loss = score.weighted_quantile_loss(draws[..., nodes], y[..., nodes], mask=observed[..., nodes])
        scores[level] = float(loss)
    return scores


def incoherence(samples: Any, hierarchy: Hierarchy) -> Incoherence:
    """Measure the incoherence of draws.

    Args:
        samples: Draws, (*batch, n).
        hierarchy: The sums over n series.

    Returns:
        Largest residuals; aggregates are taken as at least 1e-6 of the draw's largest value.

    Raises:
        ShapeError: If the draws do not have n series.
    """
    draws = _tensor(samples)
    hierarchy.check_event(draws, "The draws")
    largest = relative = 0.0
    smallest = float("inf")
    for chunk in draws.reshape(-1, draws.shape[-1]).split(max(1, CHUNK // draws.shape[-1])):
        aggregates = chunk[:, : hierarchy.aggregates]
        sums = hierarchy.aggregate(chunk[:, hierarchy.aggregates :])[:, : hierarchy.aggregates]
        gap = (aggregates - sums).abs()
        size = torch.maximum(aggregates.abs(), 1e-6 * chunk.abs().amax(-1, keepdim=True)).clamp(min=TINY)
        largest = max(largest, float(torch.linalg.vector_norm(gap, dim=-1).max()))
        relative = max(relative, float((gap / size).max()))
        smallest = min(smallest, float(chunk.min()))
    return Incoherence(largest, relative, smallest)


def calibration(
    samples: Any,
    target: Any,
    levels: Mapping[str, np.ndarray],
    probabilities: Sequence[float] = (0.5, 0.8, 0.9, 0.95),
    mask: Any = None,
) -> dict[str, dict[float, float]]:
    """Compute the coverage of central intervals.

    Args:
        samples: Draws, (S, H, n).
        target: Observed values, (H, n); NaN where missing.
        levels: Positions of each level's series.
        probabilities: Nominal probabilities of the intervals.
        mask: True where observed, (H, n).

    Returns:
        Share of observed targets inside the interval, by level and probability.

    Raises:
        ProbhardError: If shapes do not fit or draws are not finite.
    """
    draws, y, observed = _prepared(samples, target, mask)
    shares: dict[str, dict[float, float]] = {level: {} for level in levels}
    for probability in probabilities:
        inside = score.coverage(draws, y, probability, observed)
        for level, positions in levels.items():
            nodes = torch.as_tensor(np.asarray(positions))
            shares[level][probability] = float(inside[..., nodes].sum() / observed[..., nodes].sum())
    return shares


def pit_counts(samples: Any, target: Any, bins: int = 10, mask: Any = None) -> np.ndarray:
    """Count the probability integral transforms of observed targets in equal bins.

    Args:
        samples: Draws, (S, H, n).
        target: Observed values, (H, n); NaN where missing.
        bins: Number of bins.
        mask: True where observed, (H, n).

    Returns:
        Counts, (bins,).

    Raises:
        ProbhardError: If shapes do not fit or draws are not finite.
    """
    draws, y, observed = _prepared(samples, target, mask)
    values = score.pit(draws, y, observed)[observed]
    return np.histogram(values.numpy(), bins=bins, range=(0.0, 1.0))[0]


def _tensor(values: Any) -> Tensor:
    return torch.as_tensor(values).detach().cpu().double()


def _prepared(samples: Any, target: Any, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return at least two draws, the targets, and the mask of observed targets; numbers in float64."""
    draws, y = _tensor(samples), _tensor(target)
    if draws.dim() != 3 or draws.shape[1:] != y.shape or len(draws) == 0:
        raise ShapeError(
            f"Got draws of shape {tuple(draws.shape)} and a target of shape {tuple(y.shape)}.",
            "Draws are (S, H, n) and the target is (H, n).",
            "Put draws first and series last; a point forecast is one draw.",
        )
    if not bool(draws.isfinite().all()):
        raise ParameterError(
            f"{int((~draws.isfinite()).sum())} of {draws.numel()} forecast values are NaN or infinite.",
            "They cannot be scored.",
            "Look for the step where the forecaster failed.",
        )
    observed = ~y.isnan() if mask is None else torch.as_tensor(mask).bool().cpu() & ~y.isnan()
    return (draws.expand(2, -1, -1) if len(draws) == 1 else draws), y, observed
