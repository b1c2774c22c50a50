"""Checks of forecasts, targets, draws, levels and masks that all scores share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.errors import ParameterError, ShapeError, check_choice


def check_target(shape: Sequence[int], y: Tensor, forecast: str = "a forecast") -> None:
    """Raise unless the target has the forecast's event size and batch dimensions that broadcast."""
    pairs = zip(reversed(shape[:-1]), reversed(y.shape[:-1]))
    fits = all(a == b or 1 in (a, b) for a, b in pairs) and tuple(shape[-1:]) == tuple(y.shape[-1:])
    if not fits:
        raise ShapeError(
            f"Got {forecast} of shape {tuple(shape)} and a target of shape {tuple(y.shape)}.",
            "Both need n variables in the last dimension, and batch dimensions that broadcast.",
            "Move the variables to the last dimension of both, or unsqueeze the one that lacks it.",
        )


def check_samples(samples: Tensor, y: Tensor | None = None) -> None:
    """Raise unless there are at least two draws (S, *batch, n), of the shape of the target if one is passed."""
    if samples.dim() == 0 or samples.shape[0] < 2:
        raise ParameterError(
            f"Got samples of shape {tuple(samples.shape)}.",
            "The first dimension counts draws, and a spread needs at least two.",
            "Draw with dist.sample((S,)), S >= 2, or move the sample dimension to the front.",
        )
    if y is not None:
        check_target(samples.shape[1:], y, "draws")


def check_levels(levels: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """Quantile levels as a tensor (Q,) in float64 on the device of ``like``, checked to lie in (0, 1)."""
    tensor = torch.as_tensor(levels, dtype=torch.float64, device=like.device)  # (Q,)
    if checking() and not bool(((tensor > 0) & (tensor < 1)).all()):
        raise ParameterError(
            f"Got quantile levels {tensor.tolist()}.",
            "A quantile level is a probability strictly between 0 and 1.",
            "Divide percentages by 100 and leave out 0 and 1.",
        )
    return tensor


def check_mask(mask: Tensor | None) -> None:
    """Raise unless the mask is boolean or None."""
    if mask is not None and mask.dtype != torch.bool:
        raise ParameterError(
            f"The mask has dtype {mask.dtype}.",
            "A mask says which targets are observed; it holds no weights.",
            "Pass mask.bool(), and multiply the scores by weights yourself.",
        )


def observed(y: Tensor, mask: Tensor | None, instead: Tensor | float) -> Tensor:
    """The target with its masked entries replaced by ``instead``."""
    check_mask(mask)
    return y if mask is None else torch.where(mask, y, instead)


def masked(score: Tensor, mask: Tensor | None) -> Tensor:
    """The score, 0 where the mask is False."""
    return score if mask is None else torch.where(mask, score, 0.0)


def pair_count(size: int, estimator: str) -> int:
    """Number of pairs of ``size`` draws that an estimator averages over."""
    check_choice("estimator", estimator, ("standard", "fair"))
    return size * size if estimator == "standard" else size * (size - 1)
