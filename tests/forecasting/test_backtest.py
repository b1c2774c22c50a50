"""Rivals against hierarchicalforecast's own intervals, scores by hand, and windows of the past."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hierarchicalforecast.methods import MinTrace

from forecasting.helpers import KEYS, assert_three_parts, frame
from probhard.errors import ParameterError
from probhard.forecasting import HierarchicalData, from_frame, pooled_crps
from probhard.forecasting.models.classical import BaseForecast
from probhard.forecasting.report import rivals
from probhard.forecasting.report.backtest import Backtest, backtest, held_out
from probhard.forecasting.report.scores import ALL, score_window


def base(data: HierarchicalData, horizon: int = 4) -> BaseForecast:
    """Invented forecasts of all nodes, not coherent."""
    random, n = np.random.default_rng(2), len(data.names)
    size = data.values.mean(0)
    mean = size * random.uniform(0.9, 1.1, (horizon, n))
    return BaseForecast(data, mean, 0.1 * mean, data.values + 0.05 * size * random.normal(size=data.values.shape))


@pytest.mark.parametrize(("name", "method"), rivals.RECONCILED.items())
def test_reconciled_rivals_are_hierarchicalforecasts_normal_laws(name: str, method: str):
    data = from_frame(frame(), KEYS)
    given = base(data)
    theirs = MinTrace(method).fit(
        S=data.hierarchy.summation.toarray(),
        y_hat=given.mean.T,
        y_insample=data.values.T,
        y_hat_insample=given.fitted.T,
        sigmah=given.stddev.T,
        intervals_method="normality",
    )
    quantiles = theirs.predict(S=data.hierarchy.summation.toarray(), y_hat=given.mean.T, level=[80])["quantiles"]
    ours = rivals.reconciled(given, method)
    np.testing.assert_allclose(ours.mean, (theirs.sampler.SP @ given.mean.T).T, rtol=1e-9)
    upper = ours.mean + 1.2815515655446004 * ours.stddev
    np.testing.assert_allclose(upper, quantiles[..., -1].T, rtol=1e-9)


def test_bottom_up_and_seasonal_naive_by_hand():
    data = from_frame(frame(), KEYS)
    S, given = data.hierarchy.summation.toarray(), base(data)
    law = rivals.bottom_up(given)
    np.testing.assert_allclose(law.mean, given.mean[:, 3:] @ S.T)
    np.testing.assert_allclose(law.stddev, np.sqrt(given.stddev[:, 3:] ** 2 @ S.T))
    naive = rivals.seasonal_naive(data, 14)
    np.testing.assert_allclose(naive.mean[12:], data.values[-12:-10])
    size = np.sqrt(((data.values[12:] - data.values[:-12]) ** 2).mean(0))
    np.testing.assert_allclose(naive.stddev[0], size)
    np.testing.assert_allclose(naive.stddev[12], np.sqrt(2) * size)
    drawn = law.draws()
    np.testing.assert_allclose(drawn.mean(0), law.mean, rtol=1e-9)
    np.testing.assert_allclose(drawn.std(0), law.stddev, rtol=0.01)


def test_scores_by_hand_and_filled_values_do_not_count():
    df = frame()
    hole = (df["state"] == "A") & (df["region"] == "x") & (df["ds"] == "2021-02-01")
    data = from_frame(df[~hole], KEYS)
    train, test = data.train_test(4)
    random = np.random.default_rng(0)
    draws = test.values + 10 * random.normal(size=(50, 4, 7)) + 3
    scores = score_window(draws, train, test, [0.8])
    assert np.isnan(test.observed).sum() >= 1
    assert scores.crps[ALL] == pytest.approx(pooled_crps(draws, test.observed))
    scale = np.abs(train.values[12:] - train.values[:-12]).mean(0)
    errors = np.abs(test.observed - np.median(draws, 0)) / scale
    assert scores.mase[ALL] == pytest.approx(np.nanmean(errors))
    assert scores.mase["total/state"] == pytest.approx(np.nanmean(errors[:, 1:3]))
    low, high = np.quantile(draws, [0.1, 0.9], axis=0)
    inside = ((test.observed >= low) & (test.observed <= high))[~np.isnan(test.observed)]
    assert scores.coverage[ALL][0.8] == pytest.approx(inside.mean())
    assert scores.pit[ALL].sum() == scores.count[ALL] == (~np.isnan(test.observed)).sum()
    assert scores.nodes.shape == (7,)


def test_windows_do_not_overlap_and_get_fewer_in_short_histories():
    data = from_frame(frame(60), KEYS)
    windows = held_out(data, 6, 3)
    assert [len(train.index) for train, _ in windows] == [42, 48, 54]
    assert [str(test.index[0]) for _, test in windows] == ["2021-07", "2022-01", "2022-07"]
    assert len(held_out(from_frame(frame(20), KEYS), 6, 3)) == 1
    for rows, message in ((12, "12 rows and the horizon 6"), (60, "nothing but zeros")):
        df = frame(rows)
        df.loc[df["ds"] >= "2021-01-01", "y"] = 0.0
        with pytest.raises(ParameterError, match=message) as raised:
            held_out(from_frame(df, KEYS), 6, 2)
        assert_three_parts(raised.value)


def made(error: float, data: HierarchicalData) -> Backtest:
    """A backtest of the truth plus a relative error."""
    windows = held_out(data, 4, 3)
    truth = {len(train.index): np.nan_to_num(test.values) for train, test in windows}

    def forecast(train: HierarchicalData) -> tuple[np.ndarray, BaseForecast]:
        return (1 + error) * truth[len(train.index)] + np.zeros((3, 1, 1)), base(train)

    return backtest("mine", forecast, windows, [0.8])


def test_given_base_forecasts_are_reused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rivals, "base_forecast", lambda *args: pytest.fail("AutoETS was fitted again"))
    tested = made(0.0, from_frame(frame(), KEYS))
    assert list(tested.scores) == ["mine", *rivals.NAMES]
    assert len(tested.scores["mine"].windows) == 3
    assert tested.verdict.startswith("Better than its 4 rivals on 3 past windows")
    assert tested.wins == 3
    record = tested.record()
    assert record["scores"]["mine"]["crps_windows"] == [0, 0, 0]
    assert len(record["windows"]) == 3
    assert "range" in tested.table()


def test_a_rival_that_wins_is_named():
    tested = made(9.0, from_frame(frame(), KEYS))
    assert tested.ratio > 1
    assert tested.verdict.startswith("A rival was better: ")
    assert tested.best_rival in tested.verdict
    assert tested.verdict.endswith("ahead in 0 of 3.")


def test_series_that_start_or_end_within_the_windows():
    df = frame()
    late = (df["region"] == "y") & (df["ds"] < "2021-02-01")  # starts in the last window
    ended = (df["region"] == "z") & (df["ds"] >= "2020-08-01")
    data = from_frame(df[~(late | ended)], KEYS)
    tested = made(0.01, data)
    assert np.isfinite([score.crps for score in tested.scores.values()]).all()
    assert not np.isnan(pd.DataFrame(tested.record()["scores"]["mine"]["crps_levels"], index=[0]).to_numpy()).any()


def test_what_is_certain_and_right_says_nothing_of_calibration():
    data = from_frame(frame(), KEYS)
    train, test = data.train_test(4)
    draws = test.values + np.random.default_rng(0).normal(size=(50, 4, 7))
    draws[..., 3] = test.values[:, 3]  # certain and right
    draws[..., 4] = 0.0  # certain and wrong
    scores = score_window(draws, train, test, [0.8])
    assert scores.count[ALL] == 4 * 6
    assert scores.pit[ALL].sum() == 4 * 6
    inside = [score_window(draws[..., [i, i]], *(_single(x, i) for x in (train, test)), [0.8]) for i in (3, 4)]
    assert np.isnan(inside[0].coverage[ALL][0.8])
    assert inside[1].coverage[ALL][0.8] == 0


def _single(data: HierarchicalData, node: int) -> HierarchicalData:
    """One node twice, as a total and its only part."""
    values = data.values[:, [node]]
    return HierarchicalData.from_matrix(np.repeat(values, 2, 1), np.ones((2, 1)), data.index, ["t", "b"], season=12)
