"""A demonstration: one small network and one conservation law under several methods, in about a minute.

The network learns exact solutions of the porous medium equation. Every slice must have the mass

    (m t)^(1 + 1/m) / (m + 1).

All methods share seed, initial weights, batches and number of epochs. Methods with the same training share the trained
network.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from probhard import score
from probhard._util.atomic import write_text
from probhard.errors import ParameterError
from probhard.method import Method, as_method
from probhard.model import ConstrainedModel
from probhard.pde import PorousMedium, Problem
from probhard.pde._branch_trunk import BranchTrunk, batch_of
from probhard.pde._demo_picture import SHOWN, picture

__all__ = [
    "EPOCHS",
    "FULL",
    "NAMES",
    "NUMBERS",
    "PICTURE",
    "QUICK",
    "BranchTrunk",
    "Row",
    "Size",
    "batch_of",
    "evaluate",
    "picture",
    "run",
    "table",
    "train",
]

NAMES = ("base", "softc", "hardc", "probconserv", "probhard-ob", "probhard-or")
EPOCHS, RATE = 120, 3e-3
PICTURE, NUMBERS = "porous-medium.png", "results.json"
UNITS = {"mse": 1e-5, "ce_mean": 1e-3, "ce_draws": 1e-3, "crps": 1e-3}
LEGEND = """\
MSE and CRPS are means over grid points. CE mean: |mass of the mean - exact mass|, summed over the slices of a field.
CE draws: the largest |mass - exact mass| of any slice of any draw. The exact fields have a CE mean of {gap:.1f}, the
error of the trapezoid rule. softc: penalty 1, not tuned. hardc: only its mean conserves mass, its draws do not.
probconserv: the trained base, projected afterwards; probhard-inf is the same for a linear constraint and left out."""


@dataclass(frozen=True)
class Size:
    """Size of a run.

    Args:
        train: Number of training fields.
        test: Number of test fields.
        batch: Fields per batch.
        width: Width of the network.
        draws: Draws per test field.
    """

    train: int = 120
    test: int = 40
    batch: int = 20
    width: int = 64
    draws: int = 100


FULL, QUICK = Size(), Size(train=20, test=8, batch=5, width=32, draws=20)


@dataclass(frozen=True)
class Row:
    """Results of one method on the test fields.

    Args:
        method: Name of the method.
        mse: Mean squared error.
        ce_mean: Constraint error of the mean.
        ce_draws: Largest constraint error of the draws.
        crps: Mean CRPS.
        seconds: Training time; 0 if a trained network was reused.
    """

    method: str
    mse: float
    ce_mean: float
    ce_draws: float
    crps: float
    seconds: float


def train(
    problem: Problem, parameter: Tensor, method: str | Method, epochs: int, seed: int, size: Size, bar: Any
) -> ConstrainedModel:
    """Train a model with one method; initial weights and batches depend on the seed alone.

    Args:
        problem: The problem.
        parameter: Parameters of the training fields, (count,).
        method: A method or its name.
        epochs: Number of epochs.
        seed: Seed of weights and batches.
        size: Fields per batch and width of the network.
        bar: A tqdm progress bar, advanced by 1 per epoch.
    """
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
    """Evaluate a model on test fields.

    Args:
        model: The trained model.
        test: A batch of ``batch_of``.
        draws: Draws per field.
        seed: Seed of the draws.

    Returns:
        The figures of a ``Row``: mse, ce_mean, ce_draws and crps.
    """
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
    """Train and compare methods, print a table, and save numbers and picture; Ctrl-C keeps the finished methods.

    Args:
        output: Folder of the results.
        epochs: Number of epochs of every method.
        seed: Seed of data, weights and draws.
        methods: Names of the methods.
        size: Size of the run.

    Returns:
        One row per finished method.

    Raises:
        ParameterError: If there is nothing to train, a method is not known, or the folder cannot be made.
    """
    chosen = {name: as_method(name) for name in methods}
    if epochs < 1 or not chosen:
        raise ParameterError(f"Got epochs={epochs} and {len(chosen)} methods.", "Nothing is trained.", "Ask for one.")
    folder, problem, rows = _folder(output), PorousMedium(), list[Row]()
    seeded = torch.Generator().manual_seed(seed)
    parameter, test = problem.parameters(size.train, seeded), batch_of(problem, problem.parameters(size.test, seeded))
    models: dict[str, ConstrainedModel] = {}
    trained: dict[Method, ConstrainedModel] = {}  # by the part of the method that matters in training
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
    """Format the rows as text.

    Args:
        rows: Results of the methods.
        gap: Constraint error of the exact fields.

    Returns:
        A table with units in its header and a legend below.
    """
    lines = [
        f"{'method':12s}{'MSE':>9s}{'CE mean':>11s}{'CE draws':>11s}{'CRPS':>9s}{'train':>9s}",
        f"{'':12s}{'e-5':>9s}{'e-3':>11s}{'e-3':>11s}{'e-3':>9s}{'s':>9s}",
    ]
    for row in rows:
        mse, mean, draws, crps = (getattr(row, name) / unit for name, unit in UNITS.items())
        spent = f"{row.seconds:9.1f}" if row.seconds else f"{'reused':>9s}"
        lines.append(f"{row.method:12s}{mse:9.2f}{mean:11.4f}{draws:11.4f}{crps:9.3f}{spent}")
    return "\n".join([*lines, "", LEGEND.format(gap=gap / UNITS["ce_mean"])])


def _folder(output: Path) -> Path:
    """Create the output folder, before anything is trained."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(
            f"The folder {output} cannot be made ({error.strerror}).",
            "The picture and the numbers are saved there.",
            "Pass another folder, with --output on the command line.",
        ) from error
    return output


def _save(path: Path, content: dict[str, Any]) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: small matrices gain little from a second one, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
