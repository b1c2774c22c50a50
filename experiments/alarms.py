"""False alarms of nonlinear projections: points near and far, beside scipy's SLSQP, and a training step.

A false alarm is a point that is declared failed although SLSQP finds a feasible one. ``as near`` is the share of points
with ``|u - z|^2 <= (1 + 1e-6) |v - z|^2`` for SLSQP's feasible v. SLSQP starts at the same z, clipped to its bounds,
with the same Jacobians, point by point. All times are CPU milliseconds of one thread. The prose is in ``pages/``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import probhard as ph
from experiments import pictures, templates
from experiments.alarm_cases import Case, cases, flat_start, loads, power_flow
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, measured
from experiments.templates import Figure, MissingFigureError
from probhard.errors import check_choices

PAGE = Path(__file__).parent / "pages" / "alarms.md"
KEYS = ("case", "points")
NAMES = tuple(case.name for case in cases())
STEP = "training step"  # a case of its own: power flow, batch of 64
COUNT, CHUNK, SAMPLE = 10_000, 1000, 100  # points, points at once, points for SLSQP
FEASIBLE, NEAR = 1e-8, 1e-6  # largest violation of a feasible point, and tolerance of distances
BATCH, ROUNDS = 64, 7
COLOURS = {"ours": pictures.GREEN, "SLSQP": pictures.GREY}


def measure(case: Case, points: str, count: int = COUNT, sample: int = SAMPLE) -> dict[str, Any]:
    """Return the result line of a case.

    Args:
        case: The constraint and its points.
        points: ``"near"`` or ``"far"``.
        count: Number of points.
        sample: Number of points that SLSQP projects, too.
    """
    z = case.points(count, getattr(case, points))
    layer = ph.DPPL("orthogonal", on_failure="flag")
    layer.project(z[:2], case.constraint)  # compiled and cached parts
    seconds, solutions = 0.0, []
    for part in z.split(CHUNK):
        started = time.process_time()
        solutions.append(layer.project(part, case.constraint))
        seconds += time.process_time() - started
    u = torch.cat([solution.value for solution in solutions])
    converged = torch.cat([solution.stats.converged for solution in solutions])
    steps = torch.cat([solution.stats.steps for solution in solutions]).double()
    chosen = torch.arange(min(sample, count))
    started = time.process_time()
    theirs = torch.stack([slsqp(case, z[i]) for i in chosen])
    their_seconds = time.process_time() - started
    good = case.constraint.violation(theirs) <= FEASIBLE
    ours, others = ((x - z[chosen]).square().sum(-1) for x in (u[chosen], theirs))
    both = good & converged[chosen]
    failed = torch.nonzero(~converged).squeeze(-1)[:sample]
    found = [bool(case.constraint.violation(slsqp(case, z[i])) <= FEASIBLE) for i in failed]
    return {
        "case": case.name,
        "points": points,
        "spread": getattr(case, points),
        "count": count,
        "converged": float(converged.double().mean()),
        "alarms": sum(found),
        "steps": float(steps.mean()),
        "most_steps": int(steps.max()),
        "violation": float(case.constraint.violation(u[converged]).max()),
        "milliseconds": 1e3 * seconds / count,
        "sample": len(chosen),
        "their_milliseconds": 1e3 * their_seconds / len(chosen),
        "their_feasible": float(good.double().mean()),
        "as_near": float((ours <= (1 + NEAR) * others)[both].double().mean()),
        "nearer": float((ours < (1 - 1e-3) * others)[both].double().mean()),
    }


def slsqp(case: Case, z: Tensor) -> Tensor:
    """The point that SLSQP finds for z (n,)."""
    target, lower, upper, rows = z.numpy(), -np.inf, np.inf, []
    for part in case.constraint.parts():
        if isinstance(part, ph.NonlinearEquality):
            rows.append(_row("eq", part, 1.0))
        elif isinstance(part, ph.NonlinearInequality):
            rows.append(_row("ineq", part.function, -1.0))
        else:
            assert isinstance(part, ph.Box)
            lower, upper = (float(x) for x in (part.lower, part.upper))
    answer = minimize(
        lambda u: float(((u - target) ** 2).sum()),
        target.clip(lower, upper),
        jac=lambda u: 2 * (u - target),
        bounds=None if not np.isfinite([lower, upper]).any() else [(lower, upper)] * len(target),
        constraints=rows,
        method="SLSQP",
        options={"maxiter": 300, "ftol": 1e-13},
    )
    return torch.as_tensor(answer.x)


def _row(kind: str, function: ph.NonlinearEquality, sign: float) -> dict[str, Any]:
    return {
        "type": kind,
        "fun": lambda u: sign * function.residual(torch.as_tensor(u)).numpy(),
        "jac": lambda u: sign * function.jacobian(torch.as_tensor(u)).numpy(),
    }


class Network(nn.Module):
    """Means about a flat start and standard deviations, from loads (*batch, 18)."""

    def __init__(self) -> None:
        super().__init__()
        n = len(flat_start())
        self.layers = nn.Sequential(nn.Linear(18, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * n))

    def forward(self, load: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, (*batch, 36)."""
        mean, spread = self.layers(load).chunk(2, -1)
        return flat_start() + 0.1 * mean, 0.05 * nn.functional.softplus(spread) + 1e-3


