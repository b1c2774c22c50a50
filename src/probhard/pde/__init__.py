"""Partial differential equations with exact solutions: data and the conservation law that each of them obeys."""

from probhard.pde.laws import conservation_law, known_values, porous_medium_flux, porous_medium_law
from probhard.pde.problems import PorousMedium, Problem

__all__ = [
    "PorousMedium",
    "Problem",
    "conservation_law",
    "known_values",
    "porous_medium_flux",
    "porous_medium_law",
]
