"""Scores: plain functions of a forecast and a target, training losses and evaluation metrics alike.

    CRPS = E|X - y| - E|X - X'| / 2,      energy = E||X - y|| - E||X - X'|| / 2,      nll = -log p(y),
    QL_q = 2 |(x_q - y) (1[y <= x_q] - q)|,      pooled CRPS = mean over q of sum QL_q / sum |y|.

Scores are elementwise, (*batch, n), unless said otherwise. ``mask`` is True where the target is observed;
elsewhere score and gradient are exactly 0, whatever the target holds there, NaN included. A distribution is
anything that ``as_location_scale`` takes, or a projected one; samples lead, (S, *batch, n).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributions as td

from probhard._util.tensors import checking, plain
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.laws.special import betainc, log_beta, log_gamma_half_step

if TYPE_CHECKING:
    from probhard.laws.distribution import Marginals

LEVELS = tuple(k / 20 for k in range(1, 20))  # 0.05, ..., 0.95


def _marginals(dist: Any, y: Tensor) -> Marginals:
    from probhard.laws.distribution import marginals

    laws = marginals(dist)
    _check_target(laws.batch_shape, y)
    return laws


def _check_target(shape: Sequence[int], y: Tensor, forecast: str = "a forecast") -> None:
    """Raise unless the target has the forecast's event size and batch dimensions that broadcast."""
    pairs = zip(reversed(shape[:-1]), reversed(y.shape[:-1]))
    fits = all(a == b or 1 in (a, b) for a, b in pairs) and tuple(shape[-1:]) == tuple(y.shape[-1:])
    if not fits:
        raise ShapeError(
            f"Got {forecast} of shape {tuple(shape)} and a target of shape {tuple(y.shape)}.",
            "Both need n variables in the last dimension and batch dimensions that broadcast.",
            "Move the event to the last dimension of both, or unsqueeze the one that lacks it.",
        )


def _check_samples(samples: Tensor, y: Tensor | None = None) -> None:
    if samples.dim() == 0 or samples.shape[0] < 2:
        raise ParameterError(
            f"Got samples of shape {tuple(samples.shape)}.",
            "The first dimension counts the draws, and a spread needs at least two of them.",
            "Draw with dist.sample((S,)), S >= 2, or move the sample dimension to the front.",
        )
    if y is not None:
        _check_target(samples.shape[1:], y, "draws")


def _check_levels(levels: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    tensor = torch.as_tensor(levels, dtype=torch.float64, device=like.device)  # (Q,)
    if checking() and not bool(((tensor > 0) & (tensor < 1)).all()):
        raise ParameterError(
            f"Got quantile levels {tensor.tolist()}.",
            "A quantile level is a probability strictly between 0 and 1.",
            "Divide percentages by 100 and leave out 0 and 1.",
        )
    return tensor


def _check_mask(mask: Tensor | None) -> None:
    if mask is not None and mask.dtype != torch.bool:
        raise ParameterError(
            f"The mask has dtype {mask.dtype}.",
            "It says which targets are observed, and weighs none.",
            "Pass mask.bool(), and multiply the scores by weights yourself.",
        )


def _observed(y: Tensor, mask: Tensor | None, instead: Tensor | float) -> Tensor:
    """The target with its masked entries replaced by a harmless value."""
    _check_mask(mask)
    return y if mask is None else torch.where(mask, y, instead)


def _masked(score: Tensor, mask: Tensor | None) -> Tensor:
    return score if mask is None else torch.where(mask, score, 0.0)


def crps(
    dist: Any,
    y: Tensor,  # (*batch, n)
    mask: Tensor | None = None,  # (*batch, n) bool
) -> Tensor:
    """Closed-form continuous ranked probability score, (*batch, n), with finite gradients at any scale >= 0.

    Torch's Gamma and Beta are scored too, for evaluation only.
    """
    base = dist.base_dist if isinstance(dist, td.Independent) else dist
    if isinstance(base, td.Gamma | td.Beta):
        return _masked(_skewed_crps(base, _observed(y, mask, 0.5)), mask)
    laws = _marginals(dist, y)
    return _masked(laws.crps(_observed(y, mask, laws.loc.detach())), mask)


def _skewed_crps(dist: td.Gamma | td.Beta, y: Tensor) -> Tensor:
    """Gamma: y (2 F_k - 1) - k/r (2 F_(k+1) - 1) - 1 / (r B(1/2, k)); Beta: the like with F_(a+1, b)."""
    names = ("concentration", "rate") if isinstance(dist, td.Gamma) else ("concentration1", "concentration0")
    first, second = (getattr(dist, name) for name in names)
    _check_target(first.shape, y)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (first, second, y)):
        raise ParameterError(
            f"crps of a {type(dist).__name__} law got an argument that requires a gradient.",
            "The incomplete gamma and beta functions have no derivative in their shape: evaluation only.",
            "Train with crps_ensemble on dist.rsample((S,)), or evaluate under torch.no_grad().",
        )
    a, b, point = first.double(), second.double(), y.double()
    if isinstance(dist, td.Gamma):
        inside, mean = (b * point).clamp(min=0), a / b
        mass, raised = torch.special.gammainc(a, inside), torch.special.gammainc(a + 1, inside)
        half = torch.exp(log_gamma_half_step(a)) / (math.sqrt(math.pi) * b)  # E|X - X'| / 2
    else:
        inside, mean = point.clamp(0, 1), a / (a + b)
        mass, raised = betainc(a, b, inside), betainc(a + 1, b, inside)
        half = mean * 2 / a * torch.exp(log_beta(2 * a, 2 * b) - 2 * log_beta(a, b))
    return (point * (2 * mass - 1) - mean * (2 * raised - 1) - half).to(torch.promote_types(first.dtype, y.dtype))


