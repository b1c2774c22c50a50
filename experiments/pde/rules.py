"""Rules: constraints of a PDE problem by name, each a function of the problem and its parameters ``(batch,)``."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from experiments.pde.measures import Rule
from probhard.constraints import Box, NonNegative, TotalVariationDiminishing, TotalVariationPenalty, per_slice
from probhard.constraints.base import Constraint
from probhard.pde.base import Problem
from probhard.pde.laws import known_values, porous_medium_law
from probhard.pde.problems import PorousMedium

VARIATIONS = (0.01, 0.1, 1.0, 10.0)  # weights of the total variation penalty to choose from, per unit of log density
STEEP = 0.1  # the weight that the table of total variation chose


def _law(problem: Problem, parameter: Tensor) -> Constraint:
    assert isinstance(problem, PorousMedium)
    return porous_medium_law(problem, parameter)


def _known(problem: Problem, parameter: Tensor) -> Constraint:
    assert isinstance(problem, PorousMedium)
    return known_values(problem, parameter)


def _variation(weight: float, problem: Problem, parameter: Tensor) -> Constraint:
    return per_slice(TotalVariationPenalty(weight) & Box(0.0, 1.0), problem.shape)


def _steep(mass: bool, problem: Problem, parameter: Tensor) -> Constraint:
    known = Box(*problem.bounds(parameter)) & TotalVariationPenalty(STEEP)
    return per_slice(problem.slice_interval(parameter) & known if mass else known, problem.shape)


RULES: dict[str, Rule] = {
    "mass": lambda problem, parameter: problem.constraint(parameter),
    "physics": lambda problem, parameter: problem.physics(parameter),
    "interval": lambda problem, parameter: problem.physics(parameter, "interval"),
    "jump": lambda problem, parameter: problem.physics(parameter, "jump"),
    "phases": lambda problem, parameter: problem.physics(parameter, "jump", phases=True),
    "steep": partial(_steep, False),
    "steep, interval": partial(_steep, True),
    "known": _known,
    "known, positive": lambda problem, parameter: _known(problem, parameter) & NonNegative(),
    "flux": _law,
    "flux, positive": lambda problem, parameter: _law(problem, parameter) & NonNegative(),
    **{f"variation {weight:g}": partial(_variation, weight) for weight in VARIATIONS},
    "diminishing": lambda problem, parameter: TotalVariationDiminishing(problem.shape) & Box(0.0, 1.0),
}
