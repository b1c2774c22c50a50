"""Data of a slice that may differ in time, laid out for a field of slices; fields flatten time-major, n = nt * nx."""

from __future__ import annotations

from torch import Tensor

from probhard.errors import ShapeError


def rows_in_time(b: Tensor, slices: int) -> Tensor:
    """Right-hand sides (*batch, nt or 1, q) of one slice as those of all, (*batch, nt * q)."""
    if b.dim() < 2:
        b = b.unsqueeze(-2)
    _check(b.shape[-2], slices)
    return b.expand(*b.shape[:-2], slices, -1).flatten(-2)


def numbers_in_time(x: Tensor, slices: int) -> Tensor:
    """One number per slice, (*batch, nt), from (*batch, nt or 1) or a single one."""
    if x.dim() == 0:
        return x.expand(slices)
    _check(x.shape[-1], slices)
    return x.expand(*x.shape[:-1], slices)


def spread_in_time(x: Tensor, slices: int, width: int) -> Tensor:
    """One number per point of the field, (*batch, nt * nx), from (*batch, nt or 1, nx); a single number stays one."""
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
            "There is one entry per slice.",
            f"Give it the shape (*batch, {slices}).",
        )
