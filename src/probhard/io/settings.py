"""Readers of a configuration's plain values.

A reader converts a value, or raises ValueError or TypeError. ``setting`` turns these into an error that tells the user
what the value must be.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from probhard.errors import ParameterError

Reader = tuple[Callable[[Any], Any], str]  # a function, and what it accepts, in words


def whole(value: Any) -> int:
    """Read a whole number."""
    if isinstance(value, bool | str) or int(value) != value:
        raise ValueError
    return int(value)


def at_least(least: int) -> Reader:
    """A reader of whole numbers from ``least`` on."""

    def read(value: Any) -> int:
        if not least <= whole(value) < 2**63:
            raise ValueError
        return int(value)

    return read, f"a whole number from {least} to 2^63 - 1"


def number(value: Any) -> float:
    """Read a number."""
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def within(least: float, below: float, inside: bool = True) -> Callable[[Any], float]:
    """A function that reads numbers from ``least`` on (above it, if not ``inside``) and smaller than ``below``."""

    def read(value: Any) -> float:
        if not (least <= number(value) < below) or (not inside and number(value) == least):
            raise ValueError
        return float(value)

    return read


def switch(value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise ValueError
    return value


def word(value: Any) -> str:
    """Read a text."""
    if not isinstance(value, str):
        raise ValueError
    return value


def listed(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """A function that reads a list of values, or one value as a list."""
    return lambda value: [read(part) for part in value] if isinstance(value, list | tuple) else [read(value)]


def setting(name: str, value: Any, readers: Mapping[str, Reader]) -> Any:
    """Read one value of a configuration.

    Args:
        name: Name of the setting.
        value: Its value in the file.
        readers: Readers by name.

    Raises:
        ParameterError: The value is of another kind; the message says which it must be.
    """
    read, kind = readers[name]
    try:
        return read(value)
    except ParameterError:  # which says more
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ParameterError(f"{name} is {value!r}.", f"It must be {kind}.", f"Write '{name}: ...' so.") from error


def closest_name(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name, as a sentence: the closest spelling, and all known names.

    Args:
        name: The unknown name.
        known: Names that would be accepted.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}There is {', '.join(names)}." if names else "There are none."
