"""Problems of the papers that are compared: DC3's programs, HardNet's program and HardNet's piecewise toy.

HardNet draws the same quantities as DC3 from the same seed in another order, so its matrices and optima differ. The
completed variables are those of the published data: drawn from the same generator, after all else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import probhard as ph
from experiments.optimisation.programs import EQUALITIES, INEQUALITIES, INSTANCES, VARIABLES, Program, dc3

SMALLEST = 1e-4  # of the determinant of the completed columns
TOY_POINTS, TOY_LIMIT = 50, 1.2


@dataclass(frozen=True)
class Case:
    """A program, the variables that DC3 completes on it, and the loss of DC3 in that paper."""

    program: Program
    solved: tuple[int, ...]
    penalty: float
    penalty_form: str


def dc3_case(sine: bool = False) -> Case:
    """DC3's problem, or its non-convex one."""
    random = np.random.RandomState(17)
    random.random_sample(2 * VARIABLES)
    random.normal(size=(EQUALITIES, VARIABLES))
    random.uniform(-1, 1, size=(INSTANCES, EQUALITIES))
    random.normal(size=(INEQUALITIES, VARIABLES))
    program = dc3(sine)
    return Case(program, _completed(random, program.equal), 5.0, "norms")


def hardnet_case() -> Case:
    """HardNet's non-convex problem."""
    random = np.random.RandomState(17)
    quadratic, linear = random.random_sample(VARIABLES), random.random_sample(VARIABLES)
    unequal = random.normal(size=(INEQUALITIES, VARIABLES))
    equal = random.normal(size=(EQUALITIES, VARIABLES))
    most = np.abs(unequal @ np.linalg.pinv(equal)).sum(1)
    contexts = random.uniform(-1, 1, size=(INSTANCES, EQUALITIES))
    program = Program("HardNet, non-convex", quadratic, linear, equal, unequal, most, None, contexts, sine=True)
    return Case(program, _completed(random, equal), 10.0, "squares")


def _completed(random: np.random.RandomState, equal: np.ndarray) -> tuple[int, ...]:
    """The variables that the equalities are solved for: drawn again until their columns are independent."""
    while True:
        free = random.choice(VARIABLES, VARIABLES - len(equal), replace=False)
        solved = np.setdiff1d(np.arange(VARIABLES), free)
        if abs(np.linalg.det(equal[:, solved])) > SMALLEST:
            return tuple(int(index) for index in solved)


CASES = {
    "dc3-convex": dc3_case,
    "hardnet-nonconvex": hardnet_case,
    "dc3-nonconvex": lambda: dc3_case(sine=True),
}


def toy_points() -> tuple[Tensor, Tensor]:
    """HardNet's training points: inputs (50, 1) and targets (50, 1)."""
    random = np.random.RandomState(17)
    x = torch.from_numpy(random.uniform(-TOY_LIMIT, TOY_LIMIT, size=(TOY_POINTS, 1)))
    return x, toy_target(x)


def toy_grid() -> tuple[Tensor, Tensor]:
    """HardNet's test points, which reach beyond the training points: inputs (401, 1) and targets."""
    x = torch.linspace(-2, 2, 401, dtype=torch.float64).unsqueeze(-1)
    return x, toy_target(x)


def toy_target(x: Tensor) -> Tensor:
    """The function to learn, which has four pieces."""
    outer = torch.where(x <= -1, -5 * torch.sin(torch.pi * (x + 1) / 2), 8 - 5 * x)
    inner = torch.where(x <= 0, 0.0, 4 - 9 * (x - 2 / 3) ** 2)
    return torch.where((x > -1) & (x <= 1), inner, outer)


def toy_constraint(x: Tensor) -> ph.LinearInequality:
    """One row per input: the function lies above or below a boundary that depends on the piece."""
    above = torch.where((x <= -1) | ((x > 0) & (x <= 1)), -1.0, 1.0)  # of y, as the row's coefficient
    outer = torch.where(x <= -1, -5 * torch.sin(torch.pi * (x + 1) / 2) ** 2, 7.5 - 4.5 * x)
    inner = torch.where(x <= 0, 0.0, (9 * (x - 2 / 3) ** 2 - 4) * x)
    most = torch.where((x > -1) & (x <= 1), inner, outer)
    return ph.LinearInequality(above.to(x).unsqueeze(-1), most)
