"""Empty sets and bad input of inequalities are named and explained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import probhard as ph
from constraints.inequalities import normal
from probhard.errors import InfeasibleError, ParameterError, ProbhardError, ShapeError
from sets import INF, TREE


def projected(constraint: ph.Constraint, n: int, batch: tuple[int, ...] = ()) -> Tensor:
    return ph.DPPL().project(normal(1, *batch, n), constraint, dist=(torch.zeros(n), torch.ones(n))).value


EMPTY = {  # what is done, and what its message names
    "bounds crossed": (lambda: ph.Box(1.0, 0.0), ["1", "0", "bound"]),
    "bounds crossed once": (lambda: ph.Box(torch.zeros(3, 4), torch.tensor([[1.0], [1.0], [-1.0]])), ["(2, 0)"]),
    "boxes apart": (lambda: ph.Box(0.0, 1.0) & ph.Box(2.0, 3.0), ["2", "1"]),
    "mass above capacity": (
        lambda: projected(ph.Conservation(torch.ones(4), 5.0) & ph.Box(0.0, 1.0), 4),
        ["Conservation", "5", "0 to 4"],
    ),
    "mass above capacity in one element": (
        lambda: projected(ph.Conservation(torch.ones(4), torch.tensor([1.0, 5.0, 2.0])) & ph.Box(0.0, 1.0), 4, (3,)),
        ["Conservation", "5", "(1,)"],
    ),
    "mass above capacity in one element of the moments": (
        lambda: (
            ph.DPPL()(
                (torch.zeros(3, 4), torch.ones(3, 4)),
                ph.Conservation(torch.ones(4), torch.tensor([1.0, 5.0, 2.0])) & ph.Box(0.0, 1.0),
            ).mean
        ),
        ["Conservation", "5", "(1,)"],
    ),
    "mass above capacity in one slice": (
        lambda: projected(
            ph.per_slice(ph.Conservation(torch.ones(4), torch.tensor([1.0, 5.0])) & ph.Box(0, 1), (2, 4)), 8
        ),
        ["5", "Row 1"],
    ),
    "increasing with mass above capacity": (
        lambda: projected(
            ph.Monotone() & ph.Conservation(torch.ones(4), torch.tensor([1.0, 5.0])) & ph.Box(0, 1), 4, (2,)
        ),
        ["Conservation", "(1,)"],
    ),
    "rows that contradict": (
        lambda: projected(ph.LinearInequality(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([1.0, -2.0])), 2),
        ["LinearInequality"],
    ),
    "rows that contradict in one element": (
        lambda: projected(
            ph.LinearInequality(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 2.0], [1.0, -2.0]])),
            2,
            (2,),
        ),
        ["LinearInequality", "(1,)"],
    ),
    "rows of one element's own that contradict": (
        lambda: projected(
            ph.LinearInequality(torch.tensor([[[1.0, 1.0], [-1.0, 1.0]], [[1.0, 1.0], [-1.0, -1.0]]]), [1.0, -2.0]),
            2,
            (2,),
        ),
        ["LinearInequality", "(1,)"],
    ),
    "single rows that contradict": (
        lambda: projected(ph.LinearInequality(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([1.0, -2.0])), 2),
        ["2", "1"],
    ),
    "tree over its cap": (
        lambda: projected(
            ph.Hierarchy(TREE) & ph.Box(torch.tensor([9.0, *[0.0] * 6]), torch.tensor([INF, *[2.0] * 6])), 7
        ),
        ["Hierarchy"],
    ),
    "negative total": (lambda: ph.Simplex(-1.0), ["-1", "simplex"]),
    "negative total in one element": (lambda: ph.Simplex(torch.tensor([1.0, -2.0])), ["-2", "(1,)"]),
    "negative radius": (lambda: ph.Ball(-1.0), ["-1"]),
}


def explained(error: ProbhardError, fragments: list[str]) -> None:
    for part in (error.what, error.why, error.fix):
        assert part.strip()
        assert part.rstrip().endswith(".")
    for fragment in fragments:
        assert fragment in str(error)


@pytest.mark.parametrize("name", EMPTY)
def test_empty_sets_are_named(name):
    action, fragments = EMPTY[name]
    with pytest.raises(InfeasibleError) as caught:
        action()
    explained(caught.value, fragments)


NAN = torch.nan
BAD = {
    "NaN bound": (lambda: ph.Box(torch.tensor([0.0, NAN])), ParameterError, ["1 NaN", "lower"]),
    "NaN number": (lambda: ph.Box(None, NAN), ParameterError, ["NaN", "upper"]),
    "bounds of other shapes": (lambda: ph.Box(torch.zeros(3), torch.ones(4)), ShapeError, ["(3,)", "(4,)"]),
    "box of another size": (lambda: projected(ph.Box(torch.zeros(3)), 4), ShapeError, ["3", "4"]),
    "box of another batch": (lambda: projected(ph.Box(torch.zeros(3, 4), 1.0), 4, (2,)), ShapeError, ["(2,)", "(3,)"]),
    "mass of another batch": (
        lambda: projected(ph.Conservation(torch.ones(4), torch.ones(3)) & ph.NonNegative(), 4, (2,)),
        ShapeError,
        ["3", "2"],
    ),
    "'&' of sizes that differ": (
        lambda: ph.Box(torch.zeros(3)) & ph.Conservation(torch.ones(4), 1.0),
        ShapeError,
        ["3", "4"],
    ),
    "direction": (lambda: ph.Monotone("upwards"), ParameterError, ["upwards", "increasing", "decreasing"]),
    "G is a vector": (lambda: ph.LinearInequality(torch.ones(4)), ShapeError, ["(4,)"]),
    "NaN in G": (lambda: ph.LinearInequality(torch.full((2, 4), NAN)), ParameterError, ["G"]),
    "NaN in batched G": (lambda: ph.LinearInequality(torch.full((3, 2, 4), NAN)), ParameterError, ["G"]),
    "NaN in d": (lambda: ph.LinearInequality(torch.ones(1, 4), NAN), ParameterError, ["d", "NaN"]),
    "d is too long": (lambda: ph.LinearInequality(torch.ones(1, 4), torch.ones(2)), ShapeError, ["(2,)", "1 rows"]),
    "G and d in batches that differ": (
        lambda: ph.LinearInequality(torch.ones(3, 1, 4), torch.ones(2, 1)),
        ShapeError,
        ["3", "2"],
    ),
    "G of another size": (lambda: projected(ph.LinearInequality(torch.ones(1, 4)), 3), ShapeError, ["4", "3"]),
    "negative variation": (lambda: ph.TotalVariation(-1.0), ParameterError, ["-1"]),
    "NaN variation": (lambda: ph.TotalVariation(NAN), ParameterError, ["nan"]),
    "negative weight": (lambda: ph.TotalVariationPenalty(-1.0), ParameterError, ["-1", "weight"]),
    "NaN total": (lambda: ph.Simplex(NAN), ParameterError, ["NaN"]),
    "slices that do not divide": (lambda: projected(ph.Monotone(slices=3), 8), ShapeError, ["8", "3"]),
    "slices of another width": (lambda: ph.per_slice(ph.Box(torch.zeros(3)), (2, 4)), ShapeError, ["3", "4"]),
    "slices in time": (lambda: ph.per_slice(ph.Simplex(torch.ones(3)), (2, 4)), ShapeError, ["3", "2"]),
    "field of nothing": (lambda: ph.TotalVariationDiminishing((0, 3)), ShapeError, ["(0, 3)"]),
    "censored shapes": (
        lambda: ph.DPPL(covariance="censored")((torch.zeros(4), torch.ones(4)), ph.Monotone()),
        ParameterError,
        ["Monotone"],
    ),
    "probconserv without rows": (lambda: ph.NonNegative().linear_part(), ParameterError, ["linear"]),
    "frozen": (lambda: ph.DPPL("orthogonal").freeze(ph.NonNegative()), ParameterError, ["NonNegative"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_explained(name):
    action, kind, fragments = BAD[name]
    with pytest.raises(kind) as caught:
        action()
    explained(caught.value, fragments)
