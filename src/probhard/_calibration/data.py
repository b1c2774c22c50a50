"""Data of a calibration: laws, constraints and targets of batches, in double precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probhard.constraints.base import Constraint
from probhard.errors import ParameterError
from probhard.laws.distribution import LocationScale, as_location_scale
from probhard.model import Batch, ConstrainedModel


@dataclass(frozen=True)
class Term:
    """The base law, constraint and targets of a batch, in double precision."""

    law: LocationScale
    constraint: Constraint
    target: Tensor  # (*batch, n)
    mask: Tensor | None  # (*batch, n) bool


def terms_of(model: ConstrainedModel, data: Any) -> list[Term]:
    """What the numbers of a calibration are fitted on.

    Args:
        model: The model.
        data: A batch, or an iterable of batches.

    Raises:
        ParameterError: There are no data, or no targets.
    """
    with torch.no_grad(), evaluating(model):
        terms = [_term(model, Batch.of(batch)) for batch in batches_of(data)]
    if not any(term.target.numel() for term in terms):
        raise ParameterError(
            "calibrate() got no validation data.",
            "Numbers cannot be fitted to nothing.",
            "Pass a batch with targets that neither training nor early stopping used.",
        )
    return terms


def _term(model: ConstrainedModel, parts: Batch) -> Term:
    if parts.target is None:
        raise ParameterError(
            "calibrate() got validation data without targets.",
            "The numbers minimise the score of forecasts against what came.",
            "Pass (inputs, target).",
        )
    law = in_double(model.backbone(parts.inputs))
    mask = None if parts.mask is None else like(parts.mask, law.loc)
    return Term(law, model.constraint(parts), like(parts.target.double(), law.loc), mask)


def in_double(dist: Any) -> LocationScale:
    """A law in double precision, in which scores are sums of many small differences."""
    law = as_location_scale(dist)
    return LocationScale(law.loc.double(), law.cov.to(torch.float64), law.family, validate_args=False)


@contextmanager
def evaluating(model: ConstrainedModel) -> Iterator[None]:
    """Put a model into ``eval`` mode for a while, so that its laws are the same at every call."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def like(x: Tensor, loc: Tensor) -> Tensor:
    """Targets as the law has them: models of slices flatten the dimensions of samples and slices."""
    flattened = x.shape != loc.shape and x.numel() == loc.numel() and x.shape[-1:] == loc.shape[-1:]
    return x.reshape(loc.shape) if flattened else x


def observed(parts: Batch) -> Tensor:
    """The targets of a batch, all of them known.

    Raises:
        ParameterError: One is missing.
    """
    target, seen = parts.target, parts.mask is None or bool(parts.mask.all())
    if target is None or not seen or not bool(torch.isfinite(target).all()):
        raise ParameterError(
            "conformal() got a batch with missing targets.",
            "A set is about whole units.",
            "Pass (inputs, target) with complete targets, and leave out units that have none.",
        )
    return target


def batches_of(data: Any) -> Iterable[Any]:
    """Batches of data: one batch, or an iterable of batches.

    Args:
        data: Anything that ``Batch.of`` takes; or a list, loader or other iterable of such.
    """
    if isinstance(data, Batch | Mapping | tuple | Tensor):
        return (data,)
    if isinstance(data, list) and not all(isinstance(part, Batch | Mapping | tuple | list) for part in data):
        return (data,)
    return data
