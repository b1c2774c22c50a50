"""Data of another kind than the layer takes: other types, layouts and sizes, bounds that no number satisfies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import probhard as ph
from bad_input import INF, eye, ones, rejected, zeros

SIMPLEX, LAYER = ph.Simplex(), ph.DPPL("orthogonal")


def rows(count: int) -> ph.NonlinearEquality:
    return ph.NonlinearEquality(lambda u: u[..., 5 - count : 5])


# what is done, the error, and what its message must name
BAD = {
    "an array": (lambda: LAYER.project(np.ones(3), SIMPLEX), ph.ShapeError, ["ndarray"]),
    "a list": (lambda: LAYER.project([1.0, 2.0], SIMPLEX), ph.ShapeError, ["list"]),
    "a list of samples": (lambda: LAYER.project_samples([[1.0], [2.0]], SIMPLEX), ph.ShapeError, ["list"]),
    "a number": (lambda: LAYER.project(torch.tensor(1.0), SIMPLEX), ph.ShapeError, ["()"]),
    "a sparse point": (lambda: LAYER.project(ones(3).to_sparse(), SIMPLEX), ph.ShapeError, ["sparse"]),
    "eight bits": (lambda: LAYER.project(ones(3).to(torch.float8_e4m3fn), SIMPLEX), ph.ParameterError, ["float8"]),
    "a law over no variables": (lambda: LAYER(torch.distributions.Normal(0.0, 1.0), SIMPLEX), ph.ShapeError, ["()"]),
    "a tensor as covariance": (lambda: ph.LocationScale(ones(3), ones(3)), ph.ParameterError, ["Tensor"]),
    "a family by name": (
        lambda: ph.LocationScale(ones(3), ph.Diagonal(ones(3)), "normal"),
        ph.ParameterError,
        ["str"],
    ),
    "a lower bound of inf": (lambda: ph.Box(INF, INF), ph.InfeasibleError, ["lower", "inf"]),
    "an upper bound of -inf": (lambda: ph.Box(None, -INF), ph.InfeasibleError, ["upper", "-inf"]),
    "a side of -inf": (lambda: ph.LinearInequality(eye(3), -INF), ph.InfeasibleError, ["-inf"]),
    "half a row": (lambda: ph.PositiveSemidefinite(2.5), ph.ParameterError, ["2.5"]),
    "half a profile": (lambda: ph.Monotone("increasing", 1.5), ph.ParameterError, ["1.5"]),
    "slices without points": (lambda: ph.per_slice(SIMPLEX, (3,)), ph.ShapeError, ["(3,)"]),
    "slices by name": (lambda: ph.TotalVariationDiminishing("3x4"), ph.ShapeError, ["3x4"]),
    "a field without points": (lambda: ph.TotalVariationDiminishing((3,)), ph.ShapeError, ["(3,)"]),
    "a tensor as arguments": (
        lambda: ph.NonlinearEquality(lambda u, a, b: u[..., :1] - a + b, ones(2)),
        ph.ParameterError,
        ["Tensor", "tuple"],
    ),
    "no residual": (lambda: LAYER.project(ones(5), rows(0)), ph.ShapeError, ["(0,)"]),
    "complex residuals": (
        lambda: LAYER.project(ones(5), ph.NonlinearEquality(lambda u: 1j * u[..., :1])),
        ph.ShapeError,
        ["complex"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_data_of_another_kind_is_named(name):
    rejected(*BAD[name])


def test_no_rows_leave_every_point_where_it_is():
    z = torch.randn(4, 3, dtype=torch.float64)
    nothing = ph.LinearEquality(zeros(0, 3), zeros(0))
    assert torch.equal(LAYER.project(z, nothing).value, z)
    assert torch.equal(nothing.relative_violation(z), zeros(4))
