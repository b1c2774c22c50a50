"""HardNet++ (Goertzen, Alim and Azizan 2026): damped Gauss-Newton sweeps on all rows.

    y <- y - J^T (J J^T + damping I)^-1 v,     v = [h(y); relu(g(y) - upper) - relu(lower - g(y))],

with J the Jacobian of ``[h; g]`` at y. Sweeps stop once all violations are below a tolerance. Nothing is promised:
violations are those that the sweeps leave. Gradients run through all sweeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.corrections.base import Bound, Correction, inapplicable
from probhard.corrections.rows import linear_rows
from probhard.errors import ParameterError
from probhard.projection.parts import Parts

NAME = "HardNet++"


@dataclass(frozen=True)
class DampedSweeps(Correction):
    """HardNet++'s sweeps towards a set with smooth functions.

    Args:
        damping: Added to the diagonal of ``J J^T``.
        steps: Largest number of sweeps.
        tolerance: Sweeps stop when no violation of any point is larger.

    Raises:
        ParameterError: A number is not positive.
    """

    kind: ClassVar[str] = "damped-sweeps"
    damping: float = 0.3
    steps: int = 500
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        if min(self.damping, self.steps, self.tolerance) <= 0:
            raise ParameterError(
                f"Got {self}.", "Sweeps need a damping, a number and an end.", "Pass positive numbers."
            )

    def bound(self, parts: Parts, like: Tensor) -> Bound:
        if parts.semicontinuous or parts.convex_programs or parts.diminishing is not None:
            raise inapplicable(
                NAME,
                parts,
                "Its sweeps need functions with a Jacobian, and this set has none.",
                "Use 'probhard-or'.",
            )
        return _Sweeps(self, parts, like)


class _Sweeps(Bound):
    """The sweeps on one constraint."""

    def __init__(self, settings: DampedSweeps, parts: Parts, like: Tensor) -> None:
        self.settings, self.rows = settings, linear_rows(parts, like)
        self.smooth = smooth_parts(parts)
        self.gain: Tensor | None = None
        if not any(self.smooth) and self.rows.matrix.dim() == 2:
            self.gain = self._gain(self.rows.matrix)

    def __call__(self, z: Tensor) -> Tensor:
        y, self.steps = z, 0
        for _ in range(self.settings.steps):
            values, jacobian = self._linearised(y)
            if checking() and bool((values.detach().abs() <= self.settings.tolerance).all()):
                break
            if self.gain is not None:
                y = y - values @ self.gain.mT
            else:
                assert jacobian is not None
                y = y - (self._gain(jacobian) @ values.unsqueeze(-1)).squeeze(-1)
            self.steps += 1
        return y

    def _gain(self, jacobian: Tensor) -> Tensor:
        """``J^T (J J^T + damping I)^-1``, (*lead, n, m)."""
        eye = torch.eye(jacobian.shape[-2], dtype=jacobian.dtype, device=jacobian.device)
        gram = jacobian @ jacobian.mT + self.settings.damping * eye
        return torch.linalg.solve(gram, jacobian).mT

    def _linearised(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Violations (*lead, m) at y (*lead, n), and their Jacobian (*lead, m, n) unless the gain is known."""
        values = [self.rows.excess(y)]
        if self.gain is not None:
            return values[0], None
        jacobians = [self.rows.matrix.expand(*y.shape[:-1], *self.rows.matrix.shape[-2:])]
        equalities, excesses = self.smooth
        for functions, cut in ((equalities, False), (excesses, True)):
            for function in functions:
                value = function.residual(y)
                values.append(torch.relu(value) if cut else value)
                jacobians.append(function.jacobian(y, value.shape[-1]))
        return torch.cat(values, -1), torch.cat(jacobians, -2)


def smooth_parts(parts: Parts) -> tuple[list[NonlinearEquality], list[NonlinearEquality]]:
    """The equalities ``h(y) = 0`` and the inequalities ``g(y) <= 0`` of a constraint that are not linear rows."""
    equalities = [] if parts.nonlinear is None else [parts.nonlinear]
    excesses = [part.function for part in parts.curved]
    others = [*parts.cones, *(shape for shape in parts.shapes if not shape.only_rows)]
    return equalities, [*excesses, *(_function(part.excess) for part in others)]


def _function(excess: Callable[[Tensor], Tensor]) -> NonlinearEquality:
    """The excess of a part with a Jacobian by torch.func."""
    return NonlinearEquality(excess)
