"""Bad input is refused with a named error in three parts, found before torch's own; and checks can be left out."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from torch import distributions as td
from torch import nn

import probhard
from probhard import (
    DPPL,
    METHODS,
    NORMAL,
    Conservation,
    ConstrainedModel,
    Dense,
    DenseMetric,
    Diagonal,
    DiagonalMetric,
    Hierarchy,
    InfeasibleError,
    LinearEquality,
    LocationScale,
    LowRank,
    LowRankMetric,
    Method,
    ParameterError,
    ProbhardError,
    RankError,
    ShapeError,
    Step,
    as_location_scale,
    per_slice,
    student_t,
    trapezoid_weights,
)
from probhard._util.tensors import checking

DOUBLE = torch.float64
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _torchs_switch():
    """torch.compile turns the checks of torch's distributions off for the whole process; turn them on again."""
    before = td.Distribution._validate_args
    yield
    td.Distribution.set_default_validate_args(before)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=DOUBLE)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=DOUBLE)


def spoiled(x: torch.Tensor, value: float, at: int = 0) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[at] = value
    return x


def eye(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=DOUBLE)


SUMS = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=DOUBLE)
S = torch.cat([SUMS, eye(4)])  # 7 series, 4 of them at the bottom
NAMES = ["total", "left", "right", "a", "b", "c", "d"]
ROW = LinearEquality(ones(1, 5), 1.0)
GRID = torch.linspace(0, 1, 5, dtype=torch.float64)
BATCHED = torch.randn(3, 2, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))


def hierarchy(**options) -> Hierarchy:
    return Hierarchy(S, **options)


