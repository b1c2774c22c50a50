"""Joint laws of base forecasts over nodes and steps, projected on the hierarchy.

    x_h = mean_h + c s_h w_h,      cov(w_h, w_k) = rho^|h-k| C,      y_h = P_h x_h,      h = 1, ..., H,

with the base forecast's mean and deviations s_h of every node, a number c per group of levels, the correlation C of its
in-sample errors and one number rho for the dependence of steps. ``C = D + v^2 F F^T`` is low rank plus diagonal; v = 1
unless calibrated. The independent law has ``C = I`` and ``rho = 0``. All laws of a comparison have the same projections
P_h, hence the same means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probhard import DPPL, Diagonal, Hierarchy, LocationScale, LowRank, shrunk_correlation
from probhard.forecasting.models.classical import BaseForecast
from probhard.forecasting.reconciliation.joint_law import step_root

GROUPS = ("top", "middle", "bottom")
METRICS = ("orthogonal", "variances", "covariance")  # weights W of the projection: I, diag(s^2), diag(s) C diag(s)
SMALLEST = 1e-6  # deviation of a node that never varied, relative to its largest value


def group_masks(hierarchy: Hierarchy) -> Tensor:
    """Return which nodes belong to the root, to the other aggregates, and to the bottoms, (3, n) bool."""
    node = torch.arange(hierarchy.variables)
    return torch.stack([node == 0, (node > 0) & (node < hierarchy.aggregates), node >= hierarchy.aggregates])


@dataclass(frozen=True, eq=False)
class Forecast:
    """Means and deviations of every node and step, the correlation of errors, and the projection.

    Args:
        mean: (H, n).
        stddev: (H, n).
        correlation: C, (n,).
        hierarchy: The sums.
        metric: A name in ``METRICS``.
    """

    mean: Tensor
    stddev: Tensor
    correlation: LowRank
    hierarchy: Hierarchy
    metric: str

    @classmethod
    def of(cls, base: BaseForecast, metric: str) -> Forecast:
        """The law of a base forecast, with the shrunk correlation of its in-sample errors."""
        values = base.data.values
        least = SMALLEST * np.nanmax(np.abs(values), axis=0)
        stddev = torch.from_numpy(np.maximum(base.stddev, np.where(least > 0, least, 1.0)))
        correlation = shrunk_correlation(torch.from_numpy(values - base.fitted))
        return cls(torch.from_numpy(base.mean), stddev, correlation, base.data.hierarchy, metric)

    def project(self, points: Tensor) -> Tensor:
        """Project points (*samples, H, n), each step with its own weights."""
        if self.metric == "orthogonal":
            return DPPL("orthogonal").project(points, self.hierarchy).value
        joint = self.metric == "covariance"
        cov = self.correlation.scaled(self.stddev) if joint else Diagonal.from_stddev(self.stddev)
        weights = LocationScale(self.mean, cov, validate_args=False)
        return DPPL("oblique").project(points, self.hierarchy, dist=weights).value

    def projected_mean(self) -> Tensor:
        """The mean of all laws of this forecast, (H, n)."""
        return self.project(self.mean)

    def deviations(self, joint: bool, rho: float, samples: int, seed: int) -> Tensor:
        """Draw deviations from the mean before the projection.

        Args:
            joint: Whether nodes are correlated.
            rho: Correlation of two successive steps.
            samples: Number of draws S.
            seed: Seed of the noise, the same for all laws.

        Returns:
            Terms of ``s_h w_h``, (terms, S, H, n): what each node has of its own and, if ``joint``, what they share.
        """
        steps, nodes = self.mean.shape
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(samples, steps, self.correlation.root_size, generator=generator, dtype=torch.float64)
        terms = noise[None, ..., :nodes]
        if joint:
            own = self.correlation.diagonal_part.sqrt() * noise[..., :nodes]
            terms = torch.stack([own, noise[..., nodes:] @ self.correlation.factor.mT])
        return self.stddev * torch.einsum("hk,tskn->tshn", step_root(steps, rho), terms)


def group_parts(terms: Tensor, hierarchy: Hierarchy, project: Callable[[Tensor], Tensor]) -> Tensor:
    """Split terms of deviations by group and project each: with weights they add up to projected deviations.

    Args:
        terms: (terms, S, H, n).
        hierarchy: The sums.
        project: A linear projection of points (S, H, n).

    Returns:
        (3 terms, S, H, n), the three groups of the first term first.
    """
    masks = group_masks(hierarchy)
    return torch.stack([project(torch.where(mask, term, 0.0)) for term in terms for mask in masks])


def part_weights(numbers: Tensor) -> Tensor:
    """Weights of the parts, from the numbers c (3,) and, if there is a shared term, v: (3,) or (6,)."""
    return torch.cat([numbers[:3], *(numbers[:3] * shared for shared in numbers[3:])])


def weighted(terms: Tensor, numbers: Tensor, masks: Tensor) -> Tensor:
    """Deviations ``c s w`` (S, H, n) from their terms (terms, S, H, n), numbers (3 or 4,) and groups (3, n)."""
    by_term = torch.cat([torch.ones(1, dtype=numbers.dtype), numbers[3:]])
    return torch.einsum("t,tshn->shn", by_term, terms) * (numbers[:3] @ masks.double())


def step_correlation(steps: int, rho: float) -> Tensor:
    """The step correlation ``rho^|h-k|``, (H, H)."""
    step = torch.arange(steps, dtype=torch.float64)
    return torch.as_tensor(rho, dtype=torch.float64) ** (step[:, None] - step).abs()


def combined(mean: Tensor, parts: Tensor, numbers: Tensor) -> Tensor:
    """Draws (S, H, n) from the projected mean, parts (3 terms, S, H, n) and numbers (3 or 4,)."""
    return mean + torch.einsum("g,gshn->shn", part_weights(numbers), parts)
