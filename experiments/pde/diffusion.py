"""The jobs behind ProbConserv's diffusion table: the heat equation from few observations.

A function is ``u(t, x) = exp(-k t) sin x`` with k in [1, 5], seen at 10 x 10 random places. All rows of the neural
process share a first phase; the second phase continues it, each row by its own loss. Rows are measured at t = 1/2 and
k = 1 on 201 places, as in the public code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.grid import Grid
from experiments.records import Records
from probhard import score as scores
from probhard._util.atomic import replacing
from probhard.constraints.base import Constraint
from probhard.constraints.conservation import Conservation, trapezoid_weights
from probhard.constraints.slices import per_slice
from probhard.errors import check_choices
from probhard.method import METHODS, Method, Step
from probhard.model import Batch, ConstrainedModel
from probhard.pde.gaussian_process import GaussianProcess
from probhard.pde.neural_process import AttentiveNP, Observations
from probhard.training import Schedule, fit

KEYS = ("row", "seed", "epochs")
RANGE, LENGTH = (1.0, 5.0), 2 * math.pi
SEEN, TARGETS = (10, 10), (5, 20)  # times and places of observations, and of targets in training
TIME, TESTED, PLACES, TEST = 0.5, 1.0, 201, 50  # of the test: t, k, places, functions
SOFT = 1.0  # weight of the squared PDE residual
HARD = Method(inference=Step("orthogonal", covariance="keep"))


@dataclass(frozen=True)
class Row:
    """A row of the table: the network, the loss of its second phase, and the method at inference."""

    network: str
    method: Method


ROWS = {
    "ANP": Row("base", METHODS["base"]),
    "SoftC-ANP": Row("soft", METHODS["base"]),
    "HardC-ANP": Row("base", HARD),
    "ProbConserv-ANP": Row("base", METHODS["probconserv"]),
    "probhard-ob, ANP": Row("projected", METHODS["probhard-ob"]),
    "GP": Row("gp", METHODS["base"]),
    "ProbConserv-GP": Row("gp", METHODS["probconserv"]),
    "probhard-ob, GP": Row("gp-projected", METHODS["probhard-ob"]),
}


def functions(count: int, generator: torch.Generator, tested: bool = False) -> Batch:
    """Observations of random functions, their targets and the conductivities as context.

    Args:
        count: Number of functions.
        generator: Of all random numbers.
        tested: With the places and the conductivity of the test, and without truth in the inputs.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    k = torch.full((count,), TESTED) if tested else RANGE[0] + (RANGE[1] - RANGE[0]) * uniform(count)
    times = (torch.arange(SEEN[0]) + uniform(count, SEEN[0])) / SEEN[0]
    places = _mesh(times, LENGTH * uniform(count, SEEN[1]).sort(-1).values)
    if tested:
        targets = _mesh(torch.full((count, 1), TIME), torch.linspace(0, LENGTH, PLACES).expand(count, -1))
    else:
        grid = torch.linspace(0, LENGTH, TARGETS[1]).expand(count, -1)
        targets = _mesh(uniform(count, TARGETS[0]).sort(-1).values, grid)
    inputs = {"places": places, "values": _exact(k, places), "targets": targets}
    truth = _exact(k, targets)
    return Batch(inputs if tested else {**inputs, "truth": truth}, truth, None, k)


def _mesh(times: Tensor, places: Tensor) -> Tensor:
    """(count, nt * nx, 2) of (count, nt) and (count, nx)."""
    t, x = torch.broadcast_tensors(times.unsqueeze(-1), places.unsqueeze(-2))
    return torch.stack([t, x], -1).flatten(1, 2)


def _exact(k: Tensor, places: Tensor) -> Tensor:
    return torch.exp(-k.unsqueeze(-1) * places[..., 0]) * torch.sin(places[..., 1])


