"""The L1 ball, ``sum |u_i - center_i| <= radius``: turnover limits, sparse corrections."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import broadcast
from probhard.constraints._reals import radius_and_center
from probhard.constraints.base import immutable
from probhard.constraints.shapes import SLACK, LiftedRows, Shape, Term, absolute_parts
from probhard.errors import optional


@immutable
class L1Ball(Shape):
    """``|u - center|_1 <= radius``.

    Args:
        radius: A number or (*batch,), not negative.
        center: The origin unless given, (*batch, n): today's portfolio, a plan.

    Raises:
        InfeasibleError: A radius is negative or NaN.
        ParameterError: The center is not finite.
    """

    radius: Tensor
    center: Tensor | None

    def __init__(self, radius: Any, center: Any = None) -> None:
        size, place = radius_and_center("L1 ball", radius, center)
        self._set(radius=size, center=place)

    @property
    def variables(self) -> int | None:
        return None if self.center is None or self.center.dim() == 0 else self.center.shape[-1]

    @property
    def algorithm(self) -> str:
        return "active sets over positive and negative parts"

    def data(self) -> tuple[Tensor, ...]:
        radius = self.radius.unsqueeze(-1)
        return (radius,) if self.center is None else (radius, self.center)

    def excess(self, u: Tensor) -> Tensor:
        offset = u if self.center is None else u - self.center.to(u)
        return (offset.abs().sum(-1) - self.radius.to(u)).unsqueeze(-1)

    def excess_scale(self, u: Tensor) -> Tensor:
        size = u.abs() if self.center is None else u.abs() + self.center.to(u).abs()
        return (size.sum(-1) + self.radius.to(u)).unsqueeze(-1)

    @property
    def key(self) -> Hashable:
        return "L1Ball"

    def lifted(self, n: int) -> LiftedRows:
        """``u - p + m = center`` and ``sum p + m + s = radius``."""
        identity = sp.csr_array(sp.eye_array(n))
        split, stiffness = absolute_parts(identity)
        last = sp.csr_array(np.ones((1, 2 * n + 1)))
        own = sp.vstack([sp.hstack([split, sp.csr_array((n, 1))]), last])
        on_u = sp.vstack([identity, sp.csr_array((1, n))])
        return LiftedRows(sp.csr_array(on_u), sp.csr_array(own), np.append(stiffness, SLACK))

    def right_side(self, n: int, like: Tensor) -> Tensor:
        center, radius = self._centers(n, like), self.radius.to(like).unsqueeze(-1)
        shape = broadcast(center.shape[:-1], radius.shape[:-1])
        return torch.cat([center.expand(*shape, n), radius.expand(*shape, 1)], -1)

    def term(self, n: int, like: Tensor) -> Term:
        cp = optional("cvxpy", "cvx", "ConvexProgram")
        data = (self._centers(n, like), self.radius.to(like))
        return Term(self.key, lambda u, center, radius: [cp.norm1(u - center) <= radius], data, ((n,), ()))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        center = None if self.center is None else self.center.to(*args, **kwargs)
        return self._copy(radius=self.radius.to(*args, **kwargs), center=center)

    def _centers(self, n: int, like: Tensor) -> Tensor:
        center = like.new_zeros(()) if self.center is None else self.center.to(like)
        return center.expand(*center.shape[:-1], n)

    def __repr__(self) -> str:
        radius = f"{float(self.radius):g}" if self.radius.numel() == 1 else f"{tuple(self.radius.shape)} values"
        return f"L1Ball(radius={radius})"
