"""Pools of forecasts: the quadratic score, its best weights, and feasible draws."""

import itertools

import numpy as np
import pytest
import torch

import probhard as ph
from probhard.errors import ParameterError, ShapeError
from probhard.forecasting.models import pool

RANDOM = np.random.default_rng(0)
TARGET = RANDOM.gamma(2.0, 3.0, size=(4, 6))


def members(*shifts: float) -> list[np.ndarray]:
    return [TARGET + shift + abs(shift) * RANDOM.standard_normal((100, 4, 6)) for shift in shifts]


def test_the_quadratic_form_is_the_score_of_the_pool():
    draws = members(0.5, -1.0)
    near, apart = pool.scores(draws, TARGET)
    for weight in (0.0, 0.3, 1.0):
        w = np.array([weight, 1 - weight])
        both = np.concatenate(draws)
        each = np.repeat(w / 100, 100)
        first = np.einsum("s,sij->ij", each, abs(both - TARGET))
        second = np.einsum("s,t,stij->ij", each, each, abs(both[:, None] - both[None]))
        # without pairs of a draw with itself: the score of the law, not of its draws
        own = sum(w[k] ** 2 * apart[k, k] / 100 for k in range(2)) * abs(TARGET).sum()
        expected = (first.sum() - second.sum() / 2 - own / 2) / abs(TARGET).sum()
        assert w @ near - w @ apart @ w / 2 == pytest.approx(expected, rel=1e-10)


def test_one_member_scores_as_the_fair_ensemble_score():
    (draws,) = members(0.7)
    near, apart = pool.scores([draws], TARGET)
    fair = ph.crps_ensemble(torch.from_numpy(draws), torch.from_numpy(TARGET), estimator="fair").sum()
    assert near[0] - apart[0, 0] / 2 == pytest.approx(float(fair) / TARGET.sum(), rel=1e-12)


def test_weights_are_the_best_of_a_fine_grid():
    windows = [pool.scores(members(0.5, -0.8, 3.0), TARGET) for _ in range(2)]
    near, apart = (np.mean(parts, axis=0) for parts in zip(*windows))
    grid = [np.array([a, b, 100 - a - b]) / 100 for a, b in itertools.product(range(101), repeat=2) if a + b <= 100]
    best = min(float(w @ near - w @ apart @ w / 2) for w in grid)
    weights = pool.best_weights(windows)
    assert weights.sum() == pytest.approx(1)
    assert float(weights @ near - weights @ apart @ weights / 2) <= best + 1e-9
    assert weights[2] == 0
    assert (weights[:2] > 0.1).all()


def test_draws_of_the_pool_come_in_the_right_numbers():
    draws = [np.full((10, 1, 1), float(k)) for k in range(3)]
    members_drawn = pool.pooled(draws, np.array([0.255, 0.0, 0.745]), 100).ravel()
    assert [int((members_drawn == k).sum()) for k in range(3)] in ([26, 0, 74], [25, 0, 75])


def test_negative_draws_become_feasible_and_others_stay():
    hierarchy = ph.Hierarchy(np.vstack([np.ones((1, 3)), np.eye(3)]))
    bottom = RANDOM.standard_normal((50, 2, 3)) + 1
    draws = np.concatenate([bottom.sum(-1, keepdims=True), bottom], -1)
    projected = pool.nonnegative(draws, hierarchy)
    assert projected.min() >= 0
    assert abs(projected[..., 0] - projected[..., 1:].sum(-1)).max() < 1e-12
    fine = (draws >= 0).all(-1)
    assert 0 < fine.sum() < fine.size
    assert np.array_equal(projected[fine], draws[fine])


def test_bad_windows_are_refused():
    with pytest.raises(ShapeError, match="same steps"):
        pool.scores([np.zeros((5, 3, 6))], TARGET)
    with pytest.raises(ParameterError, match="all zero"):
        pool.scores([np.zeros((5, 4, 6))], np.zeros((4, 6)))
