"""Frozen projections in onnxruntime, with a dynamic batch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import probhard as ph
from registry import CONSTRAINTS

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
BATCH = ({0: torch.export.Dim("batch")},)


@pytest.fixture
def plain_dtype() -> torch.dtype:
    """Networks have torch's usual dtype here."""
    return torch.float32


def session(module: nn.Module, z: torch.Tensor, path) -> ort.InferenceSession:
    """The module in onnxruntime, exported from points z with a dynamic batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about versions to come
        torch.onnx.export(module.eval(), (z,), path, dynamo=True, dynamic_shapes=BATCH, verbose=False)
    return ort.InferenceSession(path)


def run(session: ort.InferenceSession, z: torch.Tensor) -> list[np.ndarray]:
    return session.run(None, {session.get_inputs()[0].name: z.numpy()})


@pytest.mark.parametrize("name", ["tree", "conservation", "dense"])
def test_frozen_rows_follow_a_network(name, tmp_path):
    constraint = CONSTRAINTS[name]()
    frozen = ph.DPPL("orthogonal").freeze(constraint)
    assert {buffer.dtype for buffer in frozen.buffers()} == {torch.float32}
    model = nn.Sequential(nn.Linear(3, constraint.variables), frozen)
    program = session(model, torch.randn(2, 3), tmp_path / "model.onnx")
    for batch in (1, 7):
        x = torch.randn(batch, 3)
        (actual,) = run(program, x)
        np.testing.assert_allclose(actual, model(x).detach().numpy(), rtol=1e-5, atol=1e-6)
        assert constraint.relative_violation(torch.from_numpy(actual).double()).max() < 1e-5


def test_freeze_takes_a_dtype(tmp_path):
    frozen = ph.DPPL("orthogonal").freeze(CONSTRAINTS["tree"](), dtype=torch.float64)
    z = torch.randn(4, frozen.matrix.shape[-1], dtype=torch.float64)
    (actual,) = run(session(frozen, z, tmp_path / "model.onnx"), z)
    np.testing.assert_allclose(actual, frozen(z).numpy(), atol=1e-12)
    with pytest.raises(ph.ParameterError, match="dtype"):
        frozen(z.float())


N = 8
POLYHEDRA = {
    "simplex": lambda: ph.Simplex(),
    "turnover": lambda: ph.Simplex() & ph.L1Ball(0.5, torch.full((N,), 1 / N)),
    "monotone": lambda: ph.Monotone() & ph.Box(-0.5, 0.5),
    "rows": lambda: ph.LinearInequality(torch.randn(5, N), torch.ones(5)) & ph.NonNegative(),
}


@pytest.mark.parametrize("name", list(POLYHEDRA))
def test_iterations_in_onnxruntime(name, tmp_path):
    constraint = POLYHEDRA[name]()
    frozen = ph.DPPL("orthogonal", iterations=100).freeze(constraint, variables=N)
    program = session(frozen, torch.randn(2, N), tmp_path / "model.onnx")
    for batch in (1, 6):
        z = torch.randn(batch, N)
        value, residual = run(program, z)
        exact = ph.DPPL("orthogonal").project(z, constraint).value.numpy()
        np.testing.assert_allclose(value, exact, atol=2e-3)
        assert residual.shape == (batch,)
        np.testing.assert_allclose(value, frozen(z)[0].numpy(), atol=1e-5)
        np.testing.assert_allclose(residual, constraint.violation(torch.from_numpy(value)).numpy(), atol=1e-5)
        assert residual.max() < 2e-3


def test_more_iterations_have_smaller_residuals():
    z, constraint, worst = torch.randn(50, N, dtype=torch.float64), ph.Monotone() & ph.Box(-0.5, 0.5), []
    for iterations in (10, 50, 250):
        frozen = ph.DPPL("orthogonal", iterations=iterations).freeze(constraint, torch.float64, variables=N)
        worst.append(float(frozen(z)[1].max()))
    assert worst[2] < 1e-2 * worst[1]
    assert worst[1] < worst[0]


def test_freezing_needs_one_set_of_known_size():
    layer = ph.DPPL("orthogonal", iterations=10)
    with pytest.raises(ph.ParameterError, match="variables=n"):
        layer.freeze(ph.Simplex())
    with pytest.raises(ph.ParameterError, match="batch"):
        layer.freeze(ph.Simplex(torch.ones(3)), variables=N)
    with pytest.raises(ph.ParameterError, match="iterations"):
        ph.DPPL("orthogonal").freeze(ph.NonNegative(), variables=N)
    value, residual = layer.freeze(ph.NonNegative(), variables=N)(torch.randn(3, N))
    assert value.min() >= -residual.max()
    assert residual.max() < 0.1
