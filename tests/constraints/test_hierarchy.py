"""Hierarchies: their local rows, and their projections against dense algebra and MinT."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from constraints.hierarchies import (
    DOUBLE,
    HIERARCHIES,
    close,
    each_hierarchy,
    expected,
    hierarchy_of,
    law,
    projector,
    rows_of,
    summation,
)
from probhard import (
    DPPL,
    Dense,
    DenseMetric,
    Diagonal,
    DiagonalMetric,
    Hierarchy,
    LocationScale,
    LowRankMetric,
)
from probhard.rows.children import child_rows, child_sets

# ------------------------------------------------------------------------------------------------- projections


@each_hierarchy
def test_algorithm_is_chosen_from_the_data(name):
    assert hierarchy_of(name).algorithm.startswith(HIERARCHIES[name][1])


@each_hierarchy
@pytest.mark.parametrize("metric", ["oblique", "orthogonal", "diagonal metric"])
def test_diagonal_projection_is_the_dense_one(name, metric):
    S, _ = HIERARCHIES[name]
    n, A = len(S), rows_of(S)
    weights = torch.linspace(0.3, 2.0, n, dtype=DOUBLE)
    layer = DPPL(DiagonalMetric(weights) if metric == "diagonal metric" else metric)
    dist = law(n, 1, batch=(3,))
    projected = layer(dist, hierarchy_of(name))
    for i in range(3):
        variance = dist.variance[i].numpy()
        W = {"oblique": np.diag(variance), "orthogonal": np.eye(n), "diagonal metric": np.diag(weights.numpy())}
        mean, spread = expected(A, W[metric], dist.mean[i].numpy(), np.diag(variance))
        close(projected.mean[i], mean)
        close(projected.variance[i], spread)


@pytest.mark.parametrize("name", ["tree", "unequal depth", "single children", "grouped", "paper", "large crossed"])
@pytest.mark.parametrize("kind", ["low rank", "dense"])
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_correlated_projection_is_the_dense_one(name, kind, metric):
    S, _ = HIERARCHIES[name]
    dist = law(len(S), 2, kind, batch=(2,))
    projected = DPPL(metric)(dist, hierarchy_of(name))
    full = projected.cov.dense()
    for i in range(2):
        cov = dist.cov.dense()[i].numpy()
        W = cov if metric == "oblique" else np.eye(len(S))
        mean, spread = expected(rows_of(S), W, dist.mean[i].numpy(), cov)
        close(projected.mean[i], mean)
        close(projected.variance[i], spread)
        P = projector(rows_of(S), W)
        close(full[i], P @ cov @ P.T)


@pytest.mark.parametrize("name", ["tree", "paper", "large crossed", "deep comb"])
def test_coupled_metric_on_independent_law(name):
    S, _ = HIERARCHIES[name]
    n, dist = len(S), law(len(S), 3)
    other, dense = law(n, 4, "low rank").cov, law(n, 5, "dense").cov
    for metric, W in [
        (LowRankMetric(other.factor, other.diagonal_part), other.dense()),
        (DenseMetric(dense.scale_tril), dense.dense()),
    ]:
        projected = DPPL(metric)(dist, hierarchy_of(name))
        mean, spread = expected(rows_of(S), W.numpy(), dist.mean.numpy(), np.diag(dist.variance.numpy()))
        close(projected.mean, mean)
        close(projected.variance, spread)


@each_hierarchy
def test_every_draw_is_its_own_dense_projection(name):
    S, _ = HIERARCHIES[name]
    dist, hierarchy = law(len(S), 6), hierarchy_of(name)
    draws = DPPL()(dist, hierarchy).sample((50,), torch.Generator().manual_seed(1))
    raw = dist.sample((50,), torch.Generator().manual_seed(1))
    P = projector(rows_of(S), np.diag(dist.variance.numpy()))
    close(draws, raw.numpy() @ P.T)
    assert float(hierarchy.relative_violation(draws).max()) < 1e-13


@pytest.mark.parametrize("name", ["tree", "unequal depth", "large crossed", "paper"])
def test_known_nodes_stay_and_have_no_variance(name):
    S, _ = HIERARCHIES[name]
    dist = law(len(S), 7)
    known = [0, len(S) - 1]
    variance = dist.variance.index_fill(0, torch.tensor(known), 0.0)
    projected = DPPL()(LocationScale(dist.mean, Diagonal(variance)), hierarchy_of(name))
    mean, spread = expected(rows_of(S), np.diag(variance.numpy()), dist.mean.numpy(), np.diag(variance.numpy()))
    close(projected.mean, mean)
    close(projected.variance, spread)
    assert torch.equal(projected.mean[known], dist.mean[known])
    assert projected.variance[known].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["two levels", "tree", "single children"])
@pytest.mark.parametrize("variance", [1.0, 49.0, 0.3])
def test_a_node_that_follows_from_known_ones_has_no_variance(name, variance):
    S, _ = HIERARCHIES[name]
    n = len(S)
    spread = torch.zeros(n, dtype=DOUBLE).index_fill(0, torch.arange(n - S.shape[1]), variance)
    projected = DPPL()(LocationScale(law(n, 7).mean, Diagonal(spread)), hierarchy_of(name))  # every bottom is known
    close(projected.mean, S @ law(n, 7).mean[-S.shape[1] :].numpy(), 1e-13)
    assert projected.variance.tolist() == [0.0] * n


@pytest.mark.parametrize("name", [name for name, (S, _) in HIERARCHIES.items() if len(S) <= 30])
def test_gradients_of_mean_and_variance(name):
    S, _ = HIERARCHIES[name]
    hierarchy, target = hierarchy_of(name), torch.linspace(-1, 1, len(S), dtype=DOUBLE)
    dist = law(len(S), 8)

    def moments(loc, variance):
        projected = DPPL()(LocationScale(loc, Diagonal(variance)), hierarchy)
        return (projected.mean * target).sum() + (projected.variance * target.exp()).sum()

    inputs = (dist.mean.clone().requires_grad_(), dist.variance.clone().requires_grad_())
    assert torch.autograd.gradcheck(moments, inputs)


def test_a_shared_variance_serves_a_batch_of_means():
    S, _ = HIERARCHIES["three levels"]
    dist = law(len(S), 9, batch=(4,))
    shared = dist.variance[0]
    projected = DPPL()(LocationScale(dist.mean, Diagonal(shared)), Hierarchy(S))
    for i in range(4):
        mean, spread = expected(rows_of(S), np.diag(shared.numpy()), dist.mean[i].numpy(), np.diag(shared.numpy()))
        close(projected.mean[i], mean)
        close(projected.variance[i], spread)


def test_float32_is_coherent_to_rounding():
    S, _ = HIERARCHIES["large crossed"]
    dist = law(len(S), 10, batch=(3,))
    single = LocationScale(dist.mean.float(), Diagonal(dist.variance.float()))
    projected, hierarchy = DPPL()(single, Hierarchy(S)), Hierarchy(S)
    assert projected.mean.dtype == projected.variance.dtype == torch.float32
    assert float(hierarchy.relative_violation(projected.mean).max()) < 1e-6
    reference = DPPL()(dist, hierarchy)
    torch.testing.assert_close(projected.mean.double(), reference.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(projected.variance.double(), reference.variance, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- local rows


@st.composite
def overlapping_groups(draw):
    """Any aggregates: nested, crossed, equal, in any order, none of them empty."""
    bottoms = draw(st.integers(1, 9))
    group = st.sets(st.integers(0, bottoms - 1), min_size=1).map(sorted)
    return summation(draw(st.lists(group, min_size=1, max_size=12)), bottoms)


@st.composite
def random_trees(draw):
    """Bottoms merged again and again until some roots are left, and the direct children of every node."""
    bottoms = draw(st.integers(2, 10))
    roots, groups, children = [({i}, ("bottom", i)) for i in range(bottoms)], [], []
    while len(roots) > 1 and (not groups or draw(st.booleans())):
        size = draw(st.integers(2, len(roots)))
        picked = draw(st.permutations(range(len(roots))))[:size]
        members = [roots[i] for i in picked]
        roots = [root for i, root in enumerate(roots) if i not in picked]
        groups.append(sorted(set().union(*(own for own, _ in members))))
        children.append({node for _, node in members})
        roots.append((set(groups[-1]), ("node", len(groups) - 1)))
    return summation(groups, bottoms), children


@given(overlapping_groups())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_child_sets_partition_the_bottoms(S):
    aggregates = S.shape[0] - S.shape[1]
    children = child_sets(sp.csr_array(S[:aggregates])).toarray()
    assert set(np.unique(children)) <= {0.0, 1.0}
    assert not np.diag(children).any()
    np.testing.assert_array_equal(children @ S, S[:aggregates])  # each bottom in exactly one child
    generations = np.linalg.matrix_power(children[:, :aggregates], aggregates)
    assert not generations.any()  # no aggregate is its own descendant


@given(overlapping_groups())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_local_rows_say_the_same(S):
    A = rows_of(S)
    local, transform = (part.toarray() for part in child_rows(sp.csr_array(A)))
    np.testing.assert_array_equal(transform @ A, local)
    assert abs(np.linalg.det(transform)) == pytest.approx(1.0)
    assert (local != 0).sum() <= (A != 0).sum()


@given(random_trees())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_tree_gets_its_direct_children_back(tree):
    S, truth = tree
    aggregates = S.shape[0] - S.shape[1]
    children = child_sets(sp.csr_array(S[:aggregates])).tocsr()
    for row, expected_set in enumerate(truth):
        nodes = children.indices[children.indptr[row] : children.indptr[row + 1]]
        summands = {("node", int(j)) if j < aggregates else ("bottom", int(j - aggregates)) for j in nodes}
        assert summands == expected_set
    assert Hierarchy(S).algorithm.startswith(("tree", "disjoint"))


@given(overlapping_groups(), st.sampled_from(["oblique", "orthogonal"]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_hierarchies_project_as_dense_algebra(S, metric):
    n = len(S)
    dist = law(n, n)
    variance = np.diag(dist.variance.numpy())
    projected = DPPL(metric)(dist, Hierarchy(S))
    W = variance if metric == "oblique" else np.eye(n)
    mean, spread = expected(rows_of(S), W, dist.mean.numpy(), variance)
    close(projected.mean, mean)
    close(projected.variance, spread)


# ------------------------------------------------------------------------------------------ the literature


@pytest.fixture(scope="module")
def mint():
    return pytest.importorskip("hierarchicalforecast.methods").MinTrace


def forecasts(n: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(n, 4)) * 5, generator.normal(size=(n, 60)) * generator.uniform(0.5, 3, size=(n, 1))


literature = pytest.mark.parametrize("name", ["three levels", "unequal depth", "paper", "large crossed"])


@literature
def test_orthogonal_is_mint_ols(mint, name):
    S, _ = HIERARCHIES[name]
    y, _ = forecasts(len(S))
    theirs = mint(method="ols").fit_predict(S=S, y_hat=y)["mean"]
    ours = DPPL("orthogonal").project(torch.from_numpy(y.T), hierarchy_of(name)).value
    close(ours, theirs.T, 1e-8)


@literature
def test_diagonal_oblique_is_mint_wls_var(mint, name):
    S, _ = HIERARCHIES[name]
    y, residuals = forecasts(len(S))
    method = mint(method="wls_var")
    theirs = method.fit_predict(S=S, y_hat=y, y_insample=residuals, y_hat_insample=np.zeros_like(residuals))
    variance = torch.from_numpy((residuals**2).mean(1) + 2e-8)
    projected = DPPL()(LocationScale(torch.from_numpy(y.T), Diagonal(variance)), hierarchy_of(name))
    close(projected.mean, theirs["mean"].T, 1e-8)
    covariance = S @ method.P @ np.diag(variance.numpy()) @ method.P.T @ S.T
    close(projected.variance[0], np.diag(covariance), 1e-8)


@literature
def test_sizes_as_metric_are_mint_wls_struct(mint, name):
    S, _ = HIERARCHIES[name]
    y, _ = forecasts(len(S))
    hierarchy = hierarchy_of(name)
    theirs = mint(method="wls_struct").fit_predict(S=S, y_hat=y)["mean"]
    ours = DPPL(DiagonalMetric(hierarchy.sizes)).project(torch.from_numpy(y.T), hierarchy).value
    close(ours, theirs.T, 1e-8)


@pytest.mark.parametrize("name", ["three levels", "unequal depth", "paper"])
def test_dense_oblique_is_mint_cov(mint, name):
    S, _ = HIERARCHIES[name]
    y, residuals = forecasts(len(S))
    method = mint(method="mint_cov")
    theirs = method.fit_predict(S=S, y_hat=y, y_insample=residuals, y_hat_insample=np.zeros_like(residuals))
    covariance = np.cov(residuals)
    root = torch.from_numpy(np.linalg.cholesky(covariance))
    projected = DPPL()(LocationScale(torch.from_numpy(y.T), Dense(root)), hierarchy_of(name))
    close(projected.mean, theirs["mean"].T, 1e-8)


@pytest.mark.parametrize("name", ["three levels", "paper", "large crossed"])
def test_probconserv_update(name):
    S, _ = HIERARCHIES[name]
    dist = law(len(S), 25, "dense")
    A, sigma, mu = rows_of(S), dist.cov.dense().numpy(), dist.mean.numpy()
    b = np.linspace(-1, 1, len(A))
    gain = sigma @ A.T @ np.linalg.inv(A @ sigma @ A.T)
    projected = DPPL()(dist, hierarchy_of(name).replace(torch.from_numpy(b)))
    close(projected.mean, mu - gain @ (A @ mu - b))
    close(projected.cov.dense(), sigma - gain @ A @ sigma)
    close(projected.variance, np.diag(sigma - gain @ A @ sigma))


@pytest.mark.parametrize("name", ["three levels", "paper", "large crossed"])
def test_hier_e2e_update(name):
    S, _ = HIERARCHIES[name]
    dist = law(len(S), 26, "dense")
    A, sigma, mu = rows_of(S), dist.cov.dense().numpy(), dist.mean.numpy()
    inner = np.linalg.pinv(A) @ A
    projected = DPPL("orthogonal")(dist, hierarchy_of(name))
    close(projected.mean, mu - inner @ mu)
    close(projected.cov.dense(), sigma - inner @ sigma - sigma @ inner + inner @ sigma @ inner)
