"""Surrogates of partial differential equations: exact problems, their conservation laws, and neural operators."""

from probhard.pde.adapters import OperatorBackbone
from probhard.pde.base import Problem, Split
from probhard.pde.basis import BasisNO, blocks
from probhard.pde.bayesian import BayesianNO
from probhard.pde.correlated import Correlated
from probhard.pde.diverse import DiverseNO, relative_l2
from probhard.pde.gaussian_process import GaussianProcess
from probhard.pde.laws import conservation_law, known_values, porous_medium_flux, porous_medium_law
from probhard.pde.neural_process import AttentiveNP, Observations
from probhard.pde.operators import VarianceNO
from probhard.pde.problems import PROBLEMS, Advection, Burgers, Heat, PorousMedium, Stefan
from probhard.pde.tracer import Tracer

__all__ = [
    "PROBLEMS",
    "Advection",
    "AttentiveNP",
    "BasisNO",
    "BayesianNO",
    "Burgers",
    "Correlated",
    "DiverseNO",
    "GaussianProcess",
    "Heat",
    "Observations",
    "OperatorBackbone",
    "PorousMedium",
    "Problem",
    "Split",
    "Stefan",
    "Tracer",
    "VarianceNO",
    "blocks",
    "conservation_law",
    "known_values",
    "porous_medium_flux",
    "porous_medium_law",
    "relative_l2",
]
