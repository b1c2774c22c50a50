"""Helpers about tensors: when values may be read, shapes, sums over segments, copies per device, numpy views."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from probhard.errors import ShapeError

CACHES = (
    "_copies",
    "_compressed_rows",
    "_sizes",
    "_last_side",
    "_unit_factors",
)  # attributes that belong to one dtype and device


def checking() -> bool:
    """Whether value checks may look at the data: eager mode, outside compile, export and torch.func."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def broadcast(*shapes: Sequence[int]) -> torch.Size:
    """``torch.broadcast_shapes`` with a shortcut for equal shapes, where torch's own takes longer than a projection.

    Args:
        *shapes: One shape or more.

    Returns:
        The common shape.

    Raises:
        RuntimeError: The shapes cannot be broadcast.
    """
    if torch.compiler.is_compiling():  # a comparison would fix a dynamic size
        return torch.broadcast_shapes(*shapes)
    first = torch.Size(shapes[0])
    if all(tuple(shape) == tuple(first) for shape in shapes[1:]):
        return first
    return torch.broadcast_shapes(*shapes)


def broadcast_batch(first: torch.Size, second: torch.Size, a: str, b: str) -> torch.Size:
    """The common batch shape of two things, or a ShapeError that names them."""
    try:
        return broadcast(first, second)
    except RuntimeError as error:
        raise ShapeError(
            f"The batch shape of {a} is {tuple(first)}, that of {b} {tuple(second)}.",
            "They belong to one batch and must broadcast, from the right.",
            "Give both the same leading dimensions.",
        ) from error


def plain(x: Tensor) -> bool:
    """Whether the numbers of x may leave torch: on a CPU, outside compile, torch.func and forward-mode derivatives."""
    if x.device.type != "cpu" or not checking() or forward_ad._current_level >= 0:
        return False
    return not torch._C._functorch.is_legacy_batchedtensor(x)  # of autograd.grad(..., is_grads_batched=True)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Constraints are solved in the precision that they were given in."""
    if x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient that is 0, with gradient 0, where the denominator is 0."""
    regular = denominator > 0
    return torch.where(regular, numerator / torch.where(regular, denominator, 1.0), 0.0)


def segment_sum(x: Tensor, segment: Tensor, count: int) -> Tensor:
    """Sums of x (..., k) over equal entries of ``segment`` (k,), as (..., count)."""
    return x.new_zeros(*x.shape[:-1], count).index_add(-1, segment, x)


def columns_of(product: Callable[[Tensor], Tensor], size: int, like: Tensor) -> Tensor:
    """The matrix (*batch, p, size) of a product; ``like`` (*batch, ...) gives batch dimensions, dtype and device."""
    identity = torch.eye(size, dtype=like.dtype, device=like.device)
    return product(identity.reshape(size, *[1] * (like.dim() - 1), size)).movedim(0, -1)


def matrix(x: Tensor) -> np.ndarray:
    """The numbers of x (..., k) as one contiguous matrix; a view where x is contiguous."""
    return x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()


def vector(x: Tensor) -> np.ndarray:
    """All numbers of x in one contiguous row; a view where x is contiguous."""
    return x.detach().reshape(-1).contiguous().numpy()


class OnDevice:
    """Tensors held as attributes, with one cached copy per dtype and device."""

    def at(self, like: Tensor) -> Self:
        """This object with its floating tensors in the dtype, and all tensors on the device, of ``like``."""
        copies = self.__dict__.setdefault("_copies", {})
        key = (like.dtype, like.device)
        if key in copies:
            return copies[key]
        moved = {name: _move(value, like) for name, value in vars(self).items() if name not in CACHES}
        twin = self
        if any(moved[name] is not vars(self)[name] for name in moved):
            twin = copy.copy(self)
            vars(twin).clear()
            vars(twin).update(moved)
        if checking():  # tensors of a traced graph must not outlive it
            copies[key] = twin
        return twin


def _move(value: Any, like: Tensor) -> Any:
    """A tensor, a part or a tuple of parts moved to ``like``; anything else, and what is there already, as it is."""
    if isinstance(value, Tensor):
        return _cast(value, like)
    if isinstance(value, OnDevice):
        return value.at(like)
    if isinstance(value, tuple) and value and isinstance(value[0], OnDevice):
        parts = tuple(part.at(like) for part in value)
        return value if all(a is b for a, b in zip(parts, value)) else parts
    return value


def _cast(x: Tensor, like: Tensor) -> Tensor:
    dtype = like.dtype if x.is_floating_point() else x.dtype
    return x if x.dtype == dtype and x.device == like.device else x.to(like.device, dtype)
