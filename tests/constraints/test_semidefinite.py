"""Semidefinite and correlation matrices beyond the registry: closed form, gradients, draws, edges and bad input."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import probhard as ph

DIAGONAL = [0, 2, 5]


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_vectors_keep_the_frobenius_norm():
    matrix = normal(0, 4, 3, 3)
    matrix = matrix + matrix.mT
    vector = ph.vectorise(matrix)
    torch.testing.assert_close(vector.norm(dim=-1), matrix.flatten(-2).norm(dim=-1))
    torch.testing.assert_close(ph.matrix_of(vector), matrix)
    assert ph.matrix_of(torch.zeros(0, 6)).shape == (0, 3, 3)
    with pytest.raises(ph.ShapeError, match="4 variables"):
        ph.matrix_of(torch.zeros(4))
    with pytest.raises(ph.ShapeError, match=r"\(2, 3\)"):
        ph.vectorise(torch.zeros(2, 3))


def test_negative_eigenvalues_become_zero():
    vectors, values = torch.linalg.qr(normal(1, 3, 3)).Q, torch.tensor([-1.0, -0.2, 3.0])
    z = ph.vectorise(vectors @ values.diag() @ vectors.T)
    nearest = ph.matrix_of(ph.DPPL("orthogonal").project(z, ph.PositiveSemidefinite(3)).value)
    torch.testing.assert_close(nearest, vectors @ values.clamp(min=0).diag() @ vectors.T)
    outside = ph.DPPL("orthogonal").project(
        -torch.eye(6)[0] - torch.eye(6)[2] - torch.eye(6)[5], ph.PositiveSemidefinite(3)
    )
    assert torch.equal(outside.value, torch.zeros(6))


@pytest.mark.parametrize("build", [ph.PositiveSemidefinite, ph.Correlation])
@pytest.mark.parametrize("metric", ["orthogonal", "oblique"])
def test_gradients(build, metric):
    z = (0.3 * normal(2, 1, 6)).requires_grad_()
    stddev = torch.tensor([0.3, 0.8, 0.5, 1.1, 0.7, 0.9], requires_grad=True)

    def nearest(z, stddev):
        law = ph.LocationScale(z, ph.Diagonal.from_stddev(stddev.expand_as(z)))
        return ph.DPPL(metric).project(z, build(3), dist=law).value

    assert gradcheck(nearest, (z, stddev), atol=1e-4, rtol=1e-4)


def test_points_inside_have_the_identity_as_tangent():
    z = ph.vectorise(torch.diag(torch.tensor([1.0, 2.0, 0.0])))  # an eigenvalue of 0 counts as free
    for metric in ("orthogonal", ph.DiagonalMetric(torch.rand(6) + 0.5)):
        solution = ph.DPPL(metric).project(z, ph.PositiveSemidefinite(3))
        torch.testing.assert_close(solution.value, z, rtol=0, atol=1e-14)
        torch.testing.assert_close(solution.tangent.apply(torch.eye(6)), torch.eye(6), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_drawn_correlation_matrix_is_one(dtype):
    law = ph.LocationScale(normal(3, 2, 6).to(dtype), ph.Diagonal(torch.full((2, 6), 0.5, dtype=dtype)))
    projected = ph.DPPL(draws=10)(law, ph.Correlation(3))
    draws = torch.cat([projected.sample((20,)), projected.mean[None]])
    assert torch.equal(draws[..., DIAGONAL], torch.ones_like(draws[..., DIAGONAL]))
    least = torch.linalg.eigvalsh(ph.matrix_of(draws.double())).min()
    assert float(least) > (-1e-10 if dtype == torch.float64 else -1e-6)
    assert bool((projected.variance[..., [1, 3, 4]] > 0).all())
    empty = ph.LocationScale(law.loc[:0], ph.Diagonal(law.cov.variance[:0]))
    assert ph.DPPL(draws=10)(empty, ph.Correlation(3)).mean.shape == (0, 6)


def test_bad_input_is_named():
    with pytest.raises(ph.ParameterError, match="size=0"):
        ph.PositiveSemidefinite(0)
    with pytest.raises(ph.ShapeError, match="6 variables"):
        ph.DPPL("orthogonal").project(torch.zeros(5), ph.Correlation(3))
    with pytest.raises(ph.ParameterError, match="joins a cone with"):
        ph.DPPL("orthogonal").project(torch.zeros(6), ph.PositiveSemidefinite(3) & ph.L1Ball(1.0))
    assert repr(ph.Correlation(3)) == "Correlation(3)"
