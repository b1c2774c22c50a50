"""Shapes: convex sets, or costs, that rows with auxiliary variables of their own describe.

A shape is ``{u : B u + C s = r, s >= 0}`` for auxiliary variables s, with an optional linear cost on s. Projectors that
know rows and bounds then serve every shape: active sets under any metric, and cone solvers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse as sp
from torch import Tensor

from probhard.constraints.base import Constraint, immutable
from probhard.errors import ParameterError, ShapeError

SLACK = 1e14  # weight of an auxiliary variable of one row, relative to its row: the cost of moving it is nothing
SHARED = 1e7  # ... and of one that several rows share, where more would cancel


@dataclass(frozen=True)
class LiftedRows:
    """The rows ``B u + C s = r`` of a shape, without their right-hand sides.

    Args:
        on_u: B, (p, n).
        own: C, (p, e).
        stiffness: ``SLACK`` or ``SHARED`` for each auxiliary variable, (e,).
    """

    on_u: sp.csr_array
    own: sp.csr_array
    stiffness: np.ndarray


@dataclass(frozen=True)
class Term:
    """A part of a cvxpy problem, made from u and parameters with this batch's data.

    Args:
        key: Terms with equal keys have equal structure.
        build: Maps u and one parameter for each datum to constraints, or to a cost.
        data: (*batch, *own shape) each.
        shapes: Own shapes.
        cost: Whether it is a cost.
    """

    key: Hashable
    build: Callable[..., Any]
    data: tuple[Tensor, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    cost: bool = False


@immutable
class Shape(Constraint):
    """A convex set, or a cost, in rows with auxiliary variables that are not negative."""

    role: ClassVar[str] = "shapes"
    only_rows: ClassVar[bool] = False  # whether the set is ``B u >= 0``, without variables that rows share

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What its lifted rows depend on, beside n."""

    @abstractmethod
    def lifted(self, n: int) -> LiftedRows:
        """The rows on u (*batch, n) and on auxiliary variables."""

    @abstractmethod
    def right_side(self, n: int, like: Tensor) -> Tensor:
        """Right-hand sides r of the lifted rows, (*batch, p)."""

    def cost(self, n: int, like: Tensor) -> Tensor | None:
        """Linear cost of the auxiliary variables, (*batch, e), if there is one."""
        return None

    @abstractmethod
    def term(self, n: int, like: Tensor) -> Term:
        """The shape in cvxpy's terms."""


@immutable
class Profiles(Shape):
    """A shape of each of some consecutive profiles, of any width unless one is known.

    Attributes:
        pooled_as: Its name among the direct methods of ``projection.profiles``.
    """

    slices: int
    width: int | None

    @property
    @abstractmethod
    def pooled_as(self) -> str:
        """Its name among the direct methods of ``projection.profiles``."""

    def amounts(self, like: Tensor) -> Tensor | None:
        """One amount per slice, broadcasting with (*batch, slices), if there is one."""
        return None

    @property
    def key(self) -> Hashable:
        return type(self).__name__, self.pooled_as, self.slices

    @property
    def variables(self) -> int | None:
        """The number of all points, any if the width is not known."""
        return None if self.width is None else self.slices * self.width

    def of_width(self, width: int) -> Self:
        """The same for profiles of so many points."""
        return self._copy(width=width)


def check_slices(owner: Constraint, slices: int) -> int:
    """The number of profiles, at least 1."""
    if slices < 1:
        raise ParameterError(
            f"{type(owner).__name__} got slices={slices}.", "There is at least one profile.", "Pass slices >= 1."
        )
    return slices


def profiles(u: Tensor, slices: int) -> Tensor:
    """U (*batch, n) as (*batch, slices, n / slices)."""
    return u.unflatten(-1, (slices, profile_width(u.shape[-1], slices)))


def profile_width(n: int, slices: int) -> int:
    """Points of each profile."""
    if n % slices:
        raise ShapeError(
            f"{n} variables do not divide into {slices} slices.",
            "Fields flatten time-major, n = nt * nx.",
            "Check the shape that was given to per_slice.",
        )
    return n // slices


def differences(n: int, slices: int) -> sp.csr_array:
    """``u_(i+1) - u_i`` along each profile, (slices * (width - 1), n)."""
    width = profile_width(n, slices)
    step = sp.diags_array([-np.ones(width - 1), np.ones(width - 1)], offsets=[0, 1], shape=(width - 1, width))
    return sp.csr_array(sp.kron(sp.eye_array(slices), step))


def absolute_parts(rows: sp.csr_array) -> tuple[sp.csr_array, np.ndarray]:
    """C and stiffness of ``rows u - p + m = r``: p, m >= 0 are the positive and negative parts of ``rows u - r``."""
    count = rows.shape[0]
    return sp.csr_array(sp.hstack([-sp.eye_array(count), sp.eye_array(count)])), np.full(2 * count, SHARED)


def slices_text(slices: int) -> str:
    """The argument of a repr."""
    return "" if slices == 1 else f", slices={slices}"
