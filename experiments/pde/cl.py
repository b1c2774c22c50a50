"""The jobs behind the PDE-CL table: networks that solve an equation, and networks that learn its fields.

| row                     | learns from      | last layer                 | hard at inference          |
|-------------------------|------------------|----------------------------|----------------------------|
| soft                    | residuals        | linear                     | nothing                    |
| PDE-CL                  | residuals        | weights that fit the rows  | least squares of all rows  |
| PDE-CL 4 experts       | residuals        | the same, per region       | the same                   |
| PDE-CL untrained       | nothing          | as PDE-CL                  | the same                   |
| PDE-CL law probhard-ob | reference fields | as PDE-CL, and a variance  | known values and mass, too |
| VarianceNO base        | reference fields | mean and variance          | nothing                    |
| VarianceNO probhard-ob | reference fields | mean and variance          | known values and mass      |
| solver                  | nothing          | no network: all rows solved for the field | all rows    |
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.grid import Grid
from experiments.pde.cl_cases import CASES, Case
from experiments.pde.cl_tables import EPOCHS, KEYS, ROWS
from experiments.records import Records
from experiments.table import Request
from probhard import score as scores
from probhard.method import METHODS
from probhard.model import Batch, ConstrainedModel
from probhard.pde.basis import BasisNO, blocks
from probhard.pde.diverse import DiverseNO, relative_l2
from probhard.pde.operators import VarianceNO
from probhard.solvers.least_squares import least_squares
from probhard.training import Schedule, fit

UNTRAINED = ROWS[:2]
BASIS, FITTED = 24, 0.5  # functions, and share of the rows that weights are fitted to in training


@dataclass(frozen=True)
class SolverJob:
    """Train one row on a problem and measure it.

    Args:
        problem: A name in ``CASES``.
        row: One of ``ROWS``.
        seed: Of data and weights.
        epochs: Of training.
        sizes: Numbers of fields for training, validation and test.
        width: Of the networks.
    """

    problem: str
    row: str
    seed: int = 0
    epochs: int = EPOCHS
    sizes: tuple[int, int, int] = (64, 16, 32)
    width: int = 16

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return f"{self.problem}-{self.row.replace(' ', '-')}-{self.seed}-{self.epochs}"

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the line that this job gives."""
        epochs = 0 if self.row in UNTRAINED else self.epochs
        return [{"problem": self.problem, "row": self.row, "seed": self.seed, "epochs": epochs}]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Train and measure.

        Args:
            folder: For checkpoints.
            progress: Show a bar.

        Returns:
            One result line.
        """
        case = CASES[self.problem]()
        train, validation, test = (
            case.data(count, torch.Generator().manual_seed(3 * self.seed + index))
            for index, count in enumerate(self.sizes)
        )
        model = None if self.row == "solver" else self._model(case)
        if model is not None and self.row not in UNTRAINED:
            schedule = Schedule(self.epochs, 16, 3e-3, 0.0, halvings=4)
            fit(model, train, validation, schedule, seed=self.seed, directory=folder, progress=progress)
        if model is not None and isinstance(model.backbone, BasisNO):
            model.backbone.fitted = None  # all rows are known at inference
        return [{**self.expected()[0], **measured(model, case, test)}]

    def _model(self, case: Case) -> ConstrainedModel:
        torch.manual_seed(self.seed)
        options: dict[str, Any] = {"width": self.width, "modes": (6, 6), "layers": 3, "channels": case.channels}
        free = METHODS["base"]
        backbone: nn.Module
        if self.row == "soft":
            backbone = DiverseNO(1, **options).double()
            return ConstrainedModel(backbone, case.known, free, score=_Residual(case))
        if self.row.startswith("VarianceNO"):
            backbone = VarianceNO(**options).double()
            return ConstrainedModel(backbone, case.known, self.row.split()[1])
        source = torch.Generator().manual_seed(self.seed)
        fitted = torch.rand(len(case.places), generator=source) < FITTED
        regions = blocks(case.shape, case.parts) if "experts" in self.row else None
        law = "law" in self.row
        network = BasisNO(
            case.equations, BASIS, case.linear, None if law else fitted, regions, case.places, law, **options
        ).double()
        if law:
            return ConstrainedModel(network, case.known, "probhard-ob")
        return ConstrainedModel(network, case.known, free, score=network.residual_score())


class _Residual:
    """The soft loss: squared residuals of all rows."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(self, law: Any, batch: Batch) -> Tensor:
        return self.case.equations(batch.inputs).residual(law.mean).square().sum(-1)


@torch.no_grad()
def measured(model: ConstrainedModel | None, case: Case, test: Batch) -> dict[str, float | None]:
    """Return the figures of a model, or of the solver, on test fields.

    Args:
        model: None for the solver.
        case: The problem.
        test: Inputs and reference fields.
    """
    y = test.target
    assert y is not None
    started = time.process_time()
    law = None
    if model is None:
        mean = solved(case, test.inputs)
    else:
        predicted = model((test.inputs,))
        law = None if isinstance(predicted, Tensor) or isinstance(model.backbone, DiverseNO) else predicted
        mean = predicted if isinstance(predicted, Tensor) else predicted.mean
    seconds = time.process_time() - started
    rows = case.equations(test.inputs).residual(mean)
    return {
        "relative": float(relative_l2(mean, y).mean()),
        "worst": float(relative_l2(mean, y).max()),
        "residual": float(rows.square().mean().sqrt()),
        "known": float(case.known(test.inputs).residual(mean).abs().max()),
        "crps": None if law is None else float(scores.crps(law, y).mean()),
        "coverage": None if law is None else float(scores.coverage(law, y).mean()),
        "milliseconds": 1e3 * seconds / len(y),
    }


def solved(case: Case, inputs: Tensor) -> Tensor:
    """Fields (batch, n) that solve all rows, by Gauss-Newton steps from 0 without a network."""
    rows = case.equations(inputs)
    start = torch.zeros(len(inputs), case.shape[0] * case.shape[1], dtype=inputs.dtype)
    return least_squares(rows.residual, start, linear=case.linear, steps=6).value


def grid(path: Path, request: Request) -> Grid:
    """Return the chosen jobs of the table, seed by seed; a quick run has two epochs and few fields.

    Args:
        path: The file of result lines.
        request: The options of the command.
    """
    quick: dict[str, Any] = {"epochs": 2, "sizes": (16, 8, 8), "width": 8}
    options = quick if request.quick else {"epochs": request.chosen_epochs(EPOCHS)}
    jobs = [
        SolverJob(problem, row, seed, **options)
        for seed in request.chosen_seeds()
        for row in request.chosen("methods", ROWS)
        for problem in request.chosen("problems", CASES)
    ]
    return Grid(jobs, Records(path, KEYS))
