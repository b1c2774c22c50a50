"""Families of functionals joined by ``+``, and families from saved values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import scipy.sparse as sp

from probhard._score.families import BlockMeans, Horizons, Levels
from probhard._score.functionals import Directions, Functionals
from probhard.errors import ParameterError, ShapeError


@dataclass(frozen=True)
class Joined(Functionals):
    """Families over the same variables, one after the other; groups of one name are one group.

    Args:
        parts: The families.

    Raises:
        ShapeError: If they are for different numbers of variables.
    """

    parts: tuple[Functionals, ...]
    kind: ClassVar[str] = "joined"

    def __post_init__(self) -> None:
        sizes = sorted({part.variables for part in self.parts})
        if len(sizes) != 1:
            raise ShapeError(
                f"Families of functionals of {sizes} variables cannot be joined.",
                "Their functionals are of one law.",
                "Build all of them for the shape of the same event.",
            )

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for part in self.parts for label in part.labels)

    def _matrix(self) -> sp.csr_array:
        return sp.csr_array(sp.vstack([part.matrix for part in self.parts]))

    def _values(self) -> dict[str, Any]:
        return {"parts": [part.record() for part in self.parts]}

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> Joined:
        return cls(tuple(functionals_from_record(part) for part in values["parts"]))


KINDS: dict[str, type[Functionals]] = {cls.kind: cls for cls in (BlockMeans, Directions, Horizons, Joined, Levels)}


def join(*families: Functionals) -> Joined:
    """One family of the functionals of all; families that are joined already are taken apart."""
    nested = (family.parts if isinstance(family, Joined) else (family,) for family in families)
    return Joined(tuple(part for parts in nested for part in parts))


def functionals_from_record(record: Mapping[str, Any]) -> Functionals:
    """Restore a family.

    Args:
        record: Values that ``Functionals.record`` returned.

    Raises:
        ParameterError: If the kind is unknown or a value is missing.
    """
    try:
        return KINDS[record["kind"]].restored(record)
    except (KeyError, TypeError) as error:
        raise ParameterError(
            f"The saved functionals {str(record)[:200]} do not fit this version ({error}).",
            "A value is missing or the kind is unknown.",
            f"Kinds are {', '.join(map(repr, sorted(KINDS)))}; build the family again.",
        ) from error
