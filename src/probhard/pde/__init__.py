"""Partial differential equations with exact solutions: data and the conservation law that each of them obeys."""

from probhard.pde.base import Problem, Split
from probhard.pde.laws import conservation_law, known_values, porous_medium_flux, porous_medium_law
from probhard.pde.problems import PROBLEMS, Advection, Burgers, Heat, PorousMedium, Stefan

__all__ = [
    "PROBLEMS",
    "Advection",
    "Burgers",
    "Heat",
    "PorousMedium",
    "Problem",
    "Split",
    "Stefan",
    "conservation_law",
    "known_values",
    "porous_medium_flux",
    "porous_medium_law",
]
