"""Data of constraints: a grid's cells with the arrays of its file, which options name.

An option is a number, a list of numbers, or the name of an array. ``Data`` turns it into values per event, per cell, or
common to all events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard.constraints import trapezoid_weights
from probhard.errors import ParameterError
from probhard.io.cells import Cells
from probhard.io.settings import closest_name

VOLUMES, MASK = "cell_volumes", "mask"  # names of arrays


@dataclass(frozen=True, eq=False)
class Data:
    """Cells, the arrays that belong to them, and the events that a constraint is built for.

    Args:
        cells: Cells of the fields.
        arrays: Arrays of the fields' file by name.
        fields: Numbers of the chosen events; None for all.
        cache: What all events share, built once.
    """

    cells: Cells
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    fields: np.ndarray | None = None
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def chosen(self) -> np.ndarray:
        """Numbers of the chosen events, (fields,)."""
        return np.arange(self.cells.fields) if self.fields is None else self.fields

    def array(self, option: str, value: Any) -> np.ndarray:
        """The value of an option: a number, a list of numbers, or the array of that name.

        Raises:
            ParameterError: It is none of these.
        """
        if isinstance(value, str) and value in self.arrays:
            return self.arrays[value]
        try:
            if value is not None and not isinstance(value, bool):
                return np.asarray(value, dtype=np.float64)  # YAML reads 1e-3 as text
        except (TypeError, ValueError):
            pass
        raise ParameterError(
            f"{option} is {value!r}, neither a number nor the name of an array.",
            "Names are looked up among the arrays that come with the fields.",
            closest_name(str(value), self.arrays),
        )

    def each(self, option: str, value: Any, rows: tuple[int, ...] = ()) -> Tensor:
        """One value per event, (fields, *rows), or a scalar for all.

        Args:
            option: Name of the option, for errors.
            value: Its value.
            rows: Shape of each event's value.

        Raises:
            ShapeError: The value does not broadcast with the events.
        """
        array = self.array(option, value)
        return as_tensor(array if array.ndim == 0 else self.cells.each(option, array, self.chosen, rows))

    def everywhere(self, option: str, value: Any) -> Tensor:
        """One value per event and cell, (fields, n), or a scalar for all.

        Raises:
            ShapeError: The value does not broadcast with the fields.
        """
        array = self.array(option, value)
        return as_tensor(array if array.ndim == 0 else self.cells.everywhere(option, array, self.chosen))

    def shared(self, key: Any, build: Callable[[], Any]) -> Any:
        """An object that all events share, built once: structures are cached by the identity of their tensors."""
        if key not in self.cache:
            self.cache[key] = build()
        return self.cache[key]

    def weights(self, value: Any) -> Tensor:
        """Quadrature weights (n,): the array that is named, otherwise cell volumes, otherwise the trapezoid rule."""
        value = VOLUMES if value is None and VOLUMES in self.arrays else value
        if value is not None:
            return as_tensor(self.cells.shared("weights", self.array("weights", value)))
        weights = np.ones(self.cells.grid)
        for number, axis in enumerate(self.cells.axes):
            if axis in self.cells.per:
                continue
            if axis not in self.arrays:
                raise ParameterError(
                    f"conservation has no weights: there is neither an array {VOLUMES!r} nor coordinates {axis!r}.",
                    "An integral needs the size of every cell.",
                    f"Add the cell volumes or the grid points to the file, or write 'weights: 1' for a plain sum of "
                    f"{self.cells.variables} cells.",
                )
            step = trapezoid_weights(as_tensor(self.arrays[axis])).numpy()
            weights = weights * step.reshape([-1 if i == number else 1 for i in range(len(self.cells.axes))])
        return as_tensor(self.cells.shared("weights", weights))

    def profiles(self, axis: str | None) -> int | None:
        """Number of profiles along an axis, if an event holds them one after the other; otherwise None."""
        cells = self.cells
        axis = axis or cells.order[-1]
        if axis not in cells.order:
            raise ParameterError(
                f"An event has no axis {axis!r}.",
                "A profile runs along an axis that does not belong to 'per'.",
                closest_name(str(axis), cells.order),
            )
        together = cells.inside is None and axis == cells.order[-1]
        return cells.variables // cells.shape[-1] if together else None


def as_tensor(array: np.ndarray) -> Tensor:
    """A copy of an array as a float64 tensor."""
    return torch.tensor(array, dtype=torch.float64)
