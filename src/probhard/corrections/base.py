"""The interface of corrections: maps ``y(z)`` of points to points on, or near, a set.

A correction is a record of settings. ``bound`` ties it to one constraint and gives the map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from probhard.errors import ParameterError, check_choice
from probhard.projection.parts import Parts

KINDS: dict[str, type[Correction]] = {}


class Bound(ABC):
    """A correction of points on one constraint.

    Attributes:
        guaranteed: Whether every returned point is feasible.
        matrix: dy/dz (n, n) where the map is affine; None where it is not.
        steps: Iterations of the last call.
    """

    guaranteed = False
    matrix: Tensor | None = None
    steps = 1

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """Corrected points (*lead, n) of z (*lead, n) in float64, with gradients; ``lead`` includes the batch."""


@dataclass(frozen=True)
class Correction(ABC):
    """Settings of a correction."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        KINDS[cls.kind] = cls

    @abstractmethod
    def bound(self, parts: Parts, like: Tensor) -> Bound:
        """The map for a constraint.

        Args:
            parts: The parts of the constraint.
            like: A tensor of the device and of float64.

        Raises:
            ParameterError: The correction does not apply to the constraint.
        """

    def record(self) -> dict[str, Any]:
        """Plain values to save."""
        return {"kind": self.kind, **asdict(self)}

    @staticmethod
    def from_record(record: dict[str, Any]) -> Correction:
        """Restore a correction from what ``record`` returned.

        Raises:
            ParameterError: The kind is not known.
        """
        values = dict(record)
        kind = str(values.pop("kind", ""))
        check_choice("correction", kind, tuple(KINDS))
        return KINDS[kind](**values)


def inapplicable(name: str, parts: Parts, why: str, fix: str) -> ParameterError:
    """The error of a correction that does not apply to a constraint."""
    return ParameterError(f"{name} got the constraint {parts.constraint!r}.", why, fix)
