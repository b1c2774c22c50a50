"""Hierarchies with budgets and immutable nodes, alone and joined with other rows."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from constraints.hierarchies import DOUBLE, HIERARCHIES, close, expected, hierarchy_of, law, projector, rows_of
from probhard import (
    DPPL,
    Hierarchy,
    LinearEquality,
)
from probhard.rows.children import child_rows

BUDGETS = {
    "top": [0],
    "middle": [1],
    "bottom": [-1],
    "several": [0, -2, -1],
    "parent and child": [0, 1],
}


@pytest.mark.parametrize("name", ["tree", "unequal depth", "single children", "paper", "large crossed", "weighted"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_fixed_nodes_hit_their_values(name, budget, metric):
    S, _ = HIERARCHIES[name]
    n, nodes = len(S), BUDGETS[budget]
    dist = law(n, 13)
    values = torch.linspace(2.1, 7.3, len(nodes), dtype=DOUBLE)
    constraint = hierarchy_of(name).fix(nodes, values)
    projected = DPPL(metric)(dist, constraint)
    assert torch.equal(projected.mean[nodes], values)
    assert projected.variance[nodes].tolist() == [0.0] * len(nodes)
    draws = projected.sample((20,), torch.Generator().manual_seed(0))
    assert torch.equal(draws[:, nodes], values.expand(20, -1))

    A = np.vstack([rows_of(S), np.eye(n)[nodes]])
    b = np.concatenate([np.zeros(n - S.shape[1]), values.numpy()])
    variance = np.diag(dist.variance.numpy())
    mean, spread = expected(A, variance if metric == "oblique" else np.eye(n), dist.mean.numpy(), variance, b)
    close(projected.mean, mean)
    close(projected.variance, spread)
    close(constraint.residual(dist.mean).sort().values, np.sort(_local_residual(S, dist.mean.numpy(), nodes, values)))


def _local_residual(S: np.ndarray, u: np.ndarray, nodes: list[int], values: torch.Tensor) -> np.ndarray:
    """Residuals of the local rows (a node less its children) and of the budget."""
    local = child_rows(sp.csr_array(rows_of(S)))
    rows = rows_of(S) if local is None else local[0].toarray()
    return np.concatenate([rows @ u, u[nodes] - values.numpy()])


@pytest.mark.parametrize("kind", ["low rank", "dense"])
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_fixed_nodes_of_a_correlated_law(kind, metric):
    S, _ = HIERARCHIES["three levels"]
    n, nodes = len(S), [0, 4]
    dist, values = law(n, 14, kind), torch.tensor([5.0, -2.0], dtype=DOUBLE)
    projected = DPPL(metric)(dist, Hierarchy(S).fix(nodes, values))
    cov = dist.cov.dense().numpy()
    A = np.vstack([rows_of(S), np.eye(n)[nodes]])
    b = np.concatenate([np.zeros(n - S.shape[1]), values.numpy()])
    mean, spread = expected(A, cov if metric == "oblique" else np.eye(n), dist.mean.numpy(), cov, b)
    close(projected.mean, mean)
    close(projected.variance, spread)


@pytest.mark.parametrize("kind", ["low rank", "dense"])
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_fixed_nodes_of_a_correlated_law_have_no_variance_at_all(kind, metric):
    S, _ = HIERARCHIES["three levels"]
    values = torch.tensor([5.0, -2.0], dtype=DOUBLE)
    projected = DPPL(metric)(law(len(S), 14, kind), Hierarchy(S).fix([0, 4], values))
    assert projected.variance[[0, 4]].tolist() == [0.0, 0.0]


def test_a_node_that_follows_from_budgets_is_exact_too():
    S, _ = HIERARCHIES["tree"]
    projected = DPPL()(law(9, 15), Hierarchy(S).fix([0, 1], [10.0, 4.0]))
    assert float(projected.mean[2]) == 6.0
    assert float(projected.variance[2]) == 0.0
    assert (projected.variance[3:] > 0).all()


def test_all_bottoms_fixed_leaves_one_point():
    S, _ = HIERARCHIES["three levels"]
    bottom = torch.arange(8, dtype=DOUBLE)
    constraint = Hierarchy(S).fix(range(7, 15), bottom)
    projected = DPPL()(law(15, 16), constraint)
    close(projected.mean, S @ bottom.numpy(), 1e-13)
    assert not projected.variance.any()


def test_budgets_of_a_batch():
    S, _ = HIERARCHIES["unequal depth"]
    n, dist = len(S), law(len(S), 17, batch=(3,))
    budget = torch.tensor([[10.0], [20.0], [-5.0]], dtype=DOUBLE)
    projected = DPPL()(dist, Hierarchy(S).fix([0], budget))
    assert torch.equal(projected.mean[:, 0], budget[:, 0])
    A = np.vstack([rows_of(S), np.eye(n)[:1]])
    for i in range(3):
        W = np.diag(dist.variance[i].numpy())
        b = np.concatenate([np.zeros(n - S.shape[1]), budget[i].numpy()])
        mean, spread = expected(A, W, dist.mean[i].numpy(), W, b)
        close(projected.mean[i], mean)
        close(projected.variance[i], spread)


@pytest.fixture
def _single_by_default():
    """Torch's own default, whatever the other tests use."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_single_by_default")
