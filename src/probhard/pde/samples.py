"""A user's own fields: what a file of samples must hold, and what a network takes of it.

    parameters  (N,) or (N, P)      numbers that tell one sample from another,      and / or
    inputs      (N, C, *grid)       fields that do, such as initial values or coefficients
    solutions   (N, *grid)          what is to be predicted; not needed where it is
    time, x, y, z                   coordinates of the grid's axes, in this order

The network sees P + C + axes channels on the grid: parameters and coordinates are spread over it. Other arrays, such as
the mass of every sample, are there for the constraints, which look them up by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard.constraints import Constraint
from probhard.errors import ParameterError, ShapeError
from probhard.io.fields import Cells
from probhard.io.settings import closest_name
from probhard.io.spec import Data, cells_from, constraint_from
from probhard.model import Batch

PARAMETERS, INPUTS, SOLUTIONS = "parameters", "inputs", "solutions"


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of fields on one grid.

    Args:
        inputs: Channels of the network, (N, C, *grid), in the units of the file.
        solutions: Fields, (N, *grid), or None.
        data: Cells of the grid and all arrays, for the constraints.
        spec: Names of the constraints, as ``constraint_from`` takes them.
    """

    inputs: np.ndarray
    solutions: np.ndarray | None
    data: Data
    spec: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def cells(self) -> Cells:
        """Of the grid, with the samples as batch."""
        return self.data.cells

    @property
    def slices(self) -> int:
        """Events of one sample, each under a constraint of its own."""
        return len(self.cells.index)

    @classmethod
    def solved(cls, arrays: Mapping[str, np.ndarray], spec: Mapping[str, Any]) -> Samples:
        """Samples with their solutions, to train on."""
        if SOLUTIONS not in arrays:
            raise ParameterError(
                f"There is no array {SOLUTIONS!r}.", "It is what the network learns.", closest_name(SOLUTIONS, arrays)
            )
        solutions = arrays[SOLUTIONS]
        if solutions.ndim < 2:
            raise ShapeError(
                f"The solutions have shape {solutions.shape}.",
                "The first dimension counts samples, the others are the grid.",
                "Save them as (N, *grid).",
            )
        return cls._of(arrays, spec, len(solutions), solutions.shape[1:], solutions)

    @classmethod
    def unsolved(cls, arrays: Mapping[str, np.ndarray], spec: Mapping[str, Any], grid: Sequence[int]) -> Samples:
        """Samples whose solutions are to be predicted, on a grid unless the arrays tell another."""
        fields, names = arrays.get(INPUTS), spec["axes"]
        sizes = tuple(arrays[name].size if name in arrays else size for name, size in zip(names, grid))
        given = [len(arrays[name]) for name in (INPUTS, PARAMETERS) if name in arrays and arrays[name].ndim]
        shape = sizes if fields is None else fields.shape[2:]
        return cls._of(arrays, spec, given[0] if given else 0, shape, None)

    @classmethod
    def _of(
        cls,
        arrays: Mapping[str, np.ndarray],
        spec: Mapping[str, Any],
        count: int,
        grid: tuple[int, ...],
        solutions: np.ndarray | None,
    ) -> Samples:
        parts = _parts(arrays, count, grid)
        cells = cells_from(spec, arrays, (count, *grid))
        if cells.grid != grid:
            raise ShapeError(
                f"The fields have the grid {grid}, but only the axes {', '.join(cells.axes)} are named.",
                "Every dimension after the first is an axis of the grid.",
                "Save coordinates for every axis as time, x, y, z, or write 'axes: [time, x]' in the configuration.",
            )
        for name, array in ((INPUTS, arrays.get(INPUTS)), (SOLUTIONS, solutions)):
            if array is not None:
                fields = array if array.ndim == len(grid) + 1 else np.moveaxis(array, 1, 0)  # channels as draws
                _check_finite(name, cells.gather(fields, np.arange(cells.fields)))
        parts += [_coordinate(arrays, cells, axis) for axis in range(len(grid))]
        spread = [np.broadcast_to(part, (count, part.shape[1], *grid)) for part in parts]
        return cls(np.concatenate(spread, 1), solutions, Data(cells, arrays), spec)

    def batch(self, numbers: np.ndarray | None = None) -> Batch:
        """Some samples, all unless told: channels, events (N, slices, n), and as context the samples' numbers."""
        chosen = np.arange(len(self)) if numbers is None else numbers
        events = None
        if self.solutions is not None:
            gathered = self.cells.gather(self.solutions, self.events(chosen))
            events = torch.from_numpy(gathered).unflatten(0, (len(chosen), self.slices))
        return Batch(torch.from_numpy(self.inputs[chosen]), events, None, torch.from_numpy(chosen))

    def events(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of the events of some samples, (len(numbers) * slices,)."""
        return (numbers[:, None] * self.slices + np.arange(self.slices)).ravel()

    def constraint(self, numbers: Tensor) -> Constraint:
        """The constraint of all events of some samples."""
        chosen = replace(self.data, fields=self.events(numbers.cpu().numpy()))
        return constraint_from(self.spec, chosen).to(numbers.device)


def _parts(arrays: Mapping[str, np.ndarray], count: int, grid: tuple[int, ...]) -> list[np.ndarray]:
    """Parameters and input fields as channels (N, channels, *grid or ones)."""
    parts = []
    if PARAMETERS in arrays:
        parameters = arrays[PARAMETERS]
        if parameters.ndim not in (1, 2) or len(parameters) != count:
            raise ShapeError(
                f"The parameters have shape {parameters.shape}, and there are {count} samples on the grid {grid}.",
                "Every sample has its own.",
                f"Save them as ({count},) or ({count}, P).",
            )
        _check_finite(PARAMETERS, parameters)
        parts.append(parameters.reshape(count, -1, *[1] * len(grid)))
    if INPUTS in arrays:
        inputs = arrays[INPUTS]
        if inputs.ndim != len(grid) + 2 or (len(inputs), *inputs.shape[2:]) != (count, *grid):
            raise ShapeError(
                f"The inputs have shape {inputs.shape}, and there are {count} samples on the grid {grid}.",
                "Inputs and solutions lie on one grid, sample by sample.",
                f"Save them as ({count}, C, {', '.join(map(str, grid))}), with C = 1 for a single input field.",
            )
        parts.append(inputs)
    if not parts:
        raise ParameterError(
            f"There is neither {PARAMETERS!r} nor {INPUTS!r}.",
            "Nothing tells one sample from another.",
            closest_name(PARAMETERS, arrays),
        )
    return parts


def _coordinate(arrays: Mapping[str, np.ndarray], cells: Cells, axis: int) -> np.ndarray:
    """The coordinate of an axis as a channel, (1, 1, *grid or ones); from 0 to 1 where the file has none."""
    size = cells.grid[axis]
    values = arrays.get(cells.axes[axis], np.linspace(0, 1, size))
    _check_finite(cells.axes[axis], values)
    return values.reshape([1, 1, *(size if i == axis else 1 for i in range(len(cells.grid)))])


def _check_finite(name: str, array: np.ndarray) -> None:
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ParameterError(
            f"The array {name!r} is NaN or infinite in {bad} of {array.size} places.",
            "A network would learn nothing else from it.",
            "Repair or drop these samples; for cells outside a domain, save an array 'mask' that is True inside.",
        )