def mass(k: Tensor, tested: bool = False) -> Constraint:
    """The trapezoid mass of every slice of the targets is 0, for conductivities (batch,)."""
    points, slices = (PLACES, 1) if tested else (TARGETS[1], TARGETS[0])
    weights = trapezoid_weights(torch.linspace(0, LENGTH, points, dtype=k.dtype))
    return per_slice(Conservation(weights, torch.zeros(len(k), slices, dtype=k.dtype)), (slices, points))


def tested_mass(k: Tensor) -> Constraint:
    """``mass`` on the places of the test."""
    return mass(k, tested=True)


def soft_score(backbone: AttentiveNP, weight: float = SOFT, every: int = 5) -> Callable[[Any, Batch], Tensor]:
    """The loss of the neural process plus the mean squared residual ``u_t - k u_xx`` of its mean at some targets.

    Args:
        backbone: The neural process.
        weight: Of the residual.
        every: Use one of so many targets.
    """
    free = backbone.latent_score()

    def score(law: Any, batch: Batch) -> Tensor:
        parts = Observations.of(batch.inputs)
        chosen = slice(None, None, every)
        targets = parts.targets[:, chosen].clone().requires_grad_()
        truth = None if parts.truth is None else parts.truth[:, chosen]
        with torch.enable_grad():
            mean = backbone(Observations(parts.places, parts.values, targets, truth)).mean
            (first,) = torch.autograd.grad(mean.sum(), targets, create_graph=True)
            (second,) = torch.autograd.grad(first[..., 1].sum(), targets, create_graph=True)
            residual = first[..., 0] - batch.context.unsqueeze(-1) * second[..., 1]
            return free(law, batch) + weight * residual.square().mean(-1) / len(residual)

    return score


