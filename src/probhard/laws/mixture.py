"""Marginals of a mixture: one-dimensional laws ``sum_k w_k F_k`` of the coordinates.

The CRPS of a mixture of normal laws is closed (Grimit et al., 2006). With ``A(m, s) = E|N(m, s^2)|``,

    CRPS = sum_k w_k A(y - m_k, s_k) - 1/2 sum_k sum_l w_k w_l A(m_k - m_l, sqrt(s_k^2 + s_l^2)).

``A(m, s)`` is the CRPS of N(0, s^2) at m plus ``s / sqrt(pi)``, so it has finite gradients at s = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard._util.tensors import safe_sqrt
from probhard.errors import ParameterError
from probhard.laws.family import NORMAL
from probhard.laws.marginals import CensoredMarginals, Marginals

HALVINGS = 80  # of the interval that holds a quantile


class MixtureMarginals(td.Distribution):
    """The laws of the coordinates of a mixture; arguments of methods broadcast with (*batch, n).

    Args:
        members: The laws of the coordinates of each member, batch (*batch, n).
        weights: Their weights, (M, *batch), which add up to 1.
    """

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012

    def __init__(self, members: Sequence[Marginals], weights: Tensor) -> None:
        self.members, self.weights = tuple(members), weights.unsqueeze(-1)  # (M, *batch, 1)
        super().__init__(members[0].batch_shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean, (*batch, n)."""
        return self._average([member.mean for member in self.members])

    @property
    def loc(self) -> Tensor:
        """The mean, as the place of the law."""
        return self.mean

    @property
    def variance(self) -> Tensor:
        """Variance, (*batch, n): within members and between them."""
        mean = self.mean
        return self._average([member.variance + (member.mean - mean).square() for member in self.members])

    @property
    def degenerate(self) -> Tensor:
        """Where every member is a point mass, (*batch, n) bool."""
        return torch.stack([member.degenerate for member in self.members]).all(0)

    def crps(self, y: Tensor) -> Tensor:
        """Closed-form continuous ranked probability score, (*batch, n), at targets y (*batch, n).

        Raises:
            ParameterError: If a member is not normal, or clipped at bounds.
        """
        for member in self.members:
            if isinstance(member, CensoredMarginals) or member.family is not NORMAL:
                kind = "clipped at bounds" if isinstance(member, CensoredMarginals) else member.family.name
                raise ParameterError(
                    f"A member of the mixture is {kind}.",
                    "The closed form of the CRPS of a mixture is that of normal laws.",
                    "Train with Step(covariance='delta') or Step(draws=100); score draws by crps_ensemble.",
                )
        loc = torch.stack([member.loc.expand(self.batch_shape) for member in self.members])
        scale = torch.stack([member.scale.expand(self.batch_shape) for member in self.members])
        total = (self.weights * _absolute(y - loc, scale)).sum(0)
        for k in range(len(loc)):  # members, of which there are few
            both = safe_sqrt(scale[k].square() + scale[k:].square())
            pairs = self.weights[k] * self.weights[k:] * _absolute(loc[k] - loc[k:], both)
            total = total - 0.5 * pairs[0] - pairs[1:].sum(0)
        return total

    def nll(self, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Negative log density, 0 where the law is degenerate or ``mask`` is False.

        Args:
            y: Targets, (*batch, n); masked ones may be NaN.
            mask: True where the target is observed, (*batch, n) bool.
        """
        skip = self.degenerate if mask is None else self.degenerate | ~mask
        target = torch.where(skip, self.mean.detach(), y)
        logs = torch.stack([member.nll(target) for member in self.members]).neg()
        return torch.where(skip, 0.0, -torch.logsumexp(logs + self.weights.log(), 0))

    def cdf(self, value: Tensor) -> Tensor:
        """Distribution function at values (*batch, n)."""
        return self._average([member.cdf(value) for member in self.members])

    def pit(self, y: Tensor) -> Tensor:
        """Probability integral transform at targets y (*batch, n)."""
        return self._average([member.pit(y) for member in self.members])

    @torch.no_grad()
    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles at probabilities that broadcast with (*batch, n), by bisection, without gradient."""
        ends = torch.stack([member.icdf(value).expand(self.batch_shape) for member in self.members])
        low, high = ends.amin(0), ends.amax(0)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < value
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def _average(self, values: Sequence[Tensor]) -> Tensor:
        return (self.weights * torch.stack([value.expand(self.batch_shape) for value in values])).sum(0)

    def __repr__(self) -> str:
        return f"MixtureMarginals({len(self.members)} members, batch_shape={tuple(self.batch_shape)})"


def _absolute(mean: Tensor, scale: Tensor) -> Tensor:
    """``E|N(mean, scale^2)|``."""
    zero: Any = torch.zeros_like(mean)
    return NORMAL.crps(zero, scale.expand(mean.shape), mean) + scale / math.sqrt(math.pi)
