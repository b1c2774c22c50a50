"""Windows of DeepVAR and time features, against plain slices."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from forecasting.helpers import LAYOUT, START, entry, history
from probhard.forecasting.data.seasons import cycle_features, default_lags, period_frequency
from probhard.forecasting.models.windows import RandomWindows, Windows, last_windows


def test_windows_are_slices_of_the_series():
    y = history(40)
    windows = Windows([entry(y)], LAYOUT)
    assert windows.origins.tolist() == list(range(10, 38))  # a whole past before, a whole horizon after
    window = windows.at(windows.origins)
    for k, first in enumerate(windows.origins.tolist()):  # forecast start `first`, window from first - 10 on
        np.testing.assert_allclose(window.target[k], y.T[first - 10 : first + 3], rtol=1e-6)
        months = pd.period_range(START + (first - 6), periods=9, freq="M").month
        expected = np.stack([np.cos(2 * np.pi * months / 12), np.sin(2 * np.pi * months / 12)], -1)
        np.testing.assert_allclose(window.features[k], expected, atol=1e-6)
    (last,) = last_windows(windows, 4)
    np.testing.assert_allclose(last.target[0], y.T[-13:], rtol=1e-6)


def test_short_series_are_padded_and_entries_are_not_mixed():
    first, second = history(9), -history(30)
    windows = Windows([entry(first), entry(second)], LAYOUT)
    window = windows.at(windows.origins)
    positive, negative = ((~(side * window.target < 0)).all((1, 2)) for side in (1, -1))
    assert positive.tolist() == [True] * 4 + [False] * 18  # starts 3 to 6 of 9 rows, 10 to 27 of 30
    assert torch.equal(negative, ~positive)
    assert bool(window.target[:, -3:].isfinite().all())  # whole horizons
    short = window.target[0]
    missing = int(short[:, 0].isnan().sum())
    assert missing == 10 - 3
    assert bool(short[:missing].isnan().all())
    np.testing.assert_allclose(short[missing:], first.T[: 13 - missing], rtol=1e-6)
    assert bool(window.features.isfinite().all())


def test_epochs_are_seeded():
    windows = Windows([entry(history())], LAYOUT)
    one, two = RandomWindows(windows, 4, 3, seed=1), RandomWindows(windows, 4, 3, seed=1)
    first, again = list(one), list(two)
    assert len(first) == len(one) == 3
    assert all(torch.equal(a.target, b.target) for a, b in zip(first, again))
    assert not torch.equal(first[0].target, next(iter(one)).target)  # the next epoch
    assert not torch.equal(first[0].target, next(iter(RandomWindows(windows, 4, 3, seed=2))).target)


@pytest.mark.parametrize(
    ("freq", "period", "lags"), [("MS", "M", (1, 12)), ("QE", "Q-DEC", (1, 12)), ("D", "D", (1, 7, 14))]
)
def test_frequencies(freq, period, lags):
    assert period_frequency(freq) == period
    assert default_lags(freq) == lags


def test_features_of_a_cycle():
    days = pd.period_range("2024-01-01", periods=8, freq="D")  # a Monday
    features = cycle_features(("day_of_week",), days)
    np.testing.assert_allclose(features[0], [1, 0], atol=1e-12)
    np.testing.assert_allclose(features[7], features[0], atol=1e-12)
    np.testing.assert_allclose(np.hypot(*features.T), 1)
