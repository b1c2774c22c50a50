"""Constraints from plain values, such as a YAML file holds.

    constraints:
      - conservation: {mass: total_mass}     # weights: the array cell_volumes, else the trapezoid rule of the grid
      - nonnegative
      - monotone: {direction: decreasing, axis: x}
    per: time                                # for every time slice; without it, for the whole field
    axes: [time, x]                          # of the grid; needed only where coordinate arrays do not tell

Values are numbers, or names of arrays that come with the fields. ``REGISTRY`` lists the constraints.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from probhard.errors import ParameterError, ShapeError
from probhard.io.cells import Cells
from probhard.io.data import MASK, VOLUMES, Data
from probhard.io.plain import read_plain
from probhard.io.registry import REGISTRY
from probhard.io.settings import closest_name

__all__ = [
    "AXES",
    "KEYS",
    "MASK",
    "REGISTRY",
    "VOLUMES",
    "Data",
    "cells_from",
    "closest_name",
    "constraint_from",
    "read_spec",
]

AXES = ("time", "x", "y", "z")  # names of coordinate arrays, in the order that fields have them
KEYS = ("constraints", "per", "axes")


def constraint_from(spec: Mapping[str, Any] | Sequence[Any], data: Data) -> Any:
    """Build the constraint that plain values name.

    Args:
        spec: A list of entries, or a mapping with the keys ``KEYS``.
        data: Cells and arrays of the fields.

    Returns:
        The constraint; several entries are joined by ``&``.

    Raises:
        ParameterError: An entry or option is unknown, missing or has an invalid value.
        ShapeError: An array does not fit the fields.
    """
    constraint: Any = None
    for name, options in _entries(spec):
        build = REGISTRY[name]
        try:
            part = build(data, **options)
        except (ParameterError, ShapeError) as error:
            raise type(error)(f"{name}: {error.what}", error.why, error.fix) from error
        constraint = part if constraint is None else constraint & part
    return constraint


def cells_from(
    spec: Mapping[str, Any] | Sequence[Any],
    arrays: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    dims: int | None = None,
) -> Cells:
    """Cells of the fields, from a spec and the arrays beside them.

    Args:
        spec: Constraints as plain values; it may name the axes.
        arrays: Arrays by name; coordinates named as in ``AXES`` tell the axes if the spec does not.
        shape: Shape of the fields, (*batch, *grid).
        dims: Number of space axes, if neither tells.

    Raises:
        ParameterError: The axes are unknown or contradict each other.
        ShapeError: The fields are empty, or coordinates do not fit them.
    """
    top: Mapping[str, Any] = spec if isinstance(spec, Mapping) else {}
    per = _names(top.get("per"))
    axes = _names(top.get("axes")) or _axes(arrays, per, shape, dims)
    for name in per:
        _check("axis", name, axes)
    if len(set(axes)) < len(axes) or len(axes) > len(shape) or not set(per) < set(axes):
        raise ParameterError(
            f"Fields of shape {shape} got the axes {axes} and per={per}.",
            "Every axis of the grid has one name, and at least one of them is left for the constraint.",
            "Write axes in the order of the array, such as [time, x, y], and among them those of 'per'.",
        )
    grid = shape[len(shape) - len(axes) :]
    if 0 in shape:
        raise ShapeError(f"The fields have shape {shape}.", "There is nothing in them.", "Save at least one field.")
    if "axes" not in top and len(set(grid)) < len(grid):
        twin = next(size for size in grid if grid.count(size) > 1)
        alike = [axis for axis, size in zip(axes, grid) if size == twin]
        raise ParameterError(
            f"The axes {' and '.join(alike)} of the grid {grid} both have {twin} points.",
            "Nothing says in which order the arrays have them; swapped axes would pass unnoticed.",
            f"Write 'axes: [{', '.join(axes)}]' in the constraints file, in the order of the arrays.",
        )
    for axis, size in zip(axes, grid):
        if axis in arrays and arrays[axis].shape != (size,):
            raise ShapeError(
                f"The coordinates {axis!r} have shape {arrays[axis].shape}, that axis of the fields {size} points.",
                f"The fields have shape {shape} and their last axes are taken as {', '.join(axes)}.",
                "Transpose the fields, or name the axes in their order with 'axes: [...]' in the constraints file.",
            )
    shapes = [options for name, options in _entries(spec) if "axis" in options]
    profile = next((str(options["axis"]) for options in shapes), None)
    return Cells(axes, grid, shape[: len(shape) - len(axes)], per, profile, arrays.get(MASK))


def read_spec(path: Path, kind: str = "constraints file", start: str = "constraints: [nonnegative]") -> Any:
    """Read the plain values of a YAML file; tags that would build objects are rejected.

    Args:
        path: Path of the file.
        kind: What the file is, for errors.
        start: An example of its content, for errors.

    Raises:
        ParameterError: It cannot be read, is not YAML of plain values, or exceeds the limits of ``read_plain``.
    """
    return read_plain(path, kind, start)


def _entries(spec: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of the constraints, checked."""
    if isinstance(spec, Mapping):
        for key in spec:
            _check("key", key, KEYS)
    listed = spec.get("constraints") if isinstance(spec, Mapping) else spec
    if not isinstance(listed, list) or not listed:
        raise ParameterError(
            f"The constraints are {listed!r}.",
            "A list is needed.",
            "Write 'constraints:' and below it '- nonnegative'.",
        )
    return [_entry(item) for item in listed]


