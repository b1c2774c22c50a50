"""Members: each against plain recomputations, past origins that see no later rows, kept fits, plain files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from forecasting.helpers import KEYS, assert_three_parts, frame
from probhard.errors import ParameterError
from probhard.forecasting import HierarchicalData, from_frame
from probhard.forecasting.members.base import filled, past_origins
from probhard.forecasting.members.bootstrap import BootstrapMember
from probhard.forecasting.members.catalogue import default_members, default_models, named_member
from probhard.forecasting.members.external import member_of
from probhard.forecasting.members.kept import kept_forecast
from probhard.forecasting.members.network import NetworkForecast, NetworkMember
from probhard.forecasting.members.plain import from_plain, to_plain
from probhard.forecasting.members.series import seasonal_naive
from probhard.forecasting.members.smoothing import DAMPING, GRID, SmoothingMember, run
from probhard.forecasting.models.classical import base_forecast


@pytest.fixture(scope="module")
def data() -> HierarchicalData:
    return from_frame(frame(60), KEYS)


def test_past_origins_leave_half_of_the_rows_and_two_seasons(data: HierarchicalData) -> None:
    assert past_origins(data, 6) == (30, 36, 42, 48, 54)
    assert past_origins(data, 12, 2) == (36, 48)
    assert past_origins(data.window(0, 40), 10) == (26, 27, 28, 29, 30)  # overlapping
    assert past_origins(data.window(0, 30), 10) == ()
    assert past_origins(data, 1)[-1] == 59
    assert len(past_origins(data, 1)) == 24


def test_gaps_are_filled_from_the_season_before() -> None:
    values = np.array([np.nan, 1.0, 2.0, 3.0, np.nan, 5.0, np.nan])
    series, first = filled(values, 2)
    assert first == 1
    np.testing.assert_array_equal(series, [1, 2, 3, 2, 5, 2])


def test_ets_is_that_of_statsforecast_at_the_end(data: HierarchicalData) -> None:
    ours = named_member("ets", data).forecast(data, 4, (48,)).bases[-1]
    theirs = base_forecast(data, 4)
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-8)
    np.testing.assert_allclose(ours.stddev, theirs.stddev, rtol=1e-6)
    np.testing.assert_allclose(ours.fitted, theirs.fitted, rtol=1e-8)


@pytest.mark.parametrize("name", ["theta", "naive", "croston", "smoothing", "bootstrap"])
def test_past_origins_see_no_later_rows(name: str, data: HierarchicalData) -> None:
    later = data.values.copy()
    later[48:] *= 3
    changed = replace(data, values=later)
    first, second = (named_member(name, rows).forecast(rows, 4, (40, 44)) for rows in (data, changed))
    for k in range(2):
        np.testing.assert_array_equal(first.bases[k].mean, second.bases[k].mean)
        np.testing.assert_array_equal(first.bases[k].stddev, second.bases[k].stddev)
    assert np.abs(first.bases[-1].mean - second.bases[-1].mean).max() > 1


@pytest.mark.parametrize("name", ["ets", "theta", "naive", "croston", "mstl", "smoothing"])
def test_parameters_are_plain_values_that_forecast_alike(name: str, data: HierarchicalData) -> None:
    member = named_member(name, data)
    made = member.forecast(data, 4, ())
    again = member.resume(data, 4, json.loads(json.dumps(made.state)))
    np.testing.assert_allclose(again.bases[-1].mean, made.bases[-1].mean, rtol=1e-9)
    np.testing.assert_allclose(again.bases[-1].stddev, made.bases[-1].stddev, rtol=1e-3)


def test_a_form_that_needs_more_rows_than_a_past_origin_has_is_chosen_anew() -> None:
    random = np.random.default_rng(0)
    table = frame(17)
    table["y"] = 100 + 3 * (pd.to_datetime(table["ds"]).rank(method="dense") + random.normal(size=len(table)) / 10)
    data = replace(from_frame(table, KEYS), season=1)
    ours = named_member("ets", data).forecast(data, 3, (8, 11, 14))
    theirs = base_forecast(data, 3)
    assert ours.notes == []
    np.testing.assert_allclose(ours.bases[-1].mean, theirs.mean, rtol=1e-8)
    early = named_member("ets", data).forecast(data, 3, (4, 11, 14))  # too few rows for any form
    assert early.notes == []
    np.testing.assert_allclose(early.bases[-1].mean, theirs.mean, rtol=1e-8)
    naive = seasonal_naive(data.values[:4, 0], 3, 1)
    np.testing.assert_array_equal(early.bases[0].mean[:, 0], naive[0])


def test_series_without_a_fit_are_forecast_by_seasonal_naive(data: HierarchicalData) -> None:
    class Fails:
        def new(self) -> Fails:
            return self

        def fit(self, y: np.ndarray) -> Fails:
            raise RuntimeError("no")

    Fails.__module__ = "statsforecast.models"
    made = member_of(Fails(), data).forecast(data, 14, (48,))
    assert "could not be fitted to 7 series (Total, Total/A, Total/B, ...)" in made.notes[0]
    np.testing.assert_array_equal(made.bases[-1].mean[:12], data.values[-12:])
    np.testing.assert_array_equal(made.bases[0].mean[:12], data.values[36:48])
    size = np.sqrt(np.mean((data.values[12:] - data.values[:-12]) ** 2, axis=0))
    np.testing.assert_allclose(made.bases[-1].stddev[:12], np.tile(size, (12, 1)))
    np.testing.assert_allclose(made.bases[-1].stddev[12:], np.tile(np.sqrt(2) * size, (2, 1)))


def test_short_series_repeat_their_last_value() -> None:
    mean, stddev, fitted = seasonal_naive(np.array([np.nan, np.nan, 4.0]), 3, 12)
    np.testing.assert_array_equal(mean, [4, 4, 4])
    assert np.isfinite(stddev).all()
    assert np.isnan(fitted).all()


def test_smoothing_follows_its_equations() -> None:
    random = np.random.default_rng(1)
    rows = 10 + random.standard_normal((30, 3)) + 3 * np.sin(np.arange(30) * np.pi / 2)[:, None]
    rows[:9, 2] = np.nan
    rows[15, 0] = np.nan
    chosen = np.array([0, 5, len(GRID) - 1])
    fitted, (state,) = run(rows, 4, chosen, [30])
    for column, point in enumerate(chosen):
        alpha, share, gamma = GRID[point]
        y = rows[:, column]
        start = int(np.flatnonzero(~np.isnan(y))[0])
        head = y[:12].reshape(3, 4)
        seasonal = list((head - head.mean(1, keepdims=True)).mean(0)) if start == 0 else [0.0] * 4
        level, trend, inside = y[start] - seasonal[start % 4], 0.0, [np.nan] * (start + 1)
        for t in range(start + 1, 30):
            expected = level + DAMPING * trend + seasonal[t % 4]
            inside.append(expected)
            error = 0.0 if np.isnan(y[t]) else y[t] - expected
            level, trend = level + DAMPING * trend + alpha * error, DAMPING * trend + alpha * share * error
            seasonal[t % 4] += gamma * error
        np.testing.assert_allclose(fitted[:, column], inside, rtol=1e-12)
        ahead = [level + trend * sum(DAMPING**j for j in range(1, h + 1)) + seasonal[(29 + h) % 4] for h in range(1, 7)]
        np.testing.assert_allclose(state.forecast(6)[:, column], ahead, rtol=1e-12)


def test_deviations_of_smoothing_are_those_of_its_simulations(data: HierarchicalData) -> None:
    from probhard.forecasting.members.smoothing import _growth

    alpha, share, gamma = GRID[-1]
    random, paths = np.random.default_rng(0), np.zeros((20_000, 9))
    level, trend, seasonal = (np.zeros(20_000) for _ in range(3))
    seasonal = np.zeros((4, 20_000))
    for t in range(9):
        error = random.standard_normal(20_000)
        expected = level + DAMPING * trend + seasonal[t % 4]
        paths[:, t] = expected + error
        level, trend = level + DAMPING * trend + alpha * error, DAMPING * trend + alpha * share * error
        seasonal[t % 4] += gamma * error
    np.testing.assert_allclose(_growth(9, 4)[:, -1], paths.std(0), rtol=0.03)


def test_bootstrap_members_draw_coherent_paths(data: HierarchicalData) -> None:
    made = BootstrapMember().forecast(data, 4, (48,))
    assert made.draws is not None
    assert made.draws[0].shape == (400, 4, 7)
    np.testing.assert_allclose(made.draws[1][..., 0], made.draws[1][..., 3:].sum(-1))


def test_fits_are_kept(tmp_path: Path, data: HierarchicalData, monkeypatch: pytest.MonkeyPatch) -> None:
    member = named_member("theta", data)
    first = kept_forecast(member, data, 4, (48,), tmp_path)
    (file,) = tmp_path.iterdir()
    again = kept_forecast(member, data, 4, (48,), tmp_path)
    for one, other in zip(first.bases, again.bases):
        np.testing.assert_array_equal(one.mean, other.mean)
        np.testing.assert_array_equal(one.fitted, other.fitted)
    assert again.state == json.loads(json.dumps(first.state))
    kept_forecast(member, data, 5, (48,), tmp_path)
    kept_forecast(member, data.window(0, 58), 4, (48,), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    file.write_bytes(b"broken")
    np.testing.assert_array_equal(kept_forecast(member, data, 4, (48,), tmp_path).bases[0].mean, first.bases[0].mean)
    with np.load(file, allow_pickle=False) as kept:
        assert "mean1" in kept


def test_networks_are_kept_with_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = from_frame(frame(340), KEYS)
    member = NetworkMember(NetworkForecast(epochs=1, options={"num_batches_per_epoch": 1, "hidden_size": 4}))
    first = kept_forecast(member, data, 4, (310, 330), tmp_path)
    monkeypatch.setattr(NetworkForecast, "fit", None)  # a second run trains nothing
    again = kept_forecast(member, data, 4, (310, 330), tmp_path)
    assert first.draws is not None
    assert again.draws is not None
    for one, other in zip(first.draws, again.draws):
        np.testing.assert_array_equal(one, other)
    later = from_frame(frame(344), KEYS)
    drawn = [member.resume(later, 4, made.state).draws for made in (first, again)]
    np.testing.assert_array_equal(*drawn)
    law = NetworkMember(NetworkForecast(options={"family": object()}))
    assert not law.kept


def test_a_network_with_a_long_history_is_trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    fit = NetworkForecast.fit

    def counted(self: NetworkForecast, data: HierarchicalData, progress: str = "") -> NetworkForecast:
        rows.append(len(data.index))
        return fit(self, data, progress)

    monkeypatch.setattr(NetworkForecast, "fit", counted)
    member = NetworkMember(NetworkForecast(epochs=1, options={"num_batches_per_epoch": 1, "hidden_size": 4}))
    member.forecast(from_frame(frame(340), KEYS), 4, (310, 330))
    assert rows == [310]
    rows.clear()
    member.forecast(from_frame(frame(80), KEYS), 4, (60, 70))
    assert rows == [60, 80]


def test_plain_values_name_classes_of_statsforecast_only() -> None:
    assert to_plain(object()) is None
    assert from_plain(json.loads(json.dumps(to_plain({"a": (1, np.array([2.0]))}))))["a"][0] == 1
    for name in ("os", "Path", None, "np"):
        with pytest.raises(ParameterError) as caught:
            from_plain({"model": name, "fields": {}})
        assert_three_parts(caught.value)


def test_defaults_by_size_and_seasons(data: HierarchicalData) -> None:
    assert default_models(data) == ["ets", "theta", "naive"]
    assert default_models(data, fast=True) == ["ets"]
    long = from_frame(frame(400), KEYS)
    assert default_models(long) == ["ets", "theta", "naive", "deepvar"]
    assert default_models(long, horizon=60) == ["ets", "theta", "naive"]  # few rows before the past windows
    on_trial = [getattr(member, "trial", False) for member in default_members(long, 4)]
    assert on_trial == [False, False, False, True]
    with pytest.raises(ParameterError, match="prophet"):
        named_member("prophet", data)
    with pytest.raises(ParameterError, match="models has a int"):
        member_of(3, data)


def test_very_many_series_are_smoothed_at_once(data: HierarchicalData) -> None:
    member = SmoothingMember()
    made = member.forecast(data, 4, (40, 44))
    assert [base.mean.shape for base in made.bases] == [(4, 7)] * 3
    errors = np.abs(made.bases[0].mean - data.values[40:44]).sum() / data.values[40:44].sum()
    assert errors < 0.2
