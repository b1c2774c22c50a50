"""Optimal power flow of one network: make loads, train a dispatcher, compare it with PYPOWER on held-out loads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.optimisation.power_case import Network, pypower_case
from experiments.optimisation.power_loads import SEED, drawn, made
from experiments.optimisation.power_model import UNIT_COST, Dispatcher, Instances
from experiments.optimisation.training import Plan, train

OURS, PYPOWER, RAW = "probhard", "PYPOWER", "the network alone"
TEST = 0.2  # share of the served loads


@dataclass(frozen=True)
class PowerPlan:
    """Size of a run."""

    loads: int  # served ones, with their solutions
    unserved: int = 4000  # drawn by the same recipe for training; no solver has seen them
    soft_epochs: int = 250
    epochs: int = 40
    batch: int = 100


SMALL = PowerPlan(60, 1000, 150, 20)
PLANS = {"case9": SMALL, "case30": SMALL, "case57": PowerPlan(1200)}
QUICK = PowerPlan(6, 40, 1, 1, 20)


def lines(name: str, folder: Path, plan: PowerPlan) -> list[dict[str, Any]]:
    """Result lines of a network.

    Args:
        name: One of ``PLANS``.
        folder: Where the loads and the network of the first phase are kept.
        plan: Size of the run.
    """
    power, case = Network.of(name), pypower_case(name)
    loads = made(case, folder / f"{name}.jsonl", plan.loads, limits=power.lines is not None)
    every = torch.from_numpy(np.concatenate([loads.active, loads.reactive], 1)) / power.base
    first = round(len(every) * (1 - TEST))
    served, test = every[:first], every[first:]
    stream = islice(drawn(case, SEED + 1), plan.unserved)
    more = torch.from_numpy(np.array([np.concatenate(pair) for pair in stream])) / power.base
    model = Dispatcher(power, more)
    soft_seconds = _first_phase(model, more, plan, folder / f"{name}-{plan.unserved}-{plan.soft_epochs}.pt")
    training = torch.cat([served, more[: len(more) // 4]])
    instances = Instances(training, model.raw(training).detach())
    done = train(
        model.parameters(),
        lambda chosen: instances.loss(model, chosen),
        len(training),
        Plan(plan.epochs, 1e-3, plan.batch),
    )
    with torch.no_grad():
        start = time.process_time()
        solution = model(test)
        spent = time.process_time() - start
        raw = model.raw(test)
    best = torch.from_numpy(loads.cost[first:]) / UNIT_COST
    known = power.point(loads.solution[first:])
    shared = {"case": name, "variables": power.variables, "instances": len(test), "loads": len(every)}
    everywhere = torch.ones(len(test), dtype=torch.bool)
    ours = {
        "instance_ms": 1e3 * spent / len(test),
        "solver_steps": float(solution.stats.steps.double().mean()),
        "epochs": plan.epochs,
        "step_ms": 1e3 * done.seconds / done.steps,
        "batch": plan.batch,
        "projections": instances.projections,
        "failures": instances.failures,
        "training_loads": len(training),
        "unserved": len(more),
        "soft_epochs": plan.soft_epochs,
        "soft_seconds": soft_seconds,
        "training_seconds": done.seconds,
    }
    theirs = {"instance_ms": 1e3 * float(loads.seconds[first:].mean())}
    return [
        {**shared, "way": PYPOWER, **judged(power, test, known, best, everywhere), **theirs},
        {**shared, "way": OURS, **judged(power, test, solution.value, best, solution.stats.converged), **ours},
        {**shared, "way": RAW, **judged(power, test, raw, best, everywhere), "instance_ms": None},
    ]


def _first_phase(model: Dispatcher, loads: Tensor, plan: PowerPlan, path: Path) -> float:
    """Train the network without projections, or restore it from a file; returns the seconds that it took."""
    if not path.exists():
        done = train(
            model.parameters(),
            lambda chosen: model.soft_loss(loads[chosen]),
            len(loads),
            Plan(plan.soft_epochs, 3e-3),
        )
        torch.save({"state": model.state_dict(), "seconds": done.seconds}, path)
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["state"])
    return float(saved["seconds"])


def judged(power: Network, loads: Tensor, u: Tensor, best: Tensor, solved: Tensor) -> dict[str, float]:
    """Costs, gaps in percent, largest violations of solved points, and the share of these.

    Args:
        power: The network.
        loads: (k, 2 b).
        u: Points, (k, n).
        best: Optimal costs, (k,).
        solved: Which points count, (k,) bool.
    """
    u, loads, best = u[solved], loads[solved], best[solved]
    cost = power.cost(u) / UNIT_COST
    excess = float(power.box.violation(u).max())
    if power.lines is not None:
        excess = max(excess, float(power.lines.excess(u).max()), 0.0)
    return {
        "objective": float(cost.mean()),
        "gap": float(100 * (cost.mean() / best.mean() - 1)),
        "worst_gap": float(100 * (cost / best - 1).max()),
        "equality": float(power.equations(loads).residual(u).abs().max()),
        "inequality": excess,
        "solved": float(solved.double().mean()),
    }
