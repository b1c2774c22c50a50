"""Calibration and conformal sets: honest spread on data that training has not used, without losing the constraint.

    calibrate:   law -> (a few numbers) -> projection,       numbers = argmin of the score of the PROJECTED law
    conformal:   {u feasible : score(u) <= the k-th smallest score of n units},      k = ceil((n + 1) level)

Both act before or beside the projection, so every draw and every set stays feasible. The numbers of ``calibrate``
correct quantiles and draws on average. The sets of ``conformal`` carry a guarantee. Each needs data of its own: neither
the training data, nor the validation data of early stopping, nor each other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from probhard._calibration.data import batches_of, evaluating, in_double, observed, terms_of
from probhard._calibration.losses import flagging, total_score, unit_scores
from probhard._calibration.promise import CoverageReport, Promise
from probhard._calibration.search import RIDGE, WAVES, best_factor, best_numbers, draws_factor
from probhard._calibration.sets import ConformalSet, Deviations
from probhard._score.functionals import Directions, Functionals
from probhard._score.joined import functionals_from_record
from probhard._util.tensors import divide, safe_sqrt
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError
from probhard.laws.calibration import Calibration, Numbers, calibrated, correlated, labels_of
from probhard.laws.calibration import octaves as octave_labels
from probhard.laws.correlation import shrunk_correlation
from probhard.laws.covariance import Factored
from probhard.laws.distribution import LocationScale
from probhard.laws.field_correlation import spectral_correlation
from probhard.model import Batch, ConstrainedModel
from probhard.projection.layer import DPPL
from probhard.projection.mixture import Mixture
from probhard.projection.parts import parts_of
from probhard.projection.projected import Projected
from probhard.tangent.linear import Tangent

__all__ = [
    "Calibration",
    "ConformalModel",
    "ConformalSet",
    "CoverageReport",
    "Promise",
    "best_factor",
    "calibrate",
    "conformal",
    "draws_factor",
    "error_correlation",
]


def calibrate(
    model: ConstrainedModel,
    validation: Any,
    groups: Any = None,
    functionals: Any = None,
    functional_weight: float | None = None,
    octaves: bool = False,
    correlation: Factored | None = None,
    energy: float = 0.0,
) -> ConstrainedModel:
    """Fit a few numbers that correct the spread of a model's laws before they are projected.

    A covariance with an own and a correlated part gets one number for each, any other one common number. The metric
    stays that of the uncalibrated law, so that means projected on equalities do not move. The score is the CRPS of the
    projected law's variables, plus that of its functionals if there are some. Units whose projection fails are left
    out, at most one in a hundred.

    Args:
        model: A trained model.
        validation: Data with targets that neither training nor early stopping used: a batch (anything that ``Batch.of``
            takes) or several in a list, a loader or another iterable.
        groups: Labels of the variables, (n,) integers, such as levels of a hierarchy; each gets a number of its own.
        functionals: Functionals to score too, as in ``crps``; by default those of the model's method.
        functional_weight: Their weight; by default that of the method.
        octaves: Fit one number for each octave of wave numbers of a spectral covariance, instead of one for all.
        correlation: Correlation of past errors, such as ``error_correlation`` returns. It replaces that of the laws.
        energy: Weight of the energy score, which sees the size of whole errors; 0 for none.

    Returns:
        A model with the same weights; ``calibration`` holds the numbers.

    Raises:
        ParameterError: There are no validation data or targets, or too many scores are not finite.
        ShapeError: Labels or targets do not fit the law.
    """
    terms = terms_of(model, validation)
    if correlation is not None:
        correlation = correlation.to(torch.float64)
    cov, n = correlated(terms[0].law, correlation).cov, terms[0].law.event_shape[-1]
    labels = torch.zeros(0, dtype=torch.int64) if groups is None else labels_of(groups, n)
    waves = int(octave_labels(cov).max()) + 1 if octaves else 0
    scales = waves or int(isinstance(cov, Factored))  # numbers of the correlated part
    family = model.method.functionals if functionals is None else functionals
    weight = model.method.functional_weight if functional_weight is None else functional_weight
    layer, step = flagging(model.inference_layer), model.method.inference

    def numbers(x: Tensor) -> Numbers:
        """Own part, correlated part, and groups relative to the first."""
        own, parts, others = x[0], x[1 : 1 + scales], x[1 + scales :]
        shared = x.new_ones(()) if waves else parts[0] if scales else own
        by_group = torch.cat([x.new_ones(1), others]) if len(labels) else others
        return Numbers(own, shared, by_group, labels, parts if waves else parts[:0])

    def loss(x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for term in terms:
            law = calibrated(correlated(term.law, correlation), numbers(x))
            predicted = step.applied(layer, law, term.constraint, metric_from=term.law)
            total = total + total_score(unit_scores(predicted, term.target, term.mask, family, weight, energy))
        return total

    others = int(labels.max()) if len(labels) else 0
    found = numbers(best_numbers(loss, 1 + scales, others, ridge=WAVES if waves else RIDGE))
    if not len(labels):
        by_octave = found.by_octave.tolist()
        return model.calibrated(
            Calibration(float(found.own), float(found.shared), by_octave=by_octave, correlation=correlation)
        )
    shared = 1.0 if waves else float(found.shared / found.own)
    by_group, by_octave = (found.own * found.by_group).tolist(), (found.by_octave / found.own).tolist()
    return model.calibrated(Calibration(1.0, shared, by_group, labels.tolist(), by_octave, correlation))


@torch.no_grad()
def error_correlation(
    model: ConstrainedModel,
    held_out: Any,
    shape: Sequence[int] | None = None,
    boundary: str = "reflecting",
    rank: int | None = None,
) -> Factored:
    """The correlation of a model's errors on data that it was not trained on, for ``calibrate``.

    Errors are those of the projected mean, divided by the projected standard deviations.

    Args:
        model: A trained model; its laws may be those of independent variables.
        held_out: Data with targets, as in ``calibrate``. Those of early stopping serve.
        shape: Of fields on a grid, whose correlation is taken to depend on distances; None for other variables.
        boundary: Of fields; see ``Spectral``.
        rank: Most columns of the factor, without a shape.

    Returns:
        A ``Spectral`` correlation of fields, else a ``LowRank`` one, with unit diagonal.

    Raises:
        ParameterError: There are no data or targets.
        ShapeError: The fields have another shape.
    """
    errors = []
    for term in terms_of(model, held_out):
        law = model.method.inference.applied(model.inference_layer, term.law, term.constraint)
        stddev = safe_sqrt(law.variance)
        errors.append(divide(term.target - law.mean, stddev).flatten(0, -2))
    residuals = torch.cat(errors)
    if shape is not None:
        return spectral_correlation(residuals, shape, boundary)
    return shrunk_correlation(residuals, rank)


def conformal(
    model: ConstrainedModel,
    calibration: Any,
    level: float = 0.9,
    functionals: Any = None,
    exchangeable: bool = True,
    elements: int = 1,
) -> ConformalModel:
    """Sets that hold the target of a new unit with a guaranteed probability.

    Every batch element is a unit, unless several form one: their targets then lie in their sets at once. Without
    functionals, a set is an ellipsoid in the tangent space of the equalities. With functionals, it is a band: one
    threshold for the largest deviation of all of them, in units of their standard deviations. Sets are intersected with
    the constraint, which loses nothing if targets obey it.

    Args:
        model: A trained model, calibrated or not.
        calibration: Units with targets that nothing else has used: a batch or several, as in ``calibrate``.
        level: Wanted coverage, in (0, 1). The promise is ``k / (n + 1)`` with ``k = ceil((n + 1) level)``.
        functionals: A matrix (k, n) or a family such as ``BlockMeans``; None for joint sets.
        exchangeable: False for rolling origins and other units in order: there is no guarantee then.
        elements: Consecutive batch elements that form one unit, such as the time slices of a sample.

    Returns:
        The model with its threshold; ``region(batch)`` gives the sets.

    Raises:
        ParameterError: The level is not in (0, 1), there are no units or only parts of one, or targets are missing.
        ShapeError: Functionals or targets do not fit the law.
    """
    if not 0 < level < 1:
        raise ParameterError(
            f"conformal() got level={level}.",
            "It is the wanted probability that the set holds the target.",
            "Pass a number between 0 and 1, such as 0.9.",
        )
    family = functionals if functionals is None or isinstance(functionals, Functionals) else Directions(functionals)
    parts = [Batch.of(batch) for batch in batches_of(calibration)]
    scores = [deviations(model, part, family)[0].score(observed(part)).flatten() for part in parts]
    if not scores or not sum(map(len, scores)):
        raise ParameterError(
            "conformal() got no calibration units.",
            "The threshold is a quantile of their scores.",
            "Pass a batch with targets that neither training nor calibrate used.",
        )
    record = None if family is None else family.record()
    return ConformalModel(model, Promise.of(torch.cat(scores).cpu(), level, exchangeable, record, elements), family)


@dataclass(frozen=True, eq=False)
class ConformalModel:
    """A model with the threshold of its conformal sets.

    Args:
        model: The model.
        promise: Threshold, and what it promises.
        functionals: The family of the bands; None for joint sets.
    """

    model: ConstrainedModel
    promise: Promise
    functionals: Functionals | None = None

    @property
    def guarantee(self) -> str:
        """What exactly is covered, and when."""
        return str(self.promise)

    def forecast(self, batch: Any) -> Projected | LocationScale | Mixture:
        """The law of the model, whose quantiles and draws carry no guarantee; see ``ConstrainedModel.forecast``."""
        return self.model.forecast(batch)

    def region(self, batch: Any) -> ConformalSet:
        """The sets of a batch, one for each unit; targets are ignored."""
        shape, constraint, bounds = deviations(self.model, Batch.of(batch), self.functionals)
        return ConformalSet(shape, self.promise, constraint, *bounds)

    def report(self, batch: Any) -> CoverageReport:
        """Promised and measured coverage of a batch with targets.

        Raises:
            ParameterError: Targets are missing.
        """
        parts = Batch.of(batch)
        return self.region(parts).report(observed(parts))

    def record(self) -> dict[str, Any]:
        """Plain values to save beside the model."""
        return self.promise.record()

    @classmethod
    def from_record(cls, model: ConstrainedModel, record: Mapping[str, Any]) -> ConformalModel:
        """Restore what ``record`` returned, for the same model.

        Raises:
            ParameterError: A field is missing or unknown.
        """
        promise = Promise.from_record(record)
        stored = promise.functionals
        return cls(model, promise, None if stored is None else functionals_from_record(stored))


@torch.no_grad()
def deviations(
    model: ConstrainedModel, parts: Batch, family: Functionals | None
) -> tuple[Deviations, Constraint, tuple[Tensor, Tensor] | tuple[()]]:
    """Center and shape of the sets of a batch, its constraint and, if there are some, bounds of the variables."""
    with evaluating(model):
        dist, constraint = in_double(model.backbone(parts.inputs)), model.constraint(parts)
    law = dist if model.calibration is None else model.calibration.apply(dist)
    n, layer, step = law.event_shape[-1], model.inference_layer, model.method.inference
    forecast = step.applied(layer, law, constraint, metric_from=dist)
    kinds = parts_of(constraint, n)
    tangent, oblique = None, False
    if forecast.feasible and layer is not None and kinds.linear is not None:
        equal = DPPL(layer.metric, "delta", on_failure="raise", validate_args=layer.validate_args)(
            law, kinds.linear, metric_from=dist
        )
        tangent = cast(Tangent, cast(Projected, equal).tangent)
        same = model.calibration is None or model.calibration.proportional
        oblique = layer.metric.oblique and same and kinds.linear.system.held is None
    rows = None if family is None else family.rows(n)
    bounds = () if kinds.box is None else kinds.bounds(law.loc)
    return Deviations(forecast.mean, law.cov, tangent, oblique, rows), constraint, bounds
