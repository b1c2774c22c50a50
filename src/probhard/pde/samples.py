"""Users' own fields: the arrays of a file of samples, as inputs of a network and data of constraints.

| array         | shape          | content                                                                   |
|---------------|----------------|---------------------------------------------------------------------------|
| parameters    | (N,) or (N, P) | numbers that identify a sample; these or inputs are needed                |
| inputs        | (N, C, *grid)  | fields that identify a sample, such as initial values or coefficients     |
| solutions     | (N, *grid)     | fields to predict; needed for training only                               |
| time, x, y, z | (size,) each   | coordinates of the grid's axes, in this order                             |

The network gets P + C + axes channels on the grid; parameters and coordinates are broadcast. Constraints look up other
arrays by name, such as the mass of every sample.
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
        spec: Specification of the constraints, as of ``constraint_from``.
    """

    inputs: np.ndarray
    solutions: np.ndarray | None
    data: Data
    spec: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def cells(self) -> Cells:
        """Cells of the grid, with the samples as batch."""
        return self.data.cells

    @property
    def slices(self) -> int:
        """Number of events per sample, each with its own constraint."""
        return len(self.cells.index)

    @classmethod
    def solved(cls, arrays: Mapping[str, np.ndarray], spec: Mapping[str, Any]) -> Samples:
        """Samples with their solutions, for training.

        Args:
            arrays: Arrays of a file, by name.
            spec: Specification of the constraints.

        Raises:
            ParameterError: If an array is missing, or not finite.
            ShapeError: If shapes do not fit.
        """
        if SOLUTIONS not in arrays:
            raise ParameterError(
                f"There is no array {SOLUTIONS!r}.",
                "The network learns to predict it.",
                closest_name(SOLUTIONS, arrays),
            )
        solutions = arrays[SOLUTIONS]
        if solutions.ndim < 2:
            raise ShapeError(
                f"The solutions have shape {solutions.shape}.",
                "The first dimension counts samples; the others form the grid.",
                "Save them as (N, *grid).",
            )
        return cls._of(arrays, spec, len(solutions), solutions.shape[1:], solutions)

    @classmethod
    def unsolved(cls, arrays: Mapping[str, np.ndarray], spec: Mapping[str, Any], grid: Sequence[int]) -> Samples:
        """Samples whose solutions are to be predicted.

        Args:
            arrays: Arrays of a file, by name.
            spec: Specification of the constraints, with the names of the axes.
            grid: Grid of the training data, used where the arrays have no coordinates or inputs.

        Raises:
            ParameterError: If an array is missing, or not finite.
            ShapeError: If shapes do not fit.
        """
        fields, names = arrays.get(INPUTS), spec["axes"]
        sizes = tuple(arrays[name].size if name in arrays else size for name, size in zip(names, grid))
        counts = [len(arrays[name]) for name in (INPUTS, PARAMETERS) if name in arrays and arrays[name].ndim]
        shape = sizes if fields is None else fields.shape[2:]
        return cls._of(arrays, spec, counts[0] if counts else 0, shape, None)

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
        channels = [np.broadcast_to(part, (count, part.shape[1], *grid)) for part in parts]
        return cls(np.concatenate(channels, 1), solutions, Data(cells, arrays), spec)

    def batch(self, numbers: np.ndarray | None = None) -> Batch:
        """Select samples.

        Args:
            numbers: Numbers of the samples, (count,); None selects all.

        Returns:
            Inputs (count, C, *grid), targets (count, slices, n) or None, and the numbers as context.
        """
        selected = np.arange(len(self)) if numbers is None else numbers
        events = None
        if self.solutions is not None:
            gathered = self.cells.gather(self.solutions, self.events(selected))
            events = torch.from_numpy(gathered).unflatten(0, (len(selected), self.slices))
        return Batch(torch.from_numpy(self.inputs[selected]), events, None, torch.from_numpy(selected))

    def events(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of the events of the samples ``numbers`` (count,), (count * slices,)."""
        return (numbers[:, None] * self.slices + np.arange(self.slices)).ravel()

    def constraint(self, numbers: Tensor) -> Constraint:
        """The constraint of all events of the samples ``numbers`` (count,), batch (count * slices,)."""
        data = replace(self.data, fields=self.events(numbers.cpu().numpy()))
        return constraint_from(self.spec, data).to(numbers.device)


def _parts(arrays: Mapping[str, np.ndarray], count: int, grid: tuple[int, ...]) -> list[np.ndarray]:
    """Parameters and input fields as channels (N, channels, *grid or ones)."""
    parts = []
    if PARAMETERS in arrays:
        parameters = arrays[PARAMETERS]
        if parameters.ndim not in (1, 2) or len(parameters) != count:
            raise ShapeError(
                f"The parameters have shape {parameters.shape}, and there are {count} samples on the grid {grid}.",
                "Every sample needs its own parameters.",
                f"Save them as ({count},) or ({count}, P).",
            )
        _check_finite(PARAMETERS, parameters)
        parts.append(parameters.reshape(*parameters.shape, *[1] * (len(grid) + 2 - parameters.ndim)))
    if INPUTS in arrays:
        inputs = arrays[INPUTS]
        if inputs.ndim != len(grid) + 2 or (len(inputs), *inputs.shape[2:]) != (count, *grid):
            raise ShapeError(
                f"The inputs have shape {inputs.shape}, and there are {count} samples on the grid {grid}.",
                "Inputs and solutions must have the same samples and grid.",
                f"Save them as ({count}, C, {', '.join(map(str, grid))}), with C = 1 for a single input field.",
            )
        parts.append(inputs)
    if not parts:
        raise ParameterError(
            f"There is neither {PARAMETERS!r} nor {INPUTS!r}.",
            "The network needs inputs that differ between samples.",
            closest_name(PARAMETERS, arrays),
        )
    return parts


def _coordinate(arrays: Mapping[str, np.ndarray], cells: Cells, axis: int) -> np.ndarray:
    """The coordinate of an axis as a channel, (1, 1, *grid or ones); from 0 to 1 if the file has none."""
    size = cells.grid[axis]
    values = arrays.get(cells.axes[axis], np.linspace(0, 1, size))
    _check_finite(cells.axes[axis], values)
    return values.reshape([1, 1, *(size if i == axis else 1 for i in range(len(cells.grid)))])


def _check_finite(name: str, array: np.ndarray) -> None:
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ParameterError(
            f"The array {name!r} is NaN or infinite in {bad} of {array.size} places.",
            "Training on it would make every weight NaN.",
            "Repair or drop these samples; for cells outside a domain, save an array 'mask' that is True inside.",
        )
