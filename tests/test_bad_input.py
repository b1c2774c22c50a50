"""Bad laws, points, options, metrics and batches: an error of the right kind, in three parts, before torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as td

import probhard
from bad_input import (
    BATCHED,
    DOUBLE,
    INF,
    NAMES,
    NAN,
    ROW,
    Backbone,
    eye,
    hierarchy,
    law,
    ones,
    rejected,
    spoiled,
    zeros,
)
from probhard import (
    DPPL,
    METHODS,
    NORMAL,
    ConstrainedModel,
    Dense,
    DenseMetric,
    Diagonal,
    DiagonalMetric,
    InfeasibleError,
    LinearEquality,
    LocationScale,
    LowRank,
    LowRankMetric,
    Method,
    ParameterError,
    ProbhardError,
    ShapeError,
    Step,
    as_location_scale,
    student_t,
)

# what is done, the error, and what its message must name
BAD = {
    # distributions
    "loc and variance differ": (lambda: LocationScale(zeros(5), Diagonal(ones(4))), ShapeError, ["(5,)", "4"]),
    "batches of loc and variance differ": (
        lambda: LocationScale(zeros(3, 5), Diagonal(ones(2, 5))),
        ShapeError,
        ["(3, 5)", "(2, 5)"],
    ),
    "loc is a number": (lambda: LocationScale(torch.tensor(0.0), Diagonal(ones(1))), ShapeError, ["()"]),
    "pair that differs": (lambda: as_location_scale((zeros(5), ones(4))), ShapeError, ["(5,)", "4"]),
    "low-rank factor transposed": (lambda: LowRank(ones(2, 5), ones(5)), ShapeError, ["(2, 5)", "(5,)"]),
    "root is not square": (lambda: Dense(ones(5, 2)), ShapeError, ["(5, 2)"]),
    "root is not triangular": (lambda: LocationScale(zeros(3), Dense(ones(3, 3))), ParameterError, ["diagonal"]),
    "NaN loc": (lambda: LocationScale(spoiled(zeros(5), NAN), Diagonal(ones(5))), ParameterError, ["1 NaN", "5"]),
    "infinite loc": (lambda: as_location_scale((spoiled(zeros(5), INF), ones(5))), ParameterError, ["5"]),
    "negative variance": (
        lambda: LocationScale(zeros(5), Diagonal(spoiled(ones(5), -0.25))),
        ParameterError,
        ["variance", "1 entries", "-0.25"],
    ),
    "NaN variance": (lambda: LocationScale(zeros(5), Diagonal(spoiled(ones(5), NAN))), ParameterError, ["variance"]),
    "negative stddev": (lambda: as_location_scale((zeros(5), spoiled(ones(5), -2.0))), ParameterError, ["-2"]),
    "negative low-rank diagonal": (
        lambda: LocationScale(zeros(5), LowRank(ones(5, 1), spoiled(ones(5), -3.0))),
        ParameterError,
        ["-3"],
    ),
    "NaN in a low-rank factor": (
        lambda: LocationScale(zeros(5), LowRank(spoiled(ones(5, 1), NAN), ones(5))),
        ParameterError,
        ["factor"],
    ),
    "NaN in a root": (lambda: LocationScale(zeros(2), Dense(spoiled(eye(2), NAN))), ParameterError, ["Cholesky"]),
    "two degrees of freedom": (lambda: student_t(2.0), ParameterError, ["2.0"]),
    "torch's heavy tails": (lambda: as_location_scale(td.StudentT(1.5, *law())), ParameterError, ["1.5"]),
    "a law without location": (lambda: as_location_scale(td.Gamma(ones(5), ones(5))), ParameterError, ["Gamma"]),
    "event of two dimensions": (
        lambda: as_location_scale(td.Independent(td.Normal(zeros(2, 5), ones(2, 5)), 2)),
        ShapeError,
        ["2"],
    ),
    # projections
    "event of another size": (lambda: DPPL()(law(4), ROW), ShapeError, ["(4,)", "5"]),
    "point of another size": (lambda: ROW.residual(zeros(4)), ShapeError, ["(4,)", "5"]),
    "violation at another size": (lambda: ROW.violation(zeros(2, 4)), ShapeError, ["(2, 4)", "5"]),
    "points of another size": (lambda: DPPL("orthogonal").project(zeros(3, 6), ROW), ShapeError, ["(3, 6)", "5"]),
    "samples of another size": (lambda: DPPL().project_samples(zeros(3, 6), ROW), ShapeError, ["(3, 6)", "5"]),
    "data of another batch": (
        lambda: DPPL()(law(5, (3,)), LinearEquality(ones(1, 5), zeros(4, 1))),
        ShapeError,
        ["(3,)", "(4,)"],
    ),
    "rows of another batch": (
        lambda: DPPL()(law(5, (4,)), LinearEquality(BATCHED)),
        ShapeError,
        ["(4,)", "(3,)"],
    ),
    "metric's law of another size": (lambda: DPPL().project(zeros(5), ROW, dist=law(4)), ShapeError, ["5", "4"]),
    "metric's law of another batch": (
        lambda: DPPL().project(zeros(3, 5), ROW, dist=law(5, (4,))),
        ShapeError,
        ["(3,)", "(4,)"],
    ),
    "oblique points without a law": (lambda: DPPL().project(zeros(5), ROW), ParameterError, ["oblique", "dist"]),
    "one sample": (lambda: DPPL().project_samples(zeros(1, 5), ROW), ShapeError, ["(1, 5)"]),
    "samples without a dimension": (lambda: DPPL("orthogonal").project_samples(zeros(5), ROW), ShapeError, ["(5,)"]),
    "NaN point": (lambda: DPPL("orthogonal").project(spoiled(zeros(5), NAN), ROW), ParameterError, ["1 NaN", "5"]),
    "NaN sample": (lambda: DPPL().project_samples(spoiled(zeros(2, 5), NAN), ROW), ParameterError, ["1 NaN", "10"]),
    "NaN law": (
        lambda: DPPL()(td.Normal(spoiled(zeros(5), NAN), ones(5), validate_args=False), ROW),
        ParameterError,
        ["1 NaN", "5"],
    ),
    "negative law": (
        lambda: DPPL()(LocationScale(zeros(5), Diagonal(-ones(5)), NORMAL, validate_args=False), ROW),
        ParameterError,
        ["5 entries", "-1"],
    ),
    "no variable may move": (lambda: DPPL()((zeros(5), zeros(5)), ROW), InfeasibleError, ["0", "variance"]),
    "one family may not move": (
        lambda: DPPL()((ones(7), torch.tensor([1.0, 0, 1, 0, 0, 1, 1], dtype=DOUBLE)), hierarchy()),
        InfeasibleError,
        ["variance"],
    ),
    "one batch element may not move": (
        lambda: DPPL()((zeros(2, 5), torch.stack([ones(5), zeros(5)])), ROW),
        InfeasibleError,
        ["variance"],
    ),
    "an immutable family": (
        lambda: DPPL()((ones(7), ones(7)), hierarchy(immutable=["left", "a", "b"], names=NAMES)),
        InfeasibleError,
        ["fixed"],
    ),
    "identical samples": (lambda: DPPL().project_samples(ones(3, 5), ROW), InfeasibleError, ["variance"]),
    "freeze with oblique": (lambda: DPPL().freeze(ROW), ParameterError, ["Oblique"]),
    "project onto something else": (lambda: DPPL()(law(), "sum to one"), ParameterError, ["str"]),
    # names
    "unknown metric": (lambda: DPPL("mahalanobis"), ParameterError, ["mahalanobis", "oblique", "orthogonal"]),
    "no metric": (lambda: DPPL(None), ParameterError, ["None", "oblique"]),
    "unknown covariance": (lambda: DPPL(covariance="full"), ParameterError, ["full", "delta"]),
    "unknown curvature": (lambda: DPPL(curvature="newton"), ParameterError, ["newton", "exact"]),
    "unknown on_failure": (lambda: DPPL(on_failure="ignore"), ParameterError, ["ignore", "flag"]),
    "unknown solver": (lambda: DPPL(solver="cg"), ParameterError, ["cg", "dense"]),
    "unknown score": (lambda: Method(score="mse"), ParameterError, ["mse", "crps"]),
    "unknown method": (lambda: ConstrainedModel(Backbone(), ROW, "probhard"), ParameterError, ["probhard-ob"]),
    "unknown metric in a step": (
        lambda: ConstrainedModel(Backbone(), ROW, Method(training=Step("diagonal"))),
        ParameterError,
        ["diagonal"],
    ),
    "quantiles without draws": (lambda: Method(score="quantile"), ParameterError, ["quantile", "0 draws"]),
    "likelihood of draws": (
        lambda: METHODS["hier-e2e"].replace(score="nll"),
        ParameterError,
        ["nll", "100 draws"],
    ),
    # metrics
    "metric of another size": (lambda: DPPL(DiagonalMetric(ones(4)))(law(), ROW), ShapeError, ["4", "5"]),
    "low-rank metric of another size": (
        lambda: DPPL(LowRankMetric(ones(4, 1), ones(4)))(law(), ROW),
        ShapeError,
        ["4", "5"],
    ),
    "dense metric of another size": (lambda: DPPL(DenseMetric(eye(4)))(law(), ROW), ShapeError, ["4", "5"]),
    "negative metric": (lambda: DiagonalMetric(spoiled(ones(5), -1.0)), ParameterError, ["-1"]),
    "NaN metric": (lambda: DiagonalMetric(spoiled(ones(5), NAN)), ParameterError, ["NaN"]),
    "learned metric from zero": (lambda: DiagonalMetric(spoiled(ones(5), 0.0), learn=True), ParameterError, ["1 zero"]),
    "negative low-rank metric": (lambda: LowRankMetric(ones(5, 1), -ones(5)), ParameterError, ["-1"]),
    "dense metric above its diagonal": (lambda: DenseMetric(ones(3, 3)), ParameterError, ["diagonal"]),
    "metric that holds a row still": (lambda: DPPL(DiagonalMetric(zeros(5)))(law(), ROW), InfeasibleError, ["row"]),
    # batches
    "loss without a target": (
        lambda: ConstrainedModel(Backbone(), ROW).loss(zeros(2, 3)),
        ParameterError,
        ["target"],
    ),
    "batch with other keys": (
        lambda: ConstrainedModel(Backbone(), ROW).loss({"x": zeros(2, 3), "y": zeros(2, 5)}),
        ParameterError,
        ["'x'", "inputs"],
    ),
    "batch of too many parts": (
        lambda: ConstrainedModel(Backbone(), ROW).loss((zeros(2, 3), zeros(2, 5), None, None, None)),
        ParameterError,
        ["5"],
    ),
    "target of another size": (
        lambda: ConstrainedModel(Backbone(), ROW).loss((zeros(2, 3), zeros(2, 4))),
        ShapeError,
        ["(2, 5)", "(2, 4)"],
    ),
    "backbone of another size": (
        lambda: ConstrainedModel(Backbone(4), ROW).forecast(zeros(2, 3)),
        ShapeError,
        ["(2, 4)", "5"],
    ),
    "backbone gone wild": (
        lambda: ConstrainedModel(Backbone(), ROW).forecast(spoiled(zeros(2, 3), NAN)),
        ParameterError,
        ["NaN"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_explained(name):
    rejected(*BAD[name])


@pytest.mark.parametrize("name", ["ShapeError", "ParameterError", "RankError", "InfeasibleError", "ConvergenceError"])
def test_every_error_is_a_value_error(name):
    kind = getattr(probhard, name)
    assert issubclass(kind, ProbhardError)
    assert issubclass(kind, ValueError)
