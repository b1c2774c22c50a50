"""A neural operator for a user's own fields, under the constraints that a file names.

    z = shift + scale * network((inputs - center) / spread),      u = projection of z on the constraint

Center and spread are those of the training inputs, shift and scale those of the training solutions: the law is back in
the units of the solutions before it is projected. The network computes in float32, everything after it in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from probhard import score as scores
from probhard.errors import ParameterError, ProbhardError
from probhard.io.settings import Reader, at_least, closest_name, listed, number, setting, switch, whole, within, word
from probhard.io.spec import KEYS
from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale
from probhard.method import METHODS, Method
from probhard.model import Batch, ConstrainedModel
from probhard.pde.operators import VarianceNO
from probhard.pde.samples import Samples
from probhard.projection.layer import DPPL

MODES = 12  # per axis, or as many as the grid tells apart
FLOOR = 1e-8  # of variances in the network's units: in float32 a softplus can reach 0, and nothing could move then
PADDING = 9  # points on the right of each axis, against periodicity
BUDGET = 2_000_000  # numbers that are drawn at a time

READERS: dict[str, Reader] = {
    **dict.fromkeys(("epochs", "batch_size", "patience", "width", "layers"), at_least(1)),
    **dict.fromkeys(("seed", "warm_up"), at_least(0)),
    **dict.fromkeys(("method", "score"), (word, "a name")),
    "lr": (within(0, math.inf, inside=False), "a positive number"),
    "modes": (listed(whole), "a whole number, or one per axis of the grid"),
    "split": (listed(number), "three numbers, for training, validation and test"),
    "normalise": (switch, "true or false"),
}
STEPS = {name: method.inference for name, method in METHODS.items()}
PROJECTED = [
    name
    for name, step in STEPS.items()
    if step.metric is not None and step.covariance != "keep" and not step.linear_only
]  # methods all of whose draws obey the whole constraint


@dataclass(frozen=True)
class Settings:
    """What a configuration may say beside the constraints, with defaults.

    Args:
        method: One that projects every draw.
        score: ``crps`` or ``nll``; None takes the method's own.
        warm_up: Epochs trained without the constraint at first.
        patience: Epochs without a better validation score after which to stop; None trains to the end.
        modes: Of the Fourier layers, per axis; None takes 12, fewer on small grids.
        split: Shares of the samples for training, for the choice of the best epoch, and held out.
        normalise: Standardise inputs and solutions.
    """

    method: str = "probhard-ob"
    score: str | None = None
    epochs: int = 200
    batch_size: int = 20
    lr: float = 1e-3
    warm_up: int = 0
    patience: int | None = 50
    width: int = 32
    layers: int = 4
    modes: list[int] | None = None
    seed: int = 0
    split: list[float] | None = None
    normalise: bool = True

    @classmethod
    def read(cls, content: Any) -> tuple[dict[str, Any], Settings]:
        """Constraints and settings of a configuration, plain values such as a YAML file holds."""
        if not isinstance(content, Mapping):
            raise ParameterError(
                f"The configuration is {content!r}.", "Its entries have names.", "Write 'constraints:', 'epochs:', ..."
            )
        names = [field.name for field in fields(cls)]
        for name in content:
            if name not in (*names, *KEYS):
                raise ParameterError(
                    f"There is no setting {name!r}.", "Nothing is guessed.", closest_name(str(name), (*names, *KEYS))
                )
        chosen = {name: setting(name, content[name], READERS) for name in names if content.get(name) is not None}
        if "patience" in content and content["patience"] is None:
            chosen["patience"] = None
        settings = cls(**chosen)
        settings.step()
        return {name: content[name] for name in KEYS if name in content}, settings

    def step(self) -> Method:
        """The method, with the score."""
        if self.method not in PROJECTED:
            known = f"{self.method!r} does not project every draw on the whole constraint."
            raise ParameterError(
                known if self.method in METHODS else f"There is no method {self.method!r}.",
                "Predictions come with a certificate for every draw.",
                closest_name(self.method, PROJECTED),
            )
        method = METHODS[self.method]
        return method if self.score is None else method.replace(score=self.score)

    def resolved(self, grid: tuple[int, ...]) -> Settings:
        """The same with modes for every axis of a grid."""
        if self.modes is None:
            return replace(self, modes=[min(MODES, (size + PADDING) // 2) for size in grid])
        modes = self.modes * len(grid) if len(self.modes) == 1 else self.modes
        if len(modes) != len(grid):
            raise ParameterError(
                f"modes={self.modes} for the grid {grid}.", "Every axis has its own.", "Write one number, or one each."
            )
        return replace(self, modes=modes)

    def parts(self, count: int) -> list[np.ndarray]:
        """Numbers of the samples for training, validation and test, drawn by the seed."""
        shares = self.split or [0.7, 0.15, 0.15]
        sizes = [round(share * count) for share in shares[1:]]
        if len(shares) != 3 or abs(sum(shares) - 1) > 1e-6 or min(*sizes, count - sum(sizes)) < 1:
            raise ParameterError(
                f"split={shares} of {count} samples.",
                "Training, the choice of the best epoch and the held-out figures each need at least one.",
                "Write three shares that sum to 1, such as [0.7, 0.15, 0.15], and bring more samples.",
            )
        order = np.random.default_rng(self.seed).permutation(count)
        validation, test, train = np.split(order, np.cumsum(sizes))
        return [train, validation, test]

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Normalised(nn.Module):
    """A neural operator between units: standardised inputs, and the law of all events in the units of the solutions.

    Args:
        operator: From (batch, channels, *grid) to a law over the flattened grid.
        channels: Of the inputs.
        index: Cells of every event in the flattened grid, (slices, n).
    """

    center: Tensor
    spread: Tensor
    shift: Tensor
    scale: Tensor
    index: Tensor

    def __init__(self, operator: nn.Module, channels: int, index: Tensor) -> None:
        super().__init__()
        self.operator = operator
        for name, value, shape in (
            ("center", 0, channels),
            ("spread", 1, channels),
            ("shift", 0, ()),
            ("scale", 1, ()),
        ):
            self.register_buffer(name, torch.full((shape,) if shape else (), value, dtype=torch.float64))
        self.register_buffer("index", index, persistent=False)

    def standardise(self, batch: Batch) -> None:
        """Take units from the training data; channels and solutions that never vary keep their scale."""
        assert batch.target is not None
        channels = batch.inputs.transpose(0, 1).flatten(1)  # (channels, points), NaN outside the domain
        self.center = channels.nanmean(1)
        self.spread = _or_one((channels - self.center[:, None]).square().nanmean(1).sqrt())
        self.shift, self.scale = batch.target.mean(), _or_one(batch.target.std(correction=0))

    def forward(self, inputs: Tensor) -> LocationScale:
        """The law of all events, batch (batch * slices,) of n variables."""
        shape = (-1, *[1] * (inputs.dim() - 2))
        unit = (inputs - self.center.view(shape)) / self.spread.view(shape)
        law = self.operator(unit.nan_to_num(0.0).float())
        mean, variance = (part.double()[:, self.index].flatten(0, 1) for part in (law.mean, law.variance))
        return LocationScale(mean, Diagonal(variance + FLOOR), validate_args=False).affine(self.scale, self.shift)


def _or_one(spread: Tensor) -> Tensor:
    return torch.where(spread > 0, spread, 1.0)


class Surrogate(ConstrainedModel):
    """A constrained model whose batches are whole samples, and whose events are their slices."""

    @classmethod
    def build(cls, settings: Settings, samples: Samples, training: np.ndarray) -> Surrogate:
        """An untrained one with the units of the samples to train on; weights depend on the seed."""
        backbone = _backbone(settings, samples)
        if settings.normalise:
            backbone.standardise(samples.batch(training))
        return cls(backbone, samples.constraint, settings.step())

    @classmethod
    def read(cls, path: Any, settings: Settings, samples: Samples) -> ConstrainedModel:
        """A trained one."""
        return cls.load(path, _backbone(settings, samples), samples.constraint).eval()

    def loss(self, batch: Any) -> Tensor:
        """As for every model, of targets (batch, slices, n); scores that have units are divided by the scale."""
        parts = Batch.of(batch)
        events = None if parts.target is None else parts.target.flatten(0, 1)
        total = super().loss(Batch(parts.inputs, events, None, parts.context))
        # Else weight decay would weigh against the units of the data.
        return total if self.method.score == "nll" else total / cast(Tensor, self.backbone.scale)


def _backbone(settings: Settings, samples: Samples) -> Normalised:
    assert settings.modes is not None
    torch.manual_seed(settings.seed)
    channels = samples.inputs.shape[1]
    operator = VarianceNO(channels, settings.modes, settings.width, settings.layers, PADDING).float()
    return Normalised(operator, channels, torch.from_numpy(samples.cells.index))


@torch.no_grad()
def check_constraints(model: ConstrainedModel, samples: Samples, numbers: np.ndarray) -> None:
    """Raise for the first sample whose constraint cannot be met, by its number; solutions are projected for that."""
    metric = model.method.inference.metric
    assert metric is not None
    size = max(1, BUDGET // samples.cells.index.size)
    for part in np.array_split(numbers, -(-len(numbers) // size)):
        batch = samples.batch(part)
        assert batch.target is not None
        points = batch.target.flatten(0, 1)
        try:
            DPPL(metric).project(points, samples.constraint(batch.context), (points, torch.ones_like(points)))
        except ProbhardError as error:
            if len(part) == 1:
                raise type(error)(f"Sample {part[0]}: {error.what}", error.why, error.fix) from error
            for half in np.array_split(part, 2):
                check_constraints(model, samples, half)
            raise


@torch.no_grad()
def measure(model: ConstrainedModel, samples: Samples, numbers: np.ndarray, draws: int = 100) -> dict[str, Any]:
    """Figures of held-out samples: of the solutions themselves, the bare network, and the constrained model.

    mse and crps are means over cells, crps the unbiased estimate from draws; covered_90 is the share of the solutions
    within the central 90 % of the draws; violations are the largest absolute ones of all means and draws. Events with
    draws that could not be projected are left out, and counted as ``failed``.
    """
    step, generator = model.method.inference, torch.Generator().manual_seed(0)
    assert step.metric is not None
    layer, seen = DPPL(step.metric, on_failure="flag"), dict[str, list[dict[str, Tensor]]]()
    size = max(1, BUDGET // (draws * samples.cells.index.size))
    for part in np.array_split(numbers, -(-len(numbers) // size)):
        batch = samples.batch(part)
        assert batch.target is not None
        target, constraint = batch.target.flatten(0, 1), samples.constraint(batch.context)
        seen.setdefault("solutions", []).append({"violation": constraint.violation(target)})
        law = model.backbone(batch.inputs)
        z = law.sample((draws,), generator)
        projected, mean = layer.project(z, constraint, law), layer(law, constraint).mean
        kept = projected.stats.converged.all(0)
        found = {"network": (law.mean, z), "constrained": (mean, projected.value)}
        for name, (center, sample) in found.items():
            figures = {
                "mse": (center - target).square().mean(-1),
                "crps": scores.crps_ensemble(sample, target, estimator="fair").mean(-1),
                "covered_90": scores.coverage(sample, target).mean(-1),
                "violation_mean": constraint.violation(center),
                "violation_draws": constraint.violation(sample).amax(0),
            }
            row = {key: values[kept] for key, values in figures.items()} | {"failed": ~kept}
            seen.setdefault(name, []).append(row)
    return {name: _joined(rows) for name, rows in seen.items()}


def _joined(rows: list[dict[str, Tensor]]) -> dict[str, float]:
    """The largest of violations, the number of failures, the mean of all else, over events."""
    columns = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    figures = dict[str, float]()
    for key, column in columns.items():
        violation, failed = key.startswith("violation"), key == "failed"
        figures[key] = (column.max() if violation else column.sum() if failed else column.mean()).item()
    return figures
