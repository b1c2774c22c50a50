"""Partial differential equations with exact solutions: data and the conservation law that each of them obeys."""

from probhard.pde.problems import PorousMedium, Problem

__all__ = ["PorousMedium", "Problem"]
