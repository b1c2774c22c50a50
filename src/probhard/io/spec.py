"""Constraints from plain values, such as a YAML file holds.

    constraints:
      - conservation: {mass: total_mass}     # weights: the array cell_volumes, else the trapezoid rule of the grid
      - nonnegative
      - monotone: {direction: decreasing, axis: x}
    per: time                                # for every time slice; without it, for the whole field
    axes: [time, x]                          # of the grid; needed only where coordinate arrays do not tell

Numbers are taken as such, names are looked up among the arrays that come with the fields. ``REGISTRY`` lists what there
is: a constraint is one function whose parameters are its options, and one entry.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard import constraints as library
from probhard.constraints import Constraint, trapezoid_weights
from probhard.constraints.conservation import jump_excess
from probhard.errors import ParameterError, ShapeError
from probhard.io.fields import Cells, true

AXES = ("time", "x", "y", "z")  # names of coordinate arrays, in the order that fields have them
KEYS = ("constraints", "per", "axes")
VOLUMES, MASK = "cell_volumes", "mask"


@dataclass(frozen=True, eq=False)
class Data:
    """Cells, the arrays that belong to them, and the events that are looked at, all unless told."""

    cells: Cells
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    fields: np.ndarray | None = None
    known: dict[Any, Any] = field(default_factory=dict)  # what all events share, built once

    @property
    def chosen(self) -> np.ndarray:
        """Numbers of the events, (fields,)."""
        return np.arange(self.cells.fields) if self.fields is None else self.fields

    def array(self, option: str, value: Any) -> np.ndarray:
        """A number, a list of numbers, or the array of that name."""
        if isinstance(value, str) and value in self.arrays:
            return self.arrays[value]
        try:
            if value is not None:
                return np.asarray(value, dtype=np.float64)  # texts too, since YAML takes 1e-3 for one
        except (TypeError, ValueError):
            pass
        raise ParameterError(
            f"{option} is {value!r}, neither a number nor the name of an array.",
            "Names are looked up among the arrays that come with the fields.",
            nearest(str(value), self.arrays),
        )

    def each(self, option: str, value: Any, rows: tuple[int, ...] = ()) -> Tensor:
        """One value, or one vector, per event: (fields, *rows), or a single one for all."""
        found = self.array(option, value)
        if found.ndim == 0:
            return torch.tensor(float(found), dtype=torch.float64)
        return _tensor(self.cells.each(option, found, self.chosen, rows))

    def everywhere(self, option: str, value: Any) -> Tensor:
        """One value per cell and event, (fields, n), or a single one for all."""
        found = self.array(option, value)
        if found.ndim == 0:
            return torch.tensor(float(found), dtype=torch.float64)
        return _tensor(self.cells.everywhere(option, found, self.chosen))

    def shared(self, key: Any, build: Callable[[], Any]) -> Any:
        """What is the same for all events, built once: the library remembers structures by their tensors."""
        if key not in self.known:
            self.known[key] = build()
        return self.known[key]

    def weights(self, value: Any) -> Tensor:
        """Quadrature weights (n,): those named, else the cell volumes, else the trapezoid rule of the coordinates."""
        value = VOLUMES if value is None and VOLUMES in self.arrays else value
        if value is not None:
            return _tensor(self.cells.shared("weights", self.array("weights", value)))
        whole = np.ones(self.cells.grid)
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
            step = trapezoid_weights(_tensor(self.arrays[axis])).numpy()
            whole = whole * step.reshape([-1 if i == number else 1 for i in range(len(self.cells.axes))])
        return _tensor(self.cells.shared("weights", whole))

    def lines(self, axis: str | None) -> int | None:
        """How many profiles along an axis an event holds one after the other; None if they are not laid out so."""
        cells = self.cells
        axis = axis or cells.order[-1]
        if axis not in cells.order:
            raise ParameterError(
                f"An event has no axis {axis!r}.",
                "A profile runs along an axis that does not belong to 'per'.",
                nearest(str(axis), cells.order),
            )
        together = cells.inside is None and axis == cells.order[-1]
        return cells.variables // cells.shape[-1] if together else None


def constraint_from(spec: Mapping[str, Any] | Sequence[Any], data: Data) -> Any:
    """The constraint that plain values name: a list of entries, or a mapping with such a list and the other keys."""
    found: Any = None
    for name, options in _entries(spec):
        build = REGISTRY[name]
        try:
            part = build(data, **options)
        except (ParameterError, ShapeError) as error:
            raise type(error)(f"{name}: {error.what}", error.why, error.fix) from error
        found = part if found is None else found & part
    return found


def cells_from(
    spec: Mapping[str, Any] | Sequence[Any],
    arrays: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    dims: int | None = None,
) -> Cells:
    """The cells of fields (*batch, *grid) of a shape, from a spec and the arrays beside them.

    Axes come from the spec, else from coordinate arrays named as in ``AXES``; ``dims`` is the number of space axes.
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
    """The plain values of a YAML file of this kind; tags that would build objects are refused."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ParameterError(
            f"The {kind} {path} cannot be read ({error}).",
            "It must be YAML of plain values.",
            f"Start from '{start}'.",
        ) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name: the nearest spelling, and all there are."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}There is {', '.join(names)}." if names else "There are none."


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
        raise ParameterError(f"There is no {kind} {name!r}.", "Nothing is guessed.", nearest(str(name), known))


def _names(value: Any) -> tuple[str, ...]:
    if value is not None and not isinstance(value, str | list | tuple):
        raise ParameterError(f"Got {value!r} for axes.", "Axes have names.", "Write 'time', or '[time, x]'.")
    return () if value is None else (value,) if isinstance(value, str) else tuple(map(str, value))


def _axes(
    arrays: Mapping[str, np.ndarray], per: tuple[str, ...], shape: tuple[int, ...], dims: int | None
) -> tuple[str, ...]:
    """The axes that coordinate arrays, ``per`` and the number of space axes tell."""
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


def _tensor(array: np.ndarray) -> Tensor:
    return torch.tensor(array, dtype=torch.float64)


def _conservation(
    data: Data, mass: Any, weights: Any = None, within: Any = None, place: Any = None, fall: Any = None
) -> Constraint:
    row = data.shared(("weights", str(weights)), lambda: data.weights(weights))
    total = data.each("mass", mass)
    if place is not None or fall is not None:
        cells, axis = data.cells, data.cells.order[-1]
        whole = len(cells.order) == 1 and cells.inside is None and axis in data.arrays
        if place is None or fall is None or not whole or weights is not None or VOLUMES in data.arrays:
            raise ParameterError(
                f"It got place={place!r} and fall={fall!r} of a jump, for events over {', '.join(cells.order)}.",
                "What the trapezoid rule makes of a jump needs both, one axis with coordinates, and no other weights.",
                f"Give both and the coordinates {axis!r}, put all other axes into 'per', and leave out the mask, "
                f"weights and {VOLUMES}.",
            )
        total = total + jump_excess(_tensor(data.arrays[axis]), data.each("place", place), data.each("fall", fall))
    if within is None:
        return library.Conservation(row, total)
    slack = data.each("within", within)
    if not bool((slack >= 0).all()):
        raise ParameterError(
            f"within is {float(slack.min()):g}.",
            "It says how far the sum may be from the mass.",
            "Use numbers that are not negative.",
        )
    return library.LinearInequality.between(row, total - slack, total + slack)


def _linear_equality(data: Data, matrix: Any, value: Any = 0.0) -> Constraint:
    rows = data.shared(
        ("matrix", str(matrix)), lambda: _tensor(data.cells.columns("matrix", data.array("matrix", matrix)))
    )
    return library.LinearEquality(rows, data.each("value", value, (len(rows),)))


def _linear_inequality(data: Data, matrix: Any, bound: Any = 0.0) -> Constraint:
    rows = data.shared(
        ("matrix", str(matrix)), lambda: _tensor(data.cells.columns("matrix", data.array("matrix", matrix)))
    )
    return library.LinearInequality(rows, data.each("bound", bound, (len(rows),)))


def _fixed(data: Data, mask: Any, values: Any) -> Constraint:
    """Known values: rows that are substituted; bounds where slices or fields do not know the same cells."""
    cells, known, value = data.cells, data.array("mask", mask), data.everywhere("values", values)
    if known.ndim <= len(cells.grid):
        slices = cells.on_grid("mask", true(known)).reshape(-1)[cells.index]  # (slices, n)
        if slices.any() and (slices == slices[:1]).all():
            units = sp.csr_array(sp.eye_array(len(slices[0]), format="csr")[slices[0]])
            rows = data.shared(("fixed", str(mask)), lambda: library.LinearEquality(units))
            return rows.replace(value if value.dim() == 0 else value[:, torch.from_numpy(slices[0])])
    at = torch.from_numpy(cells.everywhere("mask", true(known), data.chosen))
    return library.Box(torch.where(at, value, -torch.inf), torch.where(at, value, torch.inf))


def _monotone(data: Data, direction: str = "increasing", axis: str | None = None) -> Constraint:
    lines = data.lines(axis)
    shape = library.Monotone(direction, lines or 1)
    if lines is not None:
        return shape
    axis = axis or data.cells.order[-1]
    rows = data.shared(("steps", axis), lambda: data.cells.steps(axis))
    return library.LinearInequality(rows if shape.direction == "decreasing" else -rows, 0.0)


def _lines(data: Data, axis: str | None) -> int:
    """The number of profiles of an event, which the total variation needs side by side."""
    lines = data.lines(axis)
    if lines is None:
        raise ParameterError(
            f"The profiles along {axis or data.cells.order[-1]!r} are cut by a mask, or cross another shape.",
            "Variation is projected along whole profiles that lie one after the other.",
            "Leave out the mask, and use one axis for all shapes.",
        )
    return lines


def _total_variation(data: Data, bound: Any, axis: str | None = None) -> Constraint:
    lines = _lines(data, axis)
    return library.TotalVariation(_per_line(data.each("bound", bound), lines), lines)


def _total_variation_penalty(data: Data, weight: Any, axis: str | None = None) -> Constraint:
    lines = _lines(data, axis)
    return library.TotalVariationPenalty(_per_line(data.each("weight", weight), lines), lines)


def _per_line(amount: Tensor, lines: int) -> Tensor:
    return amount if lines == 1 else amount.unsqueeze(-1).expand(*amount.shape, lines)


def _diminishing(data: Data, axis: str | None = None) -> Constraint:
    _lines(data, axis)
    order, shape = data.cells.order, data.cells.shape
    if len(order) != 2 or order[0] != "time":
        raise ParameterError(
            f"The events run over {', '.join(order)}.",
            "The variation of a profile diminishes in time: it needs the axis 'time' and one axis of space.",
            "Put all other axes, and not time, into 'per'.",
        )
    return library.TotalVariationDiminishing((shape[0], shape[1]))


def _box(data: Data, lower: Any = None, upper: Any = None) -> Constraint:
    bounds = {"lower": lower, "upper": upper}
    if lower is None and upper is None:
        raise ParameterError("It has no bounds.", "It would allow everything.", "Write box: {lower: 0, upper: 1}.")
    return library.Box(**{name: data.everywhere(name, x) for name, x in bounds.items() if x is not None})


def _ball(data: Data, radius: Any, center: Any = 0.0) -> Constraint:
    return library.Ball(data.each("radius", radius), data.everywhere("center", center))


def _semicontinuous(data: Data, least: Any) -> Constraint:
    """One least value per cell or, where the array has no such shape, per event."""
    try:
        return library.Semicontinuous(data.everywhere("least", least))
    except ShapeError:
        return library.Semicontinuous(data.each("least", least).unsqueeze(-1))


REGISTRY: dict[str, Callable[..., Constraint]] = {
    "ball": _ball,
    "box": _box,
    "conservation": _conservation,
    "fixed": _fixed,
    "linear_equality": _linear_equality,
    "linear_inequality": _linear_inequality,
    "monotone": _monotone,
    "nonnegative": lambda data: library.NonNegative(),
    "semicontinuous": _semicontinuous,
    "simplex": lambda data, total=1.0: library.Simplex(data.each("total", total)),
    "total_variation": _total_variation,
    "total_variation_diminishing": _diminishing,
    "total_variation_penalty": _total_variation_penalty,
}
