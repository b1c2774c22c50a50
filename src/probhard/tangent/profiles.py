"""The tangent of pooled profiles: the derivative of their projection while the runs of equal values stay the same.

Let M be the average over these runs ("groups") weighted by ``q = 1/w``, and F the restriction to groups that are on no
bound. The columns of C are the active rows: a of the mass, and the signs s of the jumps for a bound on TV. Then

    T = F M - B S^-1 C^T F M,     B = F M W C,     S = C^T B.

All products cost O(n).
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from probhard._util.tensors import broadcast
from probhard.laws.covariance import Covariance, Diagonal, LowRank
from probhard.tangent import Differential


class Pooling:
    """The tangent T of pooled profiles (*lead, nx) and their groups.

    Args:
        weight: Positive weights w, (*lead, nx).
        first: Index of the first point of each point's group, (*lead, nx).
        side: -1 on the lower bound, 1 on the upper, 0 if free, -2 if the value is 0 regardless of the bounds.
        edge: Sign of the jump after each point, 0 within a group.
        rows: The vectors a and s (None for s), each with a mask (*lead, 1) of the profiles where it is active.
    """

    def __init__(
        self, weight: Tensor, first: Tensor, side: Tensor, edge: Tensor, rows: list[tuple[Tensor | None, Tensor]]
    ) -> None:
        self.first, self.side, self.inverse, self.free = first, side, 1 / weight, (side == 0).to(weight)
        self.edge = edge
        self.binds = [bind for _, bind in rows]
        self.normals = [torch.where(bind, self.sign if row is None else row, 0.0) for row, bind in rows]

    @cached_property
    def sign(self) -> Tensor:
        """The derivative s of TV: +1 at the upper end of a jump, -1 at the lower."""
        edge = self.edge.to(self.inverse)
        return torch.nn.functional.pad(edge[..., :-1], (1, 0)) - edge

    def total(self, x: Tensor) -> Tensor:
        """Sums of x (*samples, *lead, nx) over groups, repeated at each point of the group."""
        shape = broadcast(x.shape, self.first.shape)
        index = self.first.expand(shape)
        return x.new_zeros(shape).scatter_add(-1, index, x.expand(shape)).gather(-1, index)

    @cached_property
    def mass(self) -> Tensor:
        """Sums of q over groups, (*lead, nx)."""
        return self.total(self.inverse)

    @cached_property
    def responses(self) -> list[Tensor]:
        """The columns of ``B = F M W C``, each (*lead, nx)."""
        return [self.free * self.total(row) / self.mass for row in self.normals]

    @cached_property
    def gram(self) -> list[Tensor]:
        """The entries of ``S = C^T B`` on and above the diagonal; an inactive row has 1 on the diagonal."""
        entries = [_dot(self.normals[i], self.responses[j]) for i, j in self._pairs]
        return [entry + self._idle(i, j) for entry, (i, j) in zip(entries, self._pairs)]

    def average(self, x: Tensor) -> Tensor:
        """``F M x`` for x (*samples, *lead, nx)."""
        return self.free * self.total(self.inverse * x) / self.mass

    def multipliers(self, residuals: list[Tensor]) -> list[Tensor]:
        """``S^-1 r`` for residuals r, one tensor (..., 1) or (..., nx) per row."""
        if len(residuals) < 2:
            return [r / self.gram[0] for r in residuals]
        determinant = self.gram[0] * self.gram[2] - self.gram[1].square()
        first, second = residuals
        return [
            (self.gram[2] * first - self.gram[1] * second) / determinant,
            (self.gram[0] * second - self.gram[1] * first) / determinant,
        ]

    def balanced(self, u: Tensor, targets: list[Tensor]) -> Tensor:
        """``u - B S^-1 (C^T u - t)`` for u (*samples, *lead, nx) and targets t, one (*lead,) per row."""
        residuals = [
            _dot(row, u) - torch.where(bind, target.unsqueeze(-1), 0.0)
            for row, bind, target in zip(self.normals, self.binds, targets)
        ]
        for response, multiplier in zip(self.responses, self.multipliers(residuals)):
            u = u - response * multiplier
        return u

    def apply(self, x: Tensor) -> Tensor:
        """``T x`` for x (*samples, *lead, nx)."""
        return self.balanced(self.average(x), [x.new_zeros(())] * len(self.normals))

    def transpose(self, x: Tensor) -> Tensor:
        """``T^T x`` for x (*samples, *lead, nx)."""
        x = self.free * x
        multipliers = self.multipliers([_dot(response, x) for response in self.responses])
        for row, multiplier in zip(self.normals, multipliers):
            x = x - self.free * row * multiplier
        return self.inverse * self.total(x) / self.mass

    def variance(self, variance: Tensor) -> Tensor:
        """``diag(T C T^T)`` of a diagonal C (*samples, *lead, nx).

        With v the variance of a group's average, the group contributes ``(1 - Q b S^-1 b)^2 v`` and the others
        ``b S^-1 N S^-1 b``. Both are computed from sums over the others, so fixed values get exactly 0.
        """
        own = self.free * self.total(variance * self.inverse.square()) / self.mass.square()
        if not self.normals:
            return own
        pairs = [self.responses[i] * self.responses[j] * self.mass for i, j in self._pairs]
        others = [self._others(pair) + self._idle(i, j) for pair, (i, j) in zip(pairs, self._pairs)]
        noise = [self._others(pair * own * self.mass) for pair in pairs]
        if len(self.normals) == 1:
            return own * (others[0] / self.gram[0]).square() + noise[0] * (self.responses[0] / self.gram[0]).square()
        determinant = self.gram[0] * self.gram[2] - self.gram[1].square()
        kept = (others[0] * others[2] - others[1].square()).clamp(min=0) / determinant
        a, b = self.multipliers(self.responses)
        return own * kept.square() + (a * (a * noise[0] + 2 * b * noise[1]) + b * b * noise[2]).clamp(min=0)

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(len(self.normals)) for j in range(i, len(self.normals))]

    def _idle(self, i: int, j: int) -> Tensor | float:
        """1 on the diagonal of S for inactive rows."""
        return (~self.binds[i]).to(self.inverse) if i == j else 0.0

    def _others(self, x: Tensor) -> Tensor:
        """Sums over the other groups of x, which is constant on groups, without cancellation."""
        x = x * (self.first == torch.arange(x.shape[-1], device=x.device))
        before = torch.nn.functional.pad(x.cumsum(-1)[..., :-1], (1, 0))
        after = torch.nn.functional.pad(x.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
        return (before + after).gather(-1, self.first.expand(x.shape))


class FieldTangent(Differential):
    """A tangent over fields (*lead, slices, nx), flattened to (*lead, n)."""

    lead: torch.Size  # (*lead, slices, nx)

    @abstractmethod
    def apply_field(self, x: Tensor) -> Tensor:
        """``T x`` for x (*samples, *lead, slices, nx)."""

    @abstractmethod
    def transpose_field(self, x: Tensor) -> Tensor:
        """``T^T x`` for x (*samples, *lead, slices, nx)."""

    @abstractmethod
    def variance_field(self, variance: Tensor) -> Tensor:
        """``diag(T C T^T)`` of a diagonal C (*samples, *lead, slices, nx)."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.lead[:-2], self.lead[-2] * self.lead[-1]))

    def apply(self, x: Tensor) -> Tensor:
        return self.apply_field(self._field(x)).flatten(-2).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        return self.transpose_field(self._field(x)).flatten(-2).to(x.dtype)

    def variance(self, cov: Covariance) -> Tensor:
        if isinstance(cov, Diagonal):
            return self.variance_field(self._field(cov.variance)).flatten(-2).to(cov.dtype)
        if isinstance(cov, LowRank):
            own, columns = self.variance(Diagonal(cov.diagonal_part)), cov.factor.movedim(-1, 0)
            return own + self._squares(columns, len(cov.shape))
        eye = torch.eye(cov.root_size, dtype=cov.dtype, device=cov.device)
        return self._squares(cov.root(eye.reshape(-1, *[1] * (len(cov.shape) - 1), cov.root_size)), len(cov.shape))

    def _field(self, x: Tensor) -> Tensor:
        return x.to(torch.float64).unflatten(-1, tuple(self.lead[-2:]))

    def _squares(self, columns: Tensor, dims: int) -> Tensor:
        """Sum of the squares of ``T r`` over the columns r of a root, (columns, *batch, n)."""
        missing = max(0, len(self.shape) - dims)
        columns = columns.reshape(columns.shape[0], *[1] * missing, *columns.shape[1:])
        return self.apply(columns).square().sum(0)


class PooledTangent(FieldTangent):
    """The tangent of independent pooled profiles.

    Args:
        pooled: The tangent of each profile, over (*lead, slices, nx).
    """

    def __init__(self, pooled: Pooling) -> None:
        self.pooled, self.lead = pooled, pooled.first.shape

    def apply_field(self, x: Tensor) -> Tensor:
        return self.pooled.apply(x)

    def transpose_field(self, x: Tensor) -> Tensor:
        return self.pooled.transpose(x)

    def variance_field(self, variance: Tensor) -> Tensor:
        return self.pooled.variance(variance)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
