"""Distributed reconciliation, by subtree and by step, against the serial result and dense algebra."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import probhard as ph
from probhard.cli import main
from probhard.executors import Executor, executor
from probhard.forecasting.reconciliation.distributed import reconcile
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import METRICS, Reconciliation
from probhard.forecasting.reconciliation.subtrees import cut, parents

STEPS = 3


class Here(Executor):
    """Runs every task at once, in this process."""

    workers = 2

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        future.set_result(function(*args, **kwargs))
        return future


def grown(count: int, seed: int, width: int = 4) -> ph.Hierarchy:
    """A random tree: nodes of unequal depth, chains of one child, bottoms next to aggregates."""
    random = np.random.default_rng(seed)
    parent = [-1] + [int(random.integers(max(0, i - width), i)) for i in range(1, count)]
    bottom = sorted(set(range(count)) - set(parent))
    matrix = np.zeros((count, len(bottom)))
    for column, node in enumerate(bottom):
        while node >= 0:
            matrix[node, column] = 1
            node = parent[node]
    return ph.Hierarchy(sp.csr_array(matrix[sorted(range(count), key=lambda node: node in bottom)]))


def even(*widths: int) -> ph.Hierarchy:
    """A tree in which all nodes of a depth have the same number of children."""
    bottoms, count, rows = int(np.prod(widths)), 1, []
    for width in (1, *widths):
        count *= width
        rows.append(sp.kron(sp.eye_array(count), np.ones((1, bottoms // count))))
    return ph.Hierarchy(sp.csr_array(sp.vstack(rows)))


def forest() -> ph.Hierarchy:
    """Trees without a common total."""
    parts = [even(2, 3, 2).summation, even(3).summation, grown(12, 5).summation]
    above = [part[: part.shape[0] - part.shape[1]] for part in parts]
    whole = sp.block_diag(above)
    return ph.Hierarchy(sp.csr_array(sp.vstack([whole, sp.eye_array(whole.shape[1])])))


TREES = {
    "even": even(5, 4, 3),
    "narrow": even(2, 2, 2, 2, 2),
    "star": even(6),
    "grown": grown(90, 0),
    "deep": grown(60, 1, width=2),
    "bushy": grown(80, 2, width=30),
    "forest": forest(),
}


def forecasts(hierarchy: ph.Hierarchy, law: str, steps: int = STEPS) -> Forecasts:
    random, shape = np.random.default_rng(3), (steps, hierarchy.variables)
    mean, spread = random.normal(20, 10, shape), np.exp(random.normal(0, 1, shape))
    if law == "means":
        return Forecasts(mean)
    if law == "normal":
        return Forecasts(mean, spread)
    if law == "draws":
        return Forecasts(draws=mean + spread * random.normal(size=(20, *shape)))
    skewed = [mean - spread, mean, mean + 4 * spread]
    return Forecasts.of_quantiles([0.1, 0.5, 0.9], np.stack(skewed))


def assert_same(actual, expected, tolerance: float = 1e-12) -> None:
    for name in ("mean", "draws", "spread", "before"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
            assert np.nanmax(np.abs(ours - theirs), initial=0) <= tolerance * np.nanmax(np.abs(theirs), initial=0), name
    assert actual.reasons == expected.reasons
    steps = np.concatenate([group for group, _ in actual.constraints])
    assert sorted(steps) == sorted(np.concatenate([group for group, _ in expected.constraints]))
    for group, constraint in actual.constraints:
        assert float(constraint.relative_violation(torch.from_numpy(actual.mean[group])).max()) < 1e-10


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("law", ["normal", "draws", "quantiles"])
def test_subtrees_give_the_whole(tree, metric, law):
    covariance = "independent" if law == "normal" else None
    rules, base = Reconciliation(TREES[tree], metric, covariance=covariance), forecasts(TREES[tree], law)
    assert_same(reconcile(rules, base, Here(), "subtree", 15, seed=1), rules(base, 15, seed=1))


@pytest.mark.parametrize("errors", [False, True])
def test_correlated_laws_are_split_by_step(errors):
    hierarchy = TREES["even"]
    base = forecasts(hierarchy, "normal")
    if errors:
        base = replace(base, errors=np.random.default_rng(0).normal(size=(30, hierarchy.variables)))
    rules = Reconciliation(hierarchy)
    assert_same(reconcile(rules, base, Here(), None, 15, seed=1), rules(base, 15, seed=1))
    with pytest.raises(ph.ParameterError, match="correlated normal laws"):
        reconcile(rules, base, Here(), "subtree", 15)


def test_means_alone_give_the_whole():
    rules, base = Reconciliation(TREES["grown"]), forecasts(TREES["grown"], "means")
    assert_same(reconcile(rules, base, Here(), "subtree"), rules(base))


@pytest.mark.parametrize("metric", METRICS)
def test_subtrees_agree_with_dense_algebra(metric):
    hierarchy = TREES["grown"]
    base = forecasts(hierarchy, "normal")
    rules = Reconciliation(hierarchy, metric, covariance="independent")
    result = reconcile(rules, base, Here(), "subtree", samples=0)
    S, ones = hierarchy.summation.toarray(), np.ones(hierarchy.variables)
    assert result.draws.shape == (0, *base.shape)
    for step in range(STEPS):
        spread = base.stddev[step]
        weight = {"middle": spread, "oblique": spread**2, "orthogonal": ones, "structural": S.sum(1)}[metric]
        root = np.sqrt(weight)[:, None]
        projector = root * ((S / root) @ np.linalg.pinv(S / root)) / root.T
        np.testing.assert_allclose(result.mean[step], projector @ base.mean[step], rtol=1e-9, atol=1e-9)
        exact = np.sqrt((projector**2) @ base.stddev[step] ** 2)
        np.testing.assert_allclose(result.spread[step], exact, rtol=1e-9)


@pytest.mark.parametrize("tree", TREES)
def test_a_cut_takes_every_node_once(tree):
    hierarchy = TREES[tree]
    parent = parents(hierarchy)
    top, pieces = cut(hierarchy, parent, 8)
    inside = np.concatenate([np.delete(piece.nodes, piece.roots) for piece in pieces] or [np.empty(0, int)])
    assert sorted(np.concatenate([top.nodes, inside])) == list(range(hierarchy.variables))
    for piece in pieces:
        assert (piece.nodes[piece.roots] == top.nodes[piece.above]).all()
        assert len(piece.nodes) <= 2 * hierarchy.variables / 8 + 1
    assert (len(pieces) == 0) == (tree == "star")


RULES = {
    "nonnegative": {"nonnegative": True},
    "capped": {"metric": "structural", "nonnegative": True, "upper": 25.0},
    "free": {},
}


@pytest.mark.parametrize("law", ["means", "normal", "draws", "quantiles"])
@pytest.mark.parametrize("options", RULES)
def test_steps_give_the_whole(options, law):
    hierarchy = TREES["narrow"]
    rules, base = Reconciliation(hierarchy, **RULES[options]), forecasts(hierarchy, law, 11)
    assert_same(reconcile(rules, base, Here(), "step", 6, seed=2), rules(base, 6, seed=2), 1e-13)


def test_steps_that_cannot_be_feasible_keep_their_reasons():
    hierarchy = TREES["narrow"]
    base, fixed = forecasts(hierarchy, "normal", 11), np.full((11, hierarchy.variables), np.nan)
    fixed[::2, 0], fixed[3, 1], fixed[7, 0] = 50.0, 9.0, -1.0
    rules = Reconciliation(hierarchy, nonnegative=True, fixed=fixed, on_failure="flag")
    result = reconcile(rules, base, Here(), None, 6)
    assert list(result.reasons) == [7]
    assert_same(result, rules(base, 6), 1e-13)
    with pytest.raises(ph.InfeasibleError):
        reconcile(replace(rules, on_failure="raise"), base, Here(), None, 6)


def test_what_is_not_a_plain_tree_goes_by_step():
    crossed = np.vstack([np.ones((1, 4)), np.kron(np.eye(2), np.ones((1, 2))), np.kron(np.ones((1, 2)), np.eye(2))])
    weighted = np.vstack([[[2.0, 1, 1, 1]], np.kron(np.eye(2), np.ones((1, 2)))])
    plain, (crossed, weighted) = even(2, 2), (ph.Hierarchy(np.vstack([x, np.eye(4)])) for x in (crossed, weighted))
    held = ph.Hierarchy(plain.summation, immutable=[1])
    cases = [Reconciliation(x) for x in (crossed, weighted, held)]
    cases += [Reconciliation(plain, nonnegative=True), Reconciliation(plain, upper=9.0)]
    cases += [Reconciliation(plain, fixed=[5.0] + [np.nan] * 6)]
    for rules in cases:
        base = forecasts(rules.hierarchy, "normal")
        with pytest.raises(ph.ParameterError, match="Use split='step'"):
            reconcile(rules, base, Here(), "subtree")
        assert_same(reconcile(rules, base, Here(), None, 6), rules(base, 6), 1e-13)


def test_bad_requests_are_refused():
    rules, base = Reconciliation(TREES["even"]), forecasts(TREES["even"], "normal")
    with pytest.raises(ph.ParameterError, match="split='level'"):
        reconcile(rules, base, Here(), "level")
    with pytest.raises(ph.ShapeError, match="32 series, the hierarchy has"):
        reconcile(rules, Forecasts(np.zeros((2, 32))), Here())
    with pytest.raises(ph.ParameterError, match="samples=0"):
        reconcile(rules, base, Here(), "step", samples=0)


@pytest.mark.parametrize(
    "engine", ["joblib", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ray", "dask"))]
)
def test_workers_give_the_whole(engine):
    if engine != "joblib":
        pytest.importorskip("ray" if engine == "ray" else "distributed")
    with executor(engine, 2) as pool:
        for rules in (Reconciliation(TREES["even"]), Reconciliation(TREES["even"], nonnegative=True)):
            base = forecasts(rules.hierarchy, "normal")
            assert_same(reconcile(rules, base, pool, None, 9), rules(base, 9))


@pytest.mark.parametrize("bound", [[], ["--nonnegative"]])
def test_the_command_gives_the_same_file(bound, tmp_path):
    pandas = pytest.importorskip("pandas")
    random, rows = np.random.default_rng(0), []
    names = ["Total", "A", "B", *(f"{x}/{i}" for x in "AB" for i in range(3))]
    for name in names:
        rows += [{"unique_id": name, "ds": step, "model": random.normal(5, 4)} for step in range(3)]
    frame = pandas.DataFrame(rows)
    frame["model-lo-80"], frame["model-hi-80"] = frame["model"] - 2, frame["model"] + 2
    frame.to_csv(tmp_path / "in.csv", index=False)
    outputs = []
    for name, options in (("one", []), ("two", ["--executor", "joblib", "--workers", "1"])):
        path = tmp_path / f"{name}.csv"
        command = ["reconcile", str(tmp_path / "in.csv"), "--level", "80", *bound, "--output", str(path), *options]
        assert main([*command, "--keys", "top,low"]) == 0
        outputs.append((pandas.read_csv(path), json.loads(path.with_suffix(".json").read_text())))
    (one, first), (two, second) = outputs
    pandas.testing.assert_frame_equal(one, two, rtol=1e-12)
    assert first["feasible"] == second["feasible"] is True
