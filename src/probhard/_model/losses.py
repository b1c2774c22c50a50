"""Losses of a batch: the score of a law, of its draws, of points, of functionals, or a function of the user's.

law: sum_i S(F_i, y_i),     point: sum_i |u_i - y_i|, the CRPS of a point mass,     own: sum of score(u, batch).

Elements whose projection failed are NaN (``on_failure="retry"``). They are left out of every sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probhard import score as scores
from probhard._model.batch import Batch
from probhard._score.checks import check_target, masked, observed
from probhard._score.functional_crps import CLOSED, functional_rule
from probhard._util.tensors import broadcast, checking
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError, ShapeError
from probhard.laws.distribution import LocationScale
from probhard.method import Method, Score
from probhard.projection.mixture import Mixture
from probhard.projection.projected import Projected

Law = Projected | LocationScale | Mixture


def law_loss(method: Method, law: Law, batch: Batch) -> Tensor:
    """The summed score of a law over (*batch, n), or of its draws, and the weighted score of its functionals."""
    draws = law.rsample((method.training.draws,)) if method.training.draws else None  # (S, *batch, n)
    kept = usable(law) if draws is None else None
    law = _filled(law, kept) if kept is not None and isinstance(law, LocationScale) else law
    if callable(method.score):
        total = _own_score(method.score, law if draws is None else draws, batch, kept)
    else:
        target = _target(batch, (*law.batch_shape, *law.event_shape))
        total = _law_score(method.score, law, draws, target, _both(batch.mask, kept, target))
    if method.functionals is None or not method.functional_weight:
        return total
    family, target = method.functionals, _target(batch, (*law.batch_shape, *law.event_shape))
    if draws is None:
        joint = law
        if kept is not None and not isinstance(law, Mixture) and functional_rule(law) == CLOSED:
            joint = _filled(law, kept)
        score = scores.crps(joint, target, mask=batch.mask, functionals=family)
        score = masked(score, None if kept is None else kept.unsqueeze(-1))
    else:
        score = scores.crps_ensemble(draws, target, batch.mask, estimator="fair", functionals=family)
    return total + method.functional_weight * target.shape[-1] * (score * family.weight.to(score)).sum()


def point_loss(method: Method, points: Tensor, batch: Batch) -> Tensor:
    """The summed score of points (*batch, n); the CRPS of a point is its absolute error."""
    if method.training.draws or method.functionals is not None:
        raise missing_law("The method scores draws or functionals")
    kept = usable(points)
    if callable(method.score):
        return _own_score(method.score, points, batch, kept)
    if method.score != "crps":
        raise missing_law(f"The score {method.score!r} needs a law")
    target = _target(batch, points.shape)
    mask = _both(batch.mask, kept, target)
    return masked((points - observed(target, mask, points.detach())).abs(), mask).sum()


def penalty(method: Method, constraint: Constraint, mean: Tensor) -> Tensor:
    """The residuals and excesses of means (*batch, n) in the form of the method, (*batch,)."""
    if method.penalty_form == "squares":
        return constraint.penalty(mean)
    equal, unequal = constraint.violated(mean)
    return torch.linalg.vector_norm(equal, dim=-1) + torch.linalg.vector_norm(unequal, dim=-1)


def usable(prediction: Law | Tensor) -> Tensor | None:
    """Elements of a prediction that did not fail, (*batch,) bool; None if none failed."""
    if not checking():
        return None
    if isinstance(prediction, Projected | Mixture):
        return prediction.usable
    values = prediction if isinstance(prediction, Tensor) else prediction.loc
    kept = ~torch.isnan(values).any(-1)
    return None if bool(kept.all()) else kept


def _filled(law: Projected | LocationScale, kept: Tensor) -> LocationScale:
    """The law with means of 0 where it failed: scores there are finite, and left out of the loss."""
    return LocationScale(torch.where(kept.unsqueeze(-1), law.mean, 0.0), law.cov, law.family, validate_args=False)


def _both(mask: Tensor | None, kept: Tensor | None, target: Tensor) -> Tensor | None:
    """Where targets (*batch, n) are observed and their elements did not fail."""
    if kept is None:
        return mask
    whole = kept.unsqueeze(-1).expand(target.shape)
    return whole if mask is None else whole & mask


def _law_score(name: str, law: Law, draws: Tensor | None, target: Tensor, mask: Tensor | None) -> Tensor:
    """The summed score of this name."""
    if draws is None:
        return scores.SCORES[name](law, target, mask=mask).sum()
    if name == "crps":
        return scores.crps_ensemble(draws, target, mask=mask, estimator="fair").sum()
    quantiles = scores.sample_quantiles(draws, scores.LEVELS)
    return scores.quantile_loss(quantiles, target, scores.LEVELS, mask=mask).mean(0).sum()


def _own_score(score: Score, prediction: Any, batch: Batch, kept: Tensor | None) -> Tensor:
    """The sum of the user's score over elements that are kept (*batch,), with checks of what it returns."""
    value = score(prediction, batch)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"the type {type(value).__name__}"
        raise ParameterError(
            f"The score returned {kind}.",
            "The loss is its sum and needs a gradient.",
            "Return a tensor of floats, one for each sample, such as ((u - batch.target) ** 2).sum(-1).",
        )
    if kept is None:
        return value.sum()
    if value.shape[: kept.dim()] != kept.shape:
        raise ParameterError(
            f"The score returned the shape {tuple(value.shape)} for a batch of shape {tuple(kept.shape)}, in which the "
            f"projection of {int((~kept).sum())} elements failed.",
            "Failed elements are left out of the loss, and a sum over the batch cannot leave them out.",
            "Return one value for each sample, such as ((u - batch.target) ** 2).sum(-1), or pass on_failure='raise'.",
        )
    return masked(value, kept.reshape(*kept.shape, *[1] * (value.dim() - kept.dim()))).sum()


def missing_law(what: str) -> ParameterError:
    """The error where a law is needed and the backbone returns points."""
    return ParameterError(
        f"{what}, and the backbone returns points (one tensor).",
        "A point has no spread.",
        "Call model(x) for points, with score='crps' or a function as the score; or return (mean, stddev).",
    )


def _target(batch: Batch, shape: Sequence[int]) -> Tensor:
    """The target, checked not to be broadcast to the shape (*batch, n) of the prediction."""
    if batch.target is None:
        raise ParameterError(
            "loss() got a batch without a target.",
            "There is nothing to score.",
            "Pass (inputs, target), or score=... with a function of the prediction and the batch.",
        )
    check_target(shape, batch.target)
    if tuple(batch.target.shape) != tuple(broadcast(batch.target.shape, shape)):
        raise ShapeError(
            f"The target has shape {tuple(batch.target.shape)}, the prediction {tuple(shape)}.",
            "One target would be broadcast to several samples.",
            "Pass one target for each sample, (*batch, n); if they really are equal, expand the target.",
        )
    return batch.target