def law(n: int = 5, batch: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    return zeros(*batch, n), ones(*batch, n)


class Backbone(nn.Module):
    """Five Gaussians from three inputs."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2 * width, dtype=DOUBLE)

    def forward(self, x):
        mean, raw = self.linear(x).chunk(2, -1)
        return mean, nn.functional.softplus(raw) + 0.1


TAGS = {"all": ["x"], "all/side": ["x/l", "x/r"], "all/side/leaf": ["x/l/1", "x/l/2", "x/r/1"]}
FRAME = pd.DataFrame({"all": "x", "side": ["l", "l", "r"], "leaf": ["1", "2", "1"]})


def with_zero_row() -> sp.csr_array:
    """The summation matrix with an aggregate that holds stored zeros only."""
    dense = torch.cat([S[:1], zeros(1, 4), S[1:]]).numpy()
    row, column = np.nonzero(dense)
    row, column = np.append(row, [1, 1]), np.append(column, [0, 2])
    return sp.csr_array((dense[row, column], (row, column)), shape=dense.shape)


# what is done, the error, and what its message must name
BAD = {
    # shapes of rows and right-hand sides
    "A is a vector": (lambda: LinearEquality(ones(5)), ShapeError, ["(5,)"]),
    "A is a number": (lambda: LinearEquality(torch.tensor(1.0)), ShapeError, ["()"]),
    "b is too long": (lambda: LinearEquality(ones(1, 5), zeros(3)), ShapeError, ["(3,)", "1 row"]),
    "b is transposed": (lambda: LinearEquality(eye(5)[:2], zeros(2, 4)), ShapeError, ["(2, 4)", "2 rows"]),
    "sparse A in a batch": (lambda: LinearEquality(BATCHED.to_sparse_coo()), ShapeError, ["(3, 2, 5)"]),
    "A and b in batches that differ": (lambda: LinearEquality(BATCHED, zeros(4, 2)), ShapeError, ["3", "4"]),
    "other right-hand sides": (lambda: ROW.replace(zeros(2)), ShapeError, ["(2,)", "1 row"]),
    "'&' of sizes that differ": (lambda: ROW & LinearEquality(ones(1, 6)), ShapeError, ["5", "6"]),
    "'&' of batches that differ": (
        lambda: LinearEquality(eye(5)[:1], zeros(3, 1)) & LinearEquality(eye(5)[1:2], zeros(4, 1)),
        ShapeError,
        ["3", "4"],
    ),
    "'&' of batched rows": (lambda: LinearEquality(BATCHED) & ROW, ParameterError, ["&"]),
    # values of rows and right-hand sides
    "NaN in A": (lambda: LinearEquality(spoiled(ones(1, 5), NAN)), ParameterError, ["A", "1 NaN", "5"]),
    "infinite A": (lambda: LinearEquality(spoiled(ones(2, 5), INF)), ParameterError, ["A", "10"]),
    "NaN in a numpy A": (lambda: LinearEquality(np.array([[1.0, NAN]])), ParameterError, ["A"]),
    "NaN in a scipy A": (lambda: LinearEquality(sp.csr_array([[1.0, NAN]])), ParameterError, ["A"]),
    "NaN in a sparse A": (lambda: LinearEquality(spoiled(ones(1, 5), NAN).to_sparse_coo()), ParameterError, ["A"]),
    "NaN in a CSR A": (lambda: LinearEquality(spoiled(ones(1, 5), NAN).to_sparse_csr()), ParameterError, ["A"]),
    "NaN in a batched A": (lambda: LinearEquality(spoiled(BATCHED, NAN)), ParameterError, ["A", "30"]),
    "complex A": (lambda: LinearEquality(ones(1, 5).to(torch.complex128)), ParameterError, ["complex"]),
    "NaN in b": (lambda: LinearEquality(eye(5)[:2], spoiled(zeros(2), NAN)), ParameterError, ["b", "1 NaN", "2"]),
    "infinite b": (lambda: LinearEquality(ones(1, 5), INF), ParameterError, ["b"]),
    "unknown rank": (lambda: LinearEquality(ones(1, 5), 0.0, rank="drop"), ParameterError, ["drop", "reveal"]),
    # rank
    "a repeated row": (lambda: LinearEquality(ones(2, 5), 1.0), RankError, ["row"]),
    "a combined row": (
        lambda: LinearEquality(torch.stack([ones(5), eye(5)[0], ones(5) + 2 * eye(5)[0]]), 0.0),
        RankError,
        ["row"],
    ),
    "a row of zeros": (lambda: LinearEquality(torch.stack([ones(5), zeros(5)]), 0.0), RankError, ["[1]"]),
    "a row of zeros that is not zero": (
        lambda: LinearEquality(torch.stack([ones(5), zeros(5)]), torch.tensor([0.0, 2.0], dtype=DOUBLE)),
        InfeasibleError,
        ["Row 1", "2"],
    ),
    "more rows than variables": (lambda: LinearEquality(torch.cat([eye(2), ones(1, 2)]), 0.0), RankError, ["row"]),
    "contradicting rows": (
        lambda: LinearEquality(ones(2, 5), torch.tensor([1.0, 3.0])),
        InfeasibleError,
        ["contradicts", "by 2"],
    ),
    "one contradicting batch element": (
        lambda: LinearEquality(ones(2, 5), torch.tensor([[1.0, 1.0], [4.0, 4.0], [1.0, 1.25]]), rank="reveal"),
        InfeasibleError,
        ["0.25", "(2,)"],
    ),
    "a variable pinned twice": (
        lambda: LinearEquality(eye(5)[[1, 1]], torch.tensor([1.0, 2.0])),
        InfeasibleError,
        ["by 1"],
    ),
    "one deficient batch element": (
        lambda: LinearEquality(torch.stack([BATCHED[0], ones(2, 5), BATCHED[1]])),
        RankError,
        ["(1,)"],
    ),
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
    # hierarchies
    "S is transposed": (lambda: Hierarchy(S.T), ShapeError, ["(4, 7)"]),
    "S has no aggregate": (lambda: Hierarchy(eye(4)), ShapeError, ["(4, 4)"]),
    "S is a vector": (lambda: Hierarchy(ones(4).numpy()), ShapeError, ["(4,)"]),
    "S is a vector of torch": (lambda: Hierarchy(ones(4)), ShapeError, ["(4,)"]),
    "S has a batch": (lambda: Hierarchy(S.expand(2, 7, 4)), ShapeError, ["(2, 7, 4)"]),
    "S begins with the identity": (lambda: Hierarchy(S.flip(0)), ParameterError, ["identity", "row 4"]),
    "S ends in a permutation": (lambda: Hierarchy(S[[0, 1, 2, 4, 3, 5, 6]]), ParameterError, ["identity", "row 3"]),
    "S by name ends in a permutation": (
        lambda: Hierarchy(S[[0, 1, 2, 4, 3, 5, 6]], names=NAMES),
        ParameterError,
        ["'a'"],
    ),
    "S has an empty row": (lambda: Hierarchy(torch.cat([zeros(1, 4), S])), ParameterError, ["Row 0", "nothing"]),
    "S has an empty row in the middle": (
        lambda: Hierarchy(torch.cat([S[:2], zeros(1, 4), S[2:]]).to_sparse_coo()),
        ParameterError,
        ["Row 2"],
    ),
    "S holds explicit zeros alone": (
        lambda: Hierarchy(with_zero_row()),
        ParameterError,
        ["Row 1"],
    ),
    "NaN in S": (lambda: Hierarchy(spoiled(S, NAN)), ParameterError, ["S", "NaN"]),
    "labels in S": (lambda: Hierarchy(pd.DataFrame(S.numpy()).assign(unique_id=NAMES)), ParameterError, ["numbers"]),
    "too few names": (lambda: hierarchy(names=NAMES[:6]), ShapeError, ["7", "6"]),
    "unknown label": (lambda: hierarchy(names=NAMES).index("middle"), ParameterError, ["middle"]),
    "label without names": (lambda: hierarchy().fix(["total"], [1.0]), ParameterError, ["total"]),
    "unknown number": (lambda: hierarchy().index(7), ParameterError, ["7"]),
    "unknown immutable node": (lambda: hierarchy(immutable=[9]), ParameterError, ["9", "7"]),
    "too many budgets": (lambda: hierarchy().fix([0], [1.0, 2.0]), ShapeError, ["(2,)"]),
    "NaN budget": (lambda: hierarchy().fix([0], [NAN]), ParameterError, ["b"]),
    "budgets that contradict": (lambda: hierarchy().fix([0, 1, 2], [10.0, 4.0, 5.0]), InfeasibleError, ["by 1"]),
    "budgets that repeat": (lambda: hierarchy().fix([0, 1, 2], [10.0, 4.0, 6.0]), RankError, ["row"]),
    "one node fixed twice": (lambda: hierarchy().fix([0, 0], [1.0, 1.0]), RankError, ["row"]),
    "too many bottom series": (lambda: hierarchy().aggregate(zeros(5)), ShapeError, ["5", "4"]),
    "too few bottom series": (lambda: hierarchy().aggregate(zeros(3)), ShapeError, ["3", "4"]),
    "spec without a column": (
        lambda: Hierarchy.from_frame(FRAME, [["all"], ["all", "town"]]),
        ParameterError,
        ["town"],
    ),
    "empty spec": (lambda: Hierarchy.from_frame(FRAME, []), ParameterError, ["spec"]),
    "last level misses a key": (
        lambda: Hierarchy.from_frame(FRAME, [["side"], ["all", "leaf"]]),
        ParameterError,
        ["side"],
    ),
    "a missing key": (
        lambda: Hierarchy.from_frame(FRAME.assign(leaf=["1", None, "2"]), [["all"], ["all", "leaf"]]),
        ParameterError,
        ["missing"],
    ),
    "no tags": (lambda: Hierarchy.from_tags({}), ParameterError, ["tags"]),
    "a level that misses a node": (
        lambda: Hierarchy.from_tags({**TAGS, "all/side": ["x/l"]}),
        ParameterError,
        ["all/side", "x/r"],
    ),
    "a level with a stranger": (
        lambda: Hierarchy.from_tags({**TAGS, "all/side": ["x/l", "x/r", "x/m"]}),
        ParameterError,
        ["all/side", "x/m"],
    ),
    "a level with a node twice": (
        lambda: Hierarchy.from_tags({**TAGS, "all/side": ["x/l", "x/r", "x/l"]}),
        ParameterError,
        ["all/side", "twice"],
    ),
    "a level with another key": (
        lambda: Hierarchy.from_tags({"kind": ["k"], **TAGS}),
        ParameterError,
        ["kind", "all/side/leaf"],
    ),
    "a bottom label of too few parts": (
        lambda: Hierarchy.from_tags({**TAGS, "all/side/leaf": ["x/l/1", "x/l", "x/r/1"]}),
        ParameterError,
        ["x/l"],
    ),
    "tags that do not fit S": (lambda: Hierarchy.from_tags(TAGS, S=S), ShapeError, ["7", "6"]),
    # conservation
    "weights of two dimensions": (lambda: Conservation(ones(2, 5), 1.0), ShapeError, ["(2, 5)"]),
    "weights of zero": (lambda: Conservation(zeros(5), 1.0), ParameterError, ["zero"]),
    "NaN weight": (lambda: Conservation(spoiled(ones(5), NAN), 1.0), ParameterError, ["weights"]),
    "NaN mass": (lambda: Conservation(ones(5), NAN), ParameterError, ["b"]),
    "a grid of one point": (lambda: trapezoid_weights(zeros(1)), ShapeError, ["(1,)"]),
    "a grid that turns back": (lambda: trapezoid_weights(torch.tensor([0.0, 2.0, 1.0])), ParameterError, ["grid"]),
    "jumps of other profiles": (
        lambda: Conservation.trapezoid(GRID, ones(3), (ones(2), 1.0)),
        ShapeError,
        ["(3,), (2,), ()"],
    ),
    "a jump without its fall": (lambda: Conservation.trapezoid(GRID, 1.0, (0.5,)), ShapeError, ["(), ()"]),
    "a jump that is a number": (lambda: Conservation.trapezoid(GRID, 1.0, 0.5), ShapeError, ["(), ()"]),
    "NaN jump": (lambda: Conservation.trapezoid(GRID, 1.0, (0.5, NAN)), ParameterError, ["b"]),
    "slices of another width": (lambda: per_slice(Conservation(ones(5), 1.0), (3, 4)), ShapeError, ["5", "4"]),
    "masses of other times": (lambda: per_slice(Conservation(ones(5), ones(2)), (3, 5)), ShapeError, ["2", "3"]),
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
        lambda: DPPL()((zeros(7), torch.tensor([1.0, 0, 1, 0, 0, 1, 1], dtype=DOUBLE)), hierarchy()),
        InfeasibleError,
        ["variance"],
    ),
    "one batch element may not move": (
        lambda: DPPL()((zeros(2, 5), torch.stack([ones(5), zeros(5)])), ROW),
        InfeasibleError,
        ["variance"],
    ),
    "an immutable family": (
        lambda: DPPL()(law(7), hierarchy(immutable=["left", "a", "b"], names=NAMES)),
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


def explained(error: ProbhardError, fragments: list[str]) -> None:
    """Three sentences, and the numbers that matter among them."""
    assert isinstance(error, ValueError)
    for part in (error.what, error.why, error.fix):
        assert part.strip()
        assert part.rstrip().endswith(".")
    assert str(error) == f"{error.what} {error.why} {error.fix}"
    for fragment in fragments:
        assert fragment in str(error)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_explained(name):
    action, kind, fragments = BAD[name]
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    explained(caught.value, fragments)


@pytest.mark.parametrize("name", ["ShapeError", "ParameterError", "RankError", "InfeasibleError", "ConvergenceError"])
def test_every_error_is_a_value_error(name):
    kind = getattr(probhard, name)
    assert issubclass(kind, ProbhardError)
    assert issubclass(kind, ValueError)


# ---------------------------------------------------------------------------------------------------- rank


def numbers(text: str) -> list[int]:
    return [int(k) for k in re.findall(r"\d+", text)]


def test_the_rows_named_as_redundant_are_redundant():
    generator = torch.Generator().manual_seed(1)
    free = torch.randn(4, 9, dtype=DOUBLE, generator=generator)
    rows = torch.stack([free[0], free[1], free[0] - 2 * free[2], free[2], free[3], free[1] + free[3]])
    with pytest.raises(RankError) as caught:
        LinearEquality(rows, 0.0)
    named, source = (numbers(part) for part in re.findall(r"\[(.*?)\]", caught.value.what))
    assert len(named) == 2
    rest = [i for i in range(6) if i not in named]
    assert torch.linalg.matrix_rank(rows[rest]) == 4
    assert torch.linalg.matrix_rank(rows[source]) == len(source)
    assert torch.linalg.matrix_rank(rows[source + named]) == len(source)


REVEALED = {
    "repeated": (ones(2, 5), torch.tensor([2.0, 2.0], dtype=DOUBLE), [0]),
    "scaled": (torch.stack([ones(5), -3 * ones(5), eye(5)[1] - eye(5)[2]]), [1.0, -3.0, 0.5], [0, 2]),
    "pinned and summed": (torch.cat([eye(5)[:2], eye(5)[:2].sum(0)[None], ones(1, 5)]), [1.0, 2, 3, 9], [0, 1, 3]),
    "zero row": (torch.stack([zeros(5), ones(5)]), [0.0, 1.0], [1]),
}


@pytest.mark.parametrize("name", REVEALED)
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
def test_reveal_drops_redundant_rows(name, metric, kind):
    rows, right, independent = REVEALED[name]
    right = torch.as_tensor(right, dtype=DOUBLE)
    generator = torch.Generator().manual_seed(2)
    variance = torch.rand(5, dtype=DOUBLE, generator=generator) + 0.5
    factor = torch.randn(5, 5, dtype=DOUBLE, generator=generator)
    cov = {"diagonal": Diagonal(variance), "low rank": LowRank(factor[:, :2], variance)}
    cov["dense"] = Dense(factor.tril(-1) + torch.diag(variance))
    base = LocationScale(torch.randn(5, dtype=DOUBLE, generator=generator), cov[kind])
    constraint = LinearEquality(rows, right, rank="reveal")
    found = DPPL(metric)(base, constraint)
    A, b, sigma = rows[independent], right[independent], base.cov.dense()
    W = sigma if metric == "oblique" else eye(5)
    gain = W @ A.mT @ torch.linalg.inv(A @ W @ A.mT)
    P = eye(5) - gain @ A
    torch.testing.assert_close(found.mean, base.mean - gain @ (A @ base.mean - b), rtol=0, atol=1e-11)
    torch.testing.assert_close(found.variance, (P @ sigma @ P.mT).diagonal(), rtol=0, atol=1e-11)
    draws = found.sample((5,), generator)
    assert constraint.residual(draws).abs().max() < 1e-11  # the dropped rows hold too


NT, NX = 4, 6
WEIGHTS = trapezoid_weights(torch.linspace(0, 1, NX, dtype=DOUBLE))
INITIAL = torch.linspace(0.2, 1.4, NX, dtype=DOUBLE)
START = eye(NT * NX)[:NX]


def masses(first: float) -> torch.Tensor:
    return torch.cat([torch.tensor([first], dtype=DOUBLE), torch.linspace(0.7, 0.9, NT - 1, dtype=DOUBLE)])


@pytest.mark.parametrize("order", ["initial first", "mass first"])
def test_initial_condition_and_mass_at_the_start(order):
    """Decision 9: the initial condition already says what the mass at t = 0 is."""
    true_mass = float(WEIGHTS @ INITIAL)

    def both(first: float, rank: str = "strict") -> LinearEquality:
        start = LinearEquality(START, INITIAL, rank=rank)
        slices = per_slice(Conservation(WEIGHTS, masses(first)), (NT, NX))
        return start & slices if order == "initial first" else slices & start

    with pytest.raises(RankError) as caught:
        both(true_mass)
    explained(caught.value, ["reveal"])
    named, source = (numbers(part) for part in re.findall(r"\[(.*?)\]", caught.value.what))
    involved = set(range(NX + 1)) if order == "initial first" else {0, *range(NT, NT + NX)}
    assert set(named) | set(source) == involved
    assert len(named) == 1

    with pytest.raises(InfeasibleError) as caught:
        both(true_mass + 0.125)
    explained(caught.value, ["contradicts"])
    assert int(re.search(r"Row (\d+)", caught.value.what).group(1)) in involved
    with pytest.raises(InfeasibleError):
        both(true_mass + 0.125, rank="reveal")

    revealed = both(true_mass, rank="reveal")
    generator = torch.Generator().manual_seed(3)
    n = NT * NX
    loc, variance = torch.randn(n, dtype=DOUBLE, generator=generator), torch.rand(n, dtype=DOUBLE, generator=generator)
    found = DPPL()(LocationScale(loc, Diagonal(variance)), revealed)
    A = torch.cat([START, torch.block_diag(*[WEIGHTS[None]] * NT)[1:]])
    b, W = torch.cat([INITIAL, masses(true_mass)[1:]]), torch.diag(variance)
    gain = W @ A.mT @ torch.linalg.inv(A @ W @ A.mT)
    P = eye(n) - gain @ A
    torch.testing.assert_close(found.mean, loc - gain @ (A @ loc - b), rtol=0, atol=1e-11)
    torch.testing.assert_close(found.variance, (P @ W @ P.mT).diagonal(), rtol=0, atol=1e-11)
    torch.testing.assert_close(found.mean[:NX], INITIAL, rtol=0, atol=1e-14)
    assert not found.variance[:NX].any()


def test_a_matrix_changed_in_place_is_looked_at_again():
    rows = torch.stack([ones(5), eye(5)[0]])
    LinearEquality(rows, 0.0)
    rows[1] = 1.0
    with pytest.raises(RankError):
        LinearEquality(rows, 0.0)


def test_nearly_redundant_rows_are_not_redundant():
    rows = torch.stack([ones(5), ones(5) + 1e-4 * eye(5)[0]])
    constraint = LinearEquality(rows, torch.tensor([1.0, 1.0001], dtype=DOUBLE))
    found = DPPL("orthogonal").project(zeros(5), constraint).value
    torch.testing.assert_close(found[0], torch.tensor(1.0, dtype=DOUBLE), rtol=0, atol=1e-8)
    assert constraint.violation(found) < 1e-11


# --------------------------------------------------------------------------------------------------- saved files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    ConstrainedModel(Backbone(), ROW).save(path)
    return path


def test_a_saved_file_is_read_back(saved):
    assert ConstrainedModel.load(saved, Backbone(), ROW).method == METHODS["probhard-ob"]


def refused(path: Path, *fragments: str) -> None:
    with pytest.raises(ParameterError) as caught:
        ConstrainedModel.load(path, Backbone(), ROW)
    explained(caught.value, [path.name, *fragments])


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 broken archive", bytes(range(256)) * 40])
def test_garbage_is_not_a_model(tmp_path, content):
    path = tmp_path / "garbage.pt"
    path.write_bytes(content)
    refused(path)


def test_a_truncated_file_is_not_a_model(saved):
    saved.write_bytes(saved.read_bytes()[:-200])
    refused(saved)


class Trap:
    """Pickles to a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("container", ["torch", "pickle", "inside a model"])
def test_code_in_a_file_is_never_run(tmp_path, container, saved):
    path, mark = tmp_path / "trap.pt", tmp_path / "sprung"
    if container == "torch":
        torch.save(Trap(mark), path)
    elif container == "pickle":
        path.write_bytes(pickle.dumps(Trap(mark), protocol=2))
    else:
        content = torch.load(saved, weights_only=True)
        torch.save({**content, "extra": Trap(mark)}, path)
    refused(path)
    assert not mark.exists()
    if container == "torch":  # the trap works where code is allowed
        torch.load(path, weights_only=False)
        assert mark.exists()


CHANGED = {
    "not a model": lambda content: {"weights": content["state"]},
    "a bare state": lambda content: content["state"],
    "a list": lambda content: [content],
    "another format": lambda content: {**content, "format": "other"},
    "a newer version": lambda content: {**content, "version": 99},
    "a version that is no number": lambda content: {**content, "version": "two"},
    "no state": lambda content: {k: v for k, v in content.items() if k != "state"},
    "no method": lambda content: {k: v for k, v in content.items() if k != "method"},
    "a state of another kind": lambda content: {**content, "state": [1, 2]},
    "a method of another kind": lambda content: {**content, "method": "probhard-ob"},
    "a method with a part missing": lambda content: {**content, "method": {"score": "crps"}},
    "a method with a stranger": lambda content: {
        **content,
        "method": {**content["method"], "training": {**content["method"]["training"], "speed": 3}},
    },
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_file_of_another_content_is_refused(saved, change):
    torch.save(CHANGED[change](torch.load(saved, weights_only=True)), saved)
    refused(saved, *(["99"] if change == "a newer version" else []))


@pytest.mark.parametrize("other", [Backbone(6), nn.Linear(3, 10, dtype=DOUBLE), nn.Sequential(Backbone())])
def test_weights_of_another_architecture_are_refused(saved, other):
    with pytest.raises(ParameterError) as caught:
        ConstrainedModel.load(saved, other, ROW)
    explained(caught.value, [saved.name, "linear."])


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        ConstrainedModel.load(tmp_path / "nowhere.pt", Backbone(), ROW)


def test_a_saved_metric_module_must_be_given_again(tmp_path):
    method = Method(Step(DiagonalMetric(ones(5), learn=True)))
    ConstrainedModel(Backbone(), ROW, method).save(tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "metric")


# ----------------------------------------------------------------------------------------- checks that are skipped


def test_checks_look_at_nothing_inside_transforms():
    assert checking()
    seen = []

    def look(x):
        seen.append(checking())
        return x.sum()

    torch.func.vmap(look)(ones(2, 3))
    torch.func.grad(look)(ones(3))
    torch.func.jacrev(look)(ones(3))
    assert seen == [False] * 3
    compiled = torch.compile(lambda x: x + (1 if checking() else 2), backend="eager", fullgraph=True)
    assert compiled(zeros(1)).item() == 2.0


CONSTRAINTS = {"row": lambda: ROW, "hierarchy": hierarchy}
each_constraint = pytest.mark.parametrize("name", CONSTRAINTS)


def moderate(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    loc = torch.randn(3, n, dtype=DOUBLE, generator=generator)
    return loc, torch.rand(3, n, dtype=DOUBLE, generator=generator) + 0.5


@each_constraint
@pytest.mark.parametrize("transform", ["vmap", "compile"])
def test_values_are_not_checked_inside_transforms(name, transform):
    constraint, layer = CONSTRAINTS[name](), DPPL()
    loc, scale = moderate(constraint.variables)

    def projected(loc, scale):
        return layer((loc, scale), constraint).mean

    truth = projected(loc, scale)
    if transform == "vmap":
        inside = torch.func.vmap(projected)
    else:
        inside = torch.compile(projected, backend="eager", fullgraph=True)
    torch.testing.assert_close(inside(loc, scale), truth, rtol=1e-12, atol=1e-12)
    mean = inside(spoiled(loc, NAN), scale)  # the same call raises in eager mode
    assert mean[0].isnan().any()
    torch.testing.assert_close(mean[1:], truth[1:], rtol=1e-12, atol=1e-12)
    inside(loc, 0 * scale)
    with pytest.raises(ParameterError):
        projected(spoiled(loc, NAN), scale)
    with pytest.raises(InfeasibleError):
        projected(loc, 0 * scale)


@each_constraint
def test_moments_compile_into_one_graph(name):
    constraint, layer = CONSTRAINTS[name](), DPPL()
    loc, scale = moderate(constraint.variables)

    def variance(loc, scale):
        return layer((loc, scale), constraint).variance

    compiled = torch.compile(variance, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(loc, scale), variance(loc, scale), rtol=1e-12, atol=1e-12)


def test_compiling_does_not_switch_the_layers_checks_off():
    torch.compile(torch.sin, backend="eager")(zeros(2))
    with pytest.raises(ParameterError, match="NaN"):
        DPPL()((spoiled(zeros(5), NAN), ones(5)), ROW)


def test_shapes_are_checked_under_vmap():
    with pytest.raises(ShapeError, match="5"):
        torch.func.vmap(lambda loc: DPPL("orthogonal").project(loc, ROW).value)(zeros(3, 4))


def test_validate_args_false_skips_values_and_keeps_shapes():
    bad = spoiled(zeros(5), NAN)
    assert LocationScale(bad, Diagonal(-ones(5)), validate_args=False).mean[0].isnan()
    assert as_location_scale((bad, -ones(5)), validate_args=False).mean[0].isnan()
    layer = DPPL(validate_args=False)
    assert layer((bad, ones(5)), ROW).mean.isnan().any()
    assert layer.project(bad, ROW, dist=law()).value.isnan().any()
    assert layer.project_samples(torch.stack([bad, bad]), ROW).value.isnan().any()
    layer((zeros(5), zeros(5)), ROW)  # nothing can move, and nothing is said
    for action in (
        lambda: LocationScale(bad, Diagonal(ones(4)), validate_args=False),
        lambda: layer(law(4), ROW),
        lambda: layer(law(5, (3,)), LinearEquality(ones(1, 5), zeros(4, 1))),
    ):
        with pytest.raises(ShapeError):
            action()


def test_torchs_switch_does_not_silence_the_checks():
    """torch.compile turns torch's own switch off for the whole process."""
    bad = spoiled(zeros(5), NAN)
    td.Distribution.set_default_validate_args(False)
    with pytest.raises(ParameterError):
        LocationScale(bad, Diagonal(ones(5)))
    assert LocationScale(bad, Diagonal(ones(5)), validate_args=False).mean[0].isnan()


def test_a_checked_law_is_not_checked_again(monkeypatch):
    calls = []
    base = LocationScale(zeros(5), Diagonal(ones(5)))
    monkeypatch.setattr("probhard.laws.distribution.check_finite", lambda *args, **kwargs: calls.append(args))
    DPPL()(base, ROW)
    assert calls == []
    DPPL()(LocationScale(zeros(5), Diagonal(ones(5)), validate_args=False), ROW)
    assert len(calls) == 1


def test_a_sparse_matrix_cannot_be_trained():
    with pytest.raises(ParameterError, match="requires a gradient"):
        LinearEquality(torch.ones(1, 4).to_sparse().requires_grad_(), 1.0)