def training_step(batch: int = BATCH, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the line of a training step on power flow, with the projection and without.

    Args:
        batch: Batch size.
        rounds: Steps of each, after two to warm up.
    """
    source = torch.Generator().manual_seed(0)
    load = loads() + 0.05 * torch.randn(batch, 18, generator=source, dtype=torch.float64)
    target = ph.DPPL("orthogonal").project(flat_start().expand(batch, -1), power_flow(load)).value
    seconds: dict[str, list[float]] = {"base": [], "probhard-or": []}
    models = {}
    for method in seconds:
        torch.manual_seed(0)
        model = ph.ConstrainedModel(Network().double(), power_flow, method)
        models[method] = (model, torch.optim.Adam(model.parameters(), 1e-3))
    for _ in range(rounds + 2):
        for method, (model, optimizer) in models.items():
            started = time.process_time()
            optimizer.zero_grad()
            model.loss((load, target)).backward()
            optimizer.step()
            seconds[method].append(time.process_time() - started)
    free, ours = (1e3 * statistics.median(values[2:]) for values in seconds.values())
    return {"case": STEP, "points": f"batch of {batch}", "milliseconds": ours, "their_milliseconds": free}


def table(request: Request) -> Table:
    """The table: the named cases near and far, or all of them and the training step."""
    names, quick = request.names("problems"), request.quick
    check_choices("problem", names, NAMES)

    def pieces(records: Records) -> list[Callable[[], Lines]]:
        left: list[Callable[[], Lines]] = [
            partial(_lines, case, points, *((40, 4) if quick else ()))
            for case in cases()
            for points in ("near", "far")
            if (not names or case.name in names) and (quick or not records.has({"case": case.name, "points": points}))
        ]
        return left if names else [*left, lambda: [training_step(BATCH, 1 if quick else ROUNDS)]]

    return Table("alarms", KEYS, measured(pieces), render, plot)


def _lines(case: Case, points: str, count: int = COUNT, sample: int = SAMPLE) -> Lines:
    return [measure(case, points, count, sample)]


def render(lines: Lines) -> str:
    """Return the page."""
    return templates.fill(
        PAGE, {"convergence": _convergence(lines), "peer": _peer(lines), "step": Figure(partial(_step, lines))}
    )


def _projections(lines: Lines) -> list[Line]:
    return [line for line in lines if line["case"] != STEP]


def _convergence(lines: Lines) -> str:
    """What our solver does with all points."""
    rows = [
        [
            f"{line['case']}, {line['points']}",
            f"{line['spread']:g}",
            f"{100 * line['converged']:.2f} %",
            str(line["alarms"]),
            f"{line['steps']:.1f} ({line['most_steps']})",
            f"{line['violation']:.0e}",
            f"{line['milliseconds']:.2g}",
        ]
        for line in _projections(lines)
    ]
    names = ["case", "sd", "converged", "false alarms", "steps, mean (most)", "worst violation", "ms per point"]
    return templates.table(names, rows)


def _peer(lines: Lines) -> str:
    """Our points beside those of SLSQP."""
    rows = [
        [
            f"{line['case']}, {line['points']}",
            *(_percent(line[field]) for field in ("their_feasible", "as_near", "nearer")),
            f"{line['their_milliseconds']:.1f}",
            f"{line['their_milliseconds'] / line['milliseconds']:.0f}",
        ]
        for line in _projections(lines)
    ]
    names = [
        "case",
        "SLSQP feasible",
        "ours as near",
        "ours nearer by 0.1 %",
        "SLSQP, ms per point",
        "its time over ours",
    ]
    return templates.table(names, rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _step(lines: Lines, field: str) -> str:
    """A number of the training step: ``ours``, ``free`` or ``ratio``."""
    for line in lines:
        if line["case"] == STEP:
            ours, free = line["milliseconds"], line["their_milliseconds"]
            return f"{ {'ours': ours, 'free': free, 'ratio': ours / free}[field.strip()]:.3g}"
    raise MissingFigureError(field)


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: times per point of both solvers."""
    from matplotlib.figure import Figure as Canvas

    own = _projections(lines)
    figure = Canvas(figsize=(9, 0.42 * len(own) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = [f"{line['case']}, {line['points']}" for line in own]
    for shift, (name, field) in zip((-0.2, 0.2), (("ours", "milliseconds"), ("SLSQP", "their_milliseconds"))):
        places = [place + shift for place in range(len(own))]
        axes.barh(places, [line[field] for line in own], height=0.38, color=COLOURS[name], label=name)
    axes.set_yticks(range(len(own)), names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="CPU milliseconds per point, one thread")
    axes.legend(frameon=False)
    pictures.save(figure, path)
