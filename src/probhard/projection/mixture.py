"""Mixtures of laws, and of projected laws: forecasts with several modes.

A mixture is projected member by member. Each mode then obeys the constraint with its own weight, and the moments of
members stay closed. The mean ``sum_k w_k mean_k`` is feasible if the set is convex; ``feasible`` says whether it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Size, Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import checking
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError, ShapeError
from probhard.laws.base import LinearMap
from probhard.laws.covariance import Dense, Diagonal, LowRank
from probhard.laws.distribution import LocationScale
from probhard.laws.mixture import MixtureMarginals
from probhard.projection.base import Solution
from probhard.projection.layer import DPPL
from probhard.projection.projected import Projected

COLUMNS = 64  # of the factor of a matched law, at most; what further columns would hold joins the diagonal
ADDS_UP = 1e-4  # weights may miss 1 by this much

Member = LocationScale | Projected


class Mixture:
    """A mixture of laws over n variables.

    Args:
        members: The laws, all of one shape (*batch, n).
        weights: Weights of the members, (M, *batch) or (M,), which add up to 1, such as
            ``torch.softmax(logits, 0)``; None for equal ones.

    Raises:
        ParameterError: If there are no members, or weights are negative or do not add up to 1.
        ShapeError: If there is not one weight for each member.
    """

    def __init__(self, members: tuple[Member, ...], weights: Tensor | None = None) -> None:
        if not members:
            raise ParameterError("The mixture has no members.", "There is nothing to mix.", "Pass one law or more.")
        self.members, self.weights = tuple(members), weights
        self.batch_shape, self.event_shape = members[0].batch_shape, members[0].event_shape
        if weights is not None:
            self._check(weights)

    def _check(self, weights: Tensor) -> None:
        shape = (len(self.members), *self.batch_shape)
        if tuple(weights.shape) not in (shape, shape[:1]):
            raise ShapeError(
                f"The weights have shape {tuple(weights.shape)} for {len(self.members)} members over the batch "
                f"{tuple(self.batch_shape)}.",
                "Every member has one weight, or one for each element of the batch.",
                f"Pass a tensor of shape {shape}, such as torch.softmax(logits, 0).",
            )
        if checking() and not bool(((weights >= 0).all()) & ((weights.sum(0) - 1).abs() <= ADDS_UP).all()):
            raise ParameterError(
                "The weights of the mixture are negative or do not add up to 1.",
                "They are probabilities.",
                "Pass torch.softmax(logits, 0), whose first dimension counts the members.",
            )

    @property
    def shares(self) -> Tensor:
        """The weights, (M, *batch)."""
        count, like = len(self.members), self.members[0].mean
        if self.weights is None:
            return torch.full((count, *self.batch_shape), 1 / count, dtype=like.dtype, device=like.device)
        missing = len(self.batch_shape) + 1 - self.weights.dim()
        return self.weights.reshape(*self.weights.shape, *[1] * missing).expand(count, *self.batch_shape)

    @property
    def marginals(self) -> MixtureMarginals:
        """The laws of the coordinates, with the closed-form CRPS of normal mixtures."""
        return MixtureMarginals([member.marginals for member in self.members], self.shares)

    def functional(self, rows: LinearMap) -> MixtureMarginals:
        """The laws of linear functionals ``F Z``, each by itself; see ``LocationScale.functional``."""
        return MixtureMarginals([member.functional(rows) for member in self.members], self.shares)

    @property
    def mean(self) -> Tensor:
        """Mean, (*batch, n)."""
        return (self.shares.unsqueeze(-1) * torch.stack([member.mean for member in self.members])).sum(0)

    @property
    def variance(self) -> Tensor:
        """Variance of each variable, (*batch, n): within members and between them."""
        return self.marginals.variance

    @property
    def stddev(self) -> Tensor:
        """Standard deviation of each variable, (*batch, n)."""
        return self.variance.sqrt()

    @property
    def usable(self) -> Tensor | None:
        """Elements whose members were all projected, (*batch,) bool; None if none failed."""
        found = [member.usable for member in self.members if isinstance(member, Projected)]
        known = [kept for kept in found if kept is not None]
        return torch.stack(known).all(0) if known else None

    @property
    def feasible(self) -> bool:
        """Whether the mean and every member obey their constraint; False if members have none."""
        first = self.members[0]
        if not isinstance(first, Projected) or not all(isinstance(x, Projected) and x.feasible for x in self.members):
            return False
        mean = self.mean.detach()
        size = torch.stack([member.mean.detach().abs() for member in self.members]).amax((0, -1)).unsqueeze(-1)
        return bool((first.constraint.relative_violation(mean, size) <= TOLERANCE[mean.dtype]).all())

    def projected(self, step: Callable[[Any], Any]) -> Mixture:
        """The mixture after a step on every member, such as ``lambda law: layer(law, constraint)``."""
        return Mixture(tuple(step(member) for member in self.members), self.weights)

    def matched(self, correlated: bool = True) -> LocationScale:
        """The normal law with the mixture's moments.

        Args:
            correlated: Whether to keep covariances, else variances only. They are exact for members that are diagonal,
                low rank or dense, if the factor has at most ``COLUMNS`` columns; else its leading ones are kept.
                Other members count with their variances. Variances are always exact.

        Returns:
            The law over (*batch, n); low rank plus diagonal unless there is one member, or no correlation is kept.
        """
        roots = self.shares.sqrt()  # (M, *batch)
        mean = self.mean
        if not correlated:
            return LocationScale(mean, Diagonal(self.variance), validate_args=False)
        parts = [_parts(member) for member in self.members]
        own = (self.shares.unsqueeze(-1) * torch.stack([own for own, _ in parts])).sum(0)
        columns = [root[..., None, None] * factor for root, (_, factor) in zip(roots, parts) if factor is not None]
        if len(self.members) > 1:
            apart = [root.unsqueeze(-1) * (member.mean - mean) for root, member in zip(roots, self.members)]
            columns.append(torch.stack(apart, -1))
        if not columns:
            return LocationScale(mean, Diagonal(own), validate_args=False)
        return LocationScale(mean, _leading(torch.cat(columns, -1), own), validate_args=False)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw from the members: in turn if weights are equal, else each draw from a random one.

        Draws carry gradients to the members, not to the weights. With weights, every member is drawn from as often as
        there are draws, and one of them is kept.

        Args:
            sample_shape: Leading dimensions of the draws, or their number.
            generator: Source of random numbers; torch's global one for None.

        Returns:
            Draws, (*sample_shape, *batch, n).
        """
        shape = Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)
        count = shape.numel()
        if self.weights is None:
            rounds = -(-count // len(self.members))
            draws = torch.stack([member.rsample((rounds,), generator) for member in self.members], 1).flatten(0, 1)
            return draws[:count].reshape(*shape, *draws.shape[1:])
        draws = torch.stack([member.rsample((count,), generator) for member in self.members])  # (M, S, *batch, n)
        shares = self.shares.detach().flatten(1).T  # (batch, M)
        chosen = torch.multinomial(shares, count, replacement=True, generator=generator)  # (batch, S)
        index = chosen.T.reshape(1, count, *self.batch_shape, 1).expand(1, *draws.shape[1:])
        return draws.gather(0, index)[0].reshape(*shape, *draws.shape[2:])

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw as ``rsample`` does, without gradient."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def project(
        self, layer: DPPL, constraint: Constraint, count: int = 100, generator: torch.Generator | None = None
    ) -> Solution:
        """Draw from the mixture and project every draw, without gradient.

        Args:
            layer: The projection; an oblique metric takes the variances of the draws as its weight.
            constraint: Over n variables.
            count: Number of draws.
            generator: Source of random numbers; torch's global one for None.

        Returns:
            The projected draws, (count, *batch, n), with the projection's statistics.
        """
        with torch.no_grad():
            return layer.project_samples(self.rsample(count, generator), constraint)


