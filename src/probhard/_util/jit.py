"""Loops over numbers, compiled by numba where it is installed; elsewhere the same source runs as plain Python."""

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
    """Compile where numba is installed, and keep the result on disk where a folder for it can be written."""
    if not AVAILABLE:
        return function
    try:
        return cast(Function, njit(cache=True, error_model="numpy", **options)(function))
    except RuntimeError:
        return cast(Function, njit(error_model="numpy", **options)(function))


def quick(function: Function) -> Function:
    """Compiled with sums in any order, several terms at a time."""
    return compiled(function, fastmath={"reassoc", "contract"})
