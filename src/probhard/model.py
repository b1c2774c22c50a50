"""Constrained models: a backbone, a constraint and a method, with ``loss``, ``forecast`` and ``sample``.

The parts are independent. The backbone never sees the constraint, the projection never sees the batch, and the score
never sees the constraint.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from probhard import score as scores
from probhard._util.atomic import replacing
from probhard._util.saved import read_model
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError
from probhard.laws.calibration import Calibration
from probhard.laws.distribution import LocationScale, as_location_scale
from probhard.method import Method, Step, as_method
from probhard.projection.layer import DPPL
from probhard.projection.projected import Projected

FORMAT, FORMAT_VERSION = "probhard-model", 2
PLAIN_VERSION = 1  # of files without a calibration, which older versions of the library read, too


@dataclass(frozen=True)
class Batch:
    """One batch of data.

    Args:
        inputs: What the backbone takes.
        target: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool.
        context: What the constraint function takes.
    """

    inputs: Any
    target: Tensor | None = None
    mask: Tensor | None = None
    context: Any = None

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """Convert data to a batch whose context is set.

        Args:
            batch: A ``Batch``; a tuple (inputs, target, mask, context), of which trailing parts may be left out; a
                mapping with these names; or the inputs alone.

        Returns:
            The batch; its context is the inputs unless another one is passed.

        Raises:
            ParameterError: If a mapping has other keys or no inputs, or a tuple another length.
        """
        if isinstance(batch, Batch):
            parts = batch
        elif isinstance(batch, Mapping):
            unknown = set(batch) - {"inputs", "target", "mask", "context"}
            if unknown or "inputs" not in batch:
                raise ParameterError(
                    f"The batch has the keys {sorted(batch)}.",
                    "A mapping must hold 'inputs' and may hold 'target', 'mask' and 'context'.",
                    "Put what the backbone takes into 'inputs' and what the constraint needs into 'context'.",
                )
            parts = cls(**batch)
        elif isinstance(batch, tuple | list):
            if len(batch) not in (1, 2, 3, 4):
                raise ParameterError(
                    f"The batch has {len(batch)} parts.",
                    "A tuple is (inputs, target, mask, context), with one to four parts.",
                    "Name the parts in a dictionary.",
                )
            parts = cls(*batch)
        else:
            parts = cls(batch)
        return parts if parts.context is not None else replace(parts, context=parts.inputs)


class ConstrainedModel(nn.Module):
    """A torch model of a distribution that obeys a constraint by a method.

    Args:
        backbone: Maps inputs to anything that ``as_location_scale`` takes, in target units.
        constraint_fn: Maps a batch's context (by default its inputs) to a constraint; or one constraint for all.
        method: A name in ``METHODS`` or a ``Method``.

    Attributes:
        calibration: Numbers that correct the spread of the law before its projection (see ``calibrate``), or None.

    Raises:
        ParameterError: If the method is not known.
    """

    calibration: Calibration | None = None

    def __init__(
        self,
        backbone: nn.Module,
        constraint_fn: Callable[[Any], Constraint] | Constraint,
        method: str | Method = "probhard-ob",
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.constraint_fn = constraint_fn
        self.method = as_method(method)
        self.training_layer = self.method.training.layer()
        self.inference_layer = self.method.inference.layer()

    def constraint(self, batch: Any) -> Constraint:
        """The constraint of a batch, which is anything that ``Batch.of`` takes."""
        if isinstance(self.constraint_fn, Constraint):
            return self.constraint_fn
        return self.constraint_fn(Batch.of(batch).context)

    def loss(self, batch: Any) -> Tensor:
        """The training loss: the score SUMMED over points and batch, plus the penalty and the score of functionals.

        The latter is ``functional_weight * n`` times the sum over groups of the mean CRPS in a group; functionals are
        scaled to means (see ``Functionals.weight``).

        Args:
            batch: Anything that ``Batch.of`` takes, with targets.

        Returns:
            A scalar.

        Raises:
            ParameterError: If the batch has no target.
        """
        parts = Batch.of(batch)
        if parts.target is None:
            raise ParameterError(
                "loss() got a batch without a target.", "There is nothing to score.", "Pass (inputs, target)."
            )
        dist = as_location_scale(self.backbone(parts.inputs))
        constraint = self.constraint(parts)
        predicted = self._applied(dist, constraint, self.method.training, self.training_layer)
        draws = self.method.training.draws
        samples = predicted.rsample((draws,)) if draws else None
        total = self._score(predicted, samples, parts.target, parts.mask).sum()
        if self.method.functionals is not None and self.method.functional_weight:
            total = total + self._functional_score(predicted, samples, parts.target, parts.mask)
        if self.method.penalty:
            total = total + self.method.penalty * constraint.penalty(predicted.mean).sum()
        return total

    def forecast(self, batch: Any) -> Projected | LocationScale:
        """The predictive distribution of a batch.

        Args:
            batch: Anything that ``Batch.of`` takes; targets are ignored.

        Returns:
            The law over (*batch, n); its draws obey the constraint if its ``feasible`` is True.
        """
        parts = Batch.of(batch)
        dist = as_location_scale(self.backbone(parts.inputs))
        return self._applied(dist, self.constraint(parts), self.method.inference, self.inference_layer)

    @torch.no_grad()
    def sample(self, batch: Any, n: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw from the forecast.

        Args:
            batch: Anything that ``Batch.of`` takes; targets are ignored.
            n: Number of draws.
            generator: Source of random numbers; torch's global one for None.

        Returns:
            Draws, (n, *batch, event).
        """
        return self.forecast(batch).sample((n,), generator)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights and method atomically to the file ``path``, as plain tensors and values."""
        target = Path(path)
        state = {name: value for name, value in self.state_dict().items() if isinstance(value, Tensor)}
        content = {
            "format": FORMAT,
            "version": PLAIN_VERSION,
            "method": self.method.record(),
            "state": state,
        }
        if self.calibration is not None:
            content |= {"version": FORMAT_VERSION, "calibration": self.calibration.record()}
        with replacing(target) as partial:
            torch.save(content, partial)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        backbone: nn.Module,
        constraint_fn: Callable[[Any], Constraint] | Constraint,
        method: str | Method | None = None,
    ) -> ConstrainedModel:
        """Load a saved model; code in the file is never run.

        Args:
            path: A file that ``save`` wrote.
            backbone: A network of the same architecture; it gets the saved weights.
            constraint_fn: As for the constructor.
            method: Replaces the saved method; needed if that has a metric module.

        Raises:
            FileNotFoundError: If there is no such file.
            ParameterError: If the file is not a saved model, or does not fit the backbone.
        """
        content = read_model(path, FORMAT, FORMAT_VERSION)
        if method is None and content["method"] is None:
            raise ParameterError(
                f"{path} was saved with a metric module in its method.",
                "Files hold the weights of modules, not the modules.",
                "Pass method=... as it was when the model was saved.",
            )
        try:
            chosen = Method.from_record(content["method"]) if method is None else as_method(method)
            record = content.get("calibration")
            calibration = None if record is None else Calibration.from_record(record)
        except ParameterError as error:
            raise ParameterError(f"{path}: {error.what}", error.why, error.fix) from error
        model = cls(backbone, constraint_fn, chosen)
        try:
            model.load_state_dict(content["state"])
        except RuntimeError as error:
            raise ParameterError(
                f"The weights in {path} do not fit this backbone: {' '.join(str(error).split())[:400]}",
                "They were saved from another architecture.",
                "Build the backbone with the same sizes as when it was saved.",
            ) from error
        return model if calibration is None else model.calibrated(calibration)

    def calibrated(self, calibration: Calibration | None) -> Self:
        """A model with the same weights whose laws are calibrated before they are projected.

        Args:
            calibration: The numbers; None for none.
        """
        twin = copy.copy(self)
        twin._modules = dict(self._modules)
        twin.calibration = calibration
        return twin

    def _applied(
        self, dist: LocationScale, constraint: Constraint, step: Step, layer: DPPL | None
    ) -> Projected | LocationScale:
        if self.calibration is None:
            return step.applied(layer, dist, constraint)
        return step.applied(layer, self.calibration.apply(dist), constraint, metric_from=dist)

    def _score(
        self, predicted: Projected | LocationScale, samples: Tensor | None, target: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The score of each variable, (*batch, n), from draws if there are any."""
        if samples is None:
            return scores.SCORES[self.method.score](predicted, target, mask=mask)
        if self.method.score == "crps":
            return scores.crps_ensemble(samples, target, mask=mask, estimator="fair")
        quantiles = scores.sample_quantiles(samples, scores.LEVELS)
        return scores.quantile_loss(quantiles, target, scores.LEVELS, mask=mask).mean(0)

    def _functional_score(
        self, predicted: Projected | LocationScale, samples: Tensor | None, target: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The weighted CRPS of the method's functionals, a scalar."""
        family, n = self.method.functionals, target.shape[-1]
        assert family is not None
        if samples is None:
            score = scores.crps(predicted, target, mask=mask, functionals=family)
        else:
            score = scores.crps_ensemble(samples, target, mask, estimator="fair", functionals=family)
        return self.method.functional_weight * n * (score * family.weight.to(score)).sum()
