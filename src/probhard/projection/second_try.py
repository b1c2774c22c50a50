"""Points that a projector flagged, from a second solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from probhard.projection.base import Solution
from probhard.tangent import ChosenTangent


def replaced(first: Solution, second: Solution, z: Tensor, solve: Callable[[Tensor], Solution]) -> Solution:
    """The first solution, with the points that only the second one found.

    Args:
        first: The solution of the projector.
        second: Another one, over the same leading dimensions.
        z: Points to project, (*lead, n).
        solve: The projector, by which gradients of the first solution are computed without its failed points.
    """
    good = second.stats.converged & ~first.stats.converged
    if not bool(good.any()):
        return first
    if torch.is_grad_enabled() and first.value.requires_grad:  # gradients of failed points may be NaN
        kept = first.stats
        first = replace(solve(torch.where(good.unsqueeze(-1), second.value.detach(), z)), stats=kept)
    residual = torch.where(good, second.stats.residual, first.stats.residual)
    stats = replace(first.stats, residual=residual, converged=good | first.stats.converged)
    value = torch.where(good.unsqueeze(-1), second.value, first.value)
    return Solution(value, ChosenTangent(good, second.tangent, first.tangent), stats)
