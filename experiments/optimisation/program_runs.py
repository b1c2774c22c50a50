"""One family of quadratic programs: train a network, then time and judge it beside OSQP and Pi-net.

All times are processor time of one thread, measured in turn in one process on the test instances.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.timing import Run, measured
from torch import Tensor

import probhard as ph
from experiments.optimisation import peers
from experiments.optimisation.programs import PROGRAMS, Program
from experiments.optimisation.training import BATCH, Plan, Trained, network, train

EPOCHS = {"pinet-control": 20}  # 60 for the others
OURS, OPTIMUM, AFRESH, UPDATED = "probhard", "optimum", "OSQP, set up for each", "OSQP, one factor"
PINET, TUNED = "Pi-net, 200 iterations", "Pi-net, 50 tuned iterations"


def lines(name: str, quick: bool = False) -> list[dict[str, Any]]:
    """Result lines of a family.

    Args:
        name: One of ``PROGRAMS``.
        quick: One epoch and few instances.
    """
    program = PROGRAMS[name]()
    training, validation, test = program.split()
    if quick:
        training, validation, test = training[:400], validation[:50], test[:50]
    model, done = _trained(program, training, validation, Plan(1 if quick else EPOCHS.get(name, 60)))
    best, spent = _clocked(lambda: peers.optima(program, test))
    judge = Judge(program, test, program.objective(best))
    at_inference, in_training = _timed(program, model, test, _slopes(program, best))
    batch = min(BATCH, len(test))
    shared = {"case": name, "variables": program.variables, "instances": len(test), "batch": batch}
    results = [{**shared, "way": OPTIMUM, **judge.of(best), "instance_ms": 1e3 * spent / len(test)}]
    for way, run in at_inference.items():
        line = {**shared, "way": way, **judge.of(run.value), "instance_ms": 1e3 * run.seconds / len(test)}
        if way in in_training:
            line["layer_ms"] = 1e3 * in_training[way].seconds
        if way == OURS:
            line |= {"step_ms": 1e3 * done.seconds / done.steps, "epochs": len(done.curve), "curve": done.curve}
            line |= {"training_seconds": done.seconds, "validation_optimum": validation_optimum(program, validation)}
        results.append(line)
    return results


def _trained(program: Program, training: Tensor, validation: Tensor, plan: Plan) -> tuple[ph.ConstrainedModel, Trained]:
    """A network under the program's constraint, trained on its objective."""
    model = ph.ConstrainedModel(
        network(training.shape[-1], program.variables),
        program.constraint,
        "probhard-or",
        lambda u, _: program.objective(u),
    )

    def validate() -> float:
        with torch.no_grad():
            return float(program.objective(model(validation)).mean())

    done = train(
        model.parameters(),
        lambda chosen: model.loss(training[chosen]) / len(chosen),
        len(training),
        plan,
        validate,
    )
    return model, done


def _timed(
    program: Program, model: ph.ConstrainedModel, test: Tensor, slopes: Tensor
) -> tuple[dict[str, Run], dict[str, Run]]:
    """Points and times of all ways on the test instances, and of layers with their gradients on one batch."""
    few = slice(0, min(BATCH, len(test)))
    layer = ph.DPPL("orthogonal")
    with torch.no_grad():
        raw = model.backbone(test)

    def whole() -> Tensor:
        with torch.no_grad():
            return model(test)

    def ours_with_gradient() -> Tensor:
        z = raw[few].clone().requires_grad_()
        nearest = layer.project(z, program.constraint(test[few])).value
        nearest.backward(slopes[few])
        assert z.grad is not None
        return z.grad

    convex = (
        {} if program.sine else {AFRESH: peers.osqp_afresh(program, test), UPDATED: peers.osqp_updated(program, test)}
    )
    work: dict[str, Callable[[], Any]] = {OURS: whole, **convex}
    both: dict[str, Callable[[], Any]] = {OURS: ours_with_gradient}
    for way, settings in {PINET: peers.DEFAULT, TUNED: peers.TUNED}.items():
        rival = peers.Pinet.of(program, settings)
        work[way] = partial(_projected, rival, model.backbone, test)
        both[way] = partial(rival.with_gradient, raw[few], test[few], slopes[few])
    return dict(zip(work, measured(*work.values()))), dict(zip(both, measured(*both.values())))


def validation_optimum(program: Program, validation: Tensor) -> float:
    """Mean optimal objective of the validation instances, which the curve of training tends to."""
    return float(program.objective(peers.optima(program, validation)).mean())


class Judge:
    """Objectives, gaps and violations of points on the test instances."""

    def __init__(self, program: Program, contexts: Tensor, best: Tensor) -> None:
        self.program, self.contexts, self.best = program, contexts, best

    def of(self, y: Tensor) -> dict[str, float]:
        """Mean objective, its gap to the optimum in percent, mean and worst gap of an instance, and violations."""
        objective = self.program.objective(y)
        gap = 100 * (objective.mean() - self.best.mean()) / self.best.mean().abs()
        each = 100 * (objective - self.best) / self.best.abs()
        equal, unequal = self.program.violations(self.contexts, y)
        return {
            "objective": float(objective.mean()),
            "gap": float(gap),
            "mean_gap": float(each.mean()),
            "worst_gap": float(each.max()),
            "equality": equal,
            "inequality": unequal,
        }


@torch.no_grad()
def _projected(rival: peers.Pinet, backbone: torch.nn.Module, contexts: Tensor) -> Tensor:
    return rival.nearest(backbone(contexts), contexts)


def _slopes(program: Program, y: Tensor) -> Tensor:
    """Gradients of the objective, (k, n)."""
    point = y.clone().requires_grad_()
    program.objective(point).sum().backward()
    assert point.grad is not None
    return point.grad


def _clocked(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    start = time.process_time()
    value = work()
    return value, time.process_time() - start
