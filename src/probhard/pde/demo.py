"""A demonstration: one small network, one conservation law, the methods side by side, in about a minute.

The network maps (m, t, x) to a mean and a variance at every grid point,

    (mean, raw variance) = sum_k branch_k(m) trunk_k(t, x),

and learns exact solutions of the porous medium equation; every slice must hold the mass ``(m t)^(1 + 1/m) / (m + 1)``.
All methods share seed, first weights, batches and number of epochs; those that train alike share the trained network.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from probhard import score
from probhard._util.atomic import replacing
from probhard.errors import ParameterError
from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale
from probhard.method import Method, as_method
from probhard.model import ConstrainedModel
from probhard.pde import PorousMedium, Problem

NAMES = ("base", "softc", "hardc", "probconserv", "probhard-ob", "probhard-or")
EPOCHS, RATE = 120, 3e-3
PICTURE, NUMBERS = "porous-medium.png", "results.json"
SHOWN = {"base": "tab:orange", "probhard-or": "tab:blue"}  # in the picture
FLOOR = 1e-10  # lowest mass error drawn, on a logarithmic axis
UNITS = {"mse": 1e-5, "ce_mean": 1e-3, "ce_draws": 1e-3, "crps": 1e-3}
LEGEND = """\
MSE and CRPS are means over grid points. CE mean: |mass of the mean - law|, summed over the slices of a field.
CE draws: the largest |mass - law| of any slice of any draw. The exact fields themselves have a CE mean of {gap:.1f},
the error of the trapezoid rule. softc: penalty 1, not tuned. hardc: only its mean obeys the law, its draws do not.
probconserv: the trained base, projected afterwards; probhard-inf is the same for a linear law and left out."""


@dataclass(frozen=True)
class Size:
    """How much is trained and tested: numbers of fields, fields per batch, network width, draws per test field."""

    train: int = 120
    test: int = 40
    batch: int = 20
    width: int = 64
    draws: int = 100


FULL, QUICK = Size(), Size(train=20, test=8, batch=5, width=32, draws=20)


@dataclass(frozen=True)
class Row:
    """One method's figures on the test fields, in plain units; ``seconds`` of training, 0 if it was reused."""

    method: str
    mse: float
    ce_mean: float
    ce_draws: float
    crps: float
    seconds: float


class BranchTrunk(nn.Module):
    """A small operator network: features of the grid, computed once per batch, weighted by each field's parameter."""

    center: Tensor
    spread: Tensor

    def __init__(self, problem: Problem, width: int) -> None:
        super().__init__()
        ends = problem.inputs(torch.tensor([problem.lower, problem.upper])).movedim(-3, 0).flatten(1)  # (3, ...)
        self.register_buffer("center", (ends.amax(1) + ends.amin(1)) / 2)
        self.register_buffer("spread", ((ends.amax(1) - ends.amin(1)) / 2).clamp(min=1e-6))
        self.branch = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, 2 * width))
        inner = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.trunk = nn.Sequential(nn.Linear(2, width), nn.ReLU(), *inner)
        self.to(problem.dtype)

    def forward(self, inputs: Tensor) -> LocationScale:
        """The law of the flattened fields (batch, nt * nx), from inputs (batch, 3, nt, nx) on one grid."""
        parameter = (inputs[:, :1, 0, 0] - self.center[0]) / self.spread[0]  # (batch, 1)
        place = (inputs[0, 1:].flatten(1).mT - self.center[1:]) / self.spread[1:]  # (n, 2)
        weights = self.branch(parameter).unflatten(-1, (2, -1))  # (batch, 2, width)
        mean, raw = (weights @ self.trunk(place).mT / math.sqrt(weights.shape[-1])).unbind(1)
        # Starts at a standard deviation of 0.05; the floor keeps float32 metrics regular where nothing is uncertain.
        return LocationScale(mean, Diagonal(nn.functional.softplus(raw - 6) + 1e-8))


def batch_of(problem: Problem, parameter: Tensor) -> dict[str, Tensor]:
    """Inputs, exact target and context of fields with these parameters."""
    return {
        "inputs": problem.inputs(parameter),
        "target": problem.solution(parameter).flatten(1),
        "context": parameter,
    }


