"""The data of constraints: numbers, arrays, frames or tensors, as real tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.errors import InfeasibleError, ParameterError


def reals(name: str, values: Any) -> Tensor:
    """Convert the data of a constraint to a real tensor.

    Args:
        name: What the data is, for errors.
        values: A number, an array, a frame or a tensor.

    Returns:
        A floating-point tensor; float64 unless ``values`` is a floating-point tensor already.

    Raises:
        ParameterError: The data is complex or not numeric.
    """
    if not isinstance(values, Tensor):
        array = np.asarray(values) if hasattr(values, "__array__") else values  # also frames
        check_real(name, array)  # a cast would drop the imaginary part
        try:
            values = torch.as_tensor(array, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ParameterError(
                f"{name}: got {values!r:.60}.",
                "Constraints are made of real numbers.",
                "Pass a number, an array or a tensor.",
            ) from error
    check_real(name, values)
    return values if values.is_floating_point() else values.to(torch.float64)


def radius_and_center(name: str, radius: Any, center: Any) -> tuple[Tensor, Tensor | None]:
    """The data of a ball, checked in eager mode.

    Args:
        name: What the ball is called, for errors.
        radius: A number or (*batch,).
        center: (*batch, n), or None for the origin.

    Raises:
        InfeasibleError: A radius is negative or NaN.
        ParameterError: The data are not real numbers, or the center is not finite.
    """
    middle = None if center is None else reals(f"The center of the {name}", center)
    size = reals(f"The radius of the {name}", radius)
    if checking():
        if not bool((size >= 0).all()):
            raise InfeasibleError(
                f"The radius of the {name} is {float(size.min()):.6g} at its smallest.",
                "A ball of negative or undefined radius has no point.",
                "Give a radius of at least 0.",
            )
        if middle is not None and not bool(torch.isfinite(middle).all()):
            raise ParameterError(
                f"The center of the {name} has NaN or infinite entries.", "No point is near it.", "Check the center."
            )
    return size, middle


def check_real(name: str, values: Any) -> None:
    """Reject complex data.

    Args:
        name: What the data is, for errors.
        values: A tensor, an array or a sparse matrix.

    Raises:
        ParameterError: The data is complex.
    """
    dtype = getattr(values, "dtype", None)
    if "complex" in str(dtype):
        raise ParameterError(
            f"{name}: got the dtype {dtype}.",
            "Constraints are made of real numbers.",
            "Treat real and imaginary parts as separate variables.",
        )
