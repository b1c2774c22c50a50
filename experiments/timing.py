"""Training time per epoch, sampling-free against samples, in the same run: the paper's timing figure.

For every case the steps of all methods are taken in turn, in rotation, so that all see the same machine; an epoch is
the median step times the steps of an epoch. ``base`` is the unconstrained network; the methods that train on 100
projected draws are the paper's alternative to closed-form moments.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from experiments.records import Records
from probhard.method import METHODS, Method, Step

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
COLOURS = {"base": "#9aa5b1", "probhard-or": "#2a78d6", "probhard-ob": "#1baf7a", SAMPLED: "#eb6834"}


@dataclass(frozen=True)
class Case:
    """A training step of every method on the same batch."""

    name: str
    steps: Mapping[str, Callable[[], object]]
    per_epoch: int


def pde_cases(problems: Sequence[str]) -> Iterator[Case]:
    """The linear laws of the PDE tables, uncompiled networks."""
    from functools import partial

    from experiments.pde.measures import dataset
    from experiments.pde.runs import RULES
    from probhard.model import ConstrainedModel
    from probhard.pde.operators import VarianceNO
    from probhard.pde.problems import PROBLEMS

    for name in problems:
        problem = PROBLEMS[name]()
        batch = dataset(problem, problem.split(0, BATCH, 1, 1).train)
        steps = {}
        for method_name, method in PDE_METHODS.items():
            torch.manual_seed(0)
            model = ConstrainedModel(VarianceNO().to(problem.dtype), partial(RULES["mass"], problem), method)
            steps[method_name] = _step(model, lambda model=model, batch=batch: model.loss(batch))  # type: ignore[misc]
        yield Case(problem.name, steps, FIELDS // BATCH)


def forecast_cases(datasets: Sequence[str]) -> Iterator[Case]:
    """DeepVAR at the settings of the forecasting table, on the data sets that are there."""
    from experiments.forecasting.runs import SETTINGS, origins
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
            steps[method_name] = _step(module, lambda module=module, window=window: module.loss(window))  # type: ignore[misc]
        yield Case(name, steps, estimator.num_batches_per_epoch)


def _step(module: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-4)

    def step() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    return step


def measure(case: Case, budget: float = 20.0) -> list[dict[str, Any]]:
    """Seconds per epoch of every method, for as many rounds as fit the budget in seconds, at least four."""
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
        names = [*names[1:], names[0]]  # none always follows the same other
    median = {name: statistics.median(found) for name, found in seconds.items()}
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


def run(path: Path, cases: Sequence[Iterator[Case]], budget: float = 20.0) -> list[dict[str, Any]]:
    """Measure all cases in one thread and keep the lines."""
    records, threads = Records(path, KEYS), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for cases_of_one_kind in cases:
            for case in tqdm(cases_of_one_kind, unit="case"):
                records.append(*measure(case, budget))
    finally:
        torch.set_num_threads(threads)
    return records.read()


def write(folder: Path, lines: Sequence[Mapping[str, Any]]) -> list[Path]:
    """A table and a figure of the lines."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(line["case"] for line in lines))
    found = {(line["case"], line["method"]): line for line in lines}
    text = [
        "# Training time per epoch",
        "",
        "Seconds per epoch, one thread, all methods of a row in the same run (`probhard bench timing`); in brackets",
        "the factor over the unconstrained network. The last column trains on 100 projected draws (of forecasts:",
        "HierE2E's loss); the line below a case says how many times longer that takes than each method.",
        "",
        f"| case | {' | '.join(COLOURS)} |",
        f"|---|{'---|' * len(COLOURS)}",
    ]
    for case in cases:
        own = [found[case, method] for method in COLOURS]
        cells = [f"{line['seconds_per_epoch']:.2f} ({line['over_base']:.2f})" for line in own]
        text.append(f"| {case} | {' | '.join(cells)} |")
        ratios = [f"{line['samples_over_this']:.1f}x" for line in own]
        text.append(f"| | {' | '.join(ratios)} |")
    page = folder / "timing.md"
    page.write_text("\n".join([*text, "", "![Training time per epoch](timing.png)", ""]))
    figure = Figure(figsize=(max(6.5, 1.5 + 1.1 * len(cases)), 4), layout="constrained")
    axes = figure.subplots()
    for k, (method, colour) in enumerate(COLOURS.items()):
        heights = [found[case, method]["seconds_per_epoch"] for case in cases]
        at = [index + 0.2 * (k - 1.5) for index in range(len(cases))]
        axes.bar(at, heights, width=0.19, color=colour, label=method)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("seconds per epoch")
    axes.set_title("Training time: closed-form moments against 100 projected draws")
    figure.legend(ncols=4, frameon=False, loc="outside lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    picture = folder / "timing.png"
    figure.savefig(picture, dpi=120)
    return [page, picture]
