"""A neural operator for users' own fields, under the constraints of a configuration file.

    z = shift + scale * network((inputs - center) / spread),      u = projection of z on the constraint

Center and spread are those of the training inputs, shift and scale those of the training solutions. The law is in the
units of the solutions before it is projected. The network computes in float32, everything after it in float64.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from probhard import score as scores
from probhard.errors import ParameterError, ProbhardError
from probhard.laws.covariance import Diagonal, LowRank
from probhard.laws.distribution import LocationScale
from probhard.model import Batch, ConstrainedModel
from probhard.pde.joint import scored_blocks
from probhard.pde.operators import VarianceNO
from probhard.pde.samples import Samples
from probhard.pde.settings import PADDING, PROJECTED, READERS, Settings
from probhard.projection.layer import DPPL

__all__ = ["PROJECTED", "READERS", "Normalised", "Settings", "Surrogate", "check_constraints", "measure"]

FLOOR = 1e-8  # added to variances in the network's units: in float32 softplus can reach 0, which stops all movement
BUDGET = 2_000_000  # numbers drawn at a time


class Normalised(nn.Module):
    """A neural operator with standardised inputs, whose law is in the units of the solutions.

    Args:
        operator: Maps (batch, channels, *grid) to a law over the flattened grid.
        channels: Number of input channels.
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
        """Set the units from a batch of training data; channels and solutions that are constant keep their scale."""
        assert batch.target is not None
        channels = batch.inputs.transpose(0, 1).flatten(1)  # (channels, points), NaN outside the domain
        self.center = channels.nanmean(1)
        self.spread = _or_one((channels - self.center[:, None]).square().nanmean(1).sqrt())
        self.shift, self.scale = batch.target.mean(), _or_one(batch.target.std(correction=0))

    def forward(self, inputs: Tensor) -> LocationScale:
        """The law of all events, batch (batch * slices,) of n variables, for inputs (batch, channels, *grid)."""
        shape = (-1, *[1] * (inputs.dim() - 2))
        unit = (inputs - self.center.view(shape)) / self.spread.view(shape)
        law = self.operator(unit.nan_to_num(0.0).float())
        mean = self._events(law.mean)
        own = self._events(law.cov.diagonal_part if isinstance(law.cov, LowRank) else law.variance) + FLOOR
        cov = LowRank(self._events(law.cov.factor), own) if isinstance(law.cov, LowRank) else Diagonal(own)
        return LocationScale(mean, cov, validate_args=False).affine(self.scale, self.shift)

    def _events(self, x: Tensor) -> Tensor:
        """The cells of every event, (batch * slices, n, ...), of values (batch, points, ...), in float64."""
        return x.double()[:, self.index].flatten(0, 1)


def _or_one(spread: Tensor) -> Tensor:
    return torch.where(spread > 0, spread, 1.0)


class Surrogate(ConstrainedModel):
    """A constrained model whose batches hold samples, and whose events are the slices of samples."""

    @classmethod
    def build(cls, settings: Settings, samples: Samples, training: np.ndarray) -> Surrogate:
        """Build an untrained surrogate; its weights depend on the seed.

        Args:
            settings: Resolved settings, with modes for every axis.
            samples: All samples.
            training: Numbers of the training samples, (count,), which set the units.
        """
        backbone = _backbone(settings, samples)
        if settings.normalise:
            backbone.standardise(samples.batch(training))
        return cls(backbone, samples.constraint, settings.scored(samples.cells))

    @classmethod
    def read(cls, path: Any, settings: Settings, samples: Samples) -> ConstrainedModel:
        """Load a trained surrogate, in ``eval`` mode.

        Args:
            path: A file that ``save`` wrote.
            settings: Resolved settings of the training.
            samples: Samples with the channels and axes of the training.

        Raises:
            ParameterError: If the file is not a saved model, or does not fit the settings.
        """
        return cls.load(path, _backbone(settings, samples), samples.constraint).eval()

    def loss(self, batch: Any) -> Tensor:
        """The scalar loss of a batch with targets (batch, slices, n); scores with units are divided by the scale."""
        parts = Batch.of(batch)
        events = None if parts.target is None else parts.target.flatten(0, 1)
        total = super().loss(Batch(parts.inputs, events, None, parts.context))
        # Without the division, the effect of weight decay would depend on the units of the data.
        return total if self.method.score == "nll" else total / cast(Tensor, self.backbone.scale)


def _backbone(settings: Settings, samples: Samples) -> Normalised:
    assert settings.modes is not None
    torch.manual_seed(settings.seed)
    channels = samples.inputs.shape[1]
    operator = VarianceNO(
        channels, settings.modes, settings.width, settings.layers, PADDING, rank=settings.rank
    ).float()
    return Normalised(operator, channels, torch.from_numpy(samples.cells.index))


