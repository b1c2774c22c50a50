"""Which Q? The metric of the projection on four PDE problems and two hierarchies, all else the same.

| metric           | W = Q^-1                                                                              |
|------------------|---------------------------------------------------------------------------------------|
| identity         | I: the orthogonal projection, or OLS                                                  |
| diagonal         | variances of the forecast itself, for each input                                      |
| learned diagonal | one variance per variable, trained by the CRPS of the projected law                   |
| low rank         | standard deviations of held-out errors, and their shrunk correlation of rank ``RANK`` |
| dense            | the same with the whole shrunk correlation: MinT-shrink                               |

The law before the projection is the same in all rows: that of the network, or AutoETS, with independent variables. Its
draws are projected. Errors come from validation fields, or from the history. The prose is in ``pages/``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import probhard as ph
from experiments import pictures, templates
from experiments.grid import Grid, Unit
from experiments.pde.measures import dataset, evaluate
from experiments.pde.rows import LINEAR
from experiments.pde.rules import RULES
from experiments.pde.runs import Job
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, resumed
from probhard.errors import check_choices
from probhard.training import Schedule

NAME = "metrics"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
KEYS = ("problem", "metric")
FIELDS, SERIES = tuple(LINEAR.problems), ("labour", "tourism")
METRICS = ("identity", "diagonal", "learned diagonal", "low rank", "dense")
EPOCHS, RANK, DRAWS = 30, 16, 100
STEPS, RATE = 100, 0.05  # of learned diagonals
FLOOR = 1e-6  # smallest weight over the mean one
Metric = str | ph.Metric


@dataclass(frozen=True)
class Errors:
    """Held-out errors (T, n) and a law whose projection by a metric can be scored on past data."""

    errors: Tensor
    variance: Tensor  # (n,), a start for learned weights
    loss: Callable[[ph.DPPL], Tensor]


def build(name: str, held: Errors) -> Metric:
    """The metric of this name."""
    if name == "identity":
        return "orthogonal"
    if name == "diagonal":
        return "oblique"
    if name == "learned diagonal":
        return _learned(held)
    spread = held.errors.square().mean(0).clamp_min(FLOOR * held.errors.square().mean()).sqrt()
    correlation = ph.shrunk_correlation(held.errors, rank=RANK if name == "low rank" else None)
    factor, rest = spread.unsqueeze(-1) * correlation.factor, spread.square() * correlation.diagonal_part
    rest = rest.clamp_min(FLOOR * float(rest.mean()))
    if name == "low rank":
        return ph.LowRankMetric(factor, rest)
    return ph.DenseMetric(torch.linalg.cholesky(factor @ factor.mT + torch.diag_embed(rest)))


def _learned(held: Errors) -> ph.DiagonalMetric:
    """Weights that minimise the loss, on a logarithmic scale from the variances."""
    metric = ph.DiagonalMetric(held.variance.clamp_min(FLOOR * float(held.variance.mean())), learn=True)
    layer = ph.DPPL(metric)
    optimizer = torch.optim.Adam(layer.parameters(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        held.loss(layer).backward()
        optimizer.step()
    return ph.DiagonalMetric(metric.values.detach().exp())


@dataclass(frozen=True)
class FieldUnit:
    """One network, all metrics at inference."""

    job: Job

    @property
    def name(self) -> str:
        """Identifies the unit; a valid file name."""
        return self.job.problem

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of its lines."""
        return [{"problem": self.job.problem, "metric": metric} for metric in METRICS]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Train, measure, and return one line per metric."""
        job = self.job
        backbone, about = job.train(folder, progress)
        backbone.double().requires_grad_(False)
        problem = replace(job.problem_of(), dtype=torch.float64)
        rule = partial(RULES["mass"], problem)
        parts = problem.split(job.seed, *job.sizes)
        validation, test = dataset(problem, parts.validation), dataset(problem, parts.test)
        law = ph.as_location_scale(backbone(validation.inputs))
        assert validation.target is not None
        target, constraint = validation.target, rule(validation.context)
        held = Errors(
            target - law.mean,
            law.variance.mean(0),
            lambda layer: ph.crps(layer(law, constraint), target).mean(),
        )
        lines = []
        for key in self.expected():
            started = time.process_time()
            metric = build(key["metric"], held)
            learning = time.process_time() - started
            model = ph.ConstrainedModel(backbone, rule, ph.Method(inference=ph.Step(metric)))
            started = time.process_time()
            with torch.no_grad():
                model.forecast(test).sample((10,))
            seconds = time.process_time() - started
            figures = evaluate(model, problem, RULES["mass"], test, torch.Generator().manual_seed(job.seed), job.draws)
            kept = {name: figures[name] for name in ("mse", "crps_draws", "energy", "variogram", "ce_draws")}
            count = 10 * len(parts.test)
            lines.append({**key, **kept, "learning": learning, "draw": 1e6 * seconds / count, **about})
        return lines


@dataclass(frozen=True)
class SeriesUnit:
    """AutoETS on a hierarchy, all metrics at all origins of the rolling table."""

    dataset: str
    draws: int = DRAWS

    @property
    def name(self) -> str:
        """Identifies the unit; a valid file name."""
        return self.dataset

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of its lines."""
        return [{"problem": self.dataset, "metric": metric} for metric in METRICS]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Forecast, reconcile, and return one line per metric."""
        from experiments.forecasting.nine_sets import splits
        from probhard.forecasting.members.base import past_origins
        from probhard.forecasting.members.catalogue import named_member
        from probhard.forecasting.members.kept import kept_forecast

        del progress
        found: dict[str, list[dict[str, float]]] = {metric: [] for metric in METRICS}
        for number, known, future in splits(self.dataset):
            horizon = len(future.index)
            made = kept_forecast(
                named_member("ets", known), known, horizon, past_origins(known, horizon), folder.parent / "fits"
            )
            base, past, tree = made.bases[-1], made.bases[:-1], known.hierarchy
            y = torch.from_numpy(future.values)
            errors = torch.from_numpy(base.data.values - base.fitted)
            errors = errors[torch.isfinite(errors).all(-1)]
            windows = [
                (_normal(one), torch.from_numpy(known.values[len(one.data.index) :][: len(one.mean)])) for one in past
            ]

            def loss(layer: ph.DPPL, windows: Any = windows, tree: Any = tree) -> Tensor:
                scores = [ph.crps(layer(law, tree), seen).sum() / seen.abs().sum() for law, seen in windows]
                return torch.stack(scores).mean()

            held = Errors(errors, errors.square().mean(0), loss)
            law = _normal(base)
            for metric, lines in found.items():
                started = time.process_time()
                layer = ph.DPPL(build(metric, held))
                learning = time.process_time() - started
                generator = torch.Generator().manual_seed(number)
                with torch.no_grad():
                    started = time.process_time()
                    forecast = layer(law, tree)
                    draws = forecast.sample((self.draws,), generator)
                    seconds = time.process_time() - started
                    lines.append(
                        {
                            "mse": float((forecast.mean - y).square().mean() / y.square().mean()),
                            "crps_draws": float(ph.crps_ensemble(draws, y, estimator="fair").sum() / y.abs().sum()),
                            "energy": float(ph.energy_score(draws, y, estimator="fair").mean() / y.norm(dim=-1).mean()),
                            "variogram": float(ph.variogram_score(draws, y).mean() / y.abs().sum(-1).mean()),
                            "ce_draws": float(tree.relative_violation(draws).max()),
                            "learning": learning,
                            "draw": 1e6 * seconds / (self.draws * horizon),
                        }
                    )
        return [
            {**key, "origins": len(lines), **{name: sum(x[name] for x in lines) / len(lines) for name in lines[0]}}
            for key, lines in ((key, found[key["metric"]]) for key in self.expected())
        ]


def _normal(base: Any) -> ph.LocationScale:
    """The forecasts of all nodes, independent."""
    return ph.as_location_scale((torch.from_numpy(base.mean), torch.from_numpy(base.stddev)))


def table(request: Request) -> Table:
    """The table: all problems and data sets, or those that are named."""
    chosen = request.names("problems")
    check_choices("problem", chosen, (*FIELDS, *SERIES))

    def grid(path: Path) -> Grid:
        few: dict[str, Any] = {"sizes": (20, 10, 10), "network": {"width": 8, "modes": (4, 4)}, "draws": 20}
        units: list[Unit] = [SeriesUnit(name) for name in chosen or SERIES if name in SERIES]
        for name in chosen or FIELDS:
            if name in FIELDS:
                schedule = Schedule(2 if request.quick else EPOCHS)
                job = Job(LINEAR.name, name, "base", schedule=schedule, compiled=False)
                units.append(FieldUnit(replace(job, **few) if request.quick else job))
        return Grid(units, Records(path, KEYS))

    return Table(NAME, KEYS, resumed(grid, request), render, plot)


def _groups(lines: Lines) -> dict[str, dict[str, Line]]:
    """Lines by problem and metric."""
    found: dict[str, dict[str, Line]] = {}
    for problem in (*FIELDS, *SERIES):
        own = {line["metric"]: line for line in lines if line["problem"] == problem}
        if own:
            found[problem] = {metric: own[metric] for metric in METRICS if metric in own}
    return found


def render(lines: Lines) -> str:
    """Return the page."""
    left = [name for name in (*FIELDS, *SERIES) if name not in _groups(lines)]
    values = {
        "best": _best(lines),
        "missing": f"Not run yet: {', '.join(left)}." if left else "",
        "fields": "\n\n".join(_part(name, own) for name, own in _groups(lines).items() if name in FIELDS),
        "series": "\n\n".join(_part(name, own) for name, own in _groups(lines).items() if name in SERIES),
        "epochs": EPOCHS,
        "rank": RANK,
    }
    return templates.fill(PAGE, values)


def _part(name: str, own: dict[str, Line]) -> str:
    columns = ["metric", "MSE", "CRPS", "energy score", "variogram score", "worst draw", "learning s", "draw, µs"]
    rows = [
        [
            metric,
            *(f"{line[field]:.4g}" for field in ("mse", "crps_draws", "energy", "variogram")),
            f"{line['ce_draws']:.0e}",
            f"{line['learning']:.2f}",
            f"{line['draw']:.3g}",
        ]
        for metric, line in own.items()
    ]
    return f"### {name}\n\n" + templates.table(columns, rows)


def _best(lines: Lines) -> str:
    """The metric with the smallest energy score of every problem, and by how much it is ahead of identity."""
    parts = []
    for name, own in _groups(lines).items():
        best = min(own, key=lambda metric: own[metric]["energy"])
        if "identity" in own:
            gain = 100 * (own[best]["energy"] / own["identity"]["energy"] - 1)
            parts.append(f"{name}: {best} ({gain:+.1f} %)")
    return "; ".join(parts)


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: energy scores over that of the identity."""
    from matplotlib.figure import Figure as Canvas

    groups = _groups(lines)
    figure = Canvas(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    colours = (pictures.GREY, pictures.BLUE, pictures.GREEN, pictures.ORANGE, pictures.PURPLE)
    for shift, (metric, colour) in enumerate(zip(METRICS, colours)):
        places = [k + 0.16 * (shift - 2) for k in range(len(groups))]
        ratios = [own[metric]["energy"] / own["identity"]["energy"] if metric in own else 1 for own in groups.values()]
        axes.bar(places, [ratio - 1 for ratio in ratios], width=0.15, bottom=1.0, color=colour, label=metric)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.axhline(1.0, color="#888888", lw=0.8)
    axes.set_ylabel("energy score over that of the identity")
    figure.legend(ncols=5, frameon=False, loc="outside lower center", fontsize=8)
    pictures.save(figure, path)
