"""The jobs behind the out-of-range table: operators that know their uncertainty, outside the range they learned.

Every row trains its networks on parameters in the problem's range and is measured on that range and on ranges beyond
it. Weights stay in the work folder beside the lines; rows share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.grid import Grid
from experiments.pde.measures import dataset
from experiments.pde.range_tables import EPOCHS, KEYS
from experiments.records import Records
from experiments.table import Request
from probhard import score as scores
from probhard._util.atomic import replacing
from probhard.ensembles import DeepEnsemble, MCDropout
from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale
from probhard.model import Batch, ConstrainedModel
from probhard.pde.base import Problem
from probhard.pde.bayesian import BayesianNO
from probhard.pde.diverse import DiverseNO
from probhard.pde.operators import VarianceNO
from probhard.pde.problems import Heat
from probhard.training import Schedule, fit

MEMBERS, HEADS, PASSES, DROPOUT = 3, 10, 10, 0.1
WARM_UP = 10  # epochs of DiverseNO without diversity
CHUNK = 20
PROBLEMS: dict[str, tuple[type[Problem], tuple[tuple[float, float], ...]]] = {
    "heat": (Heat, ((1.0, 5.0), (5.0, 6.0), (6.0, 7.0), (7.0, 8.0))),
}


class Independent(nn.Module):
    """A backbone whose law keeps the variances of another's, without its correlations, as the public code does."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, inputs: Tensor) -> LocationScale:
        """The law over (*batch, n)."""
        law = self.backbone(inputs)
        return LocationScale(law.mean, Diagonal(law.variance.expand_as(law.mean)), validate_args=False)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        networks: Names of the networks that it trains.
        methods: Methods at inference, by the ends of the row's name.
    """

    networks: tuple[str, ...]
    methods: Mapping[str, str]


JOINT = " + probhard-inf, joint"  # keeps the correlations; mixtures have fewer columns than there are slices
BOTH = {"": "base", " + ProbConserv": "probconserv"}
ALL = {**BOTH, JOINT: "probhard-inf"}
POINTS = tuple(f"point-{index}" for index in range(MEMBERS))
ROWS = {
    "VarianceNO": Row(("variance",), BOTH),
    "BayesianNO": Row(POINTS[:1], ALL),
    "DiverseNO": Row(("diverse",), BOTH),
    "MCDropoutNO": Row(("dropout",), BOTH),
    "probhard-ob": Row(("projected",), {"": "probhard-ob"}),
    "EnsembleNO": Row(POINTS, BOTH),
}


@dataclass(frozen=True)
class RangeJob:
    """Train the networks of a row and measure it on all ranges.

    Args:
        problem: A name in ``PROBLEMS``.
        row: A name in ``ROWS``.
        seed: Of data and weights.
        epochs: Of training.
        sizes: Numbers of fields for training, validation and test.
        network: Options of the operators.
        shape: Time slices and points of a field; None for the problem's own.
    """

    problem: str
    row: str
    seed: int = 0
    epochs: int = EPOCHS
    sizes: tuple[int, int, int] = (160, 40, 100)
    network: tuple[tuple[str, Any], ...] = (("width", 16),)
    shape: tuple[int, int] | None = (20, 50)

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return f"{self.problem}-{self.row}-{self.seed}-{self.epochs}"

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the lines that this job gives."""
        key = {"problem": self.problem, "seed": self.seed, "epochs": self.epochs}
        return [
            {**key, "row": f"{self.row}{end}", "range": list(span)}
            for end in ROWS[self.row].methods
            for span in PROBLEMS[self.problem][1]
        ]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Train what is missing, and measure.

        Args:
            folder: For checkpoints; weights go to the folder ``weights`` beside it.
            progress: Show a bar.

        Returns:
            One line per method and range.
        """
        networks = [self._trained(name, folder, progress) for name in ROWS[self.row].networks]
        backbone = self._backbone([network for network, _ in networks])
        seconds = sum(float(about["seconds"]) for _, about in networks)
        lines = []
        for key in self.expected():
            end = key["row"].removeprefix(self.row)
            used = backbone if end == JOINT else Independent(backbone)
            problem = self._problem(*key["range"])
            test = dataset(problem, problem.split(self.seed, *self.sizes).test)
            model = ConstrainedModel(used, partial(_law, problem), ROWS[self.row].methods[end])
            lines.append({**key, **measured(model, problem, test), "seconds": seconds})
        return lines

    def _problem(self, lower: float, upper: float, dtype: torch.dtype = torch.float64) -> Problem:
        problem = PROBLEMS[self.problem][0](lower=lower, upper=upper, dtype=dtype)
        return problem if self.shape is None else replace(problem, slices=self.shape[0], points=self.shape[1])

    def _backbone(self, networks: Sequence[nn.Module]) -> nn.Module:
        first = networks[0].double().eval()
        if self.row == "EnsembleNO":
            return DeepEnsemble([network.double() for network in networks]).eval()
        if self.row == "MCDropoutNO":
            return MCDropout(first, PASSES)
        if self.row == "BayesianNO":
            assert isinstance(first, VarianceNO)
            train = self._data(torch.float64)[0]
            return BayesianNO(first).double().fit(train.inputs, _target(train))
        return first

    def _data(self, dtype: torch.dtype) -> list[Batch]:
        problem = self._problem(*PROBLEMS[self.problem][1][0])
        parts = replace(problem, dtype=torch.float32).split(self.seed, *self.sizes)
        return [dataset(replace(problem, dtype=dtype), part.to(dtype)) for part in parts[:2]]

    def _trained(self, name: str, folder: Path, progress: bool) -> tuple[nn.Module, dict[str, Any]]:
        """A network with its weights, from their file if there is one, and how it was trained."""
        index = int(name.split("-")[1]) if "-" in name else 0
        seed = self.seed * MEMBERS + index
        torch.manual_seed(seed)
        model = self._model(name)
        path = folder.parent / "weights" / f"{self.problem}-{name}-{self.seed}-{self.epochs}.pt"
        if path.exists():
            content = torch.load(path, weights_only=True)
            model.backbone.load_state_dict(content["state"])
            return model.backbone, content["about"]
        train, validation = self._data(torch.float32)
        schedule = Schedule(self.epochs)
        done = fit(model, train, validation, schedule, seed=seed, directory=folder / name, progress=progress)
        about = {"best_epoch": done.best_epoch, "best_score": done.best_score, "seconds": done.seconds}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial_file:
            torch.save({"state": model.backbone.state_dict(), "about": about}, partial_file)
        return model.backbone, about

    def _model(self, name: str) -> ConstrainedModel:
        """The untrained model of a network's name."""
        problem = self._problem(*PROBLEMS[self.problem][1][0], dtype=torch.float32)
        law, options = partial(_law, problem), dict(self.network)
        if name in ("variance", "projected"):
            method = "base" if name == "variance" else "probhard-ob"
            return ConstrainedModel(VarianceNO(**options).float(), law, method)
        heads, dropout = (HEADS if name == "diverse" else 1), (DROPOUT if name == "dropout" else 0.0)
        backbone = DiverseNO(heads, dropout=dropout, **options).float()
        steps = WARM_UP * -(-self.sizes[0] // Schedule().batch_size)
        return ConstrainedModel(backbone, law, "base", score=backbone.diverse_score(warm_up=steps))


def _law(problem: Problem, parameter: Tensor) -> Any:
    return problem.constraint(parameter)


def _target(batch: Batch) -> Tensor:
    assert batch.target is not None
    return batch.target


@torch.no_grad()
def measured(model: ConstrainedModel, problem: Problem, test: Batch) -> dict[str, float]:
    """Return the figures of a model on test fields.

    Args:
        model: Its forecasts are measured.
        problem: Of the fields.
        test: Inputs, exact fields and parameters.
    """
    parts: list[dict[str, Tensor]] = []
    for chunk in torch.arange(len(_target(test))).split(CHUNK):
        part = Batch(test.inputs[chunk], _target(test)[chunk], None, test.context[chunk])
        law, y = model.forecast(part), _target(part)
        parts.append(
            {
                "mean": law.marginals.mean,
                "variance": law.marginals.variance.expand_as(y),
                "crps": scores.crps(law, y),
                "coverage": scores.coverage(law, y),
                "ce": problem.constraint(part.context).residual(law.mean).abs().sum(-1),
            }
        )
    every = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    mean, y = every["mean"], _target(test)
    return {
        "mse": float((mean - y).square().mean()),
        "relative": float(((mean - y).norm(dim=-1) / y.norm(dim=-1)).mean()),
        "n_merci": float(scores.n_merci((mean, every["variance"].sqrt()), y)),
        **{name: float(every[name].mean()) for name in ("crps", "coverage", "ce")},
    }


def grid(path: Path, request: Request) -> Grid:
    """Return the chosen jobs of the table, seed by seed; a quick run has small networks, little data and two epochs.

    Args:
        path: The file of result lines.
        request: The options of the command.
    """
    network = (("width", 8), ("modes", (4, 4)))
    quick: dict[str, Any] = {"epochs": 2, "sizes": (20, 10, 10), "network": network, "shape": (10, 20)}
    options = quick if request.quick else {"epochs": request.chosen_epochs(EPOCHS)}
    jobs = [
        RangeJob(problem, row, seed, **options)
        for seed in request.chosen_seeds()
        for problem in request.chosen("problems", PROBLEMS)
        for row in request.chosen("methods", ROWS)
    ]
    return Grid(jobs, Records(path, KEYS))