def _entry(item: Any) -> tuple[str, dict[str, Any]]:
    name, options = item, dict[str, Any]()
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, options),) = item.items()
        options = {} if options is None else options
    _check("constraint", name, REGISTRY)
    parameters = dict(list(inspect.signature(REGISTRY[name]).parameters.items())[1:])
    if not isinstance(options, Mapping):
        raise ParameterError(
            f"{name} got {options!r}.", "Its options have names.", f"Write '- {name}: {{{', '.join(parameters)}}}'."
        )
    for option in options:
        _check(f"option of {name}", option, parameters)
    missing = [key for key, value in parameters.items() if value.default is value.empty and key not in options]
    if missing:
        raise ParameterError(
            f"{name} lacks {', '.join(missing)}.", "It has no default.", f"Write '- {name}: {{{missing[0]}: ...}}'."
        )
    return name, dict(options)


def _check(kind: str, name: Any, known: Iterable[str]) -> None:
    if name not in tuple(known):
        raise ParameterError(f"There is no {kind} {name!r}.", "Nothing is guessed.", closest_name(str(name), known))


def _names(value: Any) -> tuple[str, ...]:
    if value is not None and not isinstance(value, str | list | tuple):
        raise ParameterError(f"Got {value!r} for axes.", "Axes have names.", "Write 'time', or '[time, x]'.")
    return () if value is None else (value,) if isinstance(value, str) else tuple(map(str, value))


def _axes(
    arrays: Mapping[str, np.ndarray], per: tuple[str, ...], shape: tuple[int, ...], dims: int | None
) -> tuple[str, ...]:
    """The axes that follow from coordinate arrays, ``per`` and the number of space axes."""
    space = AXES[1 : 1 + dims] if dims else tuple(axis for axis in AXES[1:] if axis in arrays)
    if not space and len(shape) - ("time" in per) == 1:
        space = AXES[1:2]
    if not space:
        raise ParameterError(
            f"Nothing says which dimensions of the fields' shape {shape} are the grid.",
            "The others are a batch of fields, each constrained by itself.",
            "Pass --grid-dims, add coordinate arrays x, y, z, time, or write 'axes: [x, y]' in the constraints file.",
        )
    return (AXES[:1] if "time" in arrays or "time" in per else ()) + space
