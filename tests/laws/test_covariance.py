"""Covariances and projected covariances against their dense matrices."""

from __future__ import annotations

import pytest
import torch

from law_cases import (
    DOUBLE,
    FAMILIES,
    KINDS,
    UNIT_VARIANCE,
    N,
    covariance,
    each_batch,
    each_kind,
    normal,
    same,
)
from probhard import (
    DPPL,
    Diagonal,
    LinearEquality,
    LocationScale,
    LowRank,
    ProjectedCovariance,
)
from probhard._util.tensors import matvec, safe_sqrt


@each_kind
@each_batch
def test_products_are_those_of_the_dense_matrix(kind, batch):
    cov, dense = covariance(kind, batch)
    assert cov.shape == (*batch, N)
    assert (cov.dtype, cov.device.type) == (DOUBLE, "cpu")
    same(cov.dense(), dense)
    same(cov.diagonal(), dense.diagonal(dim1=-2, dim2=-1))
    cov.validate()
    for leading in [(), (5,), (5, 2)]:
        x = normal(*leading, *batch, N, seed=9)
        same(cov.apply(x), (dense @ x.unsqueeze(-1)).squeeze(-1))
    columns = normal(*batch, N, 3, seed=10)
    same(cov.matmul(columns), dense @ columns)
    vector = normal(N, seed=11)
    same(cov.matmul(vector), dense @ vector)


@each_kind
@each_batch
def test_root_times_its_transpose_is_the_matrix(kind, batch):
    cov, dense = covariance(kind, batch)
    eye = torch.eye(cov.root_size, dtype=DOUBLE).expand(*batch, -1, -1)
    root = cov.root_matmul(eye)  # (*batch, n, root)
    assert root.shape == (*batch, N, cov.root_size)
    same(root @ root.mT, dense)
    noise = normal(6, *batch, cov.root_size, seed=12)
    same(cov.root(noise), (root @ noise.unsqueeze(-1)).squeeze(-1))


@each_kind
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_matmul_broadcasts_as_torch_does(kind, columns):
    cov, dense = covariance(kind, (3,))
    shared = normal(N, columns, seed=13)  # one right-hand side for the whole batch
    same(cov.matmul(shared), dense @ shared)
    eye = torch.eye(cov.root_size, dtype=DOUBLE)
    root = cov.root_matmul(eye)
    same(root @ root.mT, dense)


@each_kind
@each_batch
def test_scaling_both_sides(kind, batch):
    cov, dense = covariance(kind, batch)
    for scale in (normal(N, seed=14), normal(*batch, N, seed=15)):
        assert (scale < 0).any()
        twice = cov.scaled(scale).scaled(scale)
        same(cov.scaled(scale).dense(), scale.unsqueeze(-1) * dense * scale.unsqueeze(-2))
        same(cov.scaled(scale).diagonal(), scale**2 * dense.diagonal(dim1=-2, dim2=-1))
        same(twice.dense(), scale.unsqueeze(-1) ** 2 * dense * scale.unsqueeze(-2) ** 2)


@pytest.mark.parametrize("kind", KINDS[:-1])
@each_batch
def test_quadratic_and_log_determinant(kind, batch):
    cov, dense = covariance(kind, batch)
    same(cov.log_determinant(), torch.logdet(dense))
    for leading in [(), (5,)]:
        x = normal(*leading, *batch, N, seed=16)
        same(cov.quadratic(x), (x * torch.linalg.solve(dense, x.unsqueeze(-1)).squeeze(-1)).sum(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_to_changes_the_dtype_only(kind):
    cov, dense = covariance(kind, (2,))
    single = cov.to(torch.float32)
    assert type(single) is type(cov)
    assert single.dtype == single.dense().dtype == torch.float32
    torch.testing.assert_close(single.dense(), dense.float(), rtol=1e-5, atol=1e-5)


def test_low_rank_broadcasts_its_parts():
    factor, diagonal = normal(N, 2), normal(3, N, seed=1).abs() + 0.1
    cov = LowRank(factor, diagonal)
    dense = factor @ factor.mT + torch.diag_embed(diagonal)
    assert cov.shape == (3, N)
    same(cov.dense(), dense)
    same(cov.diagonal(), dense.diagonal(dim1=-2, dim2=-1))


def test_matvec_for_every_pair_of_batches():
    for batch in [(), (3,), (2, 3)]:
        matrix = normal(*batch, 2, N)
        for shape in [(N,), (*batch, N), (5, *batch, N), (6, 5, *batch, N)]:
            x = normal(*shape, seed=1)
            same(matvec(matrix, x), (matrix @ x.unsqueeze(-1)).squeeze(-1))


def test_safe_sqrt_has_no_infinite_gradient():
    x = torch.tensor([4.0, 0.25, 0.0, -1.0], dtype=DOUBLE, requires_grad=True)
    root = safe_sqrt(x)
    root.sum().backward()
    assert root.tolist() == [2.0, 0.5, 0.0, 0.0]
    assert x.grad.tolist() == [0.25, 1.0, 0.0, 0.0]


def test_a_zero_stddev_keeps_its_gradient():
    stddev = torch.tensor([0.0, 1.0], dtype=DOUBLE, requires_grad=True)
    Diagonal.from_stddev(stddev).root(torch.tensor([3.0, 5.0], dtype=DOUBLE)).sum().backward()
    assert stddev.grad.tolist() == [3.0, 5.0]


# ------------------------------------------------------------------------------------ projected covariances


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("name", ["normal", "t"])
def test_projected_covariance_is_the_dense_one(kind, metric, name):
    cov, dense = covariance(kind, (2,), n=6)
    rows, right = normal(2, 6, seed=50), normal(2, 2, seed=51)
    law = LocationScale(normal(2, 6, seed=52), cov, FAMILIES[name])
    projected = DPPL(metric)(law, LinearEquality(rows, right))
    W = dense if metric == "oblique" else torch.eye(6, dtype=DOUBLE)
    gain = W @ rows.mT @ torch.linalg.inv(rows @ W @ rows.mT)
    P = torch.eye(6, dtype=DOUBLE) - gain @ rows
    truth = P @ dense @ P.mT
    result = projected.cov
    assert isinstance(result, ProjectedCovariance)
    same(projected.mean, law.mean - (gain @ (rows @ law.mean.unsqueeze(-1) - right.unsqueeze(-1))).squeeze(-1))
    same(result.dense(), truth)
    same(result.diagonal(), truth.diagonal(dim1=-2, dim2=-1))
    same(projected.variance, truth.diagonal(dim1=-2, dim2=-1) * UNIT_VARIANCE[name])
    x = normal(4, 2, 6, seed=53)
    same(result.apply(x), (truth @ x.unsqueeze(-1)).squeeze(-1))
    same(rows @ result.dense(), torch.zeros(2, 2, 6, dtype=DOUBLE))
    rescaled = projected.as_location_scale().affine(-2.0, 1.0)
    same(rescaled.cov.dense(), 4 * truth)
    same(rescaled.mean, 1 - 2 * projected.mean)
    eye = torch.eye(result.root_size, dtype=DOUBLE).expand(2, -1, -1)
    root = result.root_matmul(eye)
    same(root @ root.mT, truth)
