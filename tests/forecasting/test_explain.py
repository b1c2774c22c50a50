"""Why a node moved: pulls against dense algebra, with immutable nodes and bounds."""

from __future__ import annotations

import numpy as np
import pytest

import probhard as ph
from probhard.forecasting import Forecasts, MetricWeights, PathLaw, Reconciliation, explain, projected_moments

CROSSED = np.vstack([np.ones(6), np.kron(np.eye(2), np.ones(3)), np.kron(np.ones(2), np.eye(3)), np.eye(6)])
NAMES = ["all", "north", "south", "a", "b", "c", *(f"{x}-{y}" for x in ("north", "south") for y in "abc")]
STEPS = 2


def law(seed: int = 0) -> PathLaw:
    random = np.random.default_rng(seed)
    errors = random.standard_normal((40, 12)) + random.standard_normal((40, 1))
    return PathLaw.of_errors(random.normal(20, 4, (STEPS, 12)), random.uniform(1, 5, (STEPS, 12)), errors)


@pytest.mark.parametrize("immutable", [(), ("south",)], ids=["free", "held"])
@pytest.mark.parametrize("weights", [MetricWeights(), MetricWeights(0, 0), MetricWeights(1, 0, 0.5)])
@pytest.mark.parametrize("node", ["all", "south", "north-b"])
def test_pulls_add_up_to_the_move(weights, node, immutable):
    hierarchy, base = ph.Hierarchy(CROSSED, names=NAMES, immutable=immutable), law()
    found = explain(base, weights, hierarchy, node)
    reconciled = projected_moments(base, weights, hierarchy)[0][:, NAMES.index(node)]
    np.testing.assert_allclose(found.reconciled, reconciled, rtol=1e-10)
    np.testing.assert_allclose(found.base + found.pulls.sum(1), found.reconciled, rtol=1e-10)
    assert found.names == tuple(NAMES[:6])
    gaps = base.mean[:, :6].numpy() - base.mean[:, 6:].numpy() @ CROSSED[:6].T
    np.testing.assert_allclose(found.incoherence, gaps)
    np.testing.assert_allclose(found.rest, 0.0, atol=1e-10)


def test_only_the_aggregate_that_does_not_add_up_pulls():
    mean = np.arange(1.0, 7.0) @ CROSSED.T
    mean[0] += 6.0  # the total alone was forecast too high
    found = explain(PathLaw(mean[None], np.ones((1, 12))), MetricWeights(0, 0), ph.Hierarchy(CROSSED, NAMES), "north-a")
    assert found.pulls[0, 0] > 0
    np.testing.assert_allclose(found.pulls[0, 1:], 0.0, atol=1e-12)
    frame = found.frame(shown=2)
    assert frame["pulled_by"].iloc[0] == "all"
    assert frame["pull"].sum() == pytest.approx(found.reconciled[0] - found.base[0])
    assert list(frame.columns) == ["step", "node", "base", "reconciled", "pulled_by", "incoherence", "pull"]


def test_bounds_are_a_term_of_their_own():
    hierarchy, base = ph.Hierarchy(CROSSED, NAMES), law()
    weights = MetricWeights(0.5, 0.0)
    rules = Reconciliation(hierarchy, weights, upper=np.where(np.arange(12) == 7, 10.0, np.inf))
    bounded = rules(Forecasts(base.mean.numpy(), base.stddev.numpy()), samples=2).mean
    found = explain(base, weights, hierarchy, "north-b", bounded)
    assert bounded[0, 7] == pytest.approx(10.0)
    np.testing.assert_allclose(found.base + found.pulls.sum(1) + found.rest, bounded[:, 7])
    frame = found.frame(stamps=["2030-01", "2030-02"])
    assert "bounds and fixed nodes" in set(frame["pulled_by"])
    assert list(frame["ds"].unique()) == ["2030-01", "2030-02"]
    for _, step in frame.groupby("ds"):
        assert step["pull"].sum() == pytest.approx(step["reconciled"].iloc[0] - step["base"].iloc[0])


def test_an_unknown_node_is_named():
    with pytest.raises(ph.ParameterError, match="no node 'west'"):
        explain(law(), MetricWeights(), ph.Hierarchy(CROSSED, NAMES), "west")
