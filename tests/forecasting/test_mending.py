"""Histories with missing rows: series that ended, late starts, gaps, closed days; sums never fail for want of a row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from forecasting.helpers import KEYS, frame
from probhard.forecasting import HierarchicalData, from_frame
from probhard.forecasting.data import mending
from probhard.forecasting.data.mending import zero_since
from probhard.forecasting.data.stored import extra_arrays, with_extras


def without(rows: pd.Series, df: pd.DataFrame | None = None) -> pd.DataFrame:
    df = frame() if df is None else df
    return df[~rows]


def series(df: pd.DataFrame, state: str, region: str) -> pd.Series:
    return (df["state"] == state) & (df["region"] == region)


def column(data, name: str) -> int:
    return data.names.index(name)


def test_ended_series_leave_sums_of_the_others_whole():
    df = frame()
    gone = (series(df, "A", "y") & (df["ds"] >= "2019-06-01")) | (series(df, "B", "x") & (df["ds"] >= "2020-03-01"))
    data = from_frame(without(gone), KEYS)
    assert not np.isnan(data.values).any()
    sold = df[~gone].groupby("ds")["y"].sum().to_numpy()
    np.testing.assert_allclose(data.values[:, 0], sold, rtol=1e-12)  # the total is what was sold, in every row
    np.testing.assert_array_equal(data.values, data.observed)  # 0 after the end is a fact, and scored
    ended = [name for name, end in zip(data.names, data.ended) if end]
    assert ended == ["Total/A/y", "Total/B/x"]
    assert (data.values[17:, column(data, "Total/A/y")] == 0).all()
    (note,) = data.notes
    assert note.startswith("2 series ended, 0 from then on and in the forecast: Total/A/y after 2019-05, Total/B/x")
    record = data.mended()
    assert record["ended"] == {"Total/A/y": "2019-05", "Total/B/x": "2020-02"}
    assert not record["started_late"]


def test_rows_with_nan_end_a_series_too_and_a_whole_branch_ends():
    df = frame()
    df.loc[(df["state"] == "A") & (df["ds"] >= "2020-01-01"), "y"] = np.nan
    data = from_frame(df, KEYS)
    assert [name for name, end in zip(data.names, data.ended) if end] == ["Total/A", "Total/A/x", "Total/A/y"]
    assert not np.isnan(data.values).any()


def test_ended_is_what_a_past_origin_could_know():
    df = frame()
    data = from_frame(without(series(df, "A", "y") & (df["ds"] >= "2019-06-01")), KEYS)  # row 17
    y = column(data, "Total/A/y")
    assert data.window(0, 20).ended[y]
    assert not data.window(0, 19).ended[y]  # two absent rows may be late ones
    assert not data.window(0, 17).ended.any()
    assert not data.window(0, 10).notes


def test_late_rows_are_filled_by_the_last_season_and_not_scored():
    df = frame()
    data = from_frame(without(series(df, "A", "y") & (df["ds"] >= "2021-03-01")), KEYS)  # the last two of 40 rows
    y = column(data, "Total/A/y")
    assert not data.ended.any()
    np.testing.assert_allclose(data.values[-2:, y], data.values[-14:-12, y])
    assert np.isnan(data.observed[-2:, y]).all()
    assert "2 missing values of 1 series filled" in data.notes[0]


def test_late_starts_are_zero_in_sums():
    df = frame()
    data = from_frame(without(series(df, "B", "z") & (df["ds"] < "2020-01-01")), KEYS)
    z = column(data, "Total/B/z")
    assert np.isnan(data.values[:24, z]).all()
    np.testing.assert_allclose(data.values[:24, column(data, "Total/B")], data.values[:24, column(data, "Total/B/x")])
    assert not np.isnan(data.values[:, 0]).any()
    assert data.notes == ["1 series started late, 0 in sums before: Total/B/z in 2020-01."]
    train, test = data.train_test(4, origin=3)  # the series starts in the test window
    assert (train.values[:, z] == 0).all()
    assert not np.isnan(test.values).all(0).any()


def test_a_branch_that_does_not_exist_yet_is_missing_not_zero():
    df = frame()
    data = from_frame(without((df["state"] == "B") & (df["ds"] < "2019-01-01")), KEYS)
    assert np.isnan(data.values[:12, column(data, "Total/B")]).all()
    assert not np.isnan(data.values[:, 0]).any()


def test_gaps_are_filled_from_the_seasons_around_and_masked_in_scores():
    df = frame()
    data = from_frame(without(series(df, "A", "x") & (df["ds"] == "2019-06-01")), KEYS)  # row 17
    x = column(data, "Total/A/x")
    assert data.values[17, x] == pytest.approx((data.values[5, x] + data.values[29, x]) / 2)
    assert np.flatnonzero(np.isnan(data.observed[:, x])).tolist() == [17]
    for aggregate in (0, 1):
        share = data.values[17, x] / data.values[17, aggregate]
        assert bool(np.isnan(data.observed[17, aggregate])) == bool(share > mending.SHARE)
    np.testing.assert_allclose(data.values, data.bottom @ data.hierarchy.summation.toarray().T)  # all the same


def test_short_gaps_without_a_season_are_on_the_line():
    filled = mending._fill(np.array([1.0, np.nan, np.nan, 4.0, np.nan]), 1)
    np.testing.assert_allclose(filled, [1, 2, 3, 4, 4])


@pytest.mark.parametrize(("on_gap", "zero"), [("mend", True), ("mask", False)])
def test_long_gaps_and_sparse_series_are_zero_unless_masked(on_gap: str, zero: bool):
    df = frame()
    paused = series(df, "A", "x") & (df["ds"] >= "2019-01-01") & (df["ds"] < "2019-09-01")
    rare = series(df, "B", "x") & (np.arange(len(df)) % 3 != 0)
    data = from_frame(without(paused | rare), KEYS, on_gap=on_gap)
    bottom = data.values[:, [column(data, "Total/A/x"), column(data, "Total/B/x")]]
    assert ((bottom == 0).sum(0) > 0).all() == zero
    assert not np.isnan(data.values[:, 0]).any()
    assert data.mending.filled.any() != zero
    if zero:
        assert data.mended()["counted_as_zero"]["Total/A/x"] == 8
        assert not data.ended.any()  # rare sales have long gaps


def test_closed_days_are_zero_and_days_without_reports_are_filled():
    stamps = pd.date_range("2024-01-01", periods=70, freq="D")
    rows = [{"shop": s, "ds": t, "y": 10.0 + t.dayofweek} for s in "ab" for t in stamps if t.dayofweek != 6]
    df = pd.DataFrame(rows)
    data = from_frame(df[df["ds"] != "2024-02-01"], ["shop"])  # a Thursday on which nobody reported
    sundays = np.asarray(data.index.dayofweek == 6)
    assert (data.values[sundays] == 0).all()
    np.testing.assert_allclose(data.values[31], [26, 13, 13])
    assert np.isnan(data.observed[31]).all()
    assert not np.isnan(data.observed[sundays]).any()


def test_rows_after_the_last_value_are_no_history():
    df = frame()
    df.loc[df["ds"] >= "2021-03-01", "y"] = np.nan
    data = from_frame(df, KEYS)
    assert (len(data.index), str(data.index[-1])) == (38, "2021-02")
    assert data.mending is None


def test_given_aggregates_are_kept_where_parts_are_missing():
    names = {"total": ["T"], "total/part": ["T/a", "T/b"]}
    stamps = pd.date_range("2020-01-01", periods=12, freq="MS")
    parts = [("T", 3.0), ("T/a", 1.0), ("T/b", 2.0)]
    df = pd.DataFrame([{"unique_id": n, "ds": t, "y": v} for n, v in parts for t in stamps])
    df = df[~((df["unique_id"] == "T/b") & (df["ds"] == "2020-05-01"))]
    data = from_frame(df, tags=names)
    np.testing.assert_allclose(data.values, np.tile([3.0, 1.0, 2.0], (12, 1)))
    assert np.isnan(data.observed).sum() == 1


def test_counts_negative_values_constants_and_zeros_are_left_alone():
    df = frame()
    df.loc[series(df, "A", "x"), "y"] = 0.0
    df.loc[series(df, "A", "y"), "y"] = -5.0
    df.loc[series(df, "B", "x"), "y"] = np.arange(40) % 4
    data = from_frame(df, KEYS)
    assert data.mending is None
    assert data.notes == []
    assert not data.ended.any()
    np.testing.assert_allclose(data.values[:, column(data, "Total/A")], -5.0)


@pytest.mark.parametrize(
    ("freq", "rows", "seasons"),
    [("h", 24 * 21, (24, 168)), ("h", 24 * 10, (24,)), ("D", 800, (7, 365)), ("D", 100, (7,)), ("MS", 60, (12,))],
)
def test_hours_and_days_have_two_seasons_where_the_history_holds_them(freq: str, rows: int, seasons: tuple[int, ...]):
    stamps = pd.date_range("2020-01-01", periods=rows, freq=freq)
    df = pd.DataFrame({"id": np.repeat(["a", "b"], rows), "ds": [*stamps, *stamps], "y": np.arange(2.0 * rows)})
    assert from_frame(df, ["id"]).seasons == seasons


def test_a_saved_history_knows_what_was_done():
    df = frame()
    gone = (series(df, "A", "y") & (df["ds"] >= "2019-06-01")) | (series(df, "A", "x") & (df["ds"] == "2019-06-01"))
    data = from_frame(without(gone), KEYS, country_holidays="CH")
    plain = HierarchicalData(data.values, data.index, data.hierarchy, season=12)  # 0 after the end adds up
    back = with_extras(plain, extra_arrays(data))
    assert back.notes == data.notes
    np.testing.assert_array_equal(back.observed, data.observed)
    np.testing.assert_array_equal(back.features, data.features)
    assert back.feature_names == ("holidays",)
    assert extra_arrays(plain) == {}


def test_zeros_at_the_end_are_told_from_an_end():
    rows = 40
    y = np.ones((rows, 6))
    y[30:, 0] = 0  # 10 zeros, none before
    y[30:, 1] = 0
    y[10:16, 1] = 0  # 6 before: 10 are not twice as many
    y[36:, 2] = 0  # too few
    y[:, 3] = 0  # never anything else
    y[:20, 4], y[20:, 4] = np.nan, 0  # nor here
    y[5, 5] = np.nan
    assert zero_since(y, 4) == {0: 30}
    assert zero_since(y, 12) == {}
