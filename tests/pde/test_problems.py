"""Problems: grids, parameters, inputs, and the constraints built from bounds, monotonicity and mass."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import pytest
import torch

import probhard as ph
from probhard import DPPL, LocationScale
from probhard.errors import ParameterError
from probhard.laws.covariance import Diagonal
from probhard.pde import PROBLEMS, Advection, Burgers, Heat, PorousMedium, Problem, Stefan

EXACT = PorousMedium(dtype=torch.float64)
NAMES = tuple(PROBLEMS)
FRONTS = tuple(name for name in NAMES if name != "heat")

# --- bounds, monotone slices and mass


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bounds_and_monotony_hold_and_are_tight(name: str, dtype: torch.dtype) -> None:
    problem = PROBLEMS[name](dtype=dtype)
    p = problem.split(3).train
    field, (lower, upper) = problem.solution(p), problem.bounds(p)
    assert lower.shape == upper.shape == (160, 20, 1)
    rounding = 4 * torch.finfo(dtype).eps
    assert float((lower - field).max()) <= rounding
    assert float((field - upper).max()) <= rounding
    reached = slice(0, 1) if name == "heat" else slice(None)  # the wave decays, and has no point on its crest
    assert float((upper.squeeze(-1) - field.amax(-1))[:, reached].max()) < 2e-3
    assert float((lower - field).amax(-1)[:, 0 if name == "heat" else 1].abs().max()) < 2e-3
    assert problem.monotone == (None if name == "heat" else "decreasing")
    if name in FRONTS:
        assert float(field.diff(dim=-1).max()) <= 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_physics_always_leave_a_point(name: str, dtype: torch.dtype) -> None:
    problem = PROBLEMS[name](dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    p = problem.parameters(200, generator)
    p[:2] = torch.tensor([problem.lower, problem.upper])
    z = torch.randn(200, *problem.shape, generator=generator, dtype=dtype)
    slices, field = problem.slice_physics(p), problem.physics(p)
    solution = DPPL("orthogonal").project(z, slices)
    assert solution.stats.converged.shape == (200, 20)
    assert bool(solution.stats.converged.all())
    tolerance = 1e-14 if dtype == torch.float64 else 2e-6
    assert float(slices.violation(solution.value).max()) < tolerance
    whole = DPPL("orthogonal").project(z.flatten(1), field)
    assert bool(whole.stats.converged.all())
    assert float(field.violation(whole.value).max()) < tolerance
    torch.testing.assert_close(whole.value, solution.value.flatten(1), atol=tolerance, rtol=0)
    # by hand, without the library's own residuals
    lower, upper = problem.bounds(p)
    mass = torch.trapezoid(solution.value.double(), problem.grid.double())
    torch.testing.assert_close(mass, problem.mass(p).double(), atol=tolerance, rtol=0)
    assert bool(((solution.value >= lower - tolerance) & (solution.value <= upper + tolerance)).all())
    assert name == "heat" or float(solution.value.diff(dim=-1).max()) <= tolerance


def test_physics_bring_noisy_fields_closer_than_mass_alone() -> None:
    for name in NAMES:
        problem = PROBLEMS[name](dtype=torch.float64)
        p = problem.split(0, test=10).test
        exact = problem.solution(p)
        z = exact + 0.2 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        several = ~problem.single_point(p)
        error = [
            float((DPPL("orthogonal").project(z, known(p)).value - exact).square()[several].mean())
            for known in (problem.slice_constraint, problem.slice_physics)
        ]
        assert error[1] < (1.0 if name == "heat" else 0.25) * error[0]


@pytest.mark.parametrize(("name", "share"), [("heat", 0), ("pme", 0.05), ("stefan", 0.05), ("burgers", 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_slices_of_a_single_point(name: str, share: float, dtype: torch.dtype) -> None:
    problem = PROBLEMS[name](dtype=dtype)
    single = problem.single_point(problem.split(0).train)
    assert single.dtype == torch.bool
    assert float(single.double().mean()) == pytest.approx(share, abs=1e-12)
    assert bool(single[:, 0].all()) == (share > 0)  # at t = 0


def test_slices_of_a_single_point_are_those_where_every_projection_agrees() -> None:
    for name in NAMES:
        problem = PROBLEMS[name](dtype=torch.float64)
        p = problem.split(0, test=30).test
        near, far = (
            DPPL("orthogonal").project(torch.randn(30, 20, 100) + shift, problem.slice_physics(p)).value
            for shift in (0.0, 1.0)
        )
        same = (near - far).abs().amax(-1) < 1e-9
        assert torch.equal(same, problem.single_point(p))
    share = Advection(dtype=torch.float64).single_point(torch.linspace(1, 2, 2001)).double().mean()
    assert abs(float(share) - 0.631) < 2e-3


def test_a_problem_of_which_only_the_mass_is_known() -> None:
    @dataclass(frozen=True)
    class Constant(Problem):
        name = "constant"
        lower: float = 1.0
        upper: float = 2.0

        def solution(self, parameter: Any) -> torch.Tensor:
            value, time, place = self._broadcast(parameter)
            return value + 0 * time * place

        def mass(self, parameter: Any) -> torch.Tensor:
            value, times = self._in_time(parameter)
            return value + 0 * times

    problem = Constant(points=5, slices=3, dtype=torch.float64)
    p = torch.tensor([1.0, 2.0])
    lower, upper = problem.bounds(p)
    assert bool((lower == -torch.inf).all() & (upper == torch.inf).all())
    assert not bool(problem.single_point(p).any())
    z = torch.randn(2, 3, 5)
    both = [
        DPPL("orthogonal").project(z, known(p)).value for known in (problem.slice_constraint, problem.slice_physics)
    ]
    torch.testing.assert_close(both[0], both[1])


# --- grids, parameters and shapes


def test_names() -> None:
    assert NAMES == ("heat", "pme", "stefan", "advection", "burgers")
    assert tuple(PROBLEMS.values()) == (Heat, PorousMedium, Stefan, Advection, Burgers)
    assert all(kind.name == name and issubclass(kind, Problem) for name, kind in PROBLEMS.items())
    ranges = {name: (kind().lower, kind().upper, kind().length) for name, kind in PROBLEMS.items()}
    assert ranges == {
        "heat": (1.0, 5.0, 2 * math.pi),
        "pme": (2.0, 3.0, 1.0),
        "stefan": (0.6, 0.65, 1.0),
        "advection": (1.0, 2.0, 1.0),
        "burgers": (0.5, 1.5, 1.0),
    }


def test_grid_and_times_follow_the_protocol() -> None:
    problem = PorousMedium()
    np.testing.assert_allclose(problem.grid, np.linspace(0, 1, 100), atol=1e-7)
    np.testing.assert_allclose(problem.times, np.linspace(0, 1, 100)[0:-1:5], atol=1e-7)
    np.testing.assert_allclose(Heat().grid, np.linspace(0, 2 * np.pi, 100), atol=1e-6)
    assert problem.shape == (20, 100)
    assert problem.grid.dtype == torch.float32
    with pytest.raises(FrozenInstanceError):
        problem.points = 50  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_shapes(name: str, batch: tuple[int, ...]) -> None:
    problem = PROBLEMS[name](points=11, slices=4)
    p = torch.full(batch, problem.lower)
    assert problem.solution(p).shape == (*batch, 4, 11)
    assert problem.mass(p).shape == problem.single_point(p).shape == (*batch, 4)
    assert problem.inputs(p).shape == (*batch, 3, 4, 11)
    assert problem.bounds(p)[0].shape == problem.bounds(p)[1].shape == (*batch, 4, 1)
    field = problem.solution(p).flatten(-2)
    assert problem.constraint(p).residual(field).shape == (*batch, 4)
    assert problem.slice_constraint(p).residual(problem.solution(p)).shape == (*batch, 4, 1)
    assert problem.physics(p).violation(field).shape == batch
    assert problem.slice_physics(p).violation(problem.solution(p)).shape == (*batch, 4)
    one = PROBLEMS[name](points=11, slices=1)
    assert DPPL("orthogonal").project(torch.zeros(*batch, 11).float(), one.physics(p)).value.shape == (*batch, 11)


def test_parameters_are_uniform_in_range_and_seeded() -> None:
    problem = PorousMedium(lower=3.0, upper=4.0)
    draw = problem.parameters(4000, torch.Generator().manual_seed(1))
    assert draw.shape == (4000,)
    assert 3.0 <= float(draw.min()) < 3.01
    assert 3.99 < float(draw.max()) <= 4.0
    assert abs(float(draw.mean()) - 3.5) < 0.02
    assert torch.equal(draw, problem.parameters(4000, torch.Generator().manual_seed(1)))
    assert not torch.equal(draw, problem.parameters(4000, torch.Generator().manual_seed(2)))


def test_split_is_seeded_and_keeps_its_test_set() -> None:
    split = Stefan().split(7)
    assert [len(part) for part in split] == [160, 40, 100]
    values = torch.cat(split)
    assert len(values.unique()) > 295  # all are draws of their own
    assert float(values.min()) >= 0.6
    assert float(values.max()) <= 0.65
    assert all(torch.equal(a, b) for a, b in zip(split, Stefan().split(7)))
    assert not torch.equal(split.test, Stefan().split(8).test)
    quick = Stefan().split(7, train=16, validation=4)
    assert torch.equal(quick.test, split.test)
    assert torch.equal(quick.train, split.train[:16])
    assert len(quick.validation) == 4


def test_inputs_hold_parameter_time_and_place() -> None:
    m = torch.tensor([2.1, 2.9], dtype=torch.float64)
    value, time, place = EXACT.inputs(m).unbind(-3)
    assert (value == m[:, None, None]).all()
    assert (time == EXACT.times[:, None]).all()
    assert (place == EXACT.grid).all()


def test_constraint_of_field_and_of_slices_project_alike() -> None:
    m = EXACT.parameters(3, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    z = EXACT.solution(m) + 0.1 * torch.randn(3, 20, 100, dtype=torch.float64, generator=generator)
    variance = torch.rand(3, 20, 100, dtype=torch.float64, generator=generator) + 0.1
    field = DPPL()(LocationScale(z.flatten(1), Diagonal(variance.flatten(1))), EXACT.constraint(m))
    slices = DPPL()(LocationScale(z, Diagonal(variance)), EXACT.slice_constraint(m))
    torch.testing.assert_close(field.mean, slices.mean.flatten(1))
    torch.testing.assert_close(field.variance, slices.variance.flatten(1))
    trapezoid = torch.trapezoid(field.mean.unflatten(-1, (20, 100)), EXACT.grid)
    torch.testing.assert_close(trapezoid, EXACT.mass(m), atol=1e-13, rtol=0)


def test_oblique_draws_obey_the_physics() -> None:
    for name in NAMES:
        problem = PROBLEMS[name](dtype=torch.float64)
        p = problem.split(0, test=2).test
        known = problem.physics(p)
        dist = LocationScale(problem.solution(p).flatten(1), Diagonal(torch.full((2, 2000), 0.01)))
        draws = DPPL("oblique")(dist, known).sample((3,))
        assert isinstance(known, ph.Constraint)
        assert float(known.violation(draws).max()) < 1e-13


@pytest.mark.parametrize("m", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_parameters_are_named(m: float) -> None:
    with pytest.raises(ParameterError, match=r"1 of 2 parameters of PorousMedium .* \[2, 3\]"):
        EXACT.solution(torch.tensor([2.5, m]))
    with pytest.raises(ParameterError, match=r"2 of 3 parameters of Stefan .* below 1: the first is 1\."):
        Stefan().mass(torch.tensor([0.6, 1.0, m]))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PorousMedium, {"lower": 0.0}),
        (PorousMedium, {"lower": 4.0}),
        (PorousMedium, {"upper": float("inf")}),
        (PorousMedium, {"points": 1}),
        (PorousMedium, {"slices": 0}),
        (PorousMedium, {"length": 0.5}),
        (Burgers, {"length": 0.4}),
        (Stefan, {"upper": 1.0}),
        (Stefan, {"law": "late"}),
        (Advection, {"law": "late"}),
    ],
)
def test_bad_problems_are_refused(kind: type[Problem], options: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        kind(**options)
    with pytest.raises(ParameterError, match="count=0"):
        PorousMedium().parameters(0)