def test_whole_number_budgets_are_not_rounded():
    dollars = torch.tensor([123_456_789])  # needs more digits than float32 has
    projected = DPPL()(law(9, 18), hierarchy_of("tree").fix([0], dollars))
    assert float(projected.mean[0]) == 123_456_789.0


def test_labels_instead_of_numbers():
    names = ["all", "left", "right", "a", "b", "c", "d", "e", "f"]
    S, _ = HIERARCHIES["tree"]
    hierarchy, plain = Hierarchy(S, names=names), Hierarchy(S)
    assert [hierarchy.index(name) for name in names] == list(range(9))
    assert hierarchy.index(-1) == 8
    dist = law(9, 19)
    first = DPPL()(dist, hierarchy.fix(["right", "a"], [3.0, 1.0]))
    second = DPPL()(dist, plain.fix([2, 3], [3.0, 1.0]))
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.variance, second.variance)
    first = DPPL()(dist, Hierarchy(S, names=names, immutable=["left", "f"]))
    second = DPPL()(dist, Hierarchy(S, immutable=[1, 8]))
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.variance, second.variance)
    assert not torch.equal(first.mean, DPPL()(dist, plain).mean)


@pytest.mark.parametrize(
    "name", ["tree", "unequal depth", "two levels", "paper", "grouped", "large crossed", "weighted"]
)
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
def test_immutable_nodes_keep_their_draws(name, metric, kind):
    S, _ = HIERARCHIES[name]
    n, held = len(S), [0, len(S) - 1]
    dist, hierarchy = law(n, 20, kind), Hierarchy(S, immutable=held)
    projected = DPPL(metric)(dist, hierarchy)
    raw = dist.sample((30,), torch.Generator().manual_seed(2))
    draws = projected.sample((30,), torch.Generator().manual_seed(2))
    assert torch.equal(projected.mean[held], dist.mean[held])
    assert torch.equal(draws[:, held], raw[:, held])
    cov = dist.cov.dense().numpy()
    keep = np.diag(np.isin(np.arange(n), held, invert=True).astype(float))
    W = keep @ (cov if metric == "oblique" else np.eye(n)) @ keep
    mean, spread = expected(rows_of(S), W, dist.mean.numpy(), cov)
    close(projected.mean, mean)
    close(projected.variance, spread)
    close(draws, raw.numpy() @ projector(rows_of(S), W).T)


def test_immutable_nodes_survive_combination():
    S, _ = HIERARCHIES["tree"]
    n, dist = 9, law(9, 21)
    extra = LinearEquality(torch.eye(n, dtype=DOUBLE)[[4]] - torch.eye(n, dtype=DOUBLE)[[5]], 1.0)
    projected = DPPL()(dist, Hierarchy(S, immutable=[1]) & extra)
    W = np.diag(dist.variance.numpy() * (np.arange(n) != 1))
    A = np.vstack([rows_of(S), extra.A.numpy()])
    mean, spread = expected(A, W, dist.mean.numpy(), np.diag(dist.variance.numpy()), np.array([0, 0, 0, 1.0]))
    assert float(projected.mean[1]) == float(dist.mean[1])
    close(projected.mean, mean)
    close(projected.variance, spread)


def test_hierarchy_with_a_conserved_combination():
    S, _ = HIERARCHIES["large crossed"]
    n, dist = len(S), law(len(S), 22)
    row = torch.rand(1, n, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    both = Hierarchy(S) & LinearEquality(row, 4.0)
    projected = DPPL()(dist, both)
    W, A = np.diag(dist.variance.numpy()), np.vstack([rows_of(S), row.numpy()])
    mean, spread = expected(A, W, dist.mean.numpy(), W, np.array([0.0] * (n - S.shape[1]) + [4.0]))
    close(projected.mean, mean)
    close(projected.variance, spread)


def test_other_right_hand_sides_reach_the_local_rows():
    S, _ = HIERARCHIES["three levels"]
    offsets = torch.linspace(-1, 2, 7, dtype=DOUBLE)  # a known discrepancy at every aggregate
    dist = law(len(S), 23)
    projected = DPPL()(dist, Hierarchy(S).replace(offsets))
    W = np.diag(dist.variance.numpy())
    mean, spread = expected(rows_of(S), W, dist.mean.numpy(), W, offsets.numpy())
    close(projected.mean, mean)
    close(projected.variance, spread)