def nll(dist: Any, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Negative log density of the marginals, (*batch, n); ``degenerate`` coordinates give 0.

    Where a censored law has a point mass, at a bound, it is the negative log of that mass.
    """
    _check_mask(mask)
    return _marginals(dist, y).nll(y, mask)


def degenerate(dist: Any) -> Tensor:
    """Where a coordinate is a point mass, (*batch, n) bool: it has no density and ``nll`` leaves it out."""
    from probhard.laws.distribution import marginals

    return marginals(dist).degenerate


def mse(dist: Any, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Squared error of the mean, (*batch, n)."""
    if isinstance(dist, Tensor):
        raise ParameterError(
            f"mse got a tensor of shape {tuple(dist.shape)}.",
            "Whether it holds means or draws is not known.",
            "Pass a distribution or (mean, stddev); the error of a point forecast is (point - y).square().",
        )
    mean = dist.mean if hasattr(dist, "mean") else _marginals(dist, y).mean
    _check_target(mean.shape, y)
    return _masked((_observed(y, mask, mean.detach()) - mean).square(), mask)


def _pairs(size: int, estimator: str) -> int:
    check_choice("estimator", estimator, ("standard", "fair"))
    return size * size if estimator == "standard" else size * (size - 1)


def crps_ensemble(
    samples: Tensor,  # (S, *batch, n)
    y: Tensor,  # (*batch, n)
    mask: Tensor | None = None,  # (*batch, n) bool
    estimator: str = "standard",
) -> Tensor:
    """CRPS of an ensemble, (*batch, n), by sorting: O(S log S).

    ``"standard"`` scores the empirical law (1 / S^2); ``"fair"`` is unbiased for the law it was drawn from
    (1 / (S (S - 1))).
    """
    _check_samples(samples, y)
    size = samples.shape[0]
    # Differences from the target rather than raw values: no cancellation far from 0.
    order = (samples - _observed(y, mask, 0.0)).sort(dim=0).values  # (S, *batch, n)
    rank = torch.arange(1 - size, size, 2, dtype=order.dtype, device=order.device) / _pairs(size, estimator)
    rank = rank.reshape(-1, *[1] * (order.dim() - 1))  # no matrix product: autocast would round it
    return _masked((order.abs() / size - rank * order).sum(0), mask)


def energy_score(
    samples: Tensor,  # (S, *batch, n)
    y: Tensor,  # (*batch, n)
    mask: Tensor | None = None,  # (*batch, n) bool; unobserved coordinates leave the norm
    estimator: str = "standard",
) -> Tensor:
    """Energy score of an ensemble over its last dimension, (*batch,); draws that coincide get gradient 0."""
    _check_samples(samples, y)
    difference = samples - _observed(y, mask, 0.0)  # (S, *batch, n)
    if mask is not None:
        difference = torch.where(mask, difference, 0.0)
    near = torch.linalg.vector_norm(difference, dim=-1).mean(0)
    draws = difference.movedim(0, -2)  # (*batch, S, n)
    apart = torch.cdist(draws, draws, compute_mode="donot_use_mm_for_euclid_dist")  # (*batch, S, S), never x n
    return near - 0.5 * apart.sum((-2, -1)) / _pairs(samples.shape[0], estimator)


def quantile_loss(
    forecast: Tensor,  # (Q, *batch, n)
    y: Tensor,  # (*batch, n)
    levels: Sequence[float] | Tensor,  # (Q,), in (0, 1)
    mask: Tensor | None = None,  # (*batch, n) bool
) -> Tensor:
    """``2 |(x_q - y) (1[y <= x_q] - q)|`` for every level, (Q, *batch, n)."""
    level = _check_levels(levels, forecast)
    if forecast.shape[:1] != level.shape:
        raise ShapeError(
            f"Got a forecast of shape {tuple(forecast.shape)} and levels of shape {tuple(level.shape)}.",
            "The first dimension of the forecast holds one quantile per level.",
            "Pass as many levels as forecast.shape[0].",
        )
    _check_target(forecast.shape[1:], y, "quantiles")
    level = level.to(forecast.dtype).reshape(-1, *[1] * (forecast.dim() - 1))
    over = forecast - _observed(y, mask, 0.0)
    return _masked(2 * torch.maximum((1 - level) * over, -level * over), mask)


def sample_quantiles(
    samples: Tensor,  # (S, *batch, n)
    levels: Sequence[float] | Tensor = LEVELS,  # (Q,), in (0, 1)
) -> Tensor:
    """Empirical quantiles ``sorted[round((S - 1) q)]``, (Q, *batch, n); halves round to even."""
    _check_samples(samples)
    index = torch.round((samples.shape[0] - 1) * _check_levels(levels, samples)).long()
    if not plain(samples):
        return samples.sort(dim=0).values.index_select(0, index)
    # numpy's vectorised sort of contiguous rows: several times faster, and gradients touch the chosen draws only
    flat = samples.detach().flatten(1).mT.contiguous().numpy()
    chosen = torch.from_numpy(flat.argsort(-1)[:, index.numpy()]).mT.reshape(-1, *samples.shape[1:])
    return samples.gather(0, chosen)


def weighted_quantile_loss(
    samples: Tensor,  # (S, *batch, n)
    y: Tensor,  # (*batch, n)
    levels: Sequence[float] | Tensor = LEVELS,
    mask: Tensor | None = None,
) -> Tensor:
    """Pooled CRPS, a scalar: mean over levels of the summed quantile loss over the summed ``|y|``."""
    loss = quantile_loss(sample_quantiles(samples, levels), y, levels, mask)
    return loss.sum() / loss.shape[0] / _observed(y, mask, 0.0).abs().expand(loss.shape[1:]).sum()


def coverage(dist_or_samples: Any, y: Tensor, level: float = 0.9, mask: Tensor | None = None) -> Tensor:
    """1.0 where the target lies in the central interval of probability ``level``, else 0.0; (*batch, n)."""
    _check_levels((level,), y)
    bounds = ((1 - level) / 2, (1 + level) / 2)
    if isinstance(dist_or_samples, Tensor):
        _check_samples(dist_or_samples, y)
        lower, upper = sample_quantiles(dist_or_samples, bounds)
    else:
        laws = _marginals(dist_or_samples, y)
        lower, upper = (laws.icdf(torch.as_tensor(p, dtype=y.dtype, device=y.device)) for p in bounds)
    return _masked(((lower <= y) & (y <= upper)).to(y.dtype), mask)


def pit(dist_or_samples: Any, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Probability integral transform F(y), (*batch, n); draws and point masses at the target count half."""
    if isinstance(dist_or_samples, Tensor):
        _check_samples(dist_or_samples, y)
        return _masked((0.5 * (dist_or_samples < y) + 0.5 * (dist_or_samples <= y)).to(y.dtype).mean(0), mask)
    laws = _marginals(dist_or_samples, y)
    return _masked(laws.pit(_observed(y, mask, laws.loc.detach())), mask)


@dataclass(frozen=True)
class ConstraintViolation:
    """How far points are from a constraint: all scalars.

    Args:
        largest: Largest violation of any point.
        mean: Mean over points of the summed absolute residuals and positive excesses.
        mean_square: Mean over points of their summed squares.
    """

    largest: Tensor
    mean: Tensor
    mean_square: Tensor


def constraint_error(
    constraint: Any,
    u: Any,  # points or draws (..., n), or a distribution, of which the mean is taken
) -> ConstraintViolation:
    """Constraint error CE of points, draws, or the mean of a distribution."""
    if not isinstance(u, Tensor):
        from probhard.laws.distribution import as_location_scale

        u = u.mean if hasattr(u, "mean") else as_location_scale(u).mean
    point = u
    residual, excess = constraint.residual(point), constraint.excess(point).clamp(min=0)  # (..., q), (..., p)
    return ConstraintViolation(
        largest=constraint.violation(point).max(),
        mean=(residual.abs().sum(-1) + excess.sum(-1)).mean(),
        mean_square=(residual.square().sum(-1) + excess.square().sum(-1)).mean(),
    )


SCORES: dict[str, Callable[..., Tensor]] = {"crps": crps, "nll": nll}
