"""Shapes: convex sets or costs described by rows with auxiliary variables.

A shape is ``{u : B u + C s = r, s >= 0}`` with auxiliary variables s and an optional linear cost on s. Any solver for
rows and bounds can therefore project on it: active sets under any metric, and cone solvers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse as sp
from torch import Tensor

from probhard.constraints.base import Constraint, immutable
from probhard.errors import ParameterError, ShapeError

SLACK = 1e14  # weight of an auxiliary variable in one row, relative to that row: moving it costs nothing
SHARED = 5e6  # the same if several rows share it; a larger weight would lose digits


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
    """A part of a cvxpy problem: constraints or a cost, with this batch's data as parameters.

    Args:
        key: Terms with equal keys have equal structure.
        build: Maps u and one parameter per datum to a list of constraints, or to a cost.
        data: Values of the parameters, each (*batch, *own shape).
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
    """A convex set, or a cost, as rows with non-negative auxiliary variables."""

    role: ClassVar[str] = "shapes"
    only_rows: ClassVar[bool] = False  # whether the set is ``B u >= 0``, with no shared auxiliary variable

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What its lifted rows depend on, besides n."""

    @abstractmethod
    def lifted(self, n: int) -> LiftedRows:
        """The rows on n variables and on the auxiliary ones; raises ShapeError if n does not fit."""

    @abstractmethod
    def right_side(self, n: int, like: Tensor) -> Tensor:
        """Right-hand sides r of the lifted rows, (*batch, p), in the dtype of ``like``."""

    def cost(self, n: int, like: Tensor) -> Tensor | None:
        """Linear cost of the auxiliary variables, (*batch, e), or None."""
        return None

    @abstractmethod
    def term(self, n: int, like: Tensor) -> Term:
        """The shape as part of a cvxpy problem in n variables, with data in the dtype of ``like``."""


@immutable
class Profiles(Shape):
    """The same shape for each of several consecutive profiles.

    Attributes:
        slices: Number of profiles.
        width: Points per profile; None if any number fits.
    """

    slices: int
    width: int | None

    @property
    @abstractmethod
    def pooled_as(self) -> str:
        """Its name in ``projection.profiles.SHAPES``."""

    def amounts(self, like: Tensor) -> Tensor | None:
        """One amount per slice, broadcasting with (*batch, slices), or None."""
        return None

    @property
    def key(self) -> Hashable:
        return type(self).__name__, self.pooled_as, self.slices

    @property
    def variables(self) -> int | None:
        return None if self.width is None else self.slices * self.width

    def of_width(self, width: int) -> Self:
        """The same for profiles of ``width`` points."""
        return self._copy(width=width)


def check_slices(owner: Constraint, slices: int) -> int:
    """Return ``slices``, checked.

    Args:
        owner: The constraint, for errors.
        slices: Number of profiles.

    Raises:
        ParameterError: It is no whole number of at least 1.
    """
    if not isinstance(slices, Integral) or slices < 1:
        raise ParameterError(
            f"{type(owner).__name__} got slices={slices!r}.",
            "It needs a whole number of profiles, at least one.",
            "Pass slices >= 1.",
        )
    return int(slices)


def profiles(u: Tensor, slices: int) -> Tensor:
    """Reshape u (*batch, n) to (*batch, slices, n / slices); raises ShapeError if n does not divide."""
    return u.unflatten(-1, (slices, profile_width(u.shape[-1], slices)))


def profile_width(n: int, slices: int) -> int:
    """Points per profile, n / slices; raises ShapeError if n does not divide."""
    if n % slices:
        raise ShapeError(
            f"{n} variables do not divide into {slices} slices.",
            "Fields flatten time-major, n = nt * nx.",
            "Check the shape passed to per_slice.",
        )
    return n // slices


def differences(n: int, slices: int) -> sp.csr_array:
    """``u_(i+1) - u_i`` along each profile, (slices * (width - 1), n)."""
    width = profile_width(n, slices)
    step = sp.diags_array([-np.ones(width - 1), np.ones(width - 1)], offsets=[0, 1], shape=(width - 1, width))
    return sp.csr_array(sp.kron(sp.eye_array(slices), step))


def absolute_parts(rows: sp.csr_array) -> tuple[sp.csr_array, np.ndarray]:
    """C and stiffness of ``rows u - p + m = r``: p, m >= 0 are the positive and negative parts of ``rows u - r``.

    Args:
        rows: (k, n).

    Returns:
        C (k, 2 k) and the stiffness of p and m (2 k,).
    """
    count = rows.shape[0]
    return sp.csr_array(sp.hstack([-sp.eye_array(count), sp.eye_array(count)])), np.full(2 * count, SHARED)


def slices_text(slices: int) -> str:
    """The argument ``slices`` in a repr; empty if it is 1."""
    return "" if slices == 1 else f", slices={slices}"
