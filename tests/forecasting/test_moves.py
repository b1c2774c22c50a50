"""Moves of nodes on the page: base, pulls and rest add up, and agree with the members' own projections."""

from __future__ import annotations

import numpy as np
import pytest

from forecasting.helpers import KEYS, TINY, frame
from probhard.errors import ParameterError
from probhard.forecasting import HierarchicalForecaster, explain, from_frame
from probhard.forecasting.members.coherent import law_of
from probhard.forecasting.reconciliation.family import projected_moments
from probhard.forecasting.report.moves import REST, moves_of


@pytest.fixture(scope="module")
def model() -> HierarchicalForecaster:
    data = from_frame(frame(60), KEYS)
    return HierarchicalForecaster(KEYS, models=["naive", "bootstrap"], horizon=4, num_samples=300, windows=2).fit(data)


def test_pulls_add_up_to_the_coherent_mean(model: HierarchicalForecaster) -> None:
    pool, data, draws = model.pool, model.data, model.sample()
    moves = moves_of(pool, data, draws, False)
    assert set(moves) == set(range(7))
    naive, boot = pool.made
    weights = pool.tuned.weights
    tuned = pool.tuned.members["naive"]
    law = law_of(naive.bases[-1], tuned.scales)
    coherent = projected_moments(law, tuned.metric, data.hierarchy)[0].numpy()
    expected = weights["naive"] * coherent.mean(0) + weights["bootstrap"] * boot.draws[-1].mean((0, 1))
    for node, move in moves.items():
        assert move.reconciled == pytest.approx(expected[node], rel=1e-9)
        assert move.base + sum(pull for _, pull in move.pulls) == pytest.approx(move.reconciled, rel=1e-9)


def test_bounds_are_a_part_of_their_own(model: HierarchicalForecaster) -> None:
    draws = model.sample() + 100.0
    move = moves_of(model.pool, model.data, draws, True)[3]
    assert move.reconciled == pytest.approx(draws[..., 3].mean())
    assert dict(move.pulls)[REST] == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize("h", [3, 6])
def test_frames_say_what_pulled_at_every_step(h: int) -> None:
    models = ["smoothing", "bootstrap"]
    model = HierarchicalForecaster(KEYS, models=models, horizon=4, num_samples=50, windows=2).fit(frame(60))
    explained = model.predict(h, level=None, explain=True)
    plain = model.predict(h, level=None)
    assert explained.columns.tolist() == [*plain.columns, "base", "pull", "pulled_by"]
    np.testing.assert_array_equal(explained["probhard"], plain["probhard"])
    pool = model.pool if h < 4 else model.pool.moved(model.data, h)
    smooth, boot = pool.made
    weights, tuned = pool.tuned.weights, pool.tuned.members["smoothing"]
    law = law_of(smooth.bases[-1], tuned.scales).at(slice(0, h))
    base = weights["smoothing"] * law.mean.numpy() + weights["bootstrap"] * boot.draws[-1].mean(0)[:h]
    np.testing.assert_allclose(explained["base"], base.T.ravel())
    for node, name in enumerate(model.data.names):
        found = explain(law, tuned.metric, model.data.hierarchy, node)
        rows = explained[explained["unique_id"] == name]
        first = np.abs(found.pulls).argmax(1)
        assert rows["pulled_by"].tolist() == [found.names[i] for i in first]
        np.testing.assert_allclose(rows["pull"], weights["smoothing"] * found.pulls[np.arange(h), first])


def test_polars_frames_say_it_too() -> None:
    polars = pytest.importorskip("polars")
    table = polars.DataFrame(frame(40).to_dict("list"))
    model = HierarchicalForecaster(KEYS, models=["smoothing"], horizon=2, num_samples=20).fit(table)
    explained = model.predict(explain=True)
    assert explained["pulled_by"].dtype == polars.String
    assert explained["pull"].abs().max() > 0


def test_a_network_alone_has_no_moves() -> None:
    model = HierarchicalForecaster(KEYS, num_samples=20, horizon=2, **TINY).fit(frame(40))
    with pytest.raises(ParameterError, match="no pool"):
        model.predict(explain=True)
