"""The last layer of a trained operator as a Bayesian regression (BayesianNO: diagonal Laplace approximation).

The mean is that of the operator, w . phi(x) + c, where phi are its last features. With a normal prior of precision p
on w and noise of variance s around the fields, the posterior precision of each weight, without correlations, is

    h_j = p + sum over training points of phi_j(x)^2 / s,        cov(u) = diag(1 / h) between features, plus s.

Both numbers maximise the marginal likelihood, as in the public code of Mouli et al. (2024):

    log Z = -sum (y - u)^2 / (2 s) - N/2 log(2 pi s) - p |w|^2 / 2 + J/2 log p - 1/2 sum_j log h_j
"""

from __future__ import annotations

import copy
import math
from typing import Self

import torch
from torch import Tensor, nn

from probhard.errors import ParameterError
from probhard.laws.covariance import LowRank
from probhard.laws.distribution import LocationScale
from probhard.pde.heads import FLOOR
from probhard.pde.operators import VarianceNO

STEPS, CHUNK = 100, 20  # of Newton's method for two numbers; fields at a time


class BayesianNO(nn.Module):
    """A backbone with the mean of a trained operator and the posterior of its last layer; call ``fit`` first.

    Args:
        operator: A trained ``VarianceNO`` of independent points, or a ``DiverseNO`` of one head; a frozen copy is kept.
        noise: Add the variance of the noise. Without it, the spread is that of the weights alone.

    Raises:
        ParameterError: If the operator has a joint law or several heads.
    """

    precision: Tensor
    prior: Tensor
    variance: Tensor

    def __init__(self, operator: VarianceNO, noise: bool = False) -> None:
        super().__init__()
        if operator.head.out_features > 2 or operator.spread is not None:
            raise ParameterError(
                f"BayesianNO got an operator with {operator.head.out_features} heads and "
                f"{operator.law.channels} channels of its law.",
                "The posterior is that of one row of weights, which predicts the mean.",
                "Pass a VarianceNO of independent points, or DiverseNO(heads=1).",
            )
        self.operator = copy.deepcopy(operator).requires_grad_(False).eval()
        self.noise = noise
        weight = self.operator.head.weight
        for name in ("prior", "variance"):
            self.register_buffer(name, torch.full((), math.nan, dtype=torch.float64))
        self.register_buffer("precision", torch.full((weight.shape[1],), math.nan, dtype=torch.float64))

    @torch.no_grad()
    def fit(self, inputs: Tensor, target: Tensor) -> Self:
        """Set the posterior from training fields.

        Args:
            inputs: (batch, channels, *grid).
            target: Exact fields, (batch, n).

        Returns:
            The backbone itself.
        """
        squares, errors = torch.zeros_like(self.precision), 0.0
        for x, y in zip(inputs.split(CHUNK), target.split(CHUNK)):
            features = self.operator.features(x).flatten(2)
            squares += features.double().square().sum((0, 2))
            errors += float((self._mean(features) - y).double().square().sum())
        weight = self.operator.head.weight[0].double()
        prior, variance = evidence_maximum(squares, errors, target.numel(), float(weight.square().sum()))
        self.prior.fill_(prior)
        self.variance.fill_(variance)
        self.precision.copy_(prior + squares / variance)
        return self

    def forward(self, inputs: Tensor) -> LocationScale:
        """The law of flattened fields, batch (batch,), of inputs (batch, channels, *grid).

        Raises:
            ParameterError: If ``fit`` was not called.
        """
        if bool(self.precision.isnan().any()):
            raise ParameterError(
                "This BayesianNO has no posterior yet.", "Its spread comes from training fields.", "Call fit() first."
            )
        self.operator._check(inputs)
        features = self.operator.features(inputs).flatten(2)
        mean = self._mean(features)
        factor = features.mT * self.precision.rsqrt().to(mean.dtype)
        own = torch.full_like(mean, float(self.variance) if self.noise else FLOOR)
        return LocationScale(mean, LowRank(factor, own), validate_args=False)

    def _mean(self, features: Tensor) -> Tensor:
        """(batch, n) of features (batch, HEAD, n)."""
        head = self.operator.head
        mean = head.weight[0] @ features
        return mean if head.bias is None else mean + head.bias[0]


def evidence_maximum(squares: Tensor, errors: float, count: int, norm: float) -> tuple[float, float]:
    """Prior precision and noise variance that maximise the marginal likelihood, by MacKay's fixed point.

    Args:
        squares: Sum over points of the square of every feature, (J,).
        errors: Sum of squared errors.
        count: Number N of points.
        norm: ``|w|^2``.

    Returns:
        The precision p and the variance s.
    """
    prior, variance = 1.0, max(errors / count, FLOOR)
    for _ in range(STEPS):
        # Number of weights that the data determine; the derivatives of log Z vanish where both equations hold.
        determined = float((squares / (squares + prior * variance)).sum())
        prior = max(determined, FLOOR) / max(norm, FLOOR)
        variance = max(errors, FLOOR) / max(count - determined, 1.0)
    return prior, variance
