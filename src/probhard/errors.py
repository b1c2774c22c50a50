"""Errors in three parts: what was wrong, why it matters, what to do."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


class ProbhardError(ValueError):
    """Bad input or an impossible request, explained in three parts.

    Args:
        what: What was wrong, with shapes and values.
        why: Why it matters.
        fix: What the caller can do about it.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(" ".join(part for part in (what, why, fix) if part))


class ShapeError(ProbhardError):
    """Shapes that do not fit together."""


class ParameterError(ProbhardError):
    """A parameter outside its range: NaN, infinite, a negative variance, an unknown option."""


class RankError(ProbhardError):
    """Constraint rows that are linearly dependent."""


class InfeasibleError(ProbhardError):
    """Constraints that no point satisfies."""


class ConvergenceError(ProbhardError):
    """A projection that did not reach the feasible set."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed; the message has the pip command.

    Args:
        package: Name of the package.
        extra: Extra of probhard that installs it.
        purpose: What needs it.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f'{purpose} needs {package}, which is not installed. pip install "probhard[{extra}]"')


def optional(module: str, extra: str, purpose: str, package: str | None = None) -> Any:
    """Import an optional dependency.

    Args:
        module: Module to import.
        extra: Extra of probhard that installs it.
        purpose: What needs it, for the error.
        package: Name of the package, if it is not the module's first part.

    Returns:
        The module.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(package or module.partition(".")[0], extra, purpose) from error


def check_choices(name: str, values: Sequence[str], choices: Sequence[str]) -> None:
    """Check several values against the choices of an option.

    Args:
        name: Name of the option.
        values: Its values.
        choices: Values that it may have.

    Raises:
        ParameterError: One of them is not among the choices.
    """
    for value in values:
        check_choice(name, value, tuple(choices))


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check a value against the choices of an option.

    Args:
        name: Name of the option.
        value: Its value.
        choices: Values that it may have.

    Raises:
        ParameterError: It is not among the choices.
    """
    if value not in choices:
        raise ParameterError(
            f"{name}={value!r} is not known.",
            "Each name selects one algorithm and there is no default to fall back on.",
            f"Choose one of {', '.join(map(repr, choices))}.",
        )
