"""A family of metrics for reconciliation, and projections of laws under them.

The weight ``W = Q^-1`` of the projection of step h is

    W_h = D_h^g C(r) D_h^g,      D_h^g = diag(s_h^g |S|^(s/2)),      C(r) = (1 - r) I + r C,

with the deviations s_h of the base law, the correlation C of its errors and the number of bottoms |S| of each node:

| g, r, s | metric                                                      |
|---------|-------------------------------------------------------------|
| 0, 0, 0 | orthogonal, MinT's ols                                      |
| 0, 0, 1 | structural, MinT's wls_struct                               |
| 1, 0, 0 | variances of the base law (oblique for independent nodes)   |
| 1, 1, 0 | covariance of the base law, MinT's mint_shrink              |

Metric and law are separate: the base law N(mean_h, Sigma_h) becomes N(P_h mean_h, P_h Sigma_h P_h^T) under any of them.
Deviations and correlations from few errors are not trusted: ``middle`` moves from g = .5, r = 0 without a history to
g = 1, r = .75 with a long one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError
from probhard.forecasting.reconciliation.joint_law import PathLaw
from probhard.laws import Diagonal, LowRank
from probhard.laws.base import Covariance
from probhard.laws.covariance import Identity
from probhard.tangent import Tangent, tangent_of

CHUNK = 10_000_000  # numbers of a factor over some steps, to bound the memory
LONG = 100  # rows of errors that are trusted fully


@dataclass(frozen=True)
class MetricWeights:
    """A member of the family.

    Args:
        exponent: g, of the deviations, in [0, 1].
        correlation: r, the weight of the correlation of errors, in [0, 1].
        structural: s, of the number of bottoms, in [0, 1].

    Raises:
        ParameterError: If a number is outside [0, 1].
    """

    exponent: float = 0.5
    correlation: float = 0.5
    structural: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= number <= 1 for number in astuple(self)):
            raise ParameterError(
                f"The metric has exponent {self.exponent}, correlation {self.correlation} and structural "
                f"{self.structural}.",
                "The family lies between the metrics of ols, wls_struct and MinT.",
                "Pass numbers from 0 to 1.",
            )

    def weight(self, stddev: Tensor, correlation: LowRank | None, sizes: Tensor) -> Covariance:
        """The weight W.

        Args:
            stddev: Deviations of the base law, (*batch, n), above 0.
            correlation: Correlation C of errors, (n,); None for the identity.
            sizes: Number of bottoms of each node, (n,).

        Returns:
            W, (*batch, n), or (n,) where it does not depend on the deviations.
        """
        scale = sizes.to(stddev) ** (self.structural / 2)
        if self.exponent:
            scale = scale * stddev**self.exponent
        r = self.correlation
        if correlation is not None and r:
            mixed = LowRank(r**0.5 * correlation.factor, (1 - r) + r * correlation.diagonal_part)
            return mixed.scaled(scale)
        if self.exponent or self.structural:
            return Diagonal(scale.square())
        return Identity.like(stddev)


def middle(rows: int) -> MetricWeights:
    """The best fixed metric for a history of so many one-step errors, chosen on windows before the published ones.

    Args:
        rows: Number of errors of each series; 0 without a history.
    """
    share = min(1.0, rows / LONG)
    return MetricWeights(0.5 + 0.5 * share, 0.75 * share)


def project_law(law: PathLaw, weights: MetricWeights, hierarchy: Hierarchy, samples: int, seed: int) -> Tensor:
    """Draw coherent paths from a base law, (S, H, n), in float64.

    Args:
        law: The base law, (H, n).
        weights: The metric.
        hierarchy: The sums.
        samples: Number of paths S.
        seed: Seed of the noise.
    """
    draws = law.draws(samples, seed)
    for steps, tangent in tangents(law, weights, hierarchy):
        draws[:, steps] = tangent.project(draws[:, steps], zeros(hierarchy))
    return draws


def projected_moments(law: PathLaw, weights: MetricWeights, hierarchy: Hierarchy) -> tuple[Tensor, Tensor]:
    """Means ``P_h mean_h`` and deviations, roots of ``diag(P_h Sigma_h P_h^T)``, of the projected law, (H, n) each.

    Args:
        law: The base law, (H, n).
        weights: The metric.
        hierarchy: The sums.
    """
    mean, variance = torch.empty_like(law.mean), torch.empty_like(law.mean)
    for steps, tangent in tangents(law, weights, hierarchy):
        part = law.at(steps)
        mean[steps] = tangent.project(part.mean, zeros(hierarchy))
        variance[steps] = tangent.variance(part.covariance)
    return mean, variance.clamp(min=0).sqrt()


def law_numbers(law: PathLaw) -> int:
    """Numbers that the projection of one step's factor takes."""
    return law.mean.shape[-1] * (1 if law.correlation is None else 1 + law.correlation.factor_size)


def tangents(law: PathLaw, weights: MetricWeights, hierarchy: Hierarchy) -> Iterator[tuple[slice, Tangent]]:
    """The tangents P_h of groups of steps."""
    count = len(law.mean)
    correlation = law.correlation if isinstance(law.correlation, LowRank) else None  # of errors
    size = max(1, CHUNK // law_numbers(law))
    for first in range(0, count, size):
        steps = slice(first, min(count, first + size))
        weight = weights.weight(law.stddev[steps], correlation, hierarchy.sizes)
        yield steps, tangent_of(hierarchy.system, weight).check()


def zeros(hierarchy: Hierarchy) -> Tensor:
    """Right-hand sides of the sums, (aggregates,)."""
    return torch.zeros(hierarchy.aggregates, dtype=torch.float64)
