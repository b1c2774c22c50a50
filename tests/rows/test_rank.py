"""Dependent rows of sparse matrices: the rank and the combination are those of dense algebra, at every size."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import lsqr

from probhard import DPPL, InfeasibleError, LinearEquality, RankError
from probhard.rows import rank
from probhard.rows.rank import find_redundancy

DOUBLE = torch.float64


def divergence(size: int, periodic: bool = True) -> sp.csr_array:
    """Divergence of a velocity with two components on the faces of a size x size grid; its rows sum to 0."""
    if periodic:
        step = sp.eye_array(size) - sp.csr_array(np.roll(np.eye(size), -1, 1))
    else:
        step = sp.diags_array([np.ones(size - 1), -np.ones(size - 1)], offsets=[0, -1], shape=(size, size - 1))
    return sp.csr_array(sp.hstack([sp.kron(step, sp.eye_array(size)), sp.kron(sp.eye_array(size), step)]))


def dependent(rows: int, variables: int, extra: int, seed: int) -> sp.csr_array:
    """Random sparse rows of several sizes, with combinations of two or three of them mixed in."""
    random = np.random.default_rng(seed)
    free = sp.random_array((rows, variables), density=4 / variables, rng=random)
    free = sp.diags_array(10.0 ** random.uniform(-3, 3, rows)) @ sp.csr_array(free + sp.eye_array(rows, variables))
    mixing = sp.random_array((extra, rows), density=2.5 / rows, rng=random)
    stacked = sp.csr_array(sp.vstack([free, mixing @ free, sp.csr_array((2, variables))]))
    return sp.csr_array(stacked[random.permutation(stacked.shape[0])])


MATRICES = {
    "periodic divergence": divergence(20),
    "divergence with walls": divergence(24, periodic=False),
    "curl of a gradient": sp.csr_array(divergence(20).T),
    "combinations": dependent(300, 1000, 60, seed=0),
    "many combinations": dependent(200, 2000, 300, seed=1),
    "pins": sp.csr_array(sp.vstack([divergence(20), sp.eye_array(300, 800)])),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_rank_is_that_of_dense_algebra(name, compiled, monkeypatch):
    monkeypatch.setattr(rank, "COMPILED", 0 if compiled else np.inf)
    matrix = MATRICES[name]
    found = find_redundancy(matrix)
    scaled = matrix.toarray()
    scaled /= np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), 1e-300)
    expected = np.linalg.matrix_rank(scaled, tol=1e-9)
    assert len(found.others) == expected
    assert sorted([*found.others, *found.dependent]) == list(range(matrix.shape[0]))
    assert np.linalg.matrix_rank(scaled[found.others], tol=1e-9) == expected
    error = matrix[found.dependent] - found.combination @ matrix[found.others]
    assert abs(error).max() < 1e-9 * abs(matrix).max()


def test_rows_that_fix_one_variable_are_kept():
    found = find_redundancy(MATRICES["pins"])
    assert set(range(400, 700)) <= set(found.others)


def test_independent_rows_have_no_redundancy():
    assert find_redundancy(sp.csr_array(divergence(24)[1:])) is None


def test_dependence_without_a_small_pivot_is_found():
    """The smallest singular value of ``u_i - 2 u_(i+1)`` is 2^-1100; all pivots are 1."""
    n = 1100
    matrix = sp.csr_array(sp.diags_array([np.ones(n), np.full(n - 1, -2.0)], offsets=[0, 1]))
    found = find_redundancy(matrix)
    assert len(found.dependent) == 1
    values = np.linalg.svd(matrix.toarray()[found.others], compute_uv=False)
    assert values[-1] > 0.1
    assert abs(matrix[found.dependent] - found.combination @ matrix[found.others]).max() < 1e-8


@pytest.mark.parametrize("size", [24, 72])  # the second has more than 5e7 entries, zeros included
def test_divergence_is_revealed_and_projected(size):
    matrix = divergence(size)
    with pytest.raises(RankError, match="repeat"):
        LinearEquality(matrix, 0.0)
    constraint = LinearEquality(matrix, 0.0, rank="reveal")
    z = torch.randn(2, 2 * size**2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    u = DPPL("orthogonal").project(z, constraint).value
    assert constraint.residual(u).abs().max() < 1e-11
    right = lsqr(matrix, matrix @ z[0].numpy(), atol=1e-14, btol=1e-14)[0]
    torch.testing.assert_close(u[0], z[0] - torch.from_numpy(right), rtol=0, atol=1e-9)


def test_sources_that_do_not_sum_to_zero_contradict():
    matrix, b = divergence(24), torch.zeros(3, 576, dtype=DOUBLE)
    b[1, 5], b[1, 9] = 0.5, -0.5
    LinearEquality(matrix, b, rank="reveal")
    b[2, 7] = 0.25
    with pytest.raises(InfeasibleError, match=r"0\.25 in batch element \(2,\)"):
        LinearEquality(matrix, b, rank="reveal")


def test_assumed_rows_are_not_looked_at(monkeypatch):
    matrix = sp.csr_array(divergence(24)[1:])
    z = torch.randn(1152, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    expected = DPPL("orthogonal").project(z, LinearEquality(matrix, 0.0)).value
    monkeypatch.setattr("probhard.rows.system.find_redundancy", None)
    constraint = LinearEquality(matrix, 0.0, rank="assume")
    torch.testing.assert_close(DPPL("orthogonal").project(z, constraint).value, expected, rtol=0, atol=1e-13)
    batched = LinearEquality(torch.randn(3, 2, 5, dtype=DOUBLE), 0.0, rank="assume")
    assert batched.rank == "assume"
    monkeypatch.undo()
    with pytest.raises(RankError):  # joined rows are looked at again
        constraint & LinearEquality(sp.csr_array(divergence(24)[:1]), 0.0, rank="assume")


def test_a_false_assumption_does_not_pass_silently():
    constraint = LinearEquality(divergence(24), torch.ones(576, dtype=DOUBLE), rank="assume")
    with pytest.raises((RankError, InfeasibleError)):
        DPPL("orthogonal").project(torch.zeros(1152, dtype=DOUBLE), constraint)
    with pytest.raises(RankError):
        LinearEquality(torch.zeros(2, 5), 0.0, rank="assume")
