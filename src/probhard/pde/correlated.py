"""A factor for a trained operator, learned in a second phase.

    own = variance softplus(p - 1),      F_xj = sqrt(variance softplus(q) / r) (1 + g_xj) phi_j(x)

The mean and the variance are those of the operator and stay. A linear map of its last features gives p, q and
g_1 .. g_r, so a step costs one pass through the operator without gradients. Use the metric ``"variances"``: under the
oblique one a small violation of the mass would become a smooth change of the whole field.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from probhard.errors import ParameterError
from probhard.laws.covariance import LowRank
from probhard.laws.distribution import LocationScale
from probhard.pde.heads import factor_of
from probhard.pde.operators import HEAD, VarianceNO, pointwise

OWN = -1.0  # first output for the own variance: softplus gives 0.31 of it, and 0.69 to the factor


class Correlated(nn.Module):
    """A backbone with the mean of a trained operator and a joint law that is still to be learned.

    Args:
        operator: A trained ``VarianceNO`` with independent points; a frozen copy is kept.
        rank: Number of columns of the factor.

    Raises:
        ParameterError: If the operator has a joint law already, or the rank is not positive.
    """

    def __init__(self, operator: VarianceNO, rank: int = 16) -> None:
        super().__init__()
        if operator.spread is not None or rank < 1:
            raise ParameterError(
                f"Correlated got an operator with {operator.law.channels} output channels, and rank={rank}.",
                "It adds a factor of at least one column to a mean and a variance.",
                "Pass a VarianceNO of independent points, and a positive rank.",
            )
        self.operator = copy.deepcopy(operator).requires_grad_(False)
        self.spread = nn.Linear(HEAD, 2 + rank)
        nn.init.normal_(self.spread.weight, std=0.01)
        nn.init.zeros_(self.spread.bias)
        self.spread.to(next(operator.parameters()))
        self.train(self.training)

    def train(self, mode: bool = True) -> Correlated:
        """As of ``nn.Module``; the frozen operator always evaluates."""
        super().train(mode)
        self.operator.eval()
        return self

    def forward(self, inputs: Tensor) -> LocationScale:
        """The law of flattened fields, batch (batch,), of inputs (batch, channels, *grid)."""
        with torch.no_grad():
            features = self.operator.features(inputs)
            mean, variance = self.operator.law.moments(pointwise(self.operator.head, features)).split(1, 1)
        own, shared, weights = pointwise(self.spread, features).split([1, 1, self.spread.out_features - 2], 1)
        factor = factor_of(variance * softplus(shared), weights).flatten(2).mT  # (batch, n, rank)
        own = (variance * softplus(own + OWN)).flatten(1)
        return LocationScale(mean.flatten(1), LowRank(factor, own), validate_args=False)
