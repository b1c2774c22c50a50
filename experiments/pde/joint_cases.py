"""The fields behind the table of joint laws: data, network and constraint of every problem.

The four linear problems are those of the table ``pde-linear``. The tracer is a 2-D field from a solver of our own.
Every problem also has calibration fields, which neither training nor early stopping sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.pde.measures import dataset
from probhard.constraints.base import Constraint
from probhard.model import Batch
from probhard.pde.problems import PROBLEMS
from probhard.pde.tracer import Flow, Tracer
from probhard.score import BlockMeans, Directions, Functionals
from probhard.training import Schedule

CALIBRATION = 60  # fields per seed
SIZES = (2, 4, 8, 16)  # sides of the blocks whose means are scored
APART = 10_000  # distance of the seed of the calibration fields from that of the others


class Data(NamedTuple):
    """Training and validation data in the precision of training; the others in float64."""

    train: Batch
    validation: Batch
    calibration: Batch
    test: Batch


@dataclass(frozen=True)
class Case:
    """A problem of the table.

    Args:
        name: Of the problem.
        shape: Of a field.
        data: All data, of a seed and numbers of fields for training, validation, calibration and test.
        constraint: The mass, of a batch's context.
        schedule: Of training.
        network: Options of ``VarianceNO``.
        periodic: Whether both axes are.
    """

    name: str
    shape: tuple[int, int]
    data: Callable[[int, tuple[int, int, int, int]], Data]
    constraint: Callable[[Tensor], Constraint]
    schedule: Schedule = field(default_factory=lambda: Schedule(150))
    network: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, int, int, int] = (160, 40, CALIBRATION, 100)
    periodic: bool = False

    @property
    def blocks(self) -> BlockMeans:
        """Means over blocks of all sizes, which training and calibration score."""
        return BlockMeans(self.shape, SIZES)

    @property
    def functionals(self) -> Functionals:
        """All functionals that are measured: block means, the mean of all cells, and the integral that is conserved.

        The constraint fixes the integral. Without periodicity the trapezoid rule halves the cells at the walls, so that
        the mean of all cells differs from it by those.
        """
        inner = torch.ones(self.shape[1], dtype=torch.float64)
        if not self.periodic:
            inner[0] = inner[-1] = 0.5
        integral = (inner / inner.sum() / self.shape[0]).repeat(self.shape[0])
        return BlockMeans(self.shape, (*SIZES, "total")) + Directions(integral[None], ["integral"])


def _linear(name: str) -> Case:
    problem = PROBLEMS[name]()
    exact = replace(problem, dtype=torch.float64)

    def data(seed: int, sizes: tuple[int, int, int, int]) -> Data:
        train, validation, calibration, test = sizes
        seen = problem.split(seed, train, validation, test)
        others = exact.parameters(calibration, torch.Generator().manual_seed(APART + seed))
        unseen = exact.split(seed, train, validation, test).test
        return Data(
            *(dataset(problem, part) for part in seen[:2]), *(dataset(exact, part) for part in (others, unseen))
        )

    def constraint(parameter: Tensor) -> Constraint:
        return (exact if parameter.dtype == torch.float64 else problem).constraint(parameter)

    return Case(name, problem.shape, data, constraint)


def _tracer() -> Case:
    tracer = Tracer()

    def batch(flow: Flow, dtype: torch.dtype) -> Batch:
        parts = tracer.inputs(flow), tracer.solution(flow).flatten(-2), tracer.mass(flow)
        inputs, target, mass = (part.to(dtype) for part in parts)
        return Batch(inputs, target, None, mass)

    def data(seed: int, sizes: tuple[int, int, int, int]) -> Data:
        generator = torch.Generator().manual_seed(seed)
        train, validation, calibration, test = (tracer.draw(count, generator) for count in sizes)
        seen = (batch(flow, torch.float32) for flow in (train, validation))
        return Data(*seen, *(batch(flow, torch.float64) for flow in (calibration, test)))

    options = {"modes": (8, 8), "width": 24, "padding": 0}
    return Case("tracer", tracer.shape, data, tracer.constraint, Schedule(60), options, (200, 40, 60, 100), True)


CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: _linear(name)) for name in ("pme", "stefan", "heat", "advection")},  # type: ignore[misc]
    "tracer": _tracer,
}
