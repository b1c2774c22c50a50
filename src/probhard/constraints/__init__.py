"""Constraints: immutable values, structure plus this batch's data; they combine with ``&``."""

from probhard.constraints.base import Constraint
from probhard.constraints.conservation import Conservation, per_slice, trapezoid_weights
from probhard.constraints.hierarchy import Hierarchy
from probhard.constraints.linear import LinearEquality

__all__ = ["Conservation", "Constraint", "Hierarchy", "LinearEquality", "per_slice", "trapezoid_weights"]
