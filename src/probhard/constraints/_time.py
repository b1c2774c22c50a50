"""Data of one time slice, laid out for a whole field. Fields flatten time-major, n = nt * nx."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from torch import Tensor

from probhard.errors import ShapeError


def field_shape(owner: str, shape: Any) -> tuple[int, int]:
    """The shape (nt, nx) of a field, checked.

    Args:
        owner: What it is for, for errors.
        shape: The shape as it was given.

    Raises:
        ShapeError: It is not two whole numbers of at least 1.
    """
    sizes = tuple(shape) if isinstance(shape, tuple | list) else ()
    if len(sizes) != 2 or not all(isinstance(size, Integral) and int(size) > 0 for size in sizes):
        raise ShapeError(f"{owner} got shape={shape!r}.", "A field has slices of points.", "Use (nt, nx), time first.")
    return int(sizes[0]), int(sizes[1])


def rows_in_time(b: Tensor, slices: int) -> Tensor:
    """Lay out the right-hand sides of a slice for all slices.

    Args:
        b: Right-hand sides of one slice, (*batch, nt or 1, q) or (q,).
        slices: Number of slices nt.

    Returns:
        Right-hand sides of the field, (*batch, nt * q).

    Raises:
        ShapeError: The data has neither 1 nor nt entries in time.
    """
    if b.dim() < 2:
        b = b.unsqueeze(-2)
    _check(b.shape[-2], slices)
    return b.expand(*b.shape[:-2], slices, -1).flatten(-2)


def numbers_in_time(x: Tensor, slices: int) -> Tensor:
    """Expand x to one number per slice.

    Args:
        x: A single number, or (*batch, nt or 1).
        slices: Number of slices nt.

    Returns:
        One number per slice, (*batch, nt).

    Raises:
        ShapeError: The data has neither 1 nor nt entries in time.
    """
    if x.dim() == 0:
        return x.expand(slices)
    _check(x.shape[-1], slices)
    return x.expand(*x.shape[:-1], slices)


def spread_in_time(x: Tensor, slices: int, width: int) -> Tensor:
    """Expand x to one number per point of the field.

    Args:
        x: A single number, or (*batch, nt or 1, nx).
        slices: Number of slices nt.
        width: Number of points per slice nx.

    Returns:
        One number per point, (*batch, nt * nx); a single number stays a scalar.

    Raises:
        ShapeError: The data has neither 1 nor nt entries in time.
    """
    if x.numel() == 1:
        return x.reshape(())
    if x.dim() < 2:
        x = x.unsqueeze(-2)
    _check(x.shape[-2], slices)
    return x.expand(*x.shape[:-2], slices, width).flatten(-2)


def _check(count: int, slices: int) -> None:
    if count not in (1, slices):
        raise ShapeError(
            f"The slice's data has {count} entries in time, the field {slices} slices.",
            "Data that differs in time needs one entry per slice.",
            f"Give it the shape (*batch, {slices}).",
        )
