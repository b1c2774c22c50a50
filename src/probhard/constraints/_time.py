"""Data of one time slice, laid out for a whole field. Fields flatten time-major, n = nt * nx."""

from __future__ import annotations

from torch import Tensor

from probhard.errors import ShapeError


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
