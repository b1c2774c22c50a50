"""Moves of nodes on the page: base, pulls and rest add up, and agree with the members' own projections."""

from __future__ import annotations

import pytest

from forecasting.helpers import KEYS, frame
from probhard.forecasting import HierarchicalForecaster, from_frame
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
