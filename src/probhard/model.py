"""Constrained models: a backbone, a constraint and a method, with ``loss``, ``forecast`` and ``sample``.

The backbone predicts a law or a point. The parts are independent: the backbone never sees the constraint, the
projection never sees the batch, and the score never sees the constraint.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from probhard._model.batch import Batch
from probhard._model.losses import law_loss, missing_law, penalty, point_loss, usable
from probhard._score.checks import masked
from probhard._util.atomic import replacing
from probhard._util.saved import read_model
from probhard.constraints.base import Constraint
from probhard.constraints.intersection import check_constraint
from probhard.errors import ParameterError
from probhard.laws.calibration import Calibration
from probhard.laws.distribution import LocationScale, as_location_scale
from probhard.method import Method, Score, Step, as_method
from probhard.projection.layer import DPPL
from probhard.projection.mixture import Mixture
from probhard.projection.projected import Projected

__all__ = ["Batch", "ConstrainedModel"]

FORMAT, FORMAT_VERSION = "probhard-model", 2
PLAIN_VERSION = 1  # of files without a calibration, which older versions of the library read, too


class ConstrainedModel(nn.Module):
    """A torch model of a distribution, or of points, that obeys a constraint by a method.

    Args:
        backbone: Maps inputs to anything that ``as_location_scale`` takes, in target units; or to a ``Mixture``, which
            is projected member by member; or to points, one tensor (*batch, n), which need a method with a fixed
            metric, such as ``"probhard-or"``.
        constraint_fn: Maps a batch's context (by default its inputs) to a constraint; or one constraint for all.
        method: A name in ``METHODS`` or a ``Method``.
        score: Replaces the score of the method: a name, or a function of the prediction and the batch that returns a
            tensor, which ``loss`` sums. It gets the projected points, the projected law, or the draws (S, *batch, n)
            of a training step with draws. No target is needed then.

    Attributes:
        calibration: Numbers that correct the spread of the law before its projection (see ``calibrate``), or None.

    Raises:
        ParameterError: If the method is not known, or there is no constraint.
    """

    calibration: Calibration | None = None

    def __init__(
        self,
        backbone: nn.Module,
        constraint_fn: Callable[[Any], Constraint] | Constraint,
        method: str | Method = "probhard-ob",
        score: str | Score | None = None,
    ) -> None:
        super().__init__()
        if isinstance(constraint_fn, type) or not callable(constraint_fn):
            check_constraint(constraint_fn, "ConstrainedModel")
        self.backbone = backbone
        self.constraint_fn = constraint_fn
        self.method = as_method(method) if score is None else as_method(method).replace(score=score)
        self.training_layer = self.method.training.layer()
        self.inference_layer = self.method.inference.layer()

    def constraint(self, batch: Any) -> Constraint:
        """The constraint of a batch, which is anything that ``Batch.of`` takes."""
        if isinstance(self.constraint_fn, Constraint):
            return self.constraint_fn
        constraint = self.constraint_fn(Batch.of(batch).context)
        check_constraint(constraint, "ConstrainedModel")
        return constraint

    def forward(self, batch: Any) -> Projected | LocationScale | Mixture | Tensor:
        """The prediction for a batch, by the inference step of the method.

        Args:
            batch: Anything that ``Batch.of`` takes; targets are ignored.

        Returns:
            The forecast, or, if the backbone returns points, the projected points (*batch, n).
        """
        parts = Batch.of(batch)
        return self._predicted(parts, self.constraint(parts), self.method.inference, self.inference_layer)

    def loss(self, batch: Any) -> Tensor:
        """The training loss: the score SUMMED over points and batch, plus the penalty and the score of functionals.

        The latter is ``functional_weight * n`` times the sum over groups of the mean CRPS in a group; functionals are
        scaled to means (see ``Functionals.weight``). The CRPS of a point is its absolute error. Elements whose
        projection failed are left out (see ``DPPL``'s ``on_failure``).

        Args:
            batch: Anything that ``Batch.of`` takes, with targets unless the score is a function.

        Returns:
            A scalar.

        Raises:
            ParameterError: If the batch has no target, or a score needs a law and the backbone returns points.
            ShapeError: If the target has another shape than the prediction.
        """
        parts, method = Batch.of(batch), self.method
        constraint = self.constraint(parts)
        predicted = self._predicted(parts, constraint, method.training, self.training_layer)
        if isinstance(predicted, Tensor):
            total = point_loss(method, predicted, parts)
        else:
            total = law_loss(method, predicted, parts)
        if method.penalty:
            mean = predicted if isinstance(predicted, Tensor) else predicted.mean
            total = total + method.penalty * masked(penalty(method, constraint, mean), usable(predicted)).sum()
        return total

    def forecast(self, batch: Any) -> Projected | LocationScale | Mixture:
        """The predictive distribution of a batch.

        Args:
            batch: Anything that ``Batch.of`` takes; targets are ignored.

        Returns:
            The law over (*batch, n); its draws obey the constraint if its ``feasible`` is True.

        Raises:
            ParameterError: If the backbone returns points.
        """
        predicted = self(batch)
        if isinstance(predicted, Tensor):
            raise missing_law("forecast() returns a law")
        return predicted

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
        """Write weights and method atomically to the file ``path``, as plain tensors and values.

        A score that is a function is not saved; ``load`` takes it again.
        """
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
        score: str | Score | None = None,
    ) -> ConstrainedModel:
        """Load a saved model; code in the file is never run.

        Args:
            path: A file that ``save`` wrote.
            backbone: A network of the same architecture; it gets the saved weights.
            constraint_fn: As for the constructor.
            method: Replaces the saved method; needed if that has a metric module.
            score: Replaces the saved score; needed if that was a function.

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
            chosen = Method.from_record(content["method"], score) if method is None else as_method(method)
            record = content.get("calibration")
            calibration = None if record is None else Calibration.from_record(record)
        except ParameterError as error:
            raise ParameterError(f"{path}: {error.what}", error.why, error.fix) from error
        model = cls(backbone, constraint_fn, chosen if score is None else chosen.replace(score=score))
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

    def _predicted(
        self, parts: Batch, constraint: Constraint, step: Step, layer: DPPL | None
    ) -> Projected | LocationScale | Mixture | Tensor:
        """The projected law, or the projected points if the backbone returns a tensor."""
        output = self.backbone(parts.inputs)
        if isinstance(output, Tensor):
            if self.calibration is not None:
                raise missing_law("A calibration corrects the spread of a law")
            return step.applied_to_points(layer, output, constraint)
        if isinstance(output, Mixture):
            return self._projected_mixture(output, constraint, step, layer)
        dist = as_location_scale(output)
        if self.calibration is None:
            return step.applied(layer, dist, constraint)
        return step.applied(layer, self.calibration.apply(dist), constraint, metric_from=dist)

    def _projected_mixture(self, mixture: Mixture, constraint: Constraint, step: Step, layer: DPPL | None) -> Mixture:
        """The mixture after a step, member by member."""
        if self.calibration is not None:
            raise ParameterError(
                "The model has a calibration, and its backbone returns a mixture.",
                "A calibration corrects the spread of one location-scale law.",
                "Call model.calibrated(None), or return mixture.matched().",
            )
        return mixture.projected(lambda law: step.applied(layer, law, constraint))
