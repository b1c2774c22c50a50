"""The spread factor: against a grid search, and what it leaves unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from probhard.forecasting import load, pooled_crps
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.models.spread import past_windows, spread_factor, widened

HORIZON = 12


@pytest.fixture
def data() -> HierarchicalData:
    return load("us-employment")


def drawn(data: HierarchicalData, width: float) -> list[np.ndarray]:
    """Coherent draws around each past window's values, too narrow by ``width``."""
    random, by_window = np.random.default_rng(0), []
    for _, test in past_windows(data, HORIZON):
        count = len(test.names) - data.hierarchy.aggregates
        scale = 0.01 * test.bottom.mean()
        error = random.normal(size=(HORIZON, count)) * scale
        noise = random.normal(size=(300, HORIZON, count)) * scale / width
        by_window.append((test.bottom + error + noise) @ data.hierarchy.summation.toarray().T)
    return by_window


@pytest.mark.parametrize("width", [0.5, 1.0, 3.0])
def test_the_factor_is_the_root_of_the_best_one(data: HierarchicalData, width: float) -> None:
    draws, windows = drawn(data, width), past_windows(data, HORIZON)
    factors = np.geomspace(0.2, 6, 300)
    losses = [
        sum(pooled_crps(widened(paths, c), test.values) for paths, (_, test) in zip(draws, windows)) for c in factors
    ]
    best = factors[np.argmin(losses)]
    assert spread_factor(draws, windows) ** 2 == pytest.approx(best, rel=0.02)
    assert best == pytest.approx(width, rel=0.35)


def test_windows_are_the_last_ones_and_none_where_rows_are_few(data: HierarchicalData) -> None:
    windows = past_windows(data, HORIZON)
    assert [len(known.index) for known, _ in windows] == [96, 108]
    assert windows[-1][1].index[-1] == data.index[-1]
    assert past_windows(data.window(0, 3 * HORIZON), HORIZON) == []
    assert spread_factor([], []) == 1.0


def test_gaps_do_not_count_and_late_series_leave_no_windows(data: HierarchicalData) -> None:
    values = data.bottom.copy()
    values[-1, 0] = np.nan
    holed = HierarchicalData.from_matrix(
        values @ data.hierarchy.summation.toarray().T, data.hierarchy, data.index, coherence="aggregate"
    )
    assert np.isfinite(spread_factor(drawn(data, 2.0), past_windows(holed, HORIZON)))
    values[:-3, 0] = np.nan
    late = HierarchicalData.from_matrix(
        values @ data.hierarchy.summation.toarray().T, data.hierarchy, data.index, coherence="aggregate"
    )
    assert past_windows(late, HORIZON) == []


def test_sums_and_means_are_kept(data: HierarchicalData) -> None:
    draws = drawn(data, 1.0)[0]
    wide = widened(draws, 2.5)
    np.testing.assert_allclose(wide.mean(0), draws.mean(0), rtol=1e-12)
    np.testing.assert_allclose(wide.std(0), 2.5 * draws.std(0), rtol=1e-9)
    bottom = wide[..., data.hierarchy.aggregates :]
    np.testing.assert_allclose(wide, bottom @ data.hierarchy.summation.toarray().T, rtol=1e-12)
    assert widened(draws, 1.0) is draws
