"""Values that are 0 or not small, ``u = 0 or u >= least``: two phases, minimum lots, switched loads. Not convex."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.constraints._time import spread_in_time
from probhard.constraints.base import Constraint, immutable, reals
from probhard.errors import ParameterError


@immutable
class Semicontinuous(Constraint):
    """``u = 0`` or ``u >= least`` for every variable, alone or along monotone profiles, with bounds and one row.

    Among all feasible points the nearest is found, though the set is not convex. Sums over variables that are not
    monotone have no such search and are refused.

    Args:
        least: Smallest value that is not 0: a number or (*batch, n), not negative.
    """

    role: ClassVar[str] = "semicontinuous"
    least: Tensor

    def __init__(self, least: Any) -> None:
        self._set(least=reals("The least value", least))
        if checking() and not bool(((self.least >= 0) & torch.isfinite(self.least)).all()):
            bad = self.least[~((self.least >= 0) & torch.isfinite(self.least))]
            raise ParameterError(
                f"Semicontinuous got the least value {float(bad.detach().flatten()[0]):g}.",
                "It is the smallest size of a value that is not 0.",
                "Pass finite numbers of at least 0.",
            )

    @property
    def variables(self) -> int | None:
        size = self.least.shape[-1] if self.least.dim() else 1
        return None if size == 1 else size

    @property
    def algorithm(self) -> str:
        return "a search for the number of zeros"

    def excess(self, u: Tensor) -> Tensor:
        """How far the nearer of both phases is."""
        return torch.minimum(u.abs(), self.least.to(u) - u)

    def excess_scale(self, u: Tensor) -> Tensor:
        return u.abs() + self.least.to(u)

    def data(self) -> tuple[Tensor, ...]:
        return (self.least,) if self.least.dim() else ()

    def on_slices(self, slices: int, width: int) -> Semicontinuous:
        return Semicontinuous(spread_in_time(self.least, slices, width))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._copy(least=self.least.to(*args, **kwargs))

    def __repr__(self) -> str:
        least = f"{float(self.least.detach()):g}" if self.least.numel() == 1 else f"{tuple(self.least.shape)} values"
        return f"Semicontinuous(least={least})"
