"""Mixtures of Poisson products: a joint law of counts whose sums are again such mixtures.

    P(y) = sum_k w_k prod_i Poisson(y_i; lambda_ik),     sum_{i in I} y_i  ~  sum_k w_k Poisson(sum_{i in I} lambda_ik).

Counts depend on each other through the component alone (Olivares et al., "Probabilistic hierarchical forecasting with
deep Poisson mixtures"). Values are counts times a unit. The factorial is continued by the gamma function, so values
that are no whole multiples of the unit have a likelihood, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard.errors import ParameterError, ShapeError
from probhard.laws.base import LinearMap
from probhard.laws.covariance import LowRank
from probhard.laws.distribution import LocationScale


class PoissonMixture(td.Distribution):
    """A mixture of K products of Poisson laws, times a unit.

    Args:
        logits: Logarithms of the weights up to a constant, (*batch, K).
        rates: Expected counts of each component, (*batch, n, K), > 0.
        unit: Value of one count, > 0.

    Raises:
        ShapeError: If the shapes do not fit.
        ParameterError: If the unit is not positive.
    """

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012
    support = td.constraints.nonnegative
    has_rsample = False  # counts have no pathwise gradient

    def __init__(self, logits: Tensor, rates: Tensor, unit: float = 1.0) -> None:
        if rates.dim() < 2 or logits.shape != (*rates.shape[:-2], rates.shape[-1]):
            raise ShapeError(
                f"PoissonMixture got logits {tuple(logits.shape)} and rates {tuple(rates.shape)}.",
                "Every component has one weight and one rate for each variable.",
                "Pass logits (*batch, K) and rates (*batch, n, K).",
            )
        if not 0 < unit < math.inf:
            raise ParameterError(f"Got unit={unit}.", "It is the value of one count.", "Pass a positive number.")
        self.log_weights, self.rates, self.unit = logits.log_softmax(-1), rates, float(unit)
        super().__init__(rates.shape[:-2], rates.shape[-2:-1], validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean, (*batch, n)."""
        return self.unit * self._mean_counts()

    @property
    def variance(self) -> Tensor:
        """Marginal variances, (*batch, n): of the counts in a component, plus that between components."""
        counts, weights = self._mean_counts(), self.log_weights.exp().unsqueeze(-2)
        between = (weights * (self.rates - counts.unsqueeze(-1)).square()).sum(-1)
        return self.unit**2 * (counts + between)

    def log_prob(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Joint log likelihood.

        Args:
            value: Values, (*batch, n).
            mask: True where the value is observed, (*batch, n) bool; the others are integrated out.

        Returns:
            (*batch,).
        """
        terms = self._terms(value if mask is None else torch.where(mask, value, 0.0))
        terms = terms if mask is None else torch.where(mask.unsqueeze(-1), terms, 0.0)
        return torch.logsumexp(self.log_weights + terms.sum(-2), -1)

    def marginal_log_prob(self, value: Tensor) -> Tensor:
        """Log likelihood of every variable by itself, (*batch, n), at values (*batch, n)."""
        return torch.logsumexp(self.log_weights.unsqueeze(-2) + self._terms(value), -1)

    def functional(self, rows: LinearMap) -> PoissonMixture:
        """The law of sums ``F y``, each by itself, for rows F (k, n) of zeros and ones."""
        rates = rows.at(self.rates).apply(self.rates.transpose(-1, -2)).transpose(-1, -2)
        return PoissonMixture(self.log_weights, rates, self.unit)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws, (*sample_shape, *batch, n): one component for all variables, then their counts.

        Args:
            sample_shape: Leading dimensions of the draws.
            generator: Source of random numbers; torch's global one for None.
        """
        shape = (*Size(sample_shape), *self.batch_shape)
        with torch.no_grad():
            cumulated = self.log_weights.exp().cumsum(-1)  # (*batch, K)
            uniform = torch.rand((*shape, 1), dtype=cumulated.dtype, device=cumulated.device, generator=generator)
            component = (uniform > cumulated).sum(-1, keepdim=True).clamp(max=cumulated.shape[-1] - 1)
            index = component.unsqueeze(-2).expand(*shape, *self.event_shape, 1)
            chosen = self.rates.expand(*shape, *self.rates.shape[-2:]).gather(-1, index).squeeze(-1)
            return self.unit * torch.poisson(chosen, generator)

    def as_location_scale(self) -> LocationScale:
        """The normal law with the same mean and covariance; the components are factors of the latter."""
        counts, weights = self._mean_counts(), self.log_weights.exp().unsqueeze(-2)
        factor = weights.sqrt() * (self.rates - counts.unsqueeze(-1))  # (*batch, n, K)
        return LocationScale(self.unit * counts, LowRank(self.unit * factor, self.unit**2 * counts))

    def to(self, dtype: torch.dtype) -> PoissonMixture:
        """The same law in another dtype."""
        return PoissonMixture(self.log_weights.to(dtype), self.rates.to(dtype), self.unit)

    def expand(self, batch_shape: Any, _instance: Any = None) -> PoissonMixture:
        """The same law with batch dimensions expanded to ``batch_shape``."""
        batch = Size(batch_shape)
        rates = self.rates.expand(*batch, *self.rates.shape[-2:])
        return PoissonMixture(self.log_weights.expand(*batch, self.log_weights.shape[-1]), rates, self.unit)

    def _mean_counts(self) -> Tensor:
        return (self.log_weights.exp().unsqueeze(-2) * self.rates).sum(-1)

    def _terms(self, value: Tensor) -> Tensor:
        """Log likelihoods of variables in components, (*batch, n, K)."""
        counts = value / self.unit
        terms = torch.xlogy(counts.unsqueeze(-1), self.rates) - self.rates
        return terms - torch.lgamma(counts + 1).unsqueeze(-1)
