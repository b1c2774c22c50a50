"""The jobs behind the PDE tables: every row on every problem, trained and measured alike.

A job trains one network and measures all rows that use it. The unconstrained network, for example, also serves the
methods that act at inference only. The figures are those of ``measures`` on the test fields.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.grid import Grid
from experiments.pde.measures import dataset, evaluate, predicted, profile
from experiments.pde.rows import TABLES, Row
from experiments.pde.rules import RULES
from experiments.records import Records
from probhard import score as scores
from probhard.errors import check_choices
from probhard.model import Batch, ConstrainedModel
from probhard.pde.base import Problem
from probhard.pde.operators import VarianceNO
from probhard.training import Schedule, fit

VALIDATION_DRAWS = 20  # per field, if a choice is made on draws


@dataclass(frozen=True)
class Job:
    """Train one network for a problem and measure every row that uses it.

    Args:
        table: A name in ``TABLES``.
        problem: One of the table's problems.
        trained: The row that is trained; rows that share its network are measured too.
        score: ``crps`` or ``nll``, the training loss.
        seed: Of data, weights and draws.
        schedule: Of training.
        sizes: Numbers of fields for training, validation and test.
        network: Options of ``VarianceNO``.
        compiled: Whether to compile the network, which pays off from a few dozen epochs on.
        draws: Per test field, at most.
        shape: Time slices and points of a field; None for the problem's own.
    """

    table: str
    problem: str
    trained: str
    score: str = "crps"
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)
    sizes: tuple[int, int, int] = (160, 40, 100)
    network: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = True
    draws: int = 100
    shape: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return f"{self.problem}-{self.trained}-{self.score}-{self.seed}-{self.schedule.epochs}"

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the lines that this job gives."""
        table = TABLES[self.table]
        problem = self.problem_of()
        key: dict[str, Any] = {"problem": problem.name}
        if "m_range" in table.keys:
            key["m_range"] = [problem.lower, problem.upper]
        setting = {"score": self.score, "seed": self.seed, "epochs": self.schedule.epochs}
        network = table.rows[self.trained].network
        names = [name for name, row in table.rows.items() if row.network == network and row.serves(self.problem)]
        return [{**key, "method": name, **setting} for name in names]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Train and measure.

        Args:
            folder: For checkpoints.
            progress: Show a bar.

        Returns:
            One result line per row.
        """
        table = TABLES[self.table]
        problem = self.problem_of()
        backbone, about = self.train(folder, progress)
        exact = replace(problem, dtype=torch.float64)
        test = dataset(exact, exact.split(self.seed, *self.sizes).test)
        validation = dataset(exact, problem.split(self.seed, *self.sizes).validation.double())  # as in training
        backbone.double()
        lines = []
        for key in self.expected():
            row, kept = table.rows[key["method"]], dict(about)
            if row.choices and row.reuses_base:
                made = [(value, self._model(one, exact, backbone)) for value, one in row.chosen()]
                candidates = [(self._quality(model, validation, row.exact), value, model) for value, model in made]
                kept["validation_crps"], kept["choice"], model = min(candidates, key=lambda one: one[0])
            else:
                one = next(one for value, one in row.chosen() if value == about.get("choice"))
                model = self._model(one if one.after is None else replace(one, rule=one.after), exact, backbone)
            generator = torch.Generator().manual_seed(self.seed)
            last = None if row.last is None else RULES[row.last]
            figures = evaluate(model, exact, RULES[table.law], test, generator, min(self.draws, table.draws), last)
            figures["crps"] = figures["crps_marginals" if row.exact else "crps_draws"]
            line = {**key, **figures, **kept}
            if table.profile is not None and exact.lower <= table.profile[0] <= exact.upper:
                line["profile"] = profile(model, exact, *table.profile, self.draws, last)
            lines.append(line)
        return lines

    def problem_of(self) -> Problem:
        """Return the problem, on the grid of the job."""
        problem = TABLES[self.table].problems[self.problem]()
        return problem if self.shape is None else replace(problem, slices=self.shape[0], points=self.shape[1])

    def _model(self, row: Row, problem: Problem, backbone: VarianceNO) -> ConstrainedModel:
        return ConstrainedModel(backbone, partial(RULES[row.rule], problem), row.method.replace(score=self.score))

    def _quality(self, model: ConstrainedModel, validation: Batch, exact: bool) -> float:
        """CRPS on validation data, computed as in the table: from the marginals if they are exact, else from draws."""
        assert validation.target is not None
        with torch.no_grad():
            forecast = model.forecast(validation)
            if exact:
                return float(scores.crps(forecast, validation.target).mean())
            prediction = predicted(forecast, torch.Generator().manual_seed(self.seed), VALIDATION_DRAWS)
            return float(scores.crps_ensemble(prediction.draws, validation.target, estimator="fair").mean())

    def train(self, folder: Path, progress: bool) -> tuple[VarianceNO, dict[str, Any]]:
        """Return the network of the best epoch, and of the choice that is best on validation data.

        Args:
            folder: For checkpoints.
            progress: Show a bar.

        Returns:
            The network, and its epoch, choice, validation score and seconds.
        """
        table, problem = TABLES[self.table], self.problem_of()
        train, validation, _ = (dataset(problem, part) for part in problem.split(self.seed, *self.sizes))
        candidates: list[tuple[float, VarianceNO, dict[str, Any]]] = []
        seconds = 0.0
        for value, row in table.rows[self.trained].chosen():
            torch.manual_seed(self.seed)
            backbone = VarianceNO(**self.network).to(problem.dtype)
            if self.compiled:
                backbone.compile()
            model = self._model(row, problem, backbone)
            where = folder / f"{value or 0:g}"
            options: dict[str, Any] = {"seed": self.seed, "directory": where, "progress": progress, "judge": row.judge}
            done = fit(model, train, validation, self.schedule, **options)
            seconds += done.seconds
            quality = self._quality(model, validation, row.exact)
            about = {"best_epoch": done.best_epoch, "validation_crps": quality}
            candidates.append((quality, backbone, about if value is None else {**about, "choice": value}))
        _, backbone, about = min(candidates, key=lambda one: one[0])
        return backbone, {**about, "seconds": seconds}


def grid(
    table: str,
    path: str | os.PathLike[str],
    epochs: int = 150,
    seeds: Sequence[int] = (0,),
    problems: Sequence[str] = (),
    trained: Sequence[str] = (),
    objectives: Sequence[str] = ("crps", "nll"),
    quick: bool = False,
) -> Grid:
    """Return all jobs of a table, the most informative first. Rows trained on draws have a CRPS only.

    Args:
        table: A name in ``TABLES``.
        path: The file of result lines.
        epochs: Of training.
        seeds: One job each.
        problems: Names of problems; empty for all.
        trained: Names of rows to train; empty for all.
        objectives: Some of ``crps`` and ``nll``.
        quick: Small networks, little data and a schedule of their own instead of ``epochs``.
    """
    known = TABLES[table]
    check_choices("problem", problems, list(known.problems))
    check_choices("method", trained, known.order)  # other rows share their networks
    check_choices("score", objectives, ("crps", "nll"))
    schedule = known.quick if quick else Schedule(epochs)
    options = {"network": {"width": 8, "modes": (4, 4)}, "compiled": False, **known.few} if quick else {}
    jobs = [
        Job(table, problem, row, score, seed, known.rows[row].warmed(schedule), **options)
        for seed in seeds
        for score in known.scores
        for row in trained or known.order
        for problem in problems or known.problems
        if score in objectives and (score == "crps" or not known.rows[row].method.training.draws)
        if known.rows[row].serves(problem)
    ]
    return Grid(jobs, Records(path, known.keys))
