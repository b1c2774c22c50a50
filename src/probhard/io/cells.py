"""The cells of gridded fields, in the order of a law's event.

A field is an array (*batch, *grid). Axes of ``per`` join the batch: with "per time" a constraint holds for every time
slice. The other axes are flattened into an event of n cells, without those outside the mask:

    (*batch, *grid)  --gather-->  (fields, n),   fields = batch x slices   --scatter-->  (*batch, *grid).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from probhard.errors import ParameterError, ShapeError


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of gridded fields, in the order of an event.

    Args:
        axes: Names of the grid's axes, in the order of the arrays.
        grid: Their sizes.
        batch: Sizes of the dimensions before the grid.
        per: Axes that join the batch, so that a constraint holds for each of their slices.
        profile: The axis that runs fastest within an event; the last one by default.
        mask: Whether a cell belongs to the domain; it broadcasts with the grid and is the same for every slice.
    """

    axes: tuple[str, ...]
    grid: tuple[int, ...]
    batch: tuple[int, ...] = ()
    per: tuple[str, ...] = ()
    profile: str | None = None
    mask: np.ndarray | None = None

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names of an event's axes, slowest first."""
        own = [axis for axis in self.axes if axis not in self.per]
        return tuple(sorted(own, key=lambda axis: axis == (self.profile or own[-1])))  # stable: only one moves

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of an event's axes, before the mask."""
        return tuple(self.grid[self.axes.index(axis)] for axis in self.order)

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the batch and of the axes that joined it."""
        return self.batch + tuple(self.grid[self.axes.index(axis)] for axis in self.per)

    @property
    def fields(self) -> int:
        """Number of events."""
        return math.prod(self.lead)

    @property
    def variables(self) -> int:
        """Number of cells n of an event."""
        return self.index.shape[1]

    @cached_property
    def index(self) -> np.ndarray:
        """Position in the flattened grid of every cell of every slice, (slices, n)."""
        where = self._by_slice(np.arange(math.prod(self.grid)).reshape(self.grid))
        return where if self.inside is None else where[:, self.inside]

    @cached_property
    def inside(self) -> np.ndarray | None:
        """Positions in an event of the cells of the domain; None if all belong to it.

        Raises:
            ParameterError: The mask is empty, or differs between slices.
        """
        if self.mask is None:
            return None
        inside = self._by_slice(self.on_grid("The mask", true(self.mask)))
        if not inside.any() or (inside != inside[:1]).any():
            raise ParameterError(
                f"The mask holds {int(inside.sum())} cells, in slices that have between {int(inside.sum(1).min())} and "
                f"{int(inside.sum(1).max())} of them.",
                "Every slice is projected on the same cells, at least one.",
                f"Use one mask for all slices along {' and '.join(self.per) or 'the batch'}.",
            )
        return np.flatnonzero(inside[0])

    def on_grid(self, name: str, array: np.ndarray) -> np.ndarray:
        """Broadcast an array to the grid.

        Raises:
            ShapeError: It does not broadcast; ``name`` names it.
        """
        return _broadcast(name, array, self.grid, self.axes)

    def gather(self, array: np.ndarray, fields: np.ndarray, columns: slice = slice(None)) -> np.ndarray:
        """Read the chosen events (*samples, fields, n) of an array (*samples, *batch, *grid), or some of its cells."""
        return np.asarray(array[self._position(fields, columns)])

    def scatter(self, array: np.ndarray, fields: np.ndarray, values: np.ndarray) -> None:
        """Write values (*samples, fields, n) into an array (*samples, *batch, *grid), except outside the mask."""
        array[self._position(fields)] = values

    def everywhere(self, name: str, array: np.ndarray, fields: np.ndarray) -> np.ndarray:
        """Read the chosen events (fields, n) of an array that broadcasts with the fields, or has one value per field.

        Raises:
            ShapeError: It does neither, or could be meant either way.
        """
        return self.gather(self._matched(name, array, self.grid, self.axes), fields)

    def shared(self, name: str, array: np.ndarray) -> np.ndarray:
        """Read an array of the grid that is the same for every slice, (n,).

        Raises:
            ShapeError: It differs between slices, or does not broadcast with the grid.
            ParameterError: It is NaN in the domain.
        """
        slices = self.on_grid(name, array).reshape(-1)[self.index]
        if np.isnan(slices).any():
            raise ParameterError(
                f"{name} are NaN in {int(np.isnan(slices).sum())} of {slices.size} cells of the domain.",
                "Every cell has its share of a sum.",
                "Save a mask that is false for these cells, or mend them.",
            )
        if (slices != slices[:1]).any():
            raise ShapeError(
                f"{name} differs between the slices along {' and '.join(self.per)}.",
                "The slices share one structure, only their values differ.",
                f"Give it the shape {self.shape} of one slice, or leave out 'per'.",
            )
        return slices[0]

    def each(self, name: str, array: np.ndarray, fields: np.ndarray, rows: tuple[int, ...] = ()) -> np.ndarray:
        """Read one value per chosen event, (fields, *rows).

        Raises:
            ShapeError: The array does not broadcast with the events, or could be meant in two ways.
        """
        rest = self.lead[len(self.batch) :] + rows
        data = self._matched(name, array, rest, self.per + ("rows",) * len(rows))
        return np.asarray(data[np.unravel_index(fields, self.lead)]) if self.lead else np.asarray(data[None])

    def columns(self, name: str, matrix: np.ndarray) -> np.ndarray:
        """Turn rows over a slice, in the order of the grid, into rows (q, n) over an event.

        Raises:
            ShapeError: The matrix has another number of columns.
        """
        own = [axis for axis in self.axes if axis not in self.per]
        sizes = tuple(self.grid[self.axes.index(axis)] for axis in own)
        if matrix.ndim < 2 or matrix[0].size != math.prod(sizes):
            raise ShapeError(
                f"{name} has shape {matrix.shape}, the grid {sizes} points along {', '.join(own)}.",
                "There is one row per law and one column per point.",
                f"Give it the shape (rows, {math.prod(sizes)}).",
            )
        turned = matrix.reshape(-1, *sizes).transpose(0, *(1 + own.index(axis) for axis in self.order))
        rows = turned.reshape(len(matrix), -1)
        return rows if self.inside is None else rows[:, self.inside]

    def steps(self, axis: str) -> sp.csr_array:
        """Rows ``u_next - u`` over an event, one for each pair of neighbours along an axis within the domain."""
        number = np.full(math.prod(self.shape), -1)
        number[slice(None) if self.inside is None else self.inside] = np.arange(self.variables)
        turned = np.moveaxis(number.reshape(self.shape), self.order.index(axis), -1)
        first, second = turned[..., :-1].ravel(), turned[..., 1:].ravel()
        both = (first >= 0) & (second >= 0)
        rows, columns = np.arange(both.sum()), np.concatenate([second[both], first[both]])
        signs = np.repeat([1.0, -1.0], len(rows))
        return sp.csr_array((signs, (np.tile(rows, 2), columns)), shape=(len(rows), self.variables))

    def _matched(self, name: str, array: np.ndarray, rest: tuple[int, ...], names: tuple[str, ...]) -> np.ndarray:
        """An array as (*batch, *rest): per batch element, or broadcast from the right; ambiguity is rejected."""
        shape, labels = self.batch + rest, ("batch",) * len(self.batch) + names
        if not rest or not self.batch or array.shape != self.batch:
            return _broadcast(name, array, shape, labels)
        alone = array.reshape(self.batch + (1,) * len(rest))
        try:
            other = np.broadcast_to(array, shape)
        except ValueError:
            return np.broadcast_to(alone, shape)
        if not np.array_equal(other, np.broadcast_to(alone, shape), equal_nan=True):
            raise ShapeError(
                f"{name} has shape {array.shape}, as the batch has and as {', '.join(names[-array.ndim :])} have.",
                "It may hold a number for each field of the batch, or for each point of these axes.",
                f"Give it the shape {alone.shape} for the batch, or {(1,) * (len(shape) - array.ndim) + array.shape}.",
            )
        return other

    def _by_slice(self, array: np.ndarray) -> np.ndarray:
        """Reorder an array of the grid to (slices, cells), cells in the order of an event."""
        turned = array.transpose([self.axes.index(axis) for axis in self.per + self.order])
        return turned.reshape(-1, math.prod(self.shape))

    def _position(self, fields: np.ndarray, columns: slice = slice(None)) -> tuple[Any, ...]:
        element, piece = np.divmod(fields, len(self.index))
        where = np.unravel_index(element[:, None], self.batch) if self.batch else ()
        return (..., *where, *np.unravel_index(self.index[piece][:, columns], self.grid))


def true(mask: np.ndarray) -> np.ndarray:
    """A mask as booleans: numbers other than 0 are true, NaN is false."""
    return np.nan_to_num(np.asarray(mask, dtype=np.float64)) != 0


def _broadcast(name: str, array: np.ndarray, shape: tuple[int, ...], names: tuple[str, ...]) -> np.ndarray:
    try:
        return np.broadcast_to(array, shape)
    except ValueError as error:
        raise ShapeError(
            f"{name} has shape {array.shape}, the fields need {shape}.",
            "It must broadcast with them, from the right.",
            f"Order its dimensions as ({', '.join(names)}), or give one number.",
        ) from error