@dataclass(frozen=True)
class DiffusionJob:
    """Train the network of a row and measure all rows that use it.

    Args:
        network: As in ``ROWS``.
        seed: Of data and weights.
        epochs: Of both phases.
        count: Number of training functions.
        width: Of the neural process.
        batch: Functions per step.
        lr: Learning rate of the first phase; the second starts with a quarter of it.
    """

    network: str
    seed: int = 0
    epochs: tuple[int, int] = (10, 3)
    count: int = 1000
    width: int = 64
    batch: int = 25
    lr: float = 1e-3

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return f"{self.network}-{self.seed}-{self.epochs[0]}-{self.epochs[1]}"

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the lines that this job gives."""
        names = [name for name, row in ROWS.items() if row.network == self.network]
        return [{"row": name, "seed": self.seed, "epochs": list(self.epochs)} for name in names]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Train what is missing, and measure.

        Args:
            folder: For checkpoints; weights go to the folder ``weights`` beside it.
            progress: Show a bar.

        Returns:
            One line per row.
        """
        data = [functions(count, self._generator(index)) for index, count in enumerate((self.count, 100))]
        backbone, seconds = self._gp(data, folder, progress) if self.network[:2] == "gp" else self._np(data, folder)
        test = functions(TEST, self._generator(2), tested=True)
        test = Batch(
            {name: value.double() for name, value in test.inputs.items()},
            _exact_double(test),
            None,
            test.context.double(),
        )
        return [
            {**key, **measured(backbone.double().eval(), ROWS[key["row"]].method, test), "seconds": seconds}
            for key in self.expected()
        ]

    def _generator(self, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(3 * self.seed + index)

    def _np(self, data: Sequence[Batch], folder: Path) -> tuple[nn.Module, float]:
        first, seconds = self._phase("first", 0, data, folder)
        last, more = self._phase(self.network, 1, data, folder, first)
        return last, seconds + more

    def _phase(
        self, name: str, phase: int, data: Sequence[Batch], folder: Path, start: nn.Module | None = None
    ) -> tuple[nn.Module, float]:
        """The neural process after a phase, from its file if there is one, and the seconds of training."""
        torch.manual_seed(self.seed)
        backbone = AttentiveNP(2, self.width, scale=(1.0, LENGTH))
        path = folder.parent / "weights" / f"{name}-{self.seed}-{self.epochs[0]}-{self.epochs[phase]}.pt"
        if path.exists():
            content = torch.load(path, weights_only=True)
            backbone.load_state_dict(content["state"])
            return backbone, content["seconds"]
        if start is not None:
            backbone.load_state_dict(start.state_dict())
        method = Method(Step("oblique"), Step("oblique")) if name == "projected" else METHODS["base"]
        score = soft_score(backbone) if name == "soft" else backbone.latent_score()
        model = ConstrainedModel(backbone, mass, method, score=score)
        schedule = Schedule(self.epochs[phase], self.batch, self.lr / 4**phase, 0.0, halvings=3)
        done = fit(model, *data, schedule, seed=self.seed, directory=folder / name, progress=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial_file:
            torch.save({"state": backbone.state_dict(), "seconds": done.seconds}, partial_file)
        return backbone, done.seconds

    def _gp(self, data: Sequence[Batch], folder: Path, progress: bool) -> tuple[nn.Module, float]:
        """A Gaussian process whose numbers are learned over functions, with the projection or without."""
        method = METHODS["probhard-ob"] if self.network == "gp-projected" else METHODS["base"]
        backbone = GaussianProcess(2, (0.5, 1.5), 1.0, 1e-6)
        few = [_first(part, min(200, len(part.context))) for part in data]
        model = ConstrainedModel(backbone, mass, method.replace(score="nll"))
        schedule = Schedule(min(10, self.epochs[0]), self.batch, 0.05, 0.0, halvings=3)
        done = fit(model, *few, schedule, seed=self.seed, directory=folder / self.network, progress=progress)
        return backbone, done.seconds


def _first(batch: Batch, count: int) -> Batch:
    assert batch.target is not None
    inputs = {name: value[:count].double() for name, value in batch.inputs.items()}
    k = batch.context[:count].double()
    inputs |= {"values": _exact(k, inputs["places"]), "truth": _exact(k, inputs["targets"])}
    return Batch(inputs, inputs["truth"], None, k)


def _exact_double(batch: Batch) -> Tensor:
    return _exact(batch.context.double(), batch.inputs["targets"].double())


@torch.no_grad()
def measured(backbone: nn.Module, method: Method, test: Batch) -> dict[str, float]:
    """Return CE, LL, MSE, CRPS and coverage of a row on test functions.

    Args:
        backbone: Trained, in double precision.
        method: Its step at inference is used.
        test: As ``functions`` gives it.
    """
    assert test.target is not None
    law = ConstrainedModel(backbone, tested_mass, method).forecast(test)
    draws = law.sample((20,), torch.Generator().manual_seed(0))
    rows = tested_mass(test.context)
    return {
        "ce": float(rows.residual(law.mean).abs().mean()),
        "ce_draws": float(rows.residual(draws).abs().max()),
        "ll": -float(scores.nll(law, test.target).mean()),
        "mse": float((law.mean - test.target).square().mean()),
        "crps": float(scores.crps(law, test.target).mean()),
        "coverage": float(scores.coverage(law, test.target).mean()),
    }


def grid(
    path: str | os.PathLike[str],
    epochs: tuple[int, int] = (10, 3),
    seeds: Sequence[int] = (0,),
    networks: Sequence[str] = (),
    quick: bool = False,
) -> Grid:
    """Return all jobs of the table.

    Args:
        path: The file of result lines.
        epochs: Of both phases.
        seeds: One job each.
        networks: Names of networks; empty for all.
        quick: Few functions, a small network and one epoch per phase.
    """
    names = list(dict.fromkeys(row.network for row in ROWS.values()))
    check_choices("method", networks, names)
    few: Mapping[str, Any] = {"epochs": (1, 1), "count": 50, "width": 16}
    options: Mapping[str, Any] = few if quick else {"epochs": epochs}
    return Grid(
        [DiffusionJob(name, seed, **options) for seed in seeds for name in networks or names], Records(path, KEYS)
    )
