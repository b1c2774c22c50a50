"""Constraints of one time slice, lifted to every slice of a field; fields flatten time-major, n = nt * nx."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from torch import Tensor

from probhard.constraints.base import Constraint
from probhard.constraints.box import Box
from probhard.constraints.conservation import Conservation, conservation_blocks
from probhard.constraints.curved import Ball, NonlinearInequality
from probhard.constraints.equality import LinearEquality
from probhard.constraints.inequality import LinearInequality, Monotone, PreparedRows, Simplex
from probhard.constraints.intersection import Intersection
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.constraints.semicontinuous import Semicontinuous
from probhard.constraints.variation import TotalVariation, TotalVariationPenalty
from probhard.errors import ParameterError, ShapeError
from probhard.rows.system import LinearSystem


def per_slice(constraint: Constraint, shape: tuple[int, int]) -> Any:
    """Lift a slice's constraint to a field of ``shape = (nt, nx)``, flattened time-major.

    The slice's data may differ in time: its second to last dimension is then nt, so a Conservation takes a mass of
    shape (*batch, nt), a Box bounds of shape (*batch, nt, nx).
    """
    slices, width = shape
    if min(shape) < 1:
        raise ShapeError(f"per_slice got shape={shape}.", "A field has slices of points.", "Use (nt, nx), time first.")
    if constraint.variables not in (None, width):
        raise ShapeError(
            f"per_slice got a constraint on {constraint.variables} variables and slices of {width}.",
            "The constraint speaks of one slice.",
            f"Use shape=(nt, {constraint.variables}), time first.",
        )
    if isinstance(constraint, LinearEquality):
        return _linear(constraint, slices, width)
    if isinstance(constraint, Intersection):
        found: Any = None
        for part in constraint.parts():
            lifted = per_slice(part, shape)
            found = lifted if found is None else found & lifted
        return found
    if isinstance(constraint, Box):
        return Box(*(_field(bound, slices, width) for bound in (constraint.lower, constraint.upper)))
    if isinstance(constraint, Semicontinuous):
        return Semicontinuous(_field(constraint.least, slices, width))
    if isinstance(constraint, Monotone):
        return Monotone(constraint.direction, slices).of_width(width)
    if isinstance(constraint, TotalVariation | TotalVariationPenalty | Simplex):
        data = constraint.total if isinstance(constraint, Simplex) else constraint.amount
        return type(constraint)(_in_time(data, slices), slices).of_width(width)
    if isinstance(constraint, LinearInequality):
        return _inequality(constraint, slices)
    if isinstance(constraint, NonlinearEquality):
        return _curved(constraint, slices, width)
    if isinstance(constraint, NonlinearInequality) and not isinstance(constraint, Ball):
        lifted = _curved(constraint.function, slices, width)
        return NonlinearInequality(lifted.fn, lifted.args, constraint.convex)
    raise ParameterError(
        f"per_slice cannot lift a {type(constraint).__name__}.",
        "It has no form for every slice of a field.",
        "Put the slices into the batch dimensions, or build the field's constraint directly.",
    )


def _linear(constraint: LinearEquality, slices: int, width: int) -> LinearEquality:
    b = _rows_in_time(constraint.b, slices)
    if isinstance(constraint, Conservation):
        return LinearEquality.from_system(conservation_blocks(constraint.weights, slices), b)
    matrix, _, held = constraint.stackable()
    lifted = sp.csr_array(sp.kron(sp.eye_array(slices), matrix))
    everywhere = (held[None, :] + width * np.arange(slices)[:, None]).ravel()
    return LinearEquality.from_system(LinearSystem.of(lifted, everywhere), b, constraint.rank)


def _inequality(constraint: LinearInequality, slices: int) -> LinearInequality:
    if constraint.prepared.matrix is None:
        raise ParameterError(
            "per_slice cannot lift rows that differ between batch elements.",
            "One pattern serves all slices.",
            "Build the field's rows directly.",
        )
    lifted = PreparedRows(sp.csr_array(sp.kron(sp.eye_array(slices), constraint.prepared.matrix)))
    return LinearInequality.from_rows(lifted, _rows_in_time(constraint.d, slices))


def _curved(constraint: NonlinearEquality, slices: int, width: int) -> NonlinearEquality:
    """Data (*batch, nt or 1, own) of slices travels as (*batch, nt * own), since what leads in it is batch."""
    own = [a.shape[-1] if isinstance(a, Tensor) and a.dim() > 1 else None for a in constraint.args]
    flat = tuple(a if size is None else _rows_in_time(a, slices) for a, size in zip(constraint.args, own))

    def fn(u: Tensor, *args: Any) -> Tensor:
        parts = (a if size is None else a.unflatten(-1, (slices, size)) for a, size in zip(args, own))
        return constraint.fn(u.unflatten(-1, (slices, width)), *parts).flatten(-2)

    return NonlinearEquality(fn, flat)


def _rows_in_time(b: Tensor, slices: int) -> Tensor:
    """Right-hand sides (*batch, nt or 1, q) of one slice as those of all, (*batch, nt * q)."""
    if b.dim() < 2:
        b = b.unsqueeze(-2)
    _check(b.shape[-2], slices)
    return b.expand(*b.shape[:-2], slices, -1).flatten(-2)


def _in_time(x: Tensor, slices: int) -> Tensor:
    if x.dim() == 0:
        return x.expand(slices)
    _check(x.shape[-1], slices)
    return x.expand(*x.shape[:-1], slices)


def _field(bound: Tensor, slices: int, width: int) -> Tensor:
    if bound.numel() == 1:
        return bound.reshape(())
    if bound.dim() < 2:
        bound = bound.unsqueeze(-2)
    _check(bound.shape[-2], slices)
    return bound.expand(*bound.shape[:-2], slices, width).flatten(-2)


def _check(found: int, slices: int) -> None:
    if found not in (1, slices):
        raise ShapeError(
            f"The slice's data has {found} entries in time, the field {slices} slices.",
            "There is one entry per slice.",
            f"Give it the shape (*batch, {slices}).",
        )
