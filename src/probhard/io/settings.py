"""Plain values of a configuration file, each read as what it must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from probhard.errors import ParameterError

Reader = tuple[Callable[[Any], Any], str]  # raises ValueError or TypeError for what is not ..., in words


def whole(value: Any) -> int:
    """A whole number."""
    if isinstance(value, bool | str) or int(value) != float(value):
        raise ValueError
    return int(value)


def at_least(least: int) -> Reader:
    """A whole number, not below another."""

    def read(value: Any) -> int:
        if not least <= whole(value) < 2**63:
            raise ValueError
        return int(value)

    return read, f"a whole number from {least} to 2^63 - 1"


def number(value: Any) -> float:
    """A number."""
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def within(least: float, below: float, inside: bool = True) -> Callable[[Any], float]:
    """A number from ``least`` on (or above it) and below another."""

    def read(value: Any) -> float:
        if not (least <= number(value) < below) or (not inside and number(value) == least):
            raise ValueError
        return float(value)

    return read


def switch(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError
    return value


def word(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError
    return value


def listed(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """One or several."""
    return lambda value: [read(part) for part in value] if isinstance(value, list | tuple) else [read(value)]


def setting(name: str, value: Any, readers: Mapping[str, Reader]) -> Any:
    """A value of a configuration, or an error that says what it must be."""
    read, kind = readers[name]
    try:
        return read(value)
    except ParameterError:  # which says more
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ParameterError(f"{name} is {value!r}.", f"It must be {kind}.", f"Write '{name}: ...' so.") from error
