"""Helpers about tensors: when values may be read, shapes, sums over segments, copies per device, numpy views."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from probhard._util.numerics import SMALLEST
from probhard.errors import ParameterError, ShapeError

CACHES = (
    "_copies",
    "_compressed_rows",
    "_sizes",
    "_rows_form",
    "_last_side",
    "_unit_factors",
    "_squares",
    "_splits",
    "_boxes",
)  # attributes that belong to one dtype and device


def checking() -> bool:
    """Whether value checks may look at the data: eager mode, outside compile, export and torch.func."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def no_transforms() -> AbstractContextManager[Any]:
    """Leave ``torch.func`` for a while: tensors made inside can be kept, those of its transforms cannot."""
    if checking() or torch.compiler.is_compiling():
        return nullcontext()
    return temporarily_clear_interpreter_stack()


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


def rows_of(transposed: Callable[[Tensor], Tensor], count: int, like: Tensor) -> Tensor:
    """The matrix A (*batch, count, n) of a product ``A^T y``; ``like`` (*batch, ...) gives the batch and the dtype."""
    identity = torch.eye(count, dtype=like.dtype, device=like.device)
    return transposed(identity.reshape(count, *[1] * (like.dim() - 1), count)).movedim(0, -2)


def matrix(x: Tensor) -> np.ndarray:
    """The numbers of x (..., k) as one contiguous matrix; a view where x is contiguous."""
    return x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()


def vector(x: Tensor) -> np.ndarray:
    """All numbers of x in one contiguous row; a view where x is contiguous."""
    return x.detach().reshape(-1).contiguous().numpy()


def relative(residual: Tensor, scale: Tensor, size: Tensor | None) -> Tensor:
    """``|residual| / scale`` with scales of at least a millionth of ``size`` (*batch, 1), and never 0."""
    floor = residual.new_tensor(SMALLEST.get(residual.dtype, SMALLEST[torch.float32]))
    return residual.abs() / torch.maximum(scale, floor if size is None else torch.maximum(1e-6 * size, floor))


class _SafeSqrt(torch.autograd.Function):
    """Square root with gradient ``1 / (2 sqrt(x))``, and 0 at 0, in few passes: every training step runs it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(min=0).sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        # root / root^2 is 0 at 0, and takes a third of the time of a masked quotient.
        return gradient * (0.5 * root / (root.square() + torch.finfo(root.dtype).tiny))


class _DualSafeSqrt(_SafeSqrt):
    """``_SafeSqrt`` with forward-mode derivatives, which torch.compile cannot trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _SafeSqrt.backward(ctx, tangent)


def safe_sqrt(x: Tensor) -> Tensor:
    """Square root of ``max(x, 0)`` whose gradient is 0, not infinite, where ``x <= 0``.

    Args:
        x: Any shape.

    Returns:
        The root, of the shape of x.
    """
    function = _SafeSqrt if torch.compiler.is_compiling() else _DualSafeSqrt
    return cast(Tensor, function.apply(x))


def matvec(
    matrix: Tensor,  # (*batch, p, n)
    x: Tensor,  # (*samples, *batch, n)
) -> Tensor:
    """Matrix times vector along the last dimension; sample dimensions become columns of one product.

    Args:
        matrix: (*batch, p, n).
        x: (*samples, *batch, n).

    Returns:
        The products, (*samples, *batch, p).
    """
    if matrix.dim() == 2:
        return x @ matrix.mT
    extra = x.dim() - (matrix.dim() - 1)
    if extra <= 0:
        return (matrix @ x.unsqueeze(-1)).squeeze(-1)
    columns = x.flatten(0, extra - 1).movedim(0, -1)  # (*batch, n, samples)
    return (matrix @ columns).movedim(-1, 0).unflatten(0, x.shape[:extra])


def check_finite(name: str, x: Tensor, minimum: float | None = None) -> None:
    """Check the entries of a tensor in one pass over the data.

    Args:
        name: How error messages call it.
        x: Any shape.
        minimum: Smallest permitted entry, if there is one.

    Raises:
        ParameterError: If an entry is NaN, infinite or below ``minimum``.
    """
    if x.numel() == 0:
        return
    low, high = (float(v) for v in torch.aminmax(x.detach()))
    if not (low > -torch.inf and high < torch.inf):
        bad = int((~torch.isfinite(x)).sum())
        raise ParameterError(
            f"{name} has {bad} NaN or infinite entries out of {x.numel()}.",
            "A projection would spread them over every coordinate that shares a constraint.",
            "Look for an exploding network or unscaled inputs before the projection.",
        )
    if minimum is not None and low < minimum:
        raise ParameterError(
            f"{name} has {int((x < minimum).sum())} entries below {minimum:g}; the smallest is {low:.4g}.",
            "It must not be negative.",
            "Map the raw network output through softplus or exp.",
        )


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
