"""CRPS of the Gamma and Beta laws.

Gamma(k, r):  y (2 F_k(y) - 1) - k/r (2 F_(k+1)(y) - 1) - 1 / (r B(1/2, k))
Beta(a, b):   y (2 F_(a,b)(y) - 1) - a/(a + b) (2 F_(a+1,b)(y) - 1) - 2 B(2a, 2b) / ((a + b) B(a, b)^2)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch import distributions as td

from probhard.errors import ParameterError
from probhard.laws.special import betainc, log_beta, log_gamma_half_step


def skewed_crps(dist: td.Gamma | td.Beta, y: Tensor) -> Tensor:
    """CRPS of torch's Gamma and Beta laws, for evaluation only.

    Args:
        dist: Law of batch (*batch, n).
        y: Targets, (*batch, n).

    Returns:
        The score, (*batch, n).

    Raises:
        ParameterError: If an argument requires a gradient.
        ShapeError: If the target does not fit the law.
    """
    names = ("concentration", "rate") if isinstance(dist, td.Gamma) else ("concentration1", "concentration0")
    first, second = (getattr(dist, name) for name in names)
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
