"""Evaluation of draws (S, H, n), as the benchmark does it.

    QL_q = sum over steps and series of 2 |(x_q - y) (1[y <= x_q] - q)|,      q = 0.05, ..., 0.95,
    CRPS = mean over q of QL_q / sum |y|,

pooled over all steps and series; a point forecast, (1, H, n), scores ``sum |x - y| / sum |y|``. Coherence is measured
on every draw: the largest ``||A y||`` and the largest ``|A y|_i / |y_i|`` of any aggregate i.
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

CHUNK = 2**24  # numbers looked at in one go


@dataclass(frozen=True)
class Incoherence:
    """How far draws are from adding up: largest residual norm, largest relative residual; and their smallest value."""

    largest: float
    relative: float
    smallest_draw: float


@dataclass(frozen=True)
class Evaluation:
    """Scores of one forecast: CRPS pooled over all series and by level, incoherence, and the smallest draw."""

    crps: float
    crps_levels: dict[str, float]
    incoherence: float
    incoherence_relative: float
    smallest_draw: float

    def record(self) -> dict[str, Any]:
        """The fields of a line of JSON."""
        return asdict(self)


def evaluate(samples: Any, test: HierarchicalData) -> Evaluation:
    """All scores of draws (S, H, n) against the observed values of a test window."""
    found = incoherence(samples, test.hierarchy)
    return Evaluation(
        crps=pooled_crps(samples, test.values),
        crps_levels=crps_levels(samples, test.values, test.levels),
        incoherence=found.largest,
        incoherence_relative=found.relative,
        smallest_draw=found.smallest_draw,
    )


def pooled_crps(
    samples: Any,  # (S, H, n); S = 1 for a point forecast
    target: Any,  # (H, n)
    mask: Any = None,  # (H, n) bool, True where observed; by default where the target is not NaN
) -> float:
    """CRPS pooled over steps and series, relative to the summed ``|y|``."""
    draws, y, observed = _prepared(samples, target, mask)
    if not bool(((y != 0) & observed).any()):
        raise ParameterError(
            "The observed targets are all zero." if bool(observed.any()) else "No target is observed.",
            "The score is relative to their sum.",
            "Choose a window with observations, or score with probhard.crps_ensemble.",
        )
    return float(score.weighted_quantile_loss(draws, y, mask=observed))


def crps_levels(samples: Any, target: Any, levels: Mapping[str, np.ndarray], mask: Any = None) -> dict[str, float]:
    """The pooled CRPS of every level; NaN where nothing but zeros was observed."""
    draws, y, observed = _prepared(samples, target, mask)
    found = {}
    for level, positions in levels.items():
        part = torch.as_tensor(np.asarray(positions))
        if not bool(((y[..., part] != 0) & observed[..., part]).any()):
            found[level] = float("nan")
            continue
        found[level] = float(score.weighted_quantile_loss(draws[..., part], y[..., part], mask=observed[..., part]))
    return found


def incoherence(samples: Any, hierarchy: Hierarchy) -> Incoherence:
    """Over all draws (..., n). Aggregates below a millionth of the draw's largest value count as that large."""
    draws = _tensor(samples)
    hierarchy.check_event(draws, "The draws")
    largest = relative = 0.0
    smallest = float("inf")
    for part in draws.reshape(-1, draws.shape[-1]).split(max(1, CHUNK // draws.shape[-1])):
        upper = part[:, : hierarchy.aggregates]
        gap = (upper - hierarchy.aggregate(part[:, hierarchy.aggregates :])[:, : hierarchy.aggregates]).abs()
        size = torch.maximum(upper.abs(), 1e-6 * part.abs().amax(-1, keepdim=True)).clamp(min=TINY)
        largest = max(largest, float(torch.linalg.vector_norm(gap, dim=-1).max()))
        relative = max(relative, float((gap / size).max()))
        smallest = min(smallest, float(part.min()))
    return Incoherence(largest, relative, smallest)


def calibration(
    samples: Any,
    target: Any,
    levels: Mapping[str, np.ndarray],
    probabilities: Sequence[float] = (0.5, 0.8, 0.9, 0.95),
    mask: Any = None,
) -> dict[str, dict[float, float]]:
    """By level, the share of observed targets inside the central interval of each probability."""
    draws, y, observed = _prepared(samples, target, mask)
    found: dict[str, dict[float, float]] = {level: {} for level in levels}
    for probability in probabilities:
        inside = score.coverage(draws, y, probability, observed)
        for level, positions in levels.items():
            part = torch.as_tensor(np.asarray(positions))
            found[level][probability] = float(inside[..., part].sum() / observed[..., part].sum())
    return found


def pit_counts(samples: Any, target: Any, bins: int = 10, mask: Any = None) -> np.ndarray:
    """How many observed targets have their probability integral transform in each of equal bins, (bins,)."""
    draws, y, observed = _prepared(samples, target, mask)
    values = score.pit(draws, y, observed)[observed]
    return np.histogram(values.numpy(), bins=bins, range=(0.0, 1.0))[0]


def _tensor(values: Any) -> Tensor:
    return torch.as_tensor(values).detach().cpu().double()


def _prepared(samples: Any, target: Any, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Draws with at least two members, targets, and where these are observed, all in float64."""
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
            "They have no score.",
            "Look for the step where the forecaster failed.",
        )
    observed = ~y.isnan() if mask is None else torch.as_tensor(mask).bool().cpu() & ~y.isnan()
    return (draws.expand(2, -1, -1) if len(draws) == 1 else draws), y, observed
