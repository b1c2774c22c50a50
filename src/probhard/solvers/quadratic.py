"""The one quadratic problem that polyhedral projections are brought to, over leading dimensions flattened to L.

    minimise  sum_i (v_i - c_i)^2 / (2 w_i) + l_i v_i     subject to  B v = b,   lower <= v <= upper.

The first n variables are the caller's; the rest are slacks of inequality rows and other auxiliary ones. These cost
nothing: their quadratic term is proximal, its centre the last iterate, so that it vanishes at the solution.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from probhard.rows.base import Structure
from probhard.rows.dense import DenseRows

HELD = 1e-13  # weight of a variable at its bound, relative to its natural one
NEAR = 1e-12  # how far beyond its bound a free variable may be, relative to its terms


@dataclass(frozen=True)
class QuadraticProblem:
    """One problem per element of the leading dimension L; float64, no gradients."""

    core: Structure | None  # B; None if there are no rows
    right: Tensor  # b, (L, q)
    centre: Tensor  # c, (L, N)
    weight: Tensor  # w, (L, N), positive; 0 for variables that do not move
    natural: Tensor  # w, and for auxiliary variables a weight like those of the others, (L, N)
    lower: Tensor  # (L, N)
    upper: Tensor  # (L, N)
    costed: Tensor | None = None  # (N,) bool, False for auxiliary variables; None if there are none
    linear: Tensor | None = None  # l, (L, N)

    @property
    def count(self) -> int:
        """Number of elements L."""
        return self.centre.shape[0]

    def select(self, index: Tensor) -> Self:
        """The elements with these indices."""
        found: dict[str, Any] = {
            field.name: value.index_select(0, index)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and field.name != "costed"
        }
        core = self.core
        if core is not None and core.batch_dims:
            assert isinstance(core, DenseRows)
            found["core"] = DenseRows(core.map.matrix.index_select(0, index))
        return replace(self, **found)

    def auxiliary(self, x: Tensor, other: Tensor) -> Tensor:
        """X at auxiliary variables, ``other`` elsewhere."""
        return other if self.costed is None else torch.where(self.costed, other, x)


@dataclass(frozen=True)
class Faces:
    """Where the solutions lie: the side of each bound they are on, and how it went."""

    side: Tensor  # (L, N) int8: -1 at lower, 1 at upper, 0 between them
    value: Tensor  # (L, N)
    steps: Tensor  # (L,)
    done: Tensor  # (L,) bool: optimal, with the right signs of all multipliers
    multiplier: Tensor  # of the rows, (L, q)

    def updated(self, index: Tensor, part: Faces) -> Faces:
        """With the elements of these indices replaced."""
        return Faces(*(a.index_copy(0, index, b) for a, b in zip(vars(self).values(), vars(part).values())))
