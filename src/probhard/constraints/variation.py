"""Total variation along a profile, ``TV(u) = sum |u_(i+1) - u_i|``: bounded, penalised, or diminishing in time.

The paper's TVD is the penalty ``1/2 |u - z|_Q^2 + weight TV(u)``, a proximal map instead of a projection. The hard
forms are a bound on the variation (convex) and true TVD (not convex). TVD is projected slice by slice in time: the
variation of each projected slice bounds the next.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.constraints._reals import reals
from probhard.constraints._time import field_shape, numbers_in_time
from probhard.constraints.base import Constraint, immutable
from probhard.constraints.shapes import (
    SLACK,
    LiftedRows,
    Profiles,
    Term,
    absolute_parts,
    check_slices,
    differences,
    profile_width,
    profiles,
    slices_text,
)
from probhard.errors import ParameterError, optional


@immutable
class _Variation(Profiles):
    """A bound or penalty of the total variation of each profile."""

    name: ClassVar[str] = "bound"
    amount: Tensor

    def __init__(self, amount: Any, slices: int) -> None:
        amount = reals(f"The {self.name} of the total variation", amount)
        self._set(amount=amount, slices=check_slices(self, slices), width=None)
        if checking() and not bool((self.amount >= 0).all()):
            raise ParameterError(
                f"The {self.name} of the total variation is {float(self.amount.min()):.6g} at its smallest.",
                "It must be a number of at least 0.",
                "Pass 0 for constant profiles, or a larger number.",
            )

    @property
    def algorithm(self) -> str:
        return "weighted taut string"

    def amounts(self, like: Tensor) -> Tensor:
        """One amount per slice, broadcasting with (*batch, slices)."""
        amount = self.amount.to(like)
        return amount.unsqueeze(-1) if self.slices == 1 else amount

    def per_slice_amounts(self, like: Tensor) -> Tensor:
        """One amount per slice, (*batch, slices)."""
        amounts = self.amounts(like)
        return amounts.expand(*amounts.shape[:-1], self.slices)

    def data(self) -> tuple[Tensor, ...]:
        return (self.amounts(self.amount),)

    def on_slices(self, slices: int, width: int) -> Self:
        return type(self)(numbers_in_time(self.amount, slices), slices).of_width(width)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._copy(amount=self.amount.to(*args, **kwargs))

    def __repr__(self) -> str:
        amount = f"{float(self.amount):g}" if self.amount.numel() == 1 else f"{tuple(self.amount.shape)} values"
        return f"{type(self).__name__}({self.name}={amount}{slices_text(self.slices)})"


@immutable
class TotalVariation(_Variation):
    """``TV(u) <= bound``.

    Args:
        bound: A number or (*batch,), not negative; with slices (*batch, slices).
        slices: Number of consecutive profiles in the variables; see ``per_slice``.

    Raises:
        ParameterError: A bound is negative or NaN, or there are no slices.
    """

    def __init__(self, bound: Any, slices: int = 1) -> None:
        super().__init__(bound, slices)

    @property
    def pooled_as(self) -> str:
        return "tv-bound"

    def lifted(self, n: int) -> LiftedRows:
        """``D u - p + m = 0`` and, for each slice, ``sum p + m + s = bound``."""
        steps, slices = differences(n, self.slices), self.slices
        count = steps.shape[0]
        split, stiffness = absolute_parts(steps)
        sums = sp.kron(sp.eye_array(slices), np.ones((1, count // slices)))
        own = sp.vstack(
            [
                sp.hstack([split, sp.csr_array((count, slices))]),
                sp.hstack([sums, sums, sp.eye_array(slices)]),
            ]
        )
        on_u = sp.vstack([steps, sp.csr_array((slices, n))])
        return LiftedRows(sp.csr_array(on_u), sp.csr_array(own), np.append(stiffness, np.full(slices, SLACK)))

    def right_side(self, n: int, like: Tensor) -> Tensor:
        amounts = self.per_slice_amounts(like)
        zeros = amounts.new_zeros(*amounts.shape[:-1], n - self.slices)
        return torch.cat([zeros, amounts], -1)

    def term(self, n: int, like: Tensor) -> Term:
        cp, steps, sums = optional("cvxpy", "cvx", "ConvexProgram"), *_sums(n, self.slices)
        data = (self.per_slice_amounts(like),)
        return Term(self.key, lambda u, a: [sums @ cp.abs(steps @ u) <= a], data, ((self.slices,),))

    def excess(self, u: Tensor) -> Tensor:
        return variation(u, self.slices) - self.amounts(u)

    def excess_scale(self, u: Tensor) -> Tensor:
        return profiles(u, self.slices).abs().sum(-1) + self.amounts(u)


@immutable
class TotalVariationPenalty(_Variation):
    """The cost ``weight * TV(u)`` added to half the squared distance. Every point is feasible.

    Args:
        weight: A number or (*batch,), not negative; with slices (*batch, slices).
        slices: Number of consecutive profiles in the variables; see ``per_slice``.

    Raises:
        ParameterError: A weight is negative or NaN, or there are no slices.
    """

    name: ClassVar[str] = "weight"

    def __init__(self, weight: Any, slices: int = 1) -> None:
        super().__init__(weight, slices)

    @property
    def pooled_as(self) -> str:
        return "tv-penalty"

    def lifted(self, n: int) -> LiftedRows:
        """``D u - p + m = 0``."""
        steps = differences(n, self.slices)
        return LiftedRows(steps, *absolute_parts(steps))

    def right_side(self, n: int, like: Tensor) -> Tensor:
        return like.new_zeros(n - self.slices)

    def cost(self, n: int, like: Tensor) -> Tensor:
        """The weight of each slice, on p and m."""
        each = self.per_slice_amounts(like).repeat_interleave(profile_width(n, self.slices) - 1, -1)
        return torch.cat([each, each], -1)

    def term(self, n: int, like: Tensor) -> Term:
        cp, steps, sums = optional("cvxpy", "cvx", "ConvexProgram"), *_sums(n, self.slices)
        data = (self.per_slice_amounts(like),)
        return Term(self.key, lambda u, a: a @ (sums @ cp.abs(steps @ u)), data, ((self.slices,),), cost=True)


@immutable
class TotalVariationDiminishing(Constraint):
    """``TV(u_t) <= TV(u_(t-1))`` for the slices of a field. Not convex: slices are projected in order of time.

    Args:
        shape: (nt, nx); the field is flattened time-major.

    Raises:
        ShapeError: It is not two whole numbers of at least 1.
    """

    role: ClassVar[str] = "diminishing"
    shape: tuple[int, int]

    def __init__(self, shape: tuple[int, int]) -> None:
        self._set(shape=field_shape("TotalVariationDiminishing", shape))

    @property
    def variables(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def algorithm(self) -> str:
        return "weighted taut string, slice after slice"

    def excess(self, u: Tensor) -> Tensor:
        self.check_event(u, "The point")
        return variation(u, self.shape[0]).diff(dim=-1)

    def excess_scale(self, u: Tensor) -> Tensor:
        size = profiles(u, self.shape[0]).abs().sum(-1)
        return size[..., 1:] + size[..., :-1]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def __repr__(self) -> str:
        return f"TotalVariationDiminishing(shape={self.shape})"


def variation(u: Tensor, slices: int = 1) -> Tensor:
    """Total variation of each slice of u (*batch, n), (*batch, slices)."""
    return profiles(u, slices).diff(dim=-1).abs().sum(-1)


def _sums(n: int, slices: int) -> tuple[sp.csr_array, sp.csr_array]:
    """The matrix of differences along each profile, and the one that sums them by profile."""
    steps = differences(n, slices)
    return steps, sp.csr_array(sp.kron(sp.eye_array(slices), np.ones((1, steps.shape[0] // slices))))
