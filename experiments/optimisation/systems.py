"""Systems of the field on optimisation problems: DC3, HardNet-Aff, HardNet++, Pi-net, ours and a soft loss.

All systems are rows of one model: the same network, data and loop, with another ``Method``. Each is trained by two
recipes, that of the papers (batch normalisation, dropout, Adam at 1e-4) and ours (neither, Adam at 1e-3 to 0).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import probhard as ph
from experiments.optimisation import peers
from experiments.optimisation.program_runs import Judge
from experiments.optimisation.programs import Program
from experiments.optimisation.system_problems import CASES, Case, toy_constraint, toy_grid, toy_points
from experiments.optimisation.training import HIDDEN, Plan, network, train
from experiments.records import Records
from probhard._util.atomic import replacing
from probhard.corrections import Completion
from probhard.model import ConstrainedModel

KEYS = ("case", "way", "recipe")
EPOCHS, LONG = 30, 300  # of our recipe and of the papers', which has 1,000
TOY, TOY_SEEDS, TOY_EPOCHS = "hardnet-toy", 5, 1000
PUBLISHED, OURS = "published", "ours"
WAYS = ("soft loss", "DC3", "HardNet-Aff", "HardNet++", "probhard")
PINET = "Pi-net"
OPTIMUM = "solver"
WARM_SHARE = 0.1  # of the epochs: HardNet's soft warm-up is 100 of 1,000
SOFT = 10.0  # HardNet's weight of squared violations
VISIBLE = 1e-4  # violation that the papers count
QUOTED = {  # published means of test objectives
    ("dc3-convex", "DC3"): -13.46,
    ("dc3-nonconvex", "DC3"): -10.66,
    ("hardnet-nonconvex", "DC3"): -12.57,
    ("hardnet-nonconvex", "HardNet-Aff"): -14.10,
}
QUOTED_TOY = {"network": 1.85, "DC3": 1.15, "HardNet-Aff": 0.16}  # mean squared errors


@dataclass(frozen=True)
class Recipe:
    """How a network is built and trained."""

    normalised: bool
    plan: Plan


def recipes(epochs: int, long: int) -> dict[str, Recipe]:
    """The recipes: that of the papers with ``long`` epochs, and ours with ``epochs``."""
    return {
        PUBLISHED: Recipe(True, Plan(long, 1e-4, constant=True)),
        OURS: Recipe(False, Plan(epochs, 1e-3)),
    }


def method_of(way: str, case: Case, epochs: int) -> ph.Method:
    """The method of a system on a problem."""
    if way == "soft loss":
        return ph.METHODS["softc"].replace(penalty=SOFT)
    if way == "DC3":
        step = ph.Step(correction=Completion(solved=case.solved))
        return ph.METHODS["dc3"].replace(
            training=step, inference=step, penalty=case.penalty, penalty_form=case.penalty_form
        )
    if way == "HardNet-Aff":
        return ph.METHODS["hardnet-aff"].replace(warm_up=int(WARM_SHARE * epochs), warm_penalty=SOFT)
    return ph.METHODS["hardnet++" if way == "HardNet++" else "probhard-or"]


def published_network(inputs: int, outputs: int, seed: int = 0, normalised: bool = True) -> nn.Sequential:
    """The papers' network: two hidden layers of 200 units, by default with batch normalisation and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for a, b in ((inputs, HIDDEN), (HIDDEN, HIDDEN)):
            layers += [nn.Linear(a, b), *([nn.BatchNorm1d(b)] if normalised else []), nn.ReLU()]
            layers += [nn.Dropout(0.2)] if normalised else []
        layers.append(nn.Linear(HIDDEN, outputs))
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
        return nn.Sequential(*layers).double()


