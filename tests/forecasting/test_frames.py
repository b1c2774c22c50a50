"""Long frames to tables and back: keys, gaps, frequencies, stamps, and input that is rejected."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hierarchicalforecast.utils import aggregate

from forecasting.helpers import KEYS, assert_three_parts
from probhard import ParameterError, ShapeError
from probhard.forecasting import from_frame, to_long


def long_frame(seed: int = 0, stamps: pd.DatetimeIndex | None = None) -> pd.DataFrame:
    stamps = pd.date_range("2020-01-01", periods=10, freq="MS") if stamps is None else stamps
    places = [("N", "x"), ("N", "y"), ("Q", "x"), ("Q", "z")]
    rows = [{"state": s, "region": r, "ds": t} for s, r in places for t in stamps]
    frame = pd.DataFrame(rows)
    frame["y"] = np.random.default_rng(seed).integers(0, 50, len(frame)).astype(float)
    return frame


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.from_pandas])
def test_keys_against_nixtlas_aggregate(kind):
    frame = long_frame().sample(frac=1, random_state=1, ignore_index=True)
    data = from_frame(kind(frame), KEYS, horizon=2)
    spec = [["top"], ["top", "state"], ["top", "state", "region"]]
    expected, summation, tags = aggregate(frame.assign(top="Total"), spec)
    wide = expected.pivot(index="ds", columns="unique_id", values="y")
    assert set(data.names) == set(wide.columns)
    np.testing.assert_allclose(data.values, wide[list(data.names)].to_numpy(), rtol=1e-14)
    assert [len(v) for v in data.levels.values()] == [len(v) for v in tags.values()]
    assert (data.freq, data.season, data.horizon) == ("M", 12, 2)
    for sparse in (False, True):
        full, matrix, tags = aggregate(kind(frame.assign(top="Total")), spec, sparse_s=sparse)
        named_nodes = from_frame(full, S=matrix, tags=tags)
        np.testing.assert_allclose(named_nodes.values, wide[list(named_nodes.names)].to_numpy(), rtol=1e-14)
        assert list(named_nodes.levels) == list(tags)
    bottoms = set(tags["top/state/region"])
    alone = from_frame(expected[expected["unique_id"].isin(bottoms)], S=summation.sample(frac=1, random_state=0))
    np.testing.assert_allclose(alone.values, wide[list(alone.names)].to_numpy(), rtol=1e-14)
    by_tags = from_frame(expected, tags=tags)
    np.testing.assert_allclose(by_tags.values, wide[list(by_tags.names)].to_numpy(), rtol=1e-14)


def test_crossed_keys_and_a_first_key_that_is_the_total():
    frame = long_frame()
    crossed = from_frame(frame.assign(top="T"), [["top"], ["region"], ["top", "state", "region"]])
    assert crossed.names[:4] == ("T", "x", "y", "z")
    np.testing.assert_allclose(crossed.values[:, 1], frame[frame["region"] == "x"].groupby("ds")["y"].sum())
    nested = from_frame(frame.assign(country="Au"), ["country", "state", "region"])
    assert nested.names[:3] == ("Au", "Au/N", "Au/Q")
    flat = from_frame(frame.assign(unique_id=frame["state"] + frame["region"]), ["unique_id"])
    assert flat.names[:2] == ("Total", "Total/Nx")


def test_gaps_are_mended_zero_or_refused():
    frame = long_frame()
    late = (frame["region"] == "z") & (frame["ds"] < "2020-04-01")
    hole = (frame["state"] == "N") & (frame["region"] == "y") & (frame["ds"] == "2020-06-01")
    frame.loc[(frame["region"] == "x") & (frame["state"] == "N") & (frame["ds"] == "2020-08-01"), "y"] = np.nan
    short = frame[~(late | hole)]
    data = from_frame(short, KEYS)
    at = {name: i for i, name in enumerate(data.names)}
    assert np.flatnonzero(np.isnan(data.values[:, at["Total/Q/z"]])).tolist() == [0, 1, 2]
    assert not np.isnan(np.delete(data.values, at["Total/Q/z"], 1)).any()
    assert np.flatnonzero(np.isnan(data.observed[:, at["Total/N/y"]])).tolist() == [5]
    assert np.flatnonzero(np.isnan(data.observed[:, at["Total/N/x"]])).tolist() == [7]
    zero = from_frame(pl.from_pandas(short), KEYS, on_gap="zero")
    assert zero.values[5, at["Total/N/y"]] == zero.observed[5, at["Total/N/y"]] == 0
    assert np.isnan(zero.observed[7, at["Total/N/x"]])  # a row with NaN
    with pytest.raises(ParameterError, match=r"'Total/Q/z' has no value at 2020-01"):
        from_frame(short, KEYS, on_gap="refuse")
    everywhere = short[short["ds"] != "2020-03-01"]  # a stamp without rows
    assert len(from_frame(everywhere, KEYS).index) == 10


def test_zero_and_constant_series_are_kept():
    frame = long_frame()
    frame.loc[frame["region"] == "x", "y"] = 0.0
    frame.loc[frame["region"] == "z", "y"] = 7.0
    data = from_frame(frame, KEYS, nonnegative=True)
    assert (data.values[:, list(data.names).index("Total/N/x")] == 0).all()
    assert (data.values[:, list(data.names).index("Total/Q/z")] == 7).all()


def edited(row: int, **values) -> pd.DataFrame:
    frame = long_frame()
    for column, value in values.items():
        frame[column] = frame[column].astype(object) if isinstance(value, str) else frame[column]
        frame.loc[row, column] = value
    return frame


TEXT = long_frame().assign(ds=lambda f: f["ds"].dt.strftime("%Y-%m-%d"))


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (pd.concat([long_frame(), long_frame().iloc[[13]]]), {}, r"'Total/N/y' has 2 rows for 2020-04"),
        (edited(13, y=-3.0), {"nonnegative": True}, r"'Total/N/y' is -3 at 2020-04"),
        (edited(13, y=np.inf), {}, r"'Total/N/y' is infinite at 2020-04|'Total.*' is infinite at 2020-04"),
        (edited(13, y="many"), {}, "not numbers"),
        (edited(13, ds=pd.NaT), {}, "Row 13 has no stamp"),
        (TEXT.assign(ds=[*TEXT["ds"][:-1], "soon"]), {}, "Row 39 has the stamp 'soon'"),
        (TEXT.assign(ds=[*TEXT["ds"][:-1], "13/02/2020"]), {}, "Row 39 has the stamp '13/02/2020'"),
        (
            long_frame().assign(ds=lambda f: f["ds"].dt.strftime("%d/%m/%Y")),
            {},
            "'01/02/2020' can be read as day/month or",
        ),
        (long_frame().assign(ds=lambda f: f["ds"].dt.year * 100 + f["ds"].dt.month), {}, "numbers such as 202001"),
        (long_frame().head(1), {}, "Two are needed"),
        (
            long_frame().head(0),
            {"keys": None, "tags": {"u": ["u"], "u/i": ["u/a"]}, "id_col": "state"},
            "Row 0 has no stamp",
        ),
        (long_frame().drop(columns="region"), {}, "no column 'region'"),
        (long_frame().drop(columns="y"), {}, "no column 'y'"),
        (long_frame(), {"keys": None}, "no column 'unique_id'"),
        (long_frame().assign(unique_id="a"), {"keys": None}, "Neither keys nor S nor tags"),
        (
            long_frame().assign(unique_id="d"),
            {"keys": None, "tags": {"up": ["u"], "up/id": ["u/a"]}},
            "'d' is not in the",
        ),
        (long_frame().assign(y=lambda f: f["y"].where(f["region"] != "z")), {}, "'Total/Q/z' has no value at any time"),
        (long_frame(), {"on_gap": "guess"}, "guess"),
        (long_frame(), {"freq": "fortnight"}, "fortnight"),
    ],
)
def test_what_cannot_be_read_is_refused_in_three_parts(frame, options, message):
    with pytest.raises(ParameterError, match=message) as raised:
        from_frame(frame, **({"keys": KEYS} | options))
    assert_three_parts(raised.value)


@pytest.mark.parametrize(
    ("stamps", "freq", "season"),
    [
        (pd.date_range("2020", periods=10, freq="MS"), "M", 12),
        (pd.date_range("2020", periods=10, freq="ME"), "M", 12),
        (pd.date_range("2020-01-15", periods=1).append(pd.DatetimeIndex(["2020-04-15", "2020-05-15"])), "M", 12),
        (pd.date_range("2020", periods=10, freq="QS"), "Q-DEC", 4),
        (pd.date_range("2020", periods=10, freq="QE"), "Q-DEC", 4),
        (pd.date_range("2020", periods=5, freq="YE"), "Y-DEC", 1),
        (pd.date_range("2020", periods=10, freq="W-SUN"), "W-SUN", 52),
        (pd.date_range("2020", periods=10, freq="W-WED"), "W-WED", 52),
        (pd.date_range("2020", periods=30, freq="D"), "D", 7),
        (pd.date_range("2020", periods=30, freq="B"), "D", 7),
        (pd.date_range("2020", periods=40, freq="h"), "h", 24),
        (pd.date_range("2020", periods=40, freq="15min"), "15min", 96),
        (pd.date_range("2020", periods=40, freq="h", tz="Australia/Sydney"), "h", 24),
    ],
)
def test_frequencies_are_found_also_with_gaps(stamps, freq, season):
    for kept in (stamps, stamps.delete(1)):
        data = from_frame(long_frame(stamps=kept), KEYS)
        assert data.freq == freq
        assert data.season == season
        assert len(data.index) >= len(kept)
        silent = np.isnan(data.observed[:, 0]) | (data.values[:, 0] == 0)  # filled, or 0 on days that are closed
        assert (~silent).sum() == len(kept)


def test_stamps_in_other_forms_give_the_same_table():
    frame = long_frame(stamps=pd.date_range("2020-01-01", periods=10, freq="QS"))
    expected = from_frame(frame, KEYS)
    for stamps in (
        frame["ds"].dt.strftime("%Y-%m-%d"),
        frame["ds"].dt.strftime("%YQ") + frame["ds"].dt.quarter.astype(str),
        frame["ds"].dt.to_period("Q"),
        frame["ds"].dt.date,
        (frame["ds"] + pd.offsets.Day(19)).dt.strftime("%d.%m.%Y"),
        (frame["ds"] + pd.offsets.Day(19)).dt.strftime("%m/%d/%Y"),
    ):
        data = from_frame(frame.assign(ds=stamps), KEYS, freq="QS")
        np.testing.assert_array_equal(data.values, expected.values)
        assert data.index.equals(expected.index)
    years = long_frame(stamps=pd.date_range("2001", periods=6, freq="YS"))
    data = from_frame(years.assign(ds=years["ds"].dt.year), KEYS, freq="Y")
    assert data.index.equals(from_frame(years, KEYS).index)


@pytest.mark.parametrize("freq", ["QE", "MS", "W-WED", "D", "h"])
def test_long_frames_go_there_and_back(freq):
    frame = long_frame(stamps=pd.date_range("2020-01-01", periods=10, freq=freq))
    frame["unique_id"] = "Total/" + frame["state"] + "/" + frame["region"]
    expected = frame[["unique_id", "ds", "y"]]
    polars = pl.from_pandas(frame).with_columns(pl.col("ds").cast(pl.Date if freq not in "h" else pl.Datetime("us")))
    for kind in (frame, polars):
        data = from_frame(kind, KEYS)
        back = to_long(data.bottom, data.names[-4:], data.index, kind, data.place)
        assert type(back) is type(kind)
        if kind is not frame:
            assert back.schema["ds"] == kind.schema["ds"]
            back = back.to_pandas().assign(ds=lambda f: pd.to_datetime(f["ds"]).astype("datetime64[ns]"))
        pd.testing.assert_frame_equal(back, expected, check_dtype=False)
    both = to_long({"mean": data.values, "low": data.values - 1}, data.names, data.index)
    assert list(both.columns) == ["unique_id", "ds", "mean", "low"]
    with pytest.raises(ShapeError, match="'y' has shape"):
        to_long(data.values.T, data.names, data.index)
