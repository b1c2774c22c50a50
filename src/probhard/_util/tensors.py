"""Shapes of tensors, and whether their values may be checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