def _parts(member: Member) -> tuple[Tensor, Tensor | None]:
    """Diagonal (*batch, n) and factor (*batch, n, columns), or None, of a member's covariance."""
    mean, cov = member.mean, member.cov
    unit = torch.as_tensor(member.family.unit_variance, dtype=mean.dtype, device=mean.device)
    if isinstance(cov, LowRank):
        own, factor = cov.diagonal_part, cov.factor
    elif isinstance(cov, Dense):
        own, factor = torch.zeros_like(mean), cov.scale_tril
    else:
        return member.variance.expand_as(mean), None
    root = unit.sqrt() if unit.dim() == 0 else unit.sqrt().expand_as(mean).unsqueeze(-1)
    return (unit * own).expand_as(mean), (root * factor).expand(*mean.shape, factor.shape[-1])


def _leading(factor: Tensor, own: Tensor) -> LowRank:
    """``factor factor^T + diag(own)``, whose factor has its leading columns only if there are too many."""
    if factor.shape[-1] <= COLUMNS:
        return LowRank(factor, own)
    _, vectors = torch.linalg.eigh(factor.mT @ factor)  # ascending
    turned = factor @ vectors
    return LowRank(turned[..., -COLUMNS:], own + turned[..., :-COLUMNS].square().sum(-1))