def train(
    problem: Problem, parameter: Tensor, method: str | Method, epochs: int, seed: int, size: Size, bar: Any
) -> ConstrainedModel:
    """A model trained with one method; weights and batches depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ConstrainedModel(BranchTrunk(problem, size.width), problem.constraint, method)
    data, shuffle = batch_of(problem, parameter), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        total = 0.0
        for index in torch.randperm(len(parameter), generator=shuffle).split(size.batch):
            loss = model.loss({name: value[index] for name, value in data.items()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        schedule.step()
        bar.set_postfix(loss=f"{total / data['target'].numel():.4f}", refresh=False)
        bar.update()
    return model


@torch.no_grad()
def evaluate(model: ConstrainedModel, test: dict[str, Tensor], draws: int, seed: int) -> dict[str, float]:
    """MSE, CE of the mean, largest CE of the draws and CRPS on the test fields."""
    forecast, constraint = model.forecast(test), model.constraint(test)
    samples = forecast.sample((draws,), torch.Generator().manual_seed(seed))
    return {
        "mse": float(score.mse(forecast, test["target"]).mean()),
        "ce_mean": float(score.constraint_error(constraint, forecast).mean),
        "ce_draws": float(score.constraint_error(constraint, samples).largest),
        "crps": float(score.crps(forecast, test["target"]).mean()),
    }


def run(
    output: Path, epochs: int = EPOCHS, seed: int = 0, methods: Sequence[str] = NAMES, size: Size = FULL
) -> list[Row]:
    """Train and compare, print the table, and save the numbers and the picture into ``output``.

    Ctrl-C ends it early: the methods that were finished are printed and saved all the same.
    """
    chosen = {name: as_method(name) for name in methods}
    if epochs < 1 or not chosen:
        raise ParameterError(f"Got epochs={epochs} and {len(chosen)} methods.", "Nothing is trained.", "Ask for one.")
    folder, problem, rows = _folder(output), PorousMedium(), list[Row]()
    seeded = torch.Generator().manual_seed(seed)
    parameter, test = problem.parameters(size.train, seeded), batch_of(problem, problem.parameters(size.test, seeded))
    models: dict[str, ConstrainedModel] = {}
    trained: dict[Method, ConstrainedModel] = {}  # by what matters in training
    total = epochs * len({replace(method, inference=Method().inference) for method in chosen.values()})
    with _one_thread(), tqdm(total=total, unit="epoch", disable=None) as bar:
        try:
            for name, method in chosen.items():
                bar.set_description(f"{name:11s}")
                key, start, seconds = replace(method, inference=Method().inference), time.perf_counter(), 0.0
                if key not in trained:
                    trained[key] = train(problem, parameter, method, epochs, seed, size, bar)
                    seconds = time.perf_counter() - start
                model = ConstrainedModel(trained[key].backbone, problem.constraint, method)
                rows.append(Row(name, **evaluate(model, test, size.draws, seed), seconds=seconds))
                models[name] = model
        except KeyboardInterrupt:
            bar.write(f"Interrupted: {len(rows)} of {len(chosen)} methods are finished.")
    if not rows:
        print("No method was finished, so there is nothing to save.")
        return rows
    gap = float(score.constraint_error(problem.constraint(test["context"]), test["target"]).mean)
    setting = {"problem": "porous medium", "epochs": epochs, "seed": seed, **asdict(size), "ce_mean_exact": gap}
    _save(folder / NUMBERS, {**setting, "rows": [asdict(row) for row in rows]})
    print(table(rows, gap), f"\nNumbers: {output / NUMBERS}", sep="\n")
    if set(SHOWN) <= set(models):
        picture(folder / PICTURE, problem, {name: models[name] for name in SHOWN}, test["context"].median(), seed)
        print(f"Picture: {output / PICTURE}")
    return rows


def table(rows: Sequence[Row], gap: float) -> str:
    """The rows as text, with the units in the header and what they mean below."""
    lines = [
        f"{'method':12s}{'MSE':>9s}{'CE mean':>11s}{'CE draws':>11s}{'CRPS':>9s}{'train':>9s}",
        f"{'':12s}{'e-5':>9s}{'e-3':>11s}{'e-3':>11s}{'e-3':>9s}{'s':>9s}",
    ]
    for row in rows:
        mse, mean, draws, crps = (getattr(row, name) / unit for name, unit in UNITS.items())
        spent = f"{row.seconds:9.1f}" if row.seconds else f"{'reused':>9s}"
        lines.append(f"{row.method:12s}{mse:9.2f}{mean:11.4f}{draws:11.4f}{crps:9.3f}{spent}")
    return "\n".join([*lines, "", LEGEND.format(gap=gap / UNITS["ce_mean"])])


@torch.no_grad()
def picture(path: Path, problem: Problem, models: dict[str, ConstrainedModel], parameter: Tensor, seed: int) -> None:
    """Means and bands at three times, their difference from the exact field, and the mass error of draws."""
    test, times, grid = batch_of(problem, parameter.reshape(1)), problem.times, problem.grid
    exact = test["target"].unflatten(-1, problem.shape)[0]  # (nt, nx)
    figure = Figure(figsize=(12, 9.6), dpi=110, layout="constrained")
    cells = figure.add_gridspec(3, 3)
    fields, errors = ([figure.add_subplot(cells[row, column]) for column in range(3)] for row in range(2))
    mass = figure.add_subplot(cells[2, :])
    slices = (problem.slices // 5, problem.slices // 2, problem.slices - 1)
    zoom = fields[1].inset_axes((0.53, 0.42, 0.44, 0.54))
    panels = [(axes, index, 1.0) for axes, index in zip(fields, slices)] + [(zoom, slices[1], 1.0)]
    panels += [(axes, index, 0.0) for axes, index in zip(errors, slices)]
    for axes, index, level in panels:
        axes.plot(grid, level * exact[index], color="black", lw=1.2, label="exact", zorder=3)
    for name, model in models.items():
        color, forecast, constraint = SHOWN[name], model.forecast(test), model.constraint(test)
        mean, band = (part.unflatten(-1, problem.shape)[0] for part in (forecast.mean, 3 * forecast.stddev))
        for axes, index, level in panels:
            middle = mean[index] - (1 - level) * exact[index]
            low, high = middle - band[index], middle + band[index]
            axes.plot(grid, middle, color=color, lw=1.2, ls="--", label=f"{name}: mean")
            axes.fill_between(grid, low, high, color=color, alpha=0.3, lw=0, label=f"{name}: 3 std. dev.")
        draws = forecast.sample((20,), torch.Generator().manual_seed(seed))
        error = constraint.residual(draws)[:, 0].abs().clamp(min=FLOOR)  # (draws, nt)
        spread = f"{name}: 20 draws, largest {float(error.max()):.0e}"
        mass.scatter(times.expand_as(error), error, s=9, color=color, alpha=0.5, lw=0, label=spread)
    gap = problem.constraint(test["context"]).residual(test["target"])[0].abs().clamp(min=FLOOR)
    mass.plot(times[1:], gap[1:], color="black", ls=":", label="exact field: error of the trapezoid rule")
    for axes, below, index in zip(fields, errors, slices):
        axes.set(title=f"t = {float(times[index]):.2f}", xlabel="x", ylim=(-0.1, 1.9))
        below.set(xlabel="x", ylim=(-0.06, 0.1))
    fields[0].set(ylabel="u")
    errors[0].set(ylabel="u - exact")
    front = float(times[slices[1]])
    zoom.set(xlim=(front - 0.06, front + 0.04), ylim=(-0.05, 0.5))
    zoom.annotate("the front", (0.95, 0.87), xycoords="axes fraction", ha="right", fontsize=9)
    zoom.tick_params(labelsize=8)
    fields[0].legend(loc="upper right", fontsize=9)
    mass.set(title=f"Mass error of draws in every slice (0 drawn at {FLOOR:.0e})", xlabel="t", ylabel="|mass - law|")
    mass.set(yscale="log", ylim=(FLOOR / 3, 1))
    mass.legend(loc="upper center", fontsize=9, ncols=3)
    for axes in (*fields, *errors, zoom, mass):
        axes.grid(alpha=0.25)
    figure.suptitle(f"Porous medium equation, test parameter m = {float(parameter):.2f}")
    figure.savefig(path)


def _folder(output: Path) -> Path:
    """The output folder, made before anything is trained."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(
            f"The folder {output} cannot be made ({error.strerror}).",
            "The picture and the numbers go there.",
            "Pass another folder, with --output on the command line.",
        ) from error
    return output


def _save(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, replacing the file in one step."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain little from a second thread, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
