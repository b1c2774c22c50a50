"""``REGISTRY``: the constraints that a file can name.

An entry is a function whose parameters after ``data`` are the constraint's options. A new constraint needs one function
and one entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import scipy.sparse as sp
import torch
from torch import Tensor

from probhard import constraints as library
from probhard.constraints import Constraint
from probhard.constraints.conservation import jump_excess
from probhard.errors import ParameterError, ShapeError
from probhard.io.cells import true
from probhard.io.data import VOLUMES, Data, as_tensor


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
        total = total + jump_excess(as_tensor(data.arrays[axis]), data.each("place", place), data.each("fall", fall))
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


def _matrix(data: Data, matrix: Any) -> Tensor:
    """Rows (q, n) over the cells of an event."""
    return data.shared(
        ("matrix", str(matrix)), lambda: as_tensor(data.cells.columns("matrix", data.array("matrix", matrix)))
    )


def _linear_equality(data: Data, matrix: Any, value: Any = 0.0) -> Constraint:
    rows = _matrix(data, matrix)
    return library.LinearEquality(rows, data.each("value", value, (len(rows),)))


def _linear_inequality(data: Data, matrix: Any, bound: Any = 0.0) -> Constraint:
    rows = _matrix(data, matrix)
    return library.LinearInequality(rows, data.each("bound", bound, (len(rows),)))


def _fixed(data: Data, mask: Any, values: Any) -> Constraint:
    """Known values: as equations if all slices know the same cells, otherwise as equal bounds."""
    cells, where, value = data.cells, data.array("mask", mask), data.everywhere("values", values)
    if where.ndim <= len(cells.grid):
        slices = cells.on_grid("mask", true(where)).reshape(-1)[cells.index]  # (slices, n)
        if slices.any() and (slices == slices[:1]).all():
            units = sp.csr_array(sp.eye_array(len(slices[0]), format="csr")[slices[0]])
            rows = data.shared(("fixed", str(mask)), lambda: library.LinearEquality(units))
            return rows.replace(value if value.dim() == 0 else value[:, torch.from_numpy(slices[0])])
    at = torch.from_numpy(cells.everywhere("mask", true(where), data.chosen))
    return library.Box(torch.where(at, value, -torch.inf), torch.where(at, value, torch.inf))


def _monotone(data: Data, direction: str = "increasing", axis: str | None = None) -> Constraint:
    profiles = data.profiles(axis)
    shape = library.Monotone(direction, profiles or 1)
    if profiles is not None:
        return shape
    axis = axis or data.cells.order[-1]
    rows = data.shared(("steps", axis), lambda: data.cells.steps(axis))
    return library.LinearInequality(rows if shape.direction == "decreasing" else -rows, 0.0)


def _convex(data: Data, direction: str = "up", axis: str | None = None) -> Constraint:
    """On the coordinates of the axis, if the file has them."""
    profiles, places = _profiles(data, axis), data.arrays.get(axis or data.cells.order[-1])
    return library.Convex(direction, None if places is None else as_tensor(places), profiles)


def _profiles(data: Data, axis: str | None) -> int:
    """Number of profiles of an event; shapes without rows of their own need them one after the other."""
    profiles = data.profiles(axis)
    if profiles is None:
        raise ParameterError(
            f"The profiles along {axis or data.cells.order[-1]!r} are cut by a mask, or cross another shape.",
            "Variation and convexity need whole profiles that lie one after the other.",
            "Leave out the mask, and use one axis for all shapes.",
        )
    return profiles


def _total_variation(data: Data, bound: Any, axis: str | None = None) -> Constraint:
    profiles = _profiles(data, axis)
    return library.TotalVariation(_per_profile(data.each("bound", bound), profiles), profiles)


def _total_variation_penalty(data: Data, weight: Any, axis: str | None = None) -> Constraint:
    profiles = _profiles(data, axis)
    return library.TotalVariationPenalty(_per_profile(data.each("weight", weight), profiles), profiles)


def _per_profile(amount: Tensor, profiles: int) -> Tensor:
    return amount if profiles == 1 else amount.unsqueeze(-1).expand(*amount.shape, profiles)


def _diminishing(data: Data, axis: str | None = None) -> Constraint:
    _profiles(data, axis)
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
    """One least value per cell, or per event if the array has no such shape."""
    try:
        return library.Semicontinuous(data.everywhere("least", least))
    except ShapeError:
        return library.Semicontinuous(data.each("least", least).unsqueeze(-1))


REGISTRY: dict[str, Callable[..., Constraint]] = {
    "ball": _ball,
    "box": _box,
    "conservation": _conservation,
    "convex": _convex,
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
