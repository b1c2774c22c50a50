"""Variances of local functionals of spectral fields against dense matrices; functionals in groups of boxes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

import probhard as ph
from probhard.laws.spectral import Spectral
from probhard.rows.boxes import LocalFunctionals

SHAPES = [(40,), (9, 20), (6, 5, 8)]


def family(shape: tuple[int, ...]) -> ph.Functionals:
    """Blocks with smaller ones at the edges, the total, scattered points, and a functional without any point."""
    n = math.prod(shape)
    scattered = torch.zeros(3, n)
    scattered[0, ::7], scattered[1, n // 2 : n // 2 + 3] = 1.0, torch.tensor([0.5, -2.0, 1.0])
    return ph.BlockMeans(shape, (1, 2, 4, "total")) + ph.Directions(scattered)


@pytest.mark.parametrize("batch", [(), (2,), (3, 2)], ids=str)
@pytest.mark.parametrize("boundary", ["periodic", "reflecting", "zero"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_variances_equal_those_of_the_dense_matrix(shape, boundary, batch):
    n = math.prod(shape)
    cov = Spectral(shape, torch.rand(*batch, n), torch.randn(2, n), torch.rand(2, n), boundary)
    functionals = family(shape)
    rows = torch.from_numpy(functionals.matrix.toarray())
    expected = (rows @ cov.dense() @ rows.T).diagonal(dim1=-2, dim2=-1)
    variance = cov.functional_variance(functionals.rows(n))
    torch.testing.assert_close(variance, expected, rtol=1e-10, atol=1e-12)
    dense = super(Spectral, cov).functional_variance(functionals.rows(n))
    torch.testing.assert_close(variance, dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_small_boxes_are_grouped_and_large_ones_left(shape):
    n, functionals = math.prod(shape), family(shape)
    local = LocalFunctionals.of(functionals.rows(n), shape)
    assert local is functionals.rows(n).local(shape)
    assert all(2 ** len(shape) * math.prod(boxes.shape) <= n for boxes in local.boxes)
    seen = torch.cat([*(boxes.functional for boxes in local.boxes), local.rest])
    assert torch.equal(seen.sort().values, torch.arange(local.count))
    x = torch.randn(2, n)
    parts = [(x[..., boxes.cell] * boxes.value).sum(-1) for boxes in local.boxes]
    values = local.collect(parts, local.rest_map.apply(x))
    torch.testing.assert_close(values, functionals.rows(n).apply(x))


def test_functionals_of_too_many_shapes_are_all_left():
    boxes = torch.zeros(40, 200)
    for k in range(40):
        boxes[k, : k + 1] = 1.0
    local = ph.Directions(boxes).rows(200).local((200,))
    assert not local.boxes
    assert len(local.rest) == 40
    cov = Spectral((200,), torch.rand(200), torch.ones(200), torch.rand(200))
    expected = (boxes @ cov.dense() @ boxes.T).diagonal()
    torch.testing.assert_close(cov.functional_variance(ph.Directions(boxes).rows(200)), expected)


@pytest.mark.parametrize("boundary", ["periodic", "reflecting", "zero"])
def test_gradients_of_variances(boundary):
    rows = ph.BlockMeans((4, 6), (2, "total")).rows(24)

    def variance(power, scale, own):
        return Spectral((4, 6), power.square(), scale, own.square(), boundary).functional_variance(rows)

    assert gradcheck(variance, [torch.randn(*batch, 24, requires_grad=True) for batch in ((), (2,), (2,))])


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("boundary", ["periodic", "zero"])
def test_spectral_laws_after_a_projection(boundary, metric):
    """Conserved slices: functionals of the projected law equal dense algebra, and conserved totals have none."""
    cov = Spectral((4, 6), torch.rand(2, 24), torch.rand(2, 24) + 0.5, torch.rand(2, 24), boundary)
    law = ph.LocationScale(torch.randn(2, 24), cov)
    projected = ph.DPPL(metric)(law, ph.per_slice(ph.Conservation(torch.ones(6), torch.ones(2, 4)), (4, 6)))
    functionals = ph.BlockMeans((4, 6), (2, (1, 6), "total"))
    S, A, rows = cov.dense(), torch.kron(torch.eye(4), torch.ones(1, 6)), torch.from_numpy(functionals.matrix.toarray())
    W = S if metric == "oblique" else torch.eye(24).expand_as(S)
    P = torch.eye(24) - W @ A.T @ torch.linalg.solve(A @ W @ A.T, A.expand(2, 4, 24))
    expected = (rows @ P @ S @ P.mT @ rows.T).diagonal(dim1=-2, dim2=-1)
    scale = projected.functional(functionals.rows(24)).scale
    torch.testing.assert_close(scale[:, :6].square(), expected[:, :6], rtol=1e-9, atol=1e-12)
    assert (scale[:, 6:] == 0).all()
    diagonal = (P @ S @ P.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(projected.variance, diagonal, rtol=1e-9, atol=1e-12)
