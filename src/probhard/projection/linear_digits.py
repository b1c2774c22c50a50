"""Digits that linear rows lose over the steps of a nonlinear solver, where weights span many decades."""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import checking
from probhard.constraints.equality import LinearEquality
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.laws.covariance import Covariance
from probhard.projection.checked import placed
from probhard.solvers.linearised import Linearised
from probhard.tangent import Tangent

STEPS = 2


def restored(
    linear: LinearEquality,
    tangent: Tangent,
    curved: NonlinearEquality,
    weight: Covariance,
    value: Tensor,  # (*lead, n)
    residual: Tensor,  # of h, (*lead,)
) -> tuple[Tensor, Tensor]:
    """Points put once more on the rows and on h where they are off, and all residuals; gradients are unchanged.

    Args:
        linear: The rows.
        tangent: Their tangent.
        curved: h.
        weight: The weight of h, which keeps the rows.
        value: The points.
        residual: Their relative residuals of h.
    """
    with torch.no_grad():
        residual = torch.maximum(residual, linear.relative_violation(value.detach()))
        if not checking() or not bool((residual > TOLERANCE[torch.float64]).any()):
            return value, residual
        target = value.detach()
        for _ in range(STEPS):
            target = tangent.project(target, linear.b)
            near = Linearised.at(curved, target, weight)
            target = target - near.images(near.h)[0]
        after = torch.maximum(linear.relative_violation(target), curved.relative_violation(target))
        better = after.nan_to_num(torch.inf) < residual
        target = torch.where(better.unsqueeze(-1), target, value.detach())
    return placed(value, target), torch.where(better, after, residual)
