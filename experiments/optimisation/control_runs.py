"""Systems of the field on HardNet's control problem: policies trained through one second of driving.

Every policy is one network with another ``Method``; the loss is the integrated cost, with the squared violations of
the method's penalty. CBF-QP has no network: it projects one given control at every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import probhard as ph
from experiments.optimisation import control
from experiments.optimisation.systems import KEYS, OURS, hardnet_methods
from experiments.optimisation.training import Plan, train
from experiments.records import Records
from probhard.corrections import Completion
from probhard.model import ConstrainedModel

CONTROL = "hardnet-control"
BATCH, EPOCHS, RATE = 100, 30, 1e-3
SOFT, CAP, CUT = 0.01, 2e4, 100  # weight of squared violations, largest cost of a run, most steps of one in training
VISIBLE = 1e-4
NOMINAL, PUBLISHED_QP, QP = "nominal control", "CBF-QP, as published", "CBF-QP"
QUOTED_CONTROL = {  # published mean costs, and violations integrated over time: the larger of the two ellipses
    "network": (421.92, 157.62),
    "soft loss": (480.10, 6.92),
    "DC3": (480.21, 6.86),
    "HardNet-Aff": (518.85, 0.0),
    PUBLISHED_QP: (948.32, 0.0),
}


def control_methods() -> dict[str, ph.Method]:
    """The trained systems; DC3 has five correction steps here, as in HardNet's code."""
    return hardnet_methods(Completion(steps=5), SOFT)


def fixed_policies() -> dict[str, control.Policy]:
    """Policies without a network. The published CBF-QP projects the nominal control, which is then added again."""
    layer = ph.DPPL("orthogonal")

    def nearest(start: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return layer.project(start(x), control.rows(x)).value

    return {
        NOMINAL: _nothing,
        QP: partial(nearest, _nothing),
        PUBLISHED_QP: partial(nearest, control.nominal),
    }


def _nothing(x: Tensor) -> Tensor:
    return torch.zeros_like(x[:, :2])


def episode_loss(model: ConstrainedModel, x: Tensor) -> Tensor:
    """The mean integrated cost and penalty of runs from states (batch, 5); a run stops to count at ``CAP``."""
    total = x.new_zeros(len(x))
    for state, y, length in control.steps(model, x, CUT):
        rate = control.cost(state, y)
        if model.method.penalty:
            rate = rate + model.method.penalty * control.rows(state).penalty(y)
        total = total + torch.where(total.detach() < CAP, length * rate, 0.0)
    return total.mean()


@dataclass
class _Sums:
    """What is summed over the steps of runs."""

    cost: Tensor  # (batch,)
    violation: Tensor  # integrated, (batch, 2 ellipses)
    worst: Tensor  # (batch,)
    hit: Tensor  # (batch,) bool


@torch.no_grad()
def driven(policy: control.Policy, x: Tensor) -> dict[str, float]:
    """Figures of runs from states (batch, 5): cost, violations and the share of runs with a collision."""
    zero = x.new_zeros(len(x))
    sums = _Sums(zero, x.new_zeros(len(x), 2), zero, zero > 0)
    for state, y, length in control.steps(policy, x):
        moving = length > 0
        excess = control.rows(state).excess(y).clamp(min=0)
        sums.cost = sums.cost + length * control.cost(state, y)
        sums.violation = sums.violation + length.unsqueeze(-1) * excess
        sums.worst = torch.maximum(sums.worst, torch.where(moving, excess.amax(-1), 0.0))
        inside = (control.motion(state).outside < -control.INSIDE).any(-1)
        sums.hit = sums.hit | (moving & inside)
    return {
        "cost": float(sums.cost.mean()),
        "violation": float(sums.violation.amax(-1).mean()),
        "worst": float(sums.worst.max()),
        "violated": float((sums.worst > VISIBLE).double().mean()),
        "collided": float(sums.hit.double().mean()),
    }


def trained_line(way: str, epochs: int = EPOCHS, count: int = control.TRAINING) -> list[dict[str, Any]]:
    """Train a system and measure it on the test states.

    Args:
        way: One of ``control_methods``.
        epochs: Of training.
        count: Number of training states.
    """
    states = control.initial_states()
    training, test = states[:count], states[control.TRAINING + control.VALIDATION :]
    model = ConstrainedModel(control.Encoded(), control.rows, control_methods()[way])
    plan = Plan(epochs, RATE, batch=BATCH)
    done = train(model.parameters(), lambda chosen: episode_loss(model, training[chosen]), count, plan)
    about = {"epochs": epochs, "step_ms": 1e3 * done.seconds / done.steps}
    return [_line(way, model, test, about)]


def fixed_line(way: str) -> list[dict[str, Any]]:
    """Measure a policy without a network on the test states."""
    test = control.initial_states()[control.TRAINING + control.VALIDATION :]
    return [_line(way, fixed_policies()[way], test, {"epochs": None, "step_ms": None})]


def _line(way: str, policy: control.Policy, test: Tensor, about: dict[str, Any]) -> dict[str, Any]:
    start = time.process_time()
    figures = driven(policy, test)
    taken = 1e3 * (time.process_time() - start) / len(test)
    return {"case": CONTROL, "way": way, "recipe": OURS, **figures, **about, "run_ms": taken}


def pieces(records: Records, quick: bool = False) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The work of every row that has no line yet; each piece returns its lines."""
    work: dict[str, Callable[[], list[dict[str, Any]]]] = {way: partial(fixed_line, way) for way in fixed_policies()}
    options = (1, BATCH) if quick else ()
    work |= {way: partial(trained_line, way, *options) for way in control_methods()}
    for way, piece in work.items():
        if not records.has(dict(zip(KEYS, (CONTROL, way, OURS)))):
            yield piece
