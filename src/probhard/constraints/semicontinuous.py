"""Semicontinuous values, ``u = 0 or u >= least``: two phases, minimum lots, switched loads. Not convex."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.constraints._reals import reals
from probhard.constraints._time import spread_in_time
from probhard.constraints.base import Constraint, immutable
from probhard.errors import ParameterError


@immutable
class Semicontinuous(Constraint):
    """``u = 0`` or ``u >= least`` for every variable.

    It may be joined with bounds, one ``Monotone`` and one row per profile. The projection is the global minimum, though
    the set is not convex. A row over variables that are not monotone is rejected when it is projected.

    Args:
        least: Smallest nonzero value, a number or (*batch, n), not negative.

    Raises:
        ParameterError: A least value is negative or not finite.
    """

    role: ClassVar[str] = "semicontinuous"
    least: Tensor

    def __init__(self, least: Any) -> None:
        self._set(least=reals("The least value", least))
        if checking() and not bool(((self.least >= 0) & torch.isfinite(self.least)).all()):
            bad = self.least[~((self.least >= 0) & torch.isfinite(self.least))]
            raise ParameterError(
                f"Semicontinuous got the least value {float(bad.detach().flatten()[0]):g}.",
                "It is the smallest nonzero value.",
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
        """Distance to the nearer phase, 0 or at least ``least``."""
        return torch.minimum(u.abs(), self.least.to(u) - u)

    def excess_scale(self, u: Tensor) -> Tensor:
        return u.abs() + self.least.to(u)

    def data(self) -> tuple[Tensor, ...]:
        return (self.least,)

    def on_slices(self, slices: int, width: int) -> Semicontinuous:
        return Semicontinuous(spread_in_time(self.least, slices, width))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._copy(least=self.least.to(*args, **kwargs))

    def __repr__(self) -> str:
        least = f"{float(self.least.detach()):g}" if self.least.numel() == 1 else f"{tuple(self.least.shape)} values"
        return f"Semicontinuous(least={least})"
