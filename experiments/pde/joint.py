"""The jobs behind the table of joint laws: one network per problem, law and seed, and the line of its figures.

Weights stay in the work folder beside the lines, so that the figures can be measured again without training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from experiments.grid import Grid
from experiments.pde.joint_cases import CASES, Case, Data
from experiments.pde.joint_measures import measured
from experiments.records import Records
from probhard._util.atomic import replacing
from probhard.errors import check_choices
from probhard.method import METHODS, Method, Step
from probhard.model import Batch, ConstrainedModel
from probhard.pde.correlated import Correlated
from probhard.pde.operators import VarianceNO
from probhard.training import Schedule, fit

TIMED = 12  # steps of each law
KEYS = ("problem", "law", "seed", "epochs")
RANK = 16


@dataclass(frozen=True)
class Law:
    """A row of the table: options of the network beside those of the problem, and a method.

    Args:
        network: Options of ``VarianceNO`` beside those of the problem.
        weight: Of the functionals in training.
        of: The row whose network it takes, and correlates by its errors on validation fields; None for its own.
        rank: Columns of a factor that is learned in a second phase, instead of that correlation; 0 for none.
    """

    network: Mapping[str, Any]
    weight: float = 0.0
    of: str | None = None
    rank: int = 0

    def method(self, case: Case) -> Method:
        """The training method on a problem."""
        method = Method(Step("variances"), Step("variances")) if self.rank else METHODS["probhard-ob"]
        return method.replace(functionals=case.blocks, functional_weight=self.weight) if self.weight else method


WEIGHT = 0.3  # of the functionals
SECOND = Schedule(12, lr=1e-2, weight_decay=0.0, halvings=2)  # of a second phase
LAWS = {
    "diagonal": Law({}),
    "errors": Law({}, of="diagonal"),
    "joint": Law({}, WEIGHT, of="diagonal", rank=RANK),
    "from the start": Law({"rank": RANK}, WEIGHT),
    "spectral": Law({"covariance": "spectral"}, WEIGHT),
}


@dataclass(frozen=True)
class FieldJob:
    """Train one network and measure it.

    Args:
        problem: A name in ``CASES``.
        law: A name in ``LAWS``.
        seed: Of data, weights and draws.
        epochs: Of training; None for those of the problem.
        sizes: Numbers of fields for training, validation, calibration and test; None for those of the problem.
        network: Options of ``VarianceNO`` that replace those of the problem.
        compiled: Whether to compile the network.
        draws: Per test field.
    """

    problem: str
    law: str
    seed: int = 0
    epochs: int | None = None
    sizes: tuple[int, int, int, int] | None = None
    network: Mapping[str, Any] | None = None
    compiled: bool = True
    draws: int = 100

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return f"{self.problem}-{self.law.replace(' ', '-')}-{self.seed}-{self._epochs}"

    @property
    def _epochs(self) -> int:
        return CASES[self.problem]().schedule.epochs if self.epochs is None else self.epochs

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the line that this job gives."""
        return [{"problem": self.problem, "law": self.law, "seed": self.seed, "epochs": self._epochs}]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Train, unless the weights are there, and measure.

        Args:
            folder: For checkpoints; the weights go to the folder ``weights`` beside it.
            progress: Show a bar.

        Returns:
            One result line.
        """
        case = CASES[self.problem]()
        data = self._data(case)
        law = LAWS[self.law]
        model, about = replace(self, law=law.of or self.law).trained(case, data, folder, progress)
        if law.rank:
            model, about = self._second_phase(model, about, case, data, folder, progress)
        errors = law.of is not None and not law.rank
        figures = measured(model.double(), case, data, self.seed, self.draws, errors=errors)
        line = {**self.expected()[0], **figures, **about}
        if self.seed == 0 and LAWS[self.law].weight:
            times = self._step_seconds(case, data)
            line |= {"step_seconds": times[1], "diagonal_step_seconds": times[0]}
        return [line]

    def _second_phase(
        self, first: ConstrainedModel, about: dict[str, Any], case: Case, data: Data, folder: Path, progress: bool
    ) -> tuple[ConstrainedModel, dict[str, Any]]:
        """The model with a factor learned on top of a trained one, and how both were trained."""
        model = self._correlated(first, case)
        path = folder.parent / "weights" / f"{self.name}.pt"
        if path.exists():
            content = torch.load(path, weights_only=True)
            model.backbone.load_state_dict(content["state"])
            return model, content["about"]
        schedule = replace(SECOND, epochs=min(SECOND.epochs, self._epochs))
        done = fit(model, data.train, data.validation, schedule, seed=self.seed, directory=folder, progress=progress)
        about = {**about, "second_phase_seconds": done.seconds}
        with replacing(path) as partial:
            torch.save({"state": model.backbone.state_dict(), "about": about}, partial)
        return model, about

    def _correlated(self, first: ConstrainedModel, case: Case) -> ConstrainedModel:
        torch.manual_seed(self.seed)
        law = LAWS[self.law]
        backbone = Correlated(cast(VarianceNO, first.backbone), law.rank)
        return ConstrainedModel(backbone, case.constraint, law.method(case))

    def _step_seconds(self, case: Case, data: Data) -> list[float]:
        """CPU seconds of a training step of the diagonal law and of this one, the least of several in turn."""
        models = [replace(self, law=law).model(case) for law in ("diagonal", LAWS[self.law].of or self.law)]
        if LAWS[self.law].rank:
            models[1] = self._correlated(models[1], case)
        size = case.schedule.batch_size
        parts = data.train.inputs[:size], data.train.target[:size], None, data.train.context[:size]  # type: ignore[index]
        for model in models:
            if self.compiled and isinstance(model.backbone, VarianceNO):
                model.backbone.compile()
        steps = [_Step(model, Batch(*parts)) for model in models]
        times = [[step.seconds() for step in steps] for _ in range(TIMED)]
        return [min(column) for column in zip(*times[2:])]  # the first ones compile

    def _data(self, case: Case) -> Data:
        return case.data(self.seed, self.sizes or case.sizes)

    def trained(self, case: Case, data: Data, folder: Path, progress: bool) -> tuple[ConstrainedModel, dict[str, Any]]:
        """The model of the best epoch, from its file if there is one, and how it was trained.

        Args:
            case: The problem.
            data: Its data.
            folder: For checkpoints.
            progress: Show a bar.
        """
        model = self.model(case)
        path = folder.parent / "weights" / f"{self.name}.pt"
        if path.exists():
            content = torch.load(path, weights_only=True)
            model.backbone.load_state_dict(content["state"])
            return model, content["about"]
        if self.compiled:
            model.backbone.compile()
        schedule = replace(case.schedule, epochs=self._epochs)
        done = fit(model, data.train, data.validation, schedule, seed=self.seed, directory=folder, progress=progress)
        about = {"best_epoch": done.best_epoch, "seconds": done.seconds}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            torch.save({"state": model.backbone.state_dict(), "about": about}, partial)
        return model, about

    def model(self, case: Case) -> ConstrainedModel:
        """The untrained model; its weights depend on the seed."""
        torch.manual_seed(self.seed)
        law = LAWS[self.law]
        backbone = VarianceNO(**{**case.network, **law.network, **(self.network or {})}).float()
        return ConstrainedModel(backbone, case.constraint, law.method(case))


class _Step:
    """One training step of a model on a batch."""

    def __init__(self, model: ConstrainedModel, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.optimiser = torch.optim.Adam(model.parameters(), 1e-3)

    def seconds(self) -> float:
        """CPU seconds of one step."""
        start = time.process_time()
        self.optimiser.zero_grad()
        self.model.loss(self.batch).backward()
        self.optimiser.step()
        return time.process_time() - start


def grid(
    path: str | os.PathLike[str],
    seeds: Sequence[int] = (0, 1, 2),
    problems: Sequence[str] = (),
    laws: Sequence[str] = (),
    epochs: int | None = None,
    quick: bool = False,
) -> Grid:
    """Return all jobs of the table, seed by seed.

    Args:
        path: The file of result lines.
        seeds: One job each.
        problems: Names of problems; empty for all.
        laws: Names of laws; empty for the rows of the table.
        epochs: Of training; None for those of each problem.
        quick: Small networks, little data and two epochs.
    """
    check_choices("problem", problems, list(CASES))
    check_choices("method", laws, list(LAWS))
    few = {"epochs": 2, "sizes": (20, 10, 10, 10), "network": {"width": 8, "modes": (4, 4)}, "compiled": False}
    options: dict[str, Any] = few if quick else {"epochs": epochs}
    jobs = [
        FieldJob(problem, law, seed, **options)
        for seed in seeds
        for problem in problems or CASES
        for law in laws or ("diagonal", "errors", "joint")
    ]
    return Grid(jobs, Records(path, KEYS))
