"""Hierarchies: how they are read, their local rows, and their projections against dense algebra and MinT."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probhard import (
    DPPL,
    Dense,
    DenseMetric,
    Diagonal,
    DiagonalMetric,
    Hierarchy,
    LinearEquality,
    LocationScale,
    LowRank,
    LowRankMetric,
)
from probhard.rows.children import child_rows, child_sets

DOUBLE = torch.float64


# ---------------------------------------------------------------------------------------------- hierarchies


def summation(groups: list[list[int]], bottoms: int) -> np.ndarray:
    """S (n, m) from the bottom series of every aggregate."""
    upper = np.zeros((len(groups), bottoms))
    for row, group in enumerate(groups):
        upper[row, group] = 1.0
    return np.vstack([upper, np.eye(bottoms)])


def crossed(places: int, regions: int, purposes: int) -> np.ndarray:
    """Total, place, region, purpose, place x purpose and region x purpose (the bottom)."""
    keys = list(itertools.product(range(places), range(regions), range(purposes)))
    rules = [lambda k: 0, lambda k: k[0], lambda k: k[:2], lambda k: k[2], lambda k: (k[0], k[2])]
    groups = []
    for rule in rules:
        labels = [rule(key) for key in keys]
        groups += [[i for i, own in enumerate(labels) if own == label] for label in dict.fromkeys(labels)]
    return summation(groups, len(keys))


def comb(depth: int) -> np.ndarray:
    """Node k is bottom k plus node k + 1: as deep as it has aggregates."""
    return summation([list(range(k, depth + 1)) for k in range(depth)], depth + 1)


PAPER = np.array(  # paper, figure "hierarchical_ts": overlapping groups
    [[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0]], dtype=float
)
WEIGHTED = np.array([[0.5, 2.0, -1.0, 1.0], [0.25, 0.0, 3.0, 0.0], [0.0, 1.5, 0.0, 0.1]])

HIERARCHIES = {  # S and the algorithms that fit it
    "tree": (summation([range(6), [0, 1, 2], [3, 4, 5]], 6), ("tree",)),
    "three levels": (summation([range(8), [0, 1, 2, 3], [4, 5, 6, 7], [0, 1], [2, 3], [4, 5], [6, 7]], 8), ("tree",)),
    "shuffled rows": (summation([[0, 1], [4, 5, 6, 7], range(8), [2, 3], [0, 1, 2, 3]], 8), ("tree",)),
    "unequal depth": (summation([range(7), [1, 2, 3, 4], [2, 3, 4], [3, 4], [5, 6]], 7), ("tree",)),
    "single children": (summation([range(5), [0], [0], [1, 2, 3, 4], [1, 2, 3, 4], [2, 3]], 5), ("tree",)),
    "repeated total": (summation([range(4), range(4), range(4)], 4), ("tree",)),
    "forest": (summation([[0, 1, 2], [0, 1], [3, 4, 5], [4, 5]], 6), ("tree",)),
    "two levels": (summation([range(5)], 5), ("disjoint",)),
    "two levels of one": (summation([[0]], 1), ("disjoint",)),
    "uncovered bottoms": (summation([[1, 2, 3], [2, 3]], 6), ("tree",)),
    "comb": (comb(20), ("tree",)),
    "deep comb": (comb(140), ("sparse", "dense")),
    "grouped": (summation([range(6), [0, 1], [2, 3], [4, 5], [0, 2, 4], [1, 3, 5]], 6), ("sparse", "dense")),
    "crossed": (crossed(2, 2, 3), ("sparse", "dense")),
    "large crossed": (crossed(6, 4, 3), ("sparse",)),
    "paper": (np.vstack([PAPER, np.eye(6)]), ("sparse", "dense")),
    "weighted": (np.vstack([WEIGHTED, np.eye(4)]), ("sparse", "dense")),
    "weighted total": (np.vstack([[[0.2, 0.3, 0.5]], np.eye(3)]), ("disjoint",)),
}


@functools.cache
def hierarchy_of(name: str) -> Hierarchy:
    """One of the above, built once for all tests."""
    return Hierarchy(HIERARCHIES[name][0])


each_hierarchy = pytest.mark.parametrize("name", HIERARCHIES)


def rows_of(S: np.ndarray) -> np.ndarray:
    """[I | -S_sum]."""
    nodes, bottoms = S.shape
    return np.hstack([np.eye(nodes - bottoms), -S[: nodes - bottoms]])


def projector(A: np.ndarray, W: np.ndarray) -> np.ndarray:
    return np.eye(A.shape[1]) - W @ A.T @ np.linalg.solve(A @ W @ A.T, A)


def expected(A: np.ndarray, W: np.ndarray, mean: np.ndarray, cov: np.ndarray, b: np.ndarray | float = 0.0):
    """Mean and variances of the dense projection."""
    P = projector(A, W)
    shift = W @ A.T @ np.linalg.solve(A @ W @ A.T, np.broadcast_to(b, A.shape[:1]))
    return P @ mean + shift, np.diag(P @ cov @ P.T)


def close(actual: torch.Tensor, oracle: np.ndarray, tolerance: float = 1e-10) -> None:
    assert actual.dtype == DOUBLE
    assert tuple(actual.shape) == oracle.shape
    scale = max(1.0, float(np.abs(oracle).max()))
    np.testing.assert_allclose(actual.detach().numpy(), oracle, rtol=0, atol=tolerance * scale)


def law(n: int, seed: int, kind: str = "diagonal", batch: tuple[int, ...] = ()) -> LocationScale:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=DOUBLE, generator=g)

    diagonal = torch.rand(*batch, n, dtype=DOUBLE, generator=g) * 2 + 0.2
    if kind == "diagonal":
        cov = Diagonal(diagonal)
    elif kind == "low rank":
        cov = LowRank(normal(*batch, n, 2), diagonal)
    else:
        cov = Dense(normal(*batch, n, n).tril(-1) / n**0.5 + torch.diag_embed(diagonal))
    return LocationScale(3 * normal(*batch, n), cov)


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


# --------------------------------------------------------------------------------------------------- reading S


def explicit_zeros(S: np.ndarray) -> sp.csr_array:
    n, m = S.shape
    row, column = np.divmod(np.arange(n * m), m)
    return sp.csr_array((S.ravel(), (row, column)), shape=S.shape)


def uncoalesced(S: np.ndarray) -> torch.Tensor:
    entries = torch.from_numpy(S).to_sparse_coo().coalesce()
    indices = torch.cat([entries.indices(), entries.indices()], 1)
    values = torch.cat([0.5 * entries.values(), 0.5 * entries.values()])
    return torch.sparse_coo_tensor(indices, values, S.shape, check_invariants=True)


FORMATS = {
    "torch": torch.from_numpy,
    "torch float32": lambda S: torch.from_numpy(S).float(),
    "torch int": lambda S: torch.from_numpy(S).long(),
    "torch coo": lambda S: torch.from_numpy(S).to_sparse_coo(),
    "torch csr": lambda S: torch.from_numpy(S).to_sparse_csr(),
    "uncoalesced coo": uncoalesced,
    "numpy": lambda S: S,
    "numpy bool": lambda S: S.astype(bool),
    "lists": lambda S: S.tolist(),
    "scipy csr": sp.csr_array,
    "scipy csc": sp.csc_matrix,
    "scipy coo": sp.coo_array,
    "explicit zeros": explicit_zeros,
    "pandas": lambda S: pd.DataFrame(S, index=[f"n{i}" for i in range(len(S))]),
    "polars": lambda S: pl.DataFrame(S),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["unequal depth", "large crossed"])
def test_every_format_of_s_gives_the_same(form, name):
    S, algorithms = HIERARCHIES[name]
    hierarchy = Hierarchy(FORMATS[form](S))
    dist = law(len(S), 11)
    assert hierarchy.algorithm.startswith(algorithms)
    assert (hierarchy.variables, hierarchy.bottoms, hierarchy.aggregates) == (*S.shape, S.shape[0] - S.shape[1])
    close(hierarchy.residual(dist.mean), rows_of(S) @ dist.mean.numpy(), 1e-13)
    close(hierarchy.A, rows_of(S), 0.0)
    close(hierarchy.sizes, S.sum(1), 0.0)
    W = np.diag(dist.variance.numpy())
    mean, spread = expected(rows_of(S), W, dist.mean.numpy(), W)
    projected = DPPL()(dist, hierarchy)
    close(projected.mean, mean)
    close(projected.variance, spread)


def test_aggregate_is_s_times_bottom():
    S, _ = HIERARCHIES["large crossed"]
    bottom = torch.randn(2, 3, S.shape[1], dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    close(Hierarchy(S).aggregate(bottom), bottom.numpy() @ S.T, 1e-13)
    weighted, _ = HIERARCHIES["weighted"]
    close(Hierarchy(weighted).aggregate(bottom[..., :4]), bottom.numpy()[..., :4] @ weighted.T, 1e-13)


SPECS = {
    "tree": [["Country"], ["Country", "State"], ["Country", "State", "Region"]],
    "crossed": [
        ["Country"],
        ["Country", "State"],
        ["Country", "Purpose"],
        ["Country", "State", "Region"],
        ["Country", "State", "Purpose"],
        ["Country", "State", "Region", "Purpose"],
    ],
}


def keys_table(spec: str, repeat: int = 2) -> pd.DataFrame:
    """Key columns with each series repeated in time, in no order, and regions of unequal number."""
    regions = {"NSW": ["Sydney", "Coast"], "VIC": ["Melbourne"], "NT": ["Darwin", "Alice", "Kakadu"]}
    rows = [
        ("Australia", state, region, purpose)
        for state, names in regions.items()
        for region in names
        for purpose in (["Business", "Holiday", "Visiting"] if spec == "crossed" else ["Any"])
    ]
    table = pd.DataFrame(rows, columns=["Country", "State", "Region", "Purpose"])
    table = pd.concat([table.assign(ds=pd.Timestamp(2020, 1, 1 + k), y=1.0) for k in range(repeat)])
    return table.sample(frac=1.0, random_state=0, ignore_index=True)


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("spec", SPECS)
def test_from_frame_and_from_tags_agree_with_nixtla(spec, library):
    utils = pytest.importorskip("hierarchicalforecast.utils")
    table = keys_table(spec)
    _, S_df, tags = utils.aggregate(table, SPECS[spec])
    truth = S_df.set_index("unique_id") if "unique_id" in S_df.columns else S_df
    truth = truth.astype(float)
    frame = table if library == "pandas" else pl.from_pandas(table)

    read = Hierarchy.from_frame(frame, SPECS[spec])
    assert sorted(read.names) == sorted(truth.index)
    bottoms = list(read.names[read.aggregates :])
    np.testing.assert_array_equal(read.summation.toarray(), truth.loc[list(read.names), bottoms].to_numpy())
    assert {k: sorted(v) for k, v in read.tags.items()} == {k: sorted(v) for k, v in tags.items()}

    named = Hierarchy.from_tags(tags)
    assert list(named.names) == list(truth.index)
    np.testing.assert_array_equal(named.summation.toarray(), truth.to_numpy())

    given_s = Hierarchy.from_tags(tags, S=truth)
    assert given_s.names == named.names
    np.testing.assert_array_equal(given_s.summation.toarray(), truth.to_numpy())
    assert given_s.tags == {level: tuple(nodes) for level, nodes in tags.items()}

    first, second = read.algorithm.split()[0], named.algorithm.split()[0]
    assert first == second
    assert first == ("tree" if spec == "tree" else "dense")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_projection_of_a_frame_is_the_same_up_to_order(library):
    utils = pytest.importorskip("hierarchicalforecast.utils")
    table = keys_table("crossed")
    _, _, tags = utils.aggregate(table, SPECS["crossed"])
    read = Hierarchy.from_frame(table if library == "pandas" else pl.from_pandas(table), SPECS["crossed"])
    named = Hierarchy.from_tags(tags)
    order = [named.index(name) for name in read.names]
    dist = law(len(order), 12)
    other = LocationScale(dist.mean[order], Diagonal(dist.variance[order]))
    first, second = DPPL()(dist, named), DPPL()(other, read)
    close(second.mean, first.mean[order].numpy())
    close(second.variance, first.variance[order].numpy())


def test_keys_that_are_not_strings():
    table = pl.DataFrame({"store": [10, 9, 10, 9], "item": [1, 1, 2, 2]})
    hierarchy = Hierarchy.from_frame(table, [["store"], ["store", "item"]])
    assert sorted(hierarchy.names) == ["10", "10/1", "10/2", "9", "9/1", "9/2"]
    for store in ("9", "10"):
        row = hierarchy.summation.toarray()[hierarchy.index(store)]
        members = {hierarchy.names[hierarchy.aggregates + int(i)] for i in np.flatnonzero(row)}
        assert members == {f"{store}/1", f"{store}/2"}


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


# ------------------------------------------------------------------------------------- budgets, immutable nodes

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


# --------------------------------------------------------------------------------------------- benchmark data

DATA = os.environ.get("PROBHARD_DATA")
DATA_SETS = {"labour": "tree", "tourism": "tree", "tourism_large": "sparse", "traffic": "tree", "wiki": "tree"}
needs_data = pytest.mark.skipif(DATA is None, reason="PROBHARD_DATA does not name the folder with the data sets")


@needs_data
@pytest.mark.parametrize("name", DATA_SETS)
def test_benchmark_data(name):
    folder = Path(DATA or "") / "hierarchical" / name
    S = pd.read_csv(folder / "agg_mat.csv", index_col=0)
    data = pd.read_csv(folder / "data.csv", index_col=0)
    hierarchy = Hierarchy(S, names=list(S.index))
    assert list(data.columns) == list(hierarchy.names)
    assert hierarchy.algorithm.startswith(DATA_SETS[name])
    series = torch.from_numpy(data.to_numpy(dtype=np.float64))
    assert float(hierarchy.relative_violation(series).max()) <= 1e-12
    assert float(hierarchy.violation(series + torch.eye(series.shape[1])[0]).min()) > 0.5  # a check that can fail

    n, A = len(S), rows_of(S.to_numpy(dtype=np.float64))
    dist = law(n, 24)
    projected = DPPL()(dist, hierarchy)
    W = np.diag(dist.variance.numpy())
    mean, spread = expected(A, W, dist.mean.numpy(), W)
    close(projected.mean, mean)
    close(projected.variance, spread)
    mean, spread = expected(A, np.eye(n), dist.mean.numpy(), W)
    projected = DPPL("orthogonal")(dist, hierarchy)
    close(projected.mean, mean)
    close(projected.variance, spread)


@needs_data
@pytest.mark.parametrize("name", DATA_SETS)
def test_benchmark_data_with_its_own_variances(name):
    folder = Path(DATA or "") / "hierarchical" / name
    S = pd.read_csv(folder / "agg_mat.csv", index_col=0).to_numpy(dtype=np.float64)
    series = torch.from_numpy(pd.read_csv(folder / "data.csv", index_col=0).to_numpy(dtype=np.float64))
    generator = torch.Generator().manual_seed(0)
    variance = series.var(0) + 1e-3 * series.var(0).mean()  # many orders of magnitude between top and bottom
    loc = series[-1] + variance.sqrt() * torch.randn(len(variance), dtype=DOUBLE, generator=generator)
    projected = DPPL()(LocationScale(loc, Diagonal(variance)), Hierarchy(S))
    W = np.diag(variance.numpy())
    mean, spread = expected(rows_of(S), W, loc.numpy(), W)
    close(projected.mean, mean, 1e-9)
    np.testing.assert_allclose(projected.variance.numpy(), spread, rtol=1e-6)
    draws = projected.sample((10,), generator)
    assert float(Hierarchy(S).relative_violation(draws).max()) < 1e-12


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
