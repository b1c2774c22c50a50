"""Numeric loops, compiled by numba if it is installed, otherwise run as plain Python."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

try:
    njit: Any = import_module("numba").njit
except ImportError:  # some hundred times slower
    njit = None

AVAILABLE = njit is not None

Function = TypeVar("Function", bound=Callable[..., Any])
Array = NDArray[np.float64]


def compiled(function: Function, **options: Any) -> Function:
    """Compile a function if numba is installed, and cache the result on disk if a cache folder is writable.

    Args:
        function: A function of numbers and arrays that numba can compile.
        **options: Options of ``numba.njit``.
    """
    if not AVAILABLE:
        return function
    try:
        return cast(Function, njit(cache=True, error_model="numpy", **options)(function))
    except RuntimeError:
        return cast(Function, njit(error_model="numpy", **options)(function))


def quick(function: Function) -> Function:
    """Compile with sums in any order, which lets the compiler use vector instructions."""
    return compiled(function, fastmath={"reassoc", "contract"})