class Warming:
    """The training loss, by a soft one during the warm-up of the method."""

    def __init__(self, model: ConstrainedModel, contexts: Tensor, batch: int) -> None:
        self.model, self.contexts, method = model, contexts, model.method
        soft = ph.METHODS["base"].replace(penalty=method.warm_penalty, score=method.score)
        self.soft = ConstrainedModel(model.backbone, model.constraint_fn, soft)
        self.left = method.warm_up * -(-len(contexts) // batch)  # steps

    def __call__(self, chosen: Tensor) -> Tensor:
        model, self.left = (self.soft if self.left > 0 else self.model), self.left - 1
        return model.loss(self.contexts[chosen]) / len(chosen)


def program_lines(
    name: str, way: str, kind: str, recipe: Recipe, folder: Path, quick: bool = False
) -> list[dict[str, Any]]:
    """Train a system on a program and measure it on the test instances.

    Args:
        name: One of ``CASES``.
        way: One of ``WAYS``.
        kind: The name of the recipe.
        recipe: The recipe.
        folder: Keeps the optima of the test instances.
        quick: Few instances.
    """
    case = CASES[name]()
    program = case.program
    training, validation, test = program.split()
    if quick:
        training, validation, test = training[:400], validation[:50], test[:50]
    make = published_network if recipe.normalised else network
    backbone = make(training.shape[-1], program.variables)
    method = method_of(way, case, recipe.plan.epochs)
    model = ConstrainedModel(backbone, program.constraint, method, lambda u, _: program.objective(u))
    every = max(1, recipe.plan.epochs // 50)
    seen = 0

    def validate() -> float:
        nonlocal seen
        seen += 1
        if seen % every:
            return float("nan")
        model.eval()
        with torch.no_grad():
            value = float(program.objective(model(validation)).mean())
        model.train()
        return value

    model.train()
    done = train(model.parameters(), Warming(model, training, recipe.plan.batch), len(training), recipe.plan, validate)
    model.eval()
    best = _optima(program, test, folder / f"{name}-{len(test)}.pt")
    judge = Judge(program, test, program.objective(best))
    shared = {"case": name, "recipe": kind, "instances": len(test), "epochs": recipe.plan.epochs}
    shared |= {"step_ms": 1e3 * done.seconds / done.steps}
    lines = [{**shared, "way": way, **_judged(judge, program, test, *_timed(lambda: _predicted(model, test)))}]
    lines[0]["curve"] = [value for value in done.curve if value == value]
    if way == "probhard":
        layer = peers.Pinet.of(program)
        raw = _predicted(ConstrainedModel(backbone, program.constraint, "base"), test)
        layer.nearest(raw, test)  # compiles
        figures = _judged(judge, program, test, *_timed(lambda: layer.nearest(_network(backbone, test), test)))
        lines.append({**shared, "way": PINET, **figures, "step_ms": None})
        lines.append({**shared, "way": OPTIMUM, **_judged(judge, program, test, best, None), "step_ms": None})
    return lines


def _optima(program: Program, test: Tensor, path: Path) -> Tensor:
    """Solutions of the test instances, computed once."""
    if path.exists():
        return torch.load(path, weights_only=True)
    best = peers.optima(program, test)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        torch.save(best, unfinished)
    return best


def _judged(judge: Judge, program: Program, test: Tensor, y: Tensor, seconds: float | None) -> dict[str, Any]:
    """Objective, gaps, largest and mean violations, and the share of instances with a visible one."""
    constraint = program.constraint(test)
    violation = constraint.violation(y)
    return {
        **judge.of(y),
        "violation": float(violation.mean()),
        "violated": float((violation > VISIBLE).double().mean()),
        "instance_ms": None if seconds is None else 1e3 * seconds / len(test),
    }


@torch.no_grad()
def _predicted(model: ConstrainedModel, contexts: Tensor) -> Tensor:
    return model(contexts)


@torch.no_grad()
def _network(backbone: nn.Module, contexts: Tensor) -> Tensor:
    return backbone(contexts)


def _timed(work: Any, repeats: int = 5) -> tuple[Tensor, float]:
    """The value of some work and the median of its processor time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        value = work()
        times.append(time.process_time() - start)
    return value, sorted(times)[repeats // 2]


def hardnet_methods(correction: Completion, soft: float) -> dict[str, ph.Method]:
    """The systems on HardNet's own problems: DC3 by a correction, squared violations weighted by ``soft``."""
    step = ph.Step(correction=correction)
    return {
        "network": ph.METHODS["base"],
        "soft loss": ph.METHODS["softc"].replace(penalty=soft),
        "DC3": ph.Method(step, step, penalty=soft),
        "HardNet-Aff": ph.METHODS["hardnet-aff"],
        "HardNet++": ph.METHODS["hardnet++"],
        "probhard": ph.METHODS["probhard-or"],
    }


def toy_methods() -> dict[str, ph.Method]:
    """The systems on HardNet's toy."""
    return hardnet_methods(Completion(rate=1e-2), SOFT)


def toy_lines(way: str, epochs: int = TOY_EPOCHS, seeds: int = TOY_SEEDS) -> list[dict[str, Any]]:
    """Train a system on HardNet's toy with several seeds; means and standard deviations of its test errors."""
    (x, y), (grid, target) = toy_points(), toy_grid()
    errors, violations = [], []
    for seed in range(1, seeds + 1):
        backbone = published_network(1, 1, seed, normalised=False)
        method = toy_methods()[way]
        model = ConstrainedModel(backbone, toy_constraint, method, lambda u, batch: (u - batch.target).square().sum(-1))
        plan = Plan(epochs, 1e-4, batch=len(x), seed=seed, constant=True)
        train(model.parameters(), partial(_toy_loss, model, x, y), len(x), plan)
        found = _predicted(model, grid)
        errors.append(float((found - target).square().mean()))
        violations.append(float(toy_constraint(grid).violation(found).max()))
    mse = torch.tensor(errors, dtype=torch.float64)
    spread = float(mse.std(correction=0)) if seeds > 1 else None
    worst = max(violations)
    return [
        {"case": TOY, "way": way, "recipe": PUBLISHED, "epochs": epochs, "seeds": seeds, "mse": float(mse.mean()),
         "mse_spread": spread, "inequality": worst}
    ]  # fmt: skip


def _toy_loss(model: ConstrainedModel, x: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    return model.loss((x[chosen], y[chosen])) / len(chosen)


def pieces(
    records: Records, names: Sequence[str], quick: bool = False, epochs: int = EPOCHS, long: int = LONG
) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The work of every row that has no line yet; each piece returns its lines.

    Args:
        records: The file of result lines.
        names: Some problems; empty for all.
        quick: One epoch and few instances.
        epochs: Of our recipe.
        long: Of the papers' recipe.
    """
    folder = records.folder("optima")
    for name, way, kind in _units(names):
        if records.has(dict(zip(KEYS, (name, way, kind)))):
            continue
        if name == TOY:
            yield partial(toy_lines, way, *((5, 1) if quick else ()))
        else:
            recipe = recipes(*((1, 1) if quick else (epochs, long)))[kind]
            yield partial(program_lines, name, way, kind, recipe, folder, quick)


def _units(names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Problem, system and recipe of every row: our recipe, the toy, the papers' recipe where it has a figure."""
    programs = [name for name in names or CASES if name != TOY]
    yield from ((name, way, OURS) for name in programs for way in WAYS)
    if TOY in (names or (TOY,)):
        yield from ((TOY, way, PUBLISHED) for way in toy_methods())
    yield from ((*row, PUBLISHED) for row in QUOTED if row[0] in programs)
