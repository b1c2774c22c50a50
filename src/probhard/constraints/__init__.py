"""Constraints: immutable values, structure plus this batch's data; they combine with ``&``."""

from probhard.constraints.base import Constraint
from probhard.constraints.conservation import Conservation, per_slice, trapezoid_weights
from probhard.constraints.hierarchy import Hierarchy
from probhard.constraints.intersection import Intersection
from probhard.constraints.linear import LinearEquality
from probhard.constraints.nonlinear import NonlinearEquality

__all__ = [
    "Conservation",
    "Constraint",
    "Hierarchy",
    "Intersection",
    "LinearEquality",
    "NonlinearEquality",
    "per_slice",
    "trapezoid_weights",
]
