"""Surrogates of partial differential equations: exact problems, their conservation laws, and neural operators."""

from probhard.pde.adapters import OperatorBackbone
from probhard.pde.base import Problem, Split
from probhard.pde.correlated import Correlated
from probhard.pde.laws import conservation_law, known_values, porous_medium_flux, porous_medium_law
from probhard.pde.operators import VarianceNO
from probhard.pde.problems import PROBLEMS, Advection, Burgers, Heat, PorousMedium, Stefan
from probhard.pde.tracer import Tracer

__all__ = [
    "PROBLEMS",
    "Advection",
    "Burgers",
    "Correlated",
    "Heat",
    "OperatorBackbone",
    "PorousMedium",
    "Problem",
    "Split",
    "Stefan",
    "Tracer",
    "VarianceNO",
    "conservation_law",
    "known_values",
    "porous_medium_flux",
    "porous_medium_law",
]
