"""HardNet's control problem against its published figure, autograd and small runs."""

from __future__ import annotations

import pytest
import torch
from experiments.optimisation import control, control_runs, system_tables

import probhard as ph
from probhard.model import ConstrainedModel


@pytest.fixture(scope="module")
def states() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(20, 5, generator=generator, dtype=torch.float64) - torch.tensor([1.5, 0, 0, 0, 0])


def test_rows_are_the_barrier_condition(states: torch.Tensor) -> None:
    y = torch.randn(20, 2, dtype=torch.float64)
    velocity = control.derivative(states, control.nominal(states) + y)
    height, rate = torch.func.jvp(control.barrier, (states,), (velocity,))
    slack = -control.rows(states).excess(y)
    torch.testing.assert_close(slack, rate + control.ALPHA * height)


def test_the_point_ahead_moves_as_it_should(states: torch.Tensor) -> None:
    def ahead(x: torch.Tensor) -> torch.Tensor:
        return x[:, :2] + control.AHEAD * torch.stack([x[:, 2].cos(), x[:, 2].sin()], -1)

    force = torch.randn(20, 2, dtype=torch.float64)

    def velocity(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(ahead, (x,), (control.derivative(x, force),))[1]

    found = control.motion(states)
    torch.testing.assert_close(found.velocity.squeeze(-2), velocity(states))
    bent = torch.func.jvp(velocity, (states,), (control.derivative(states, force),))[1]
    torch.testing.assert_close(found.drift.squeeze(-2) + (found.gain @ force.unsqueeze(-1)).squeeze(-1), bent)


def test_the_published_cost_of_the_quadratic_program_is_met() -> None:
    line = control_runs.fixed_line(control_runs.PUBLISHED_QP)[0]
    published, _ = control_runs.QUOTED_CONTROL[control_runs.PUBLISHED_QP]
    assert line["cost"] == pytest.approx(published, abs=0.005)
    assert line["violation"] < 1e-9
    assert line["collided"] == 0


def test_steps_cover_one_second_and_are_short_where_controls_are_large() -> None:
    x = control.initial_states()[:3]
    total, largest = torch.zeros(3, dtype=torch.float64), 0.0
    for state, y, length in control.steps(lambda s: 300.0 * torch.ones_like(s[:, :2]), x):
        force = (control.nominal(state) + y).abs().amax(-1)
        largest = max(largest, float((length * force).max()))
        total += length
    torch.testing.assert_close(total, torch.ones(3, dtype=torch.float64))
    assert largest <= control.STEP * control.FAST * (1 + 1e-12)


@pytest.mark.parametrize("way", ["HardNet-Aff", "probhard"])
def test_policies_that_meet_their_rows_avoid_collisions(way: str) -> None:
    x = control.initial_states()[:20]
    model = ConstrainedModel(control.Encoded(), control.rows, control_runs.control_methods()[way])
    figures = control_runs.driven(model, x)
    assert figures["worst"] < 1e-6
    assert figures["collided"] == 0
    control_runs.episode_loss(model, x).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())


def test_the_penalty_of_a_soft_loss_is_integrated() -> None:
    x = control.initial_states()[:5]
    network = control.Encoded()
    costs = {
        weight: float(
            control_runs.episode_loss(
                ConstrainedModel(network, control.rows, ph.METHODS["softc"].replace(penalty=weight)), x
            ).detach()
        )
        for weight in (0.01, 0.02, 0.04)
    }
    assert costs[0.04] - costs[0.02] == pytest.approx(2 * (costs[0.02] - costs[0.01]), rel=1e-9)
    assert costs[0.02] > costs[0.01]


def test_the_page_has_control_rows_and_says_who_is_ahead() -> None:
    figures = {"violation": 0.0, "worst": 0.0, "violated": 0.0, "collided": 0.0, "epochs": 3, "step_ms": 1.0}
    shared = {"case": control_runs.CONTROL, "recipe": "ours", "run_ms": 1.0, **figures}
    lines = [{**shared, "way": "probhard", "cost": 500.0}, {**shared, "way": "HardNet-Aff", "cost": 490.0}]
    page = system_tables.render(lines)
    assert "Not ahead: HardNet, control: HardNet-Aff has the smaller cost, 490 against 500" in page
    assert "| HardNet-Aff | 490.0 | 0 | 0 | 0% | 0% | 1.0 | 1 | 518.9 | 0 |" in page
    assert "HardNet, control / DC3" in page  # not run yet
    assert system_tables.verdict([], lines[:1]).startswith("Ahead")
