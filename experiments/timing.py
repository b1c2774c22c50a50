"""Training time per epoch, closed-form moments against samples, in the same run: the paper's timing figure.

    seconds per epoch = median seconds of a step * steps of an epoch.

The methods of a case take their steps in turn, so that all see the same machine. ``base`` is the unconstrained network.
Training on 100 projected draws is the paper's alternative to closed-form moments. The prose is in ``pages/``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import pictures, templates
from experiments.records import Records
from experiments.table import Lines, Request, Table, measured
from experiments.templates import Figure, MissingFigureError
from probhard.errors import check_choices
from probhard.method import METHODS, Method, Step

PAGE = Path(__file__).parent / "pages" / "timing.md"
PROBLEMS = ("heat", "pme", "advection", "stefan")
SAMPLED = "100 samples"
PDE_METHODS: dict[str, Method] = {
    "base": METHODS["base"],
    "probhard-or": METHODS["probhard-or"],
    "probhard-ob": METHODS["probhard-ob"],
    SAMPLED: Method(Step("oblique", draws=100), Step("oblique")),
}
FORECAST_METHODS = {
    **{name: METHODS[name] for name in ("base", "probhard-or", "probhard-ob")},
    SAMPLED: METHODS["hier-e2e"],
}
KEYS = ("case", "method")
BATCH, FIELDS = 20, 160  # of the PDE tables
COLOURS = {"base": pictures.GREY, "probhard-or": pictures.BLUE, "probhard-ob": pictures.GREEN, SAMPLED: pictures.ORANGE}


@dataclass(frozen=True)
class Case:
    """A training step of every method on the same batch."""

    name: str
    steps: Mapping[str, Callable[[], object]]
    per_epoch: int


def pde_cases(problems: Sequence[str]) -> Iterator[Case]:
    """Yield a case per PDE problem of the linear table, with uncompiled networks.

    Args:
        problems: Some of ``PROBLEMS``.
    """
    from experiments.pde.measures import dataset
    from experiments.pde.rules import RULES
    from probhard.model import ConstrainedModel
    from probhard.pde.operators import VarianceNO
    from probhard.pde.problems import PROBLEMS as BUILDERS

    for name in problems:
        problem = BUILDERS[name]()
        batch = dataset(problem, problem.split(0, BATCH, 1, 1).train)
        steps = {}
        for method_name, method in PDE_METHODS.items():
            torch.manual_seed(0)
            model = ConstrainedModel(VarianceNO().to(problem.dtype), partial(RULES["mass"], problem), method)
            steps[method_name] = _step(model, partial(model.loss, batch))
        yield Case(problem.name, steps, FIELDS // BATCH)


def forecast_cases(datasets: Sequence[str]) -> Iterator[Case]:
    """Yield a case per data set: DeepVAR at the settings of the forecasting table.

    Args:
        datasets: Some of ``experiments.forecasting.rows.DATASETS``.
    """
    from experiments.forecasting.origins import origins
    from experiments.forecasting.rows import SETTINGS
    from probhard.forecasting.models.estimator import DeepVAREstimator
    from probhard.forecasting.models.windows import RandomWindows, Windows

    for name in datasets:
        (place,), setting = origins(name, "paper"), SETTINGS[name]
        steps = {}
        for method_name, method in FORECAST_METHODS.items():
            torch.manual_seed(0)
            estimator = DeepVAREstimator(
                place.known.freq,
                len(place.future.index),
                place.known.hierarchy,
                method=method,
                context_length=setting.context,
                batch_size=setting.batch_size,
                lr=setting.lr,
            )
            estimator._windows = windows = Windows(place.known.to_gluonts(), estimator.layout)
            module = estimator.create_lightning_module()
            (window,) = RandomWindows(windows, setting.batch_size, 1, 0)
            steps[method_name] = _step(module, partial(module.loss, window))
        yield Case(name, steps, estimator.num_batches_per_epoch)


def _step(module: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-4)

    def step() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    return step


def measure(case: Case, budget: float = 20.0) -> list[dict[str, Any]]:
    """Return a result line per method.

    Args:
        case: The steps to time.
        budget: Seconds for all rounds; at least 4 and at most 32 rounds are run.
    """
    for step in case.steps.values():
        step()  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in case.steps}
    begun = time.perf_counter()
    names = list(case.steps)
    while len(seconds["base"]) < 4 or (time.perf_counter() - begun < budget and len(seconds["base"]) < 32):
        for name in names:
            started = time.perf_counter()
            case.steps[name]()
            seconds[name].append(time.perf_counter() - started)
        names = [*names[1:], names[0]]  # so that no method always follows the same other
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {
            "case": case.name,
            "method": name,
            "seconds_per_epoch": case.per_epoch * median[name],
            "over_base": median[name] / median["base"],
            "samples_over_this": median[SAMPLED] / median[name],
            "rounds": len(seconds[name]),
        }
        for name in case.steps
    ]


def table(request: Request) -> Table:
    """The table: the named PDE problems and data sets, by default all."""

    def pieces(_: Records) -> Iterator[Callable[[], Lines]]:
        from experiments.forecasting.rows import DATASETS

        chosen = request.names("problems")
        check_choices("problem", chosen, (*PROBLEMS, *DATASETS))
        fields = [name for name in chosen or PROBLEMS if name not in DATASETS]
        series = [name for name in chosen or DATASETS if name in DATASETS]
        for case in itertools.chain(pde_cases(fields), forecast_cases(series)):
            yield partial(measure, case, 1.0 if request.quick else 20.0)

    return Table("timing", KEYS, measured(pieces), render, plot)


def render(lines: Lines) -> str:
    """Return the page: seconds per epoch of every case and method."""
    by_key = {(line["case"], line["method"]): line for line in lines}
    rows = []
    for case in dict.fromkeys(line["case"] for line in lines):
        own = [by_key[case, method] for method in COLOURS]
        rows.append([case, *(f"{line['seconds_per_epoch']:.2f} ({line['over_base']:.2f})" for line in own)])
        rows.append(["", *(f"{line['samples_over_this']:.1f}x" for line in own)])
    values = {
        "slowest": Figure(partial(_slowest, lines)),
        "gain": Figure(partial(_gain, lines)),
        "table": templates.table(["case", *COLOURS], rows),
    }
    return templates.fill(PAGE, values)


def _slowest(lines: Lines, method: str) -> str:
    """The largest factor of a method over the unconstrained network, and its case."""
    worst = max((line for line in lines if line["method"] == method), key=lambda line: line["over_base"])
    return f"{worst['over_base']:.2f} times as long ({worst['case']})"


def _gain(lines: Lines, kind: str) -> str:
    """The range of factors by which 100 samples take longer than closed-form moments, on fields or on series."""
    gains = [
        line["samples_over_this"]
        for line in lines
        if line["method"] not in ("base", SAMPLED) and (line["case"] in PROBLEMS) == (kind == "fields")
    ]
    if not gains:
        raise MissingFigureError(f"cases of {kind}")
    return f"{min(gains):.1f} to {max(gains):.1f}"


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: seconds per epoch as bars on a logarithmic axis."""
    from matplotlib.figure import Figure as Canvas

    cases = list(dict.fromkeys(line["case"] for line in lines))
    seconds = {(line["case"], line["method"]): line["seconds_per_epoch"] for line in lines}
    figure = Canvas(figsize=(max(6.5, 1.5 + 1.1 * len(cases)), 4), layout="constrained")
    axes = figure.subplots()
    for k, (method, colour) in enumerate(COLOURS.items()):
        places = [index + 0.2 * (k - 1.5) for index in range(len(cases))]
        axes.bar(places, [seconds[case, method] for case in cases], width=0.19, color=colour, label=method)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("seconds per epoch")
    axes.set_title("Training time: closed-form moments against 100 projected draws")
    figure.legend(ncols=4, frameon=False, loc="outside lower center")
    pictures.save(figure, path)
