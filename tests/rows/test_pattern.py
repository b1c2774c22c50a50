"""Declared Jacobian patterns: the same results as dense Jacobians, with few vector-Jacobian products."""

from __future__ import annotations

import pytest
import torch

import probhard as ph
from probhard.rows.pattern import Pattern
from registry import rand, randn


def banded(n):
    """A pattern in which row i touches variables 2 i, 2 i + 1 and 2 i + 2."""
    rows = torch.arange(n // 2).repeat_interleave(3)
    return Pattern(rows, 2 * rows + torch.arange(3).repeat(n // 2), (n // 2, n))


def neighbours(u, a):
    return u[..., :-2:2] + 0.3 * u[..., 1:-1:2] * u[..., 2::2] - a


def pairs(u, a):
    return u[..., ::2].square() + u[..., 1::2] - a


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("explicit", [False, True])
def test_banded_rows_agree_with_dense_ones(metric, explicit):
    n, calls = 121, []

    def entries(u, a):
        calls.append(1)
        ones = torch.ones_like(u[..., :-2:2])
        return torch.stack([ones, 0.3 * u[..., 2::2], 0.3 * u[..., 1:-1:2]], -1).flatten(-2)

    pattern = banded(n)
    assert pattern.colours <= 3
    args = (0.5 + 0.1 * rand(2, n // 2),)
    mean, stddev = 0.5 + 0.3 * randn(2, n), rand(2, n)
    sparse = ph.NonlinearEquality(neighbours, args, entries if explicit else None, pattern)
    dense = ph.NonlinearEquality(neighbours, args)
    assert "sparse" in sparse.jacobian_rows(mean).algorithm
    torch.testing.assert_close(sparse.jacobian(mean), dense.jacobian(mean))
    results = []
    for constraint in (sparse, dense):
        inputs = mean.clone().requires_grad_(), stddev.clone().requires_grad_()
        projected = ph.DPPL(metric)(inputs, constraint)
        assert projected.stats.converged.all()
        loss = ph.crps(projected, torch.zeros(2, n)).sum()
        results.append((projected.mean, projected.variance, *torch.autograd.grad(loss, inputs)))
        draws = projected.sample((5,), torch.Generator().manual_seed(0))
        assert dense.relative_violation(draws).max() < 1e-10
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    assert bool(calls) is explicit


def test_disjoint_rows_take_one_product():
    n = 12
    rows = torch.arange(n // 2).repeat_interleave(2)
    pattern = Pattern(rows, torch.arange(n), (n // 2, n))
    assert pattern.colours == 1
    args = (rand(3, n // 2) + 0.5,)
    sparse, dense = ph.NonlinearEquality(pairs, args, pattern=pattern), ph.NonlinearEquality(pairs, args)
    mean, stddev = randn(3, n), rand(3, n)
    assert "disjoint" in sparse.jacobian_rows(mean).algorithm
    first, second = ph.DPPL()((mean, stddev), sparse), ph.DPPL()((mean, stddev), dense)
    # points are stationary to 1e-9, and Gauss-Newton steps shrink by a rate below 1: errors are some multiple of that
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(first.variance, second.variance, rtol=1e-7, atol=1e-9)


def test_bad_patterns():
    with pytest.raises(ph.ParameterError, match="1 repeated"):
        Pattern([0, 0], [1, 1], (1, 3))
    with pytest.raises(ph.ParameterError, match="1 empty"):
        Pattern([0, 0], [0, 1], (2, 3))
    with pytest.raises(ph.ShapeError, match="row and"):
        Pattern([0, 0], [0], (1, 3))
    wrong = ph.NonlinearEquality(pairs, (torch.zeros(2),), lambda u, a: u, Pattern([0, 0, 1, 1], [0, 1, 2, 3], (2, 4)))
    short = ph.NonlinearEquality(pairs, (torch.zeros(2),), lambda u, a: u[..., :3], wrong.pattern)
    with pytest.raises(ph.ShapeError, match="entry of the pattern"):
        ph.DPPL("orthogonal").project(torch.ones(4), short)
