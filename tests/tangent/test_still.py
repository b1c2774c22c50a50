"""Rows that no variable can move: left out where they hold, flagged where they do not, for each element by itself."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import probhard as ph
from probhard.tangent.still import StillTangent

RANDOM = np.random.default_rng(5)
CROSSED = np.vstack([np.ones((1, 4)), np.kron(np.eye(2), np.ones(2)), np.kron(np.ones(2), np.eye(2)), np.eye(4)])
TREE = np.vstack([np.ones((1, 4)), np.kron(np.eye(2), np.ones(2)), np.eye(4)])


def many(count: int = 60) -> np.ndarray:
    """Sparse rows that are no forest: consecutive sums of three."""
    return sp.diags([np.ones(count + 2)] * 3, [0, 1, 2], shape=(count, count + 2)).toarray()


ROWS = {
    "disjoint": np.kron(np.eye(2), np.ones(3)),
    "dense": RANDOM.normal(size=(3, 8)),
    "complement": RANDOM.normal(size=(6, 8)),
    "sparse": many(),
    "tree": np.hstack([np.eye(3), -TREE[:3]]),
    "crossed": np.hstack([np.eye(5), -CROSSED[:5]]),
}


def made(name: str) -> tuple[ph.LinearEquality, torch.Tensor, torch.Tensor]:
    """Rows, and three elements: no zeros; zeros on all variables of a row; zeros that make rows dependent."""
    A = ROWS[name]
    n, first = A.shape[1], A[0] != 0
    u = RANDOM.normal(size=n)
    w = RANDOM.uniform(0.5, 2, (3, n))
    w[1, first] = 0
    w[2, RANDOM.choice(n, n - len(A) + 1, replace=False)] = 0
    z = u + np.where(w > 0, RANDOM.normal(size=(3, n)), 0.0)
    constraint = ph.LinearEquality(A, torch.from_numpy(A @ u))
    return constraint, torch.from_numpy(z), torch.from_numpy(w)


def oracle(A: np.ndarray, b: np.ndarray, z: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest point among those that differ from z where w > 0 only, by least squares; and its Jacobian."""
    root = np.sqrt(w)
    inverse = np.linalg.pinv(A * root, rcond=1e-9)
    gain = root[:, None] * inverse
    return z - gain @ (A @ z - b), np.eye(len(z)) - gain @ A


@pytest.mark.parametrize("covariance", ["diagonal", "dense"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_hold_are_left_out(name, covariance):
    constraint, z, w = made(name)
    cov = ph.Diagonal(w) if covariance == "diagonal" else ph.Dense(torch.diag_embed(w.sqrt()))
    z.requires_grad_()
    law = ph.DPPL(on_failure="flag")(ph.LocationScale(z, cov), constraint)
    assert bool(law.stats.converged.all())
    sums = torch.autograd.grad(law.mean.sum() + law.variance.sum(), z)[0]
    drawn = law.draw((3,), torch.Generator().manual_seed(0))
    assert bool(drawn.stats.converged.all())
    for i in range(3):
        own = z[i].detach().numpy()
        u, slope = oracle(ROWS[name], constraint.b.numpy(), own, w[i].numpy())
        np.testing.assert_allclose(law.mean[i].detach(), u, rtol=1e-9, atol=1e-9)
        variance = np.diag(slope @ np.diag(w[i].numpy()) @ slope.T)
        np.testing.assert_allclose(law.variance[i].detach(), variance, rtol=1e-7, atol=1e-9)
        still = (w[i] == 0).numpy()
        np.testing.assert_allclose(sums[i][~still], slope.sum(0)[~still], rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(drawn.value[:, i].detach()[:, still], np.tile(own[still], (3, 1)), rtol=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_only_the_element_with_a_row_that_does_not_hold_is_flagged(name):
    constraint, z, w = made(name)
    z = torch.cat([z, z[1:2]])
    z[3, int(np.flatnonzero(ROWS[name][0])[0])] += 0.5
    law = ph.LocationScale(z, ph.Diagonal(torch.cat([w, w[1:2]])))
    expected = [True, True, True, False]
    assert ph.DPPL(on_failure="flag").project(z, constraint, law).stats.converged.tolist() == expected
    projected = ph.DPPL(on_failure="flag")(law, constraint)
    assert projected.stats.converged.tolist() == expected
    assert projected.draw((2,)).stats.converged.tolist() == [expected] * 2
    with pytest.raises(ph.InfeasibleError, match=r"batch element \(3,\)"):
        ph.DPPL()(law, constraint)


def test_gradients_in_weights_are_those_of_the_rows_that_move():
    constraint, z, w = made("dense")
    w = w[1:2].clone().requires_grad_()
    A, b = ROWS["dense"], constraint.b.numpy()
    law = ph.LocationScale(z[1:2], ph.Diagonal(w))
    grad = torch.autograd.grad(ph.DPPL(on_failure="flag")(law, constraint).mean.square().sum(), w)[0][0]
    base, own = w[0].detach().numpy(), z[1].numpy()
    for i in np.flatnonzero(base):
        step = 1e-6 * np.eye(len(base))[i]
        slope = [(oracle(A, b, own, base + s * step)[0] ** 2).sum() for s in (1, -1)]
        assert abs(float(grad[i]) - (slope[0] - slope[1]) / 2e-6) < 1e-6


def test_the_triangle_bears_weights_over_many_decades():
    torch.manual_seed(0)
    A, u = torch.randn(3, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    size = 10.0 ** torch.linspace(12, -12, 6, dtype=torch.float64)
    root = torch.tril(torch.randn(6, 6, dtype=torch.float64)) * size.unsqueeze(-1)
    constraint = ph.LinearEquality(A.numpy(), A @ u)
    tangent, z = StillTangent(constraint.system, ph.Dense(root)), u + torch.randn(6, dtype=torch.float64)
    for _ in range(2):
        z = tangent.project(z, constraint.b)
    assert float(constraint.relative_violation(z)) < 1e-14
