"""Constraints: immutable values that hold structure and this batch's data. They combine with ``&``."""

from probhard.constraints.ball import Ball
from probhard.constraints.base import Constraint
from probhard.constraints.box import Box, NonNegative
from probhard.constraints.cones import matrix_of, vectorise
from probhard.constraints.conservation import Conservation, trapezoid_weights
from probhard.constraints.convex import Convex
from probhard.constraints.convex_program import ConvexProgram
from probhard.constraints.equality import LinearEquality
from probhard.constraints.hierarchy import Hierarchy
from probhard.constraints.inequality import LinearInequality
from probhard.constraints.intersection import Intersection
from probhard.constraints.l1_ball import L1Ball
from probhard.constraints.monotone import Monotone
from probhard.constraints.nonlinear import NonlinearEquality, NonlinearInequality
from probhard.constraints.second_order_cone import SecondOrderCone
from probhard.constraints.semicontinuous import Semicontinuous
from probhard.constraints.semidefinite import Correlation, PositiveSemidefinite
from probhard.constraints.simplex import Simplex
from probhard.constraints.slices import per_slice
from probhard.constraints.variation import TotalVariation, TotalVariationDiminishing, TotalVariationPenalty

__all__ = [
    "Ball",
    "Box",
    "Conservation",
    "Constraint",
    "Convex",
    "ConvexProgram",
    "Correlation",
    "Hierarchy",
    "Intersection",
    "L1Ball",
    "LinearEquality",
    "LinearInequality",
    "Monotone",
    "NonNegative",
    "NonlinearEquality",
    "NonlinearInequality",
    "PositiveSemidefinite",
    "SecondOrderCone",
    "Semicontinuous",
    "Simplex",
    "TotalVariation",
    "TotalVariationDiminishing",
    "TotalVariationPenalty",
    "matrix_of",
    "per_slice",
    "trapezoid_weights",
    "vectorise",
]
