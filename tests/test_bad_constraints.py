"""Bad data of constraints: an error of the right kind, in three parts, before torch raises one of its own."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from bad_input import BATCHED, DOUBLE, INF, NAMES, NAN, ROW, S, eye, hierarchy, ones, rejected, spoiled, zeros
from probhard import (
    Conservation,
    Hierarchy,
    InfeasibleError,
    LinearEquality,
    ParameterError,
    RankError,
    ShapeError,
    per_slice,
    trapezoid_weights,
)

TAGS = {"all": ["x"], "all/side": ["x/l", "x/r"], "all/side/leaf": ["x/l/1", "x/l/2", "x/r/1"]}
FRAME = pd.DataFrame({"all": "x", "side": ["l", "l", "r"], "leaf": ["1", "2", "1"]})


def with_zero_row() -> sp.csr_array:
    """The summation matrix with an aggregate that holds stored zeros only."""
    dense = torch.cat([S[:1], zeros(1, 4), S[1:]]).numpy()
    row, column = np.nonzero(dense)
    row, column = np.append(row, [1, 1]), np.append(column, [0, 2])
    return sp.csr_array((dense[row, column], (row, column)), shape=dense.shape)


GRID = torch.linspace(0, 1, 5, dtype=DOUBLE)
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
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_explained(name):
    rejected(*BAD[name])
