"""A backbone, a constraint and a method as one model with explicit phases: ``loss``, ``forecast``, ``sample``.

The backbone never sees the constraint, the projection never sees the batch, the score never sees the constraint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probhard import score as scores
from probhard._util.atomic import replacing
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError
from probhard.laws.distribution import LocationScale, as_location_scale
from probhard.method import Method, Step, as_method
from probhard.projection.layer import DPPL
from probhard.projection.projected import Projected

FORMAT, FORMAT_VERSION = "probhard-model", 1


@dataclass(frozen=True)
class Batch:
    """Inputs for the backbone, context for the constraint, and targets with their mask."""

    inputs: Any
    target: Tensor | None = None
    mask: Tensor | None = None
    context: Any = None

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """Read a batch: (inputs, target), a mapping with these names, or the inputs alone."""
        if isinstance(batch, Batch):
            made = batch
        elif isinstance(batch, Mapping):
            unknown = set(batch) - {"inputs", "target", "mask", "context"}
            if unknown or "inputs" not in batch:
                raise ParameterError(
                    f"The batch has the keys {sorted(batch)}.",
                    "A mapping must hold 'inputs' and may hold 'target', 'mask' and 'context'.",
                    "Put what the backbone takes into 'inputs' and what the constraint needs into 'context'.",
                )
            made = cls(**batch)
        elif isinstance(batch, tuple | list):
            if len(batch) not in (1, 2, 3, 4):
                raise ParameterError(
                    f"The batch has {len(batch)} parts.",
                    "A tuple is (inputs, target), with mask and context as third and fourth part.",
                    "Name the parts in a dictionary.",
                )
            made = cls(*batch)
        else:
            made = cls(batch)
        return made if made.context is not None else cls(made.inputs, made.target, made.mask, made.inputs)


class ConstrainedModel(nn.Module):
    """Any torch model of a distribution, made to obey a constraint by a method.

    Args:
        backbone: Maps inputs to anything ``as_location_scale`` takes, in target units.
        constraint_fn: Maps a batch's context (its inputs unless given) to a constraint; or one constraint for all.
        method: A name in ``METHODS`` or a ``Method``.
    """

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
        """The constraint of a batch."""
        if isinstance(self.constraint_fn, Constraint):
            return self.constraint_fn
        return self.constraint_fn(Batch.of(batch).context)

    def loss(self, batch: Any) -> Tensor:
        """The training loss of a batch with targets: the score SUMMED over points and batch, plus the penalty."""
        parts = Batch.of(batch)
        if parts.target is None:
            raise ParameterError(
                "loss() got a batch without a target.", "There is nothing to score.", "Pass (inputs, target)."
            )
        dist = as_location_scale(self.backbone(parts.inputs))
        constraint = self.constraint(parts)
        predicted = self._applied(dist, constraint, self.method.training, self.training_layer)
        total = self._score(predicted, parts.target, parts.mask).sum()
        if self.method.penalty:
            total = total + self.method.penalty * constraint.penalty(predicted.mean).sum()
        return total

    def forecast(self, batch: Any) -> Projected | LocationScale:
        """The predictive distribution of a batch; feasible exactly if ``.feasible`` says so."""
        parts = Batch.of(batch)
        dist = as_location_scale(self.backbone(parts.inputs))
        return self._applied(dist, self.constraint(parts), self.method.inference, self.inference_layer)

    @torch.no_grad()
    def sample(self, batch: Any, n: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draws (n, *batch, event) of the forecast."""
        return self.forecast(batch).sample((n,), generator)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights and method to one file of plain tensors and values, replacing it in one step."""
        target = Path(path)
        state = {name: value for name, value in self.state_dict().items() if isinstance(value, Tensor)}
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "method": self.method.record(),
            "state": state,
        }
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
        """Read a saved model into a backbone of the same architecture; never runs code from the file."""
        content = _read(path)
        if method is None and content["method"] is None:
            raise ParameterError(
                f"{path} was saved with a metric module in its method.",
                "Modules are not stored, only their weights.",
                "Pass method=... as it was when the model was saved.",
            )
        try:
            chosen = Method.from_record(content["method"]) if method is None else as_method(method)
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
        return model

    @staticmethod
    def _applied(
        dist: LocationScale, constraint: Constraint, step: Step, layer: DPPL | None
    ) -> Projected | LocationScale:
        if layer is None:
            return dist
        return layer(dist, constraint.linear_part() if step.linear_only else constraint)

    def _score(self, predicted: Projected | LocationScale, target: Tensor, mask: Tensor | None) -> Tensor:
        draws = self.method.training.draws
        if not draws:
            return scores.SCORES[self.method.score](predicted, target, mask=mask)
        samples = predicted.rsample((draws,))
        if self.method.score == "crps":
            return scores.crps_ensemble(samples, target, mask=mask, estimator="fair")
        quantiles = scores.sample_quantiles(samples, scores.LEVELS)
        return scores.quantile_loss(quantiles, target, scores.LEVELS, mask=mask).mean(0)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a saved model, checked."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ParameterError(
            f"{path} cannot be read as a saved model ({type(error).__name__}).",
            "It is damaged, or holds more than tensors and plain values.",
            "Save the model again with ConstrainedModel.save.",
        ) from error
    known = isinstance(content, dict) and content.get("format") == FORMAT
    if not known or not isinstance(content.get("version"), int):
        raise ParameterError(
            f"{path} is not a saved probhard model.",
            "It lacks the format mark.",
            "Pass a file written by ConstrainedModel.save.",
        )
    if content["version"] > FORMAT_VERSION:
        raise ParameterError(
            f"{path} has format version {content['version']}, this library reads up to {FORMAT_VERSION}.",
            "It was written by a newer probhard.",
            "Upgrade probhard.",
        )
    state = content.get("state")
    if "method" not in content or not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ParameterError(
            f"{path} is damaged.",
            "It does not hold a method and named weights.",
            "Save the model again with ConstrainedModel.save.",
        )
    return content
