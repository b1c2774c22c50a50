"""The quadratic problem that all polyhedral projections are written as, over leading dimensions flattened to L.

    minimise  sum_i (v_i - c_i)^2 / (2 w_i) + l_i v_i     subject to  B v = b,   lower <= v <= upper.

The first n variables are the caller's. The others are auxiliary, such as slacks of inequality rows, and cost nothing:
their quadratic term is proximal. Its centre is the last iterate, so the term vanishes at the solution.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from probhard.rows.base import Structure
from probhard.rows.dense import DenseRows
from probhard.solvers.batched import Batched

HELD = 1e-13  # weight of a variable at its bound, relative to its natural weight
NEAR = 1e-12  # how far beyond its bound a free variable may be, relative to the terms that it is computed from


@dataclass(frozen=True)
class QuadraticProblem:
    """One problem per element of the leading dimension L; float64, no gradients."""

    core: Structure | None  # B; None if there are no rows
    right: Tensor  # b, (L, q)
    centre: Tensor  # c, (L, N)
    weight: Tensor  # w, (L, N), positive; 0 for variables that do not move
    natural: Tensor  # w, and for auxiliary variables a weight of the size of the others, (L, N)
    lower: Tensor  # (L, N)
    upper: Tensor  # (L, N)
    costed: Tensor | None = None  # (N,) bool, False for auxiliary variables; None if there are none
    linear: Tensor | None = None  # l, (L, N)

    @property
    def count(self) -> int:
        """Number of elements L."""
        return self.centre.shape[0]

    def select(self, index: Tensor) -> Self:
        """The problems with these indices (k,)."""
        chosen: dict[str, Any] = {
            field.name: value.index_select(0, index)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and field.name != "costed"
        }
        core = self.core
        if core is not None and core.batch_dims:
            assert isinstance(core, DenseRows)
            chosen["core"] = DenseRows(core.map.matrix.index_select(0, index))
        return replace(self, **chosen)

    def auxiliary(self, x: Tensor, other: Tensor) -> Tensor:
        """``x`` at auxiliary variables, ``other`` elsewhere; both (L, N)."""
        return other if self.costed is None else torch.where(self.costed, other, x)


@dataclass(frozen=True)
class Faces(Batched):
    """The face of the bounds that each solution lies on, and how the solver ended."""

    side: Tensor  # (L, N) int8: -1 at lower, 1 at upper, 0 between them
    value: Tensor  # (L, N)
    steps: Tensor  # (L,)
    done: Tensor  # (L,) bool: optimal, with the right signs of all multipliers
    multiplier: Tensor  # of the rows, (L, q)

    @property
    def unfinished(self) -> Tensor:
        """Indices of the elements that are not done, (k,)."""
        return torch.nonzero(~self.done).squeeze(-1)