@torch.no_grad()
def check_constraints(
    model: ConstrainedModel, samples: Samples, numbers: np.ndarray, tolerance: float = math.inf
) -> None:
    """Check that the constraints can be met, by projecting the solutions, and that these obey them.

    Args:
        model: Its metric is used.
        samples: All samples, with solutions.
        numbers: Numbers of the samples to check, (count,).
        tolerance: Largest relative violation of a solution.

    Raises:
        ProbhardError: For the first sample whose constraint cannot be met or is broken, with its number.
    """
    metric = model.method.inference.metric
    assert metric is not None
    size = max(1, BUDGET // samples.cells.index.size)
    for part in np.array_split(numbers, -(-len(numbers) // size)):
        batch = samples.batch(part)
        assert batch.target is not None
        points = batch.target.flatten(0, 1)
        try:
            constraint = samples.constraint(batch.context)
            layer, law = DPPL(metric, on_failure="raise"), (points, torch.ones_like(points))
            layer.project(points, constraint, law)
        except ProbhardError as error:
            if len(part) == 1:
                raise type(error)(f"Sample {part[0]}: {error.what}", error.why, error.fix) from error
            for half in np.array_split(part, 2):
                check_constraints(model, samples, half, tolerance)
            raise
        broken = constraint.relative_violation(points, points.abs().amax(-1, keepdim=True))
        if float(broken.max()) > tolerance:
            raise ParameterError(
                f"The solution of sample {part[int(broken.argmax()) // samples.slices]} breaks the constraints by "
                f"{float(broken.max()):.2g} of its size, more than data_tolerance={tolerance:g}.",
                "The network cannot fit it and obey the constraints. Units, axes or right-hand sides may be wrong.",
                "Correct them, or write a larger 'data_tolerance' in the configuration if the data are that rough.",
            )


@torch.no_grad()
def measure(model: ConstrainedModel, samples: Samples, numbers: np.ndarray, draws: int = 100) -> dict[str, Any]:
    """Measure the solutions, the unconstrained network and the constrained model on held-out samples.

    Args:
        model: The trained model.
        samples: All samples, with solutions.
        numbers: Numbers of the held-out samples, (count,).
        draws: Number of draws per event.

    Returns:
        Means over cells of mse, crps (unbiased) and covered_90 (solutions within the central 90 % of the draws), the
        same share of block means, and the largest violations. Events with draws that could not be projected are only
        counted, as ``failed``.
    """
    step, generator = model.method.inference, torch.Generator().manual_seed(0)
    assert step.metric is not None
    layer, rows = DPPL(step.metric, on_failure="flag"), dict[str, list[dict[str, Tensor]]]()
    blocks = scored_blocks(samples.cells).rows(samples.cells.variables)
    size = max(1, BUDGET // (draws * samples.cells.index.size))
    for part in np.array_split(numbers, -(-len(numbers) // size)):
        batch = samples.batch(part)
        assert batch.target is not None
        target, constraint = batch.target.flatten(0, 1), samples.constraint(batch.context)
        rows.setdefault("solutions", []).append({"violation": constraint.violation(target)})
        base = model.backbone(batch.inputs)
        law = base if model.calibration is None else model.calibration.apply(base)
        z = law.sample((draws,), generator)
        projected, mean = layer.project(z, constraint, base), layer(law, constraint, metric_from=base).mean
        kept = projected.stats.converged.all(0)
        forecasts = {"network": (law.mean, z), "constrained": (mean, projected.value)}
        for name, (center, sample) in forecasts.items():
            figures = {
                "mse": (center - target).square().mean(-1),
                "crps": scores.crps_ensemble(sample, target, estimator="fair").mean(-1),
                "covered_90": scores.coverage(sample, target).mean(-1),
                "blocks_covered_90": scores.coverage(blocks.apply(sample), blocks.apply(target)).mean(-1),
                "violation_mean": constraint.violation(center),
                "violation_draws": constraint.violation(sample).amax(0),
            }
            row = {key: values[kept] for key, values in figures.items()} | {"failed": ~kept}
            rows.setdefault(name, []).append(row)
    return {name: _joined(parts) for name, parts in rows.items()}


def _joined(rows: list[dict[str, Tensor]]) -> dict[str, float]:
    """Over events, the largest violation, the number of failures, and the mean of every other figure."""
    columns = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    figures = dict[str, float]()
    for key, column in columns.items():
        violation, failed = key.startswith("violation"), key == "failed"
        figures[key] = (column.max() if violation else column.sum() if failed else column.mean()).item()
    return figures
