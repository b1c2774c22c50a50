"""Methods as records: a step in training, a step at inference, a score, a penalty, and functionals to score.

| name                     | in training                             | at inference                              |
|--------------------------|-----------------------------------------|-------------------------------------------|
| base                     | nothing                                 | nothing                                   |
| probhard-ob, probhard-or | parameters projected                    | every draw projected                      |
| hardc                    | mean projected, Q = I, covariance kept  | the same; only the mean is feasible       |
| probconserv              | nothing                                 | draws projected, Q oblique, linear part   |
| probhard-inf             | nothing                                 | draws projected, Q oblique, all parts     |
| softc                    | penalty * squared violation of the mean | nothing                                   |
| hier-e2e                 | 100 draws projected, quantile loss      | every draw projected                      |
| hardnet-aff              | shifted along A^+                       | every draw shifted; feasible              |
| hardnet++                | damped Gauss-Newton sweeps              | the same; violations as they are          |
| dc3                      | completed, corrected, soft loss         | the same; violations as they are          |
| completion               | free variables completed                | the same; feasible on linear equalities   |

The last four correct points instead of projecting them (``probhard.corrections``). HardNet-Cvx is probhard-or.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import Tensor

from probhard._score.functionals import Functionals
from probhard._score.joined import functionals_from_record
from probhard._util.tensors import checking
from probhard.constraints.base import Constraint
from probhard.corrections import AffineShift, Completion, Correction, CorrectionLayer, DampedSweeps
from probhard.errors import ParameterError, check_choice
from probhard.laws.distribution import LocationScale
from probhard.metric import Metric
from probhard.projection.layer import DPPL
from probhard.projection.policy import blanked
from probhard.projection.projected import Projected

SCORE_NAMES = ("crps", "nll", "quantile")
Score = Callable[[Any, Any], Tensor]  # of the prediction and the batch
PENALTIES = (0.1, 1.0, 10.0)  # candidates of softc, chosen by validation CRPS
PENALTY_FORMS = ("squares", "norms")


@dataclass(frozen=True)
class Step:
    """The projection or the correction of a predicted distribution, or neither.

    Args:
        metric: Metric of the projection; None projects nothing.
        covariance: As in ``DPPL``.
        draws: Number of projected draws to score in training; 0 scores the projected parameters instead.
        linear_only: Use only the linear equalities of the constraint.
        on_failure: As in ``DPPL``. ``"retry"`` leaves failed means out of the loss; ``"flag"`` keeps them in it.
        correction: Corrects points instead of projecting them; needs ``metric=None``.

    Raises:
        ParameterError: If ``draws`` is negative, or there are a metric and a correction.
    """

    metric: str | Metric | None = None
    covariance: str = "auto"
    draws: int = 0
    linear_only: bool = False
    on_failure: str = "retry"
    correction: Correction | None = None

    def __post_init__(self) -> None:
        if self.correction is not None and self.metric is not None:
            raise ParameterError(
                f"Step got the metric {self.metric!r} and the correction {self.correction!r}.",
                "A step projects points, by a metric, or corrects them.",
                "Pass one of the two.",
            )
        if self.draws < 0:
            raise ParameterError(
                f"Got draws={self.draws}.",
                "The number of draws cannot be negative; 0 means none.",
                "Pass 0, or 100 as in HierE2E.",
            )

    def layer(self) -> DPPL | None:
        """The layer of this step; None if it neither projects nor corrects."""
        if self.correction is not None:
            return CorrectionLayer(self.correction)
        return None if self.metric is None else DPPL(self.metric, self.covariance, on_failure=self.on_failure)

    def applied(
        self, layer: DPPL | None, law: LocationScale, constraint: Constraint, metric_from: LocationScale | None = None
    ) -> Projected | LocationScale:
        """The law after this step.

        Args:
            layer: What ``layer`` returned; it may hold learned weights.
            law: The law before, over (*batch, n).
            constraint: What to project on.
            metric_from: The law whose covariance the oblique metric uses; None for ``law`` itself.
        """
        if layer is None:
            return law
        return layer(law, constraint.linear_part() if self.linear_only else constraint, metric_from=metric_from)

    def applied_to_points(self, layer: DPPL | None, points: Tensor, constraint: Constraint) -> Tensor:
        """Points (*batch, n) after this step; NaN where a projection failed.

        Raises:
            ParameterError: If the metric is oblique, which takes its weight from a law.
        """
        if layer is None:
            return points
        if not layer.metric.fixed:
            raise ParameterError(
                f"The method has the {self.metric!r} metric, and the backbone returns points (one tensor).",
                "The weight of this metric is the covariance of a law, and a point has none.",
                "Pass method='probhard-or', or Step(metric=DiagonalMetric(...)); or return (mean, stddev).",
            )
        solution = layer.project(points, constraint.linear_part() if self.linear_only else constraint)
        if not checking() or layer.as_is or bool(solution.stats.converged.all()):
            return solution.value
        return blanked(solution.value, ~solution.stats.converged)

    def record(self) -> dict[str, Any]:
        """Plain values to save; without a correction they are those of older versions."""
        values = asdict(replace(self, correction=None))
        del values["correction"]
        return values if self.correction is None else {**values, "correction": self.correction.record()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Step:
        """Restore a step from what ``record`` returned; raises TypeError if a field is unknown."""
        correction = record.get("correction")
        restored = None if correction is None else Correction.from_record(correction)
        return cls(**{**record, "correction": restored})


NOTHING = Step()
NEWER = {"penalty_form": "squares", "warm_up": 0, "warm_penalty": 0.0}  # fields that older records lack


@dataclass(frozen=True)
class Method:
    """A way to train and use a probabilistic model under constraints.

    Args:
        training: Step applied before the score in training.
        inference: Step applied to forecasts.
        score: ``"crps"``, ``"nll"`` or, for steps with draws, ``"quantile"``; or a function of the prediction and the
            batch, such as ``lambda u, batch: cost(u, batch.inputs)``, whose values are summed.
        penalty: Weight of the residuals and excesses of the mean in the loss.
        penalty_form: ``"squares"`` sums their squares; ``"norms"`` adds the norm of the residuals and that of the
            excesses, as DC3 does.
        warm_up: Number of first epochs that are trained without the training step; see also ``Schedule``.
        warm_penalty: Weight of the summed squares in these epochs.
        functionals: Family of functionals whose CRPS joins the loss, such as ``BlockMeans``; None for none.
        functional_weight: Their weight. Too large a weight costs accuracy; choose it on validation data.

    Raises:
        ParameterError: If the score is not known or does not fit the draws of the training step, or ``functionals``
            is not a family, or a number is negative.
    """

    training: Step = NOTHING
    inference: Step = NOTHING
    score: str | Score = "crps"
    penalty: float = 0.0
    functionals: Functionals | None = None
    functional_weight: float = 0.3
    penalty_form: str = "squares"
    warm_up: int = 0
    warm_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_choice("penalty_form", self.penalty_form, PENALTY_FORMS)
        if self.warm_up < 0 or not 0 <= self.warm_penalty < math.inf:
            raise ParameterError(
                f"Got warm_up={self.warm_up} and warm_penalty={self.warm_penalty}.",
                "They are a number of epochs and a weight in the loss.",
                "Pass numbers >= 0, such as 100 and 10.0.",
            )
        if self.functionals is not None and not isinstance(self.functionals, Functionals):
            raise ParameterError(
                f"Method got functionals of the type {type(self.functionals).__name__}.",
                "A method is saved with its functionals, so they are a family.",
                "Pass BlockMeans, Levels or Horizons, or Directions(matrix) for a matrix.",
            )
        if not 0 <= self.functional_weight < math.inf:
            raise ParameterError(
                f"Got functional_weight={self.functional_weight}.",
                "It multiplies scores that are added to the loss.",
                "Pass a finite number >= 0, such as 0.3.",
            )
        if callable(self.score):
            return
        check_choice("score", self.score, SCORE_NAMES)
        if (self.score == "quantile") != (self.training.draws > 0) and self.score != "crps":
            raise ParameterError(
                f"The score {self.score!r} does not fit a training step with {self.training.draws} draws.",
                "'quantile' scores draws, 'nll' scores parameters.",
                "Set Step(draws=100) for 'quantile', and draws=0 for 'nll'.",
            )

    def replace(self, **changes: Any) -> Method:
        """A copy with other fields, such as ``METHODS["base"].replace(score="nll")``."""
        return replace(self, **changes)

    def record(self) -> dict[str, Any] | None:
        """Plain values to save, with None for a score that is a function; None if a step holds a metric module."""
        if any(isinstance(step.metric, Metric) for step in (self.training, self.inference)):
            return None
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in NEWER:  # left out where they are not used, for older versions of the library
            if values[name] == NEWER[name]:
                del values[name]
        values |= {"training": self.training.record(), "inference": self.inference.record(), "functionals": None}
        values["score"] = None if callable(self.score) else self.score
        return values if self.functionals is None else {**values, "functionals": self.functionals.record()}

    @classmethod
    def from_record(cls, record: dict[str, Any], score: str | Score | None = None) -> Method:
        """Restore a method.

        Args:
            record: Values that ``record`` returned.
            score: Replaces the saved score; needed if that was a function.

        Returns:
            The method.

        Raises:
            ParameterError: If a field is missing or unknown, or the score was a function and is not passed.
                Functionals may be missing, as in older records.
        """
        try:
            complete = {"functionals": None, "functional_weight": cls.functional_weight, **NEWER, **record}
            values = {field.name: complete[field.name] for field in fields(cls)}
            steps = {name: Step.from_record(values[name]) for name in ("training", "inference")}
        except (KeyError, TypeError) as error:
            raise ParameterError(
                f"The saved method {record!r} does not fit this version ({error}).",
                "A field is missing or unknown.",
                "Pass method=... explicitly.",
            ) from error
        values["score"] = values["score"] if score is None else score
        if values["score"] is None:
            raise ParameterError(
                "The saved method has a function as its score.",
                "Files hold values, not code.",
                "Pass score=... as it was when the model was saved.",
            )
        if values["functionals"] is not None:
            values["functionals"] = functionals_from_record(values["functionals"])
        return cls(**{**values, **steps})


def _both(metric: str, **options: Any) -> Method:
    return Method(training=Step(metric, **options), inference=Step(metric, **options))


def _corrected(correction: Correction, **options: Any) -> Method:
    return Method(training=Step(correction=correction), inference=Step(correction=correction), **options)


METHODS: dict[str, Method] = {
    "base": Method(),
    "probhard-ob": _both("oblique"),
    "probhard-or": _both("orthogonal"),
    "hardc": _both("orthogonal", covariance="keep"),
    "probconserv": Method(inference=Step("oblique", linear_only=True)),
    "probhard-inf": Method(inference=Step("oblique")),
    "softc": Method(penalty=1.0),
    "hier-e2e": Method(Step("orthogonal", draws=100), Step("orthogonal"), score="quantile"),
    "hardnet-aff": _corrected(AffineShift(), warm_penalty=10.0),
    "hardnet++": _corrected(DampedSweeps()),
    "dc3": _corrected(Completion(), penalty=5.0, penalty_form="norms"),
    "completion": _corrected(Completion(steps=0)),
}


def as_method(method: str | Method) -> Method:
    """Look up a method.

    Args:
        method: A name in ``METHODS``, or a ``Method``, which is returned as it is.

    Returns:
        The method.

    Raises:
        ParameterError: If the name is not known.
    """
    if isinstance(method, Method):
        return method
    check_choice("method", method, tuple(METHODS))
    return METHODS[method]
