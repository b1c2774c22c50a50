"""Hierarchical data: histories that add up, long frames in and out, data sets by name."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
from gluonts.dataset.hierarchical import HierarchicalTimeSeries
from hierarchicalforecast.utils import aggregate

from probhard import Hierarchy, MissingExtraError, ParameterError, ShapeError
from probhard.forecasting import HierarchicalData, from_frame, load, to_long
from probhard.forecasting.data import datasets as named
from probhard.forecasting.data.table import require

S = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=float)
NAMES = ["all", "ab", "a", "b", "c"]
TAGS = {"total": ["all"], "pair": ["ab"], "leaf": ["a", "b", "c"]}
MONTHS = pd.period_range("2020-01", periods=24, freq="M")


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(1, 9, (24, 3)) @ S.T


def data(**options) -> HierarchicalData:
    return HierarchicalData.from_matrix(table(), S, MONTHS, NAMES, TAGS, **options)


# ---------------------------------------------------------------------------------------------- tables


def test_levels_names_and_frequency():
    found = data(name="x")
    assert found.names == tuple(NAMES)
    assert found.freq == "M"
    assert {k: v.tolist() for k, v in found.levels.items()} == {"total": [0], "pair": [1], "leaf": [2, 3, 4]}
    plain = HierarchicalData.from_matrix(table(), S, MONTHS)
    assert {k: v.tolist() for k, v in plain.levels.items()} == {"aggregates": [0, 1], "bottom": [2, 3, 4]}
    assert plain.names == ("0", "1", "2", "3", "4")
    assert list(found.future(2).astype(str)) == ["2022-01", "2022-02"]


def test_incoherent_history_is_refused_with_the_worst_series_or_rebuilt():
    values = table()
    values[3, 0] *= 1.001
    values[5, 1] *= 1.5
    with pytest.raises(ParameterError, match=r"'ab' differs .* at 2020-06.* 2 of 2 sums") as error:
        HierarchicalData.from_matrix(values, S, MONTHS, NAMES, TAGS)
    assert "coherence='aggregate'" in error.value.fix
    rebuilt = HierarchicalData.from_matrix(values, S, MONTHS, NAMES, TAGS, coherence="aggregate")
    np.testing.assert_allclose(rebuilt.values, table(), rtol=1e-14)
    values = table()
    values[3, 0] *= 1 + 1e-9  # rounding of a file
    assert HierarchicalData.from_matrix(values, S, MONTHS).values[3, 0] == values[3, 0]


def test_missing_values_mask_only_the_sums_that_need_them():
    values = table()
    values[2, 4] = np.nan  # c is in the total only
    values[:, :2] = np.nan
    values[2, 0] = 77.0  # known although c is not
    found = HierarchicalData.from_matrix(values, S, MONTHS).values
    assert found[2, 0] == 77.0
    np.testing.assert_allclose(found[2, 1], found[2, 2] + found[2, 3])
    np.testing.assert_allclose(np.delete(found, 2, 0), np.delete(table(), 2, 0))
    bottoms = HierarchicalData.from_matrix(values[:, 2:], S, MONTHS).values
    assert np.isnan(bottoms[2, [0, 4]]).all()
    assert np.isnan(bottoms).sum() == 2


def test_splits_by_origin():
    found = data(horizon=4)
    train, test = found.train_test()
    assert len(train.index) == 20
    np.testing.assert_array_equal(test.values, found.values[20:])
    assert str(test.index[0]) == "2021-09"
    train, test = found.train_test(origin=2)
    np.testing.assert_array_equal(train.values, found.values[:12])
    np.testing.assert_array_equal(test.values, found.values[12:16])
    train, test = found.train_test(horizon=3, origin=2, step=1)
    np.testing.assert_array_equal(test.values, found.values[19:22])
    for bad in ({"origin": 5}, {"origin": 6}, {"horizon": 24}, {"origin": -1}, {"horizon": -2}):
        with pytest.raises(ParameterError, match="rows to learn from"):
            found.train_test(**bad)
    with pytest.raises(ParameterError, match="No horizon"):
        data().train_test()
    np.testing.assert_array_equal(found.window(2, -3).values, found.values[2:-3])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"values": table().T}, ShapeError, r"\(5, 24\)"),
        ({"index": pd.date_range("2020", periods=24)}, ParameterError, "DatetimeIndex"),
        ({"index": MONTHS.delete(3).append(MONTHS[-1:] + 1)}, ParameterError, "consecutive"),
        ({"names": ["all", "ab", "a", "a", "c"]}, ParameterError, "'a' occurs more than once"),
        ({"tags": {"total": ["everything"]}}, ParameterError, "'everything', which is not a series"),
        ({"values": np.where(table() > 20, np.inf, table())}, ParameterError, "'all' is infinite at"),
        ({"coherence": "hope"}, ParameterError, "hope"),
    ],
)
def test_bad_tables_are_refused(change, error, message):
    given = {"values": table(), "S": S, "index": MONTHS, "names": NAMES, "tags": {}} | change
    with pytest.raises(error, match=message) as raised:
        HierarchicalData.from_matrix(**given)
    assert raised.value.what
    assert raised.value.why
    assert raised.value.fix


def test_gluonts_there_and_back():
    bottom = pd.DataFrame(table()[:, 2:], index=MONTHS, columns=["a", "b", "c"])
    theirs = HierarchicalTimeSeries(ts_at_bottom_level=bottom, S=S)
    found = HierarchicalData.from_gluonts(theirs, horizon=3)
    (entry,) = found.to_gluonts()
    (expected,) = theirs.to_dataset()
    np.testing.assert_allclose(entry["target"], expected["target"], rtol=1e-14)
    assert entry["start"] == expected["start"]
    assert found.names[2:] == ("a", "b", "c")


# ---------------------------------------------------------------------------------------------- frames


def long(seed: int = 0, stamps: pd.DatetimeIndex | None = None) -> pd.DataFrame:
    stamps = pd.date_range("2020-01-01", periods=10, freq="MS") if stamps is None else stamps
    places = [("N", "x"), ("N", "y"), ("Q", "x"), ("Q", "z")]
    rows = [{"state": s, "region": r, "ds": t} for s, r in places for t in stamps]
    frame = pd.DataFrame(rows)
    frame["y"] = np.random.default_rng(seed).integers(0, 50, len(frame)).astype(float)
    return frame


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.from_pandas])
def test_keys_against_nixtlas_aggregate(kind):
    frame = long().sample(frac=1, random_state=1, ignore_index=True)
    found = from_frame(kind(frame), ["state", "region"], horizon=2)
    spec = [["top"], ["top", "state"], ["top", "state", "region"]]
    expected, summation, tags = aggregate(frame.assign(top="Total"), spec)
    wide = expected.pivot(index="ds", columns="unique_id", values="y")
    assert set(found.names) == set(wide.columns)
    np.testing.assert_allclose(found.values, wide[list(found.names)].to_numpy(), rtol=1e-14)
    assert [len(v) for v in found.levels.values()] == [len(v) for v in tags.values()]
    assert (found.freq, found.season, found.horizon) == ("M", 12, 2)
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
    frame = long()
    crossed = from_frame(frame.assign(top="T"), [["top"], ["region"], ["top", "state", "region"]])
    assert crossed.names[:4] == ("T", "x", "y", "z")
    np.testing.assert_allclose(crossed.values[:, 1], frame[frame["region"] == "x"].groupby("ds")["y"].sum())
    nested = from_frame(frame.assign(country="Au"), ["country", "state", "region"])
    assert nested.names[:3] == ("Au", "Au/N", "Au/Q")
    flat = from_frame(frame.assign(unique_id=frame["state"] + frame["region"]), ["unique_id"])
    assert flat.names[:2] == ("Total", "Total/Nx")


def test_gaps_are_masked_zero_or_refused():
    frame = long()
    late = (frame["region"] == "z") & (frame["ds"] < "2020-04-01")
    hole = (frame["state"] == "N") & (frame["region"] == "y") & (frame["ds"] == "2020-06-01")
    frame.loc[(frame["region"] == "x") & (frame["state"] == "N") & (frame["ds"] == "2020-08-01"), "y"] = np.nan
    short = frame[~(late | hole)]
    found = from_frame(short, ["state", "region"])
    at = {name: i for i, name in enumerate(found.names)}
    assert np.flatnonzero(np.isnan(found.values[:, at["Total/Q/z"]])).tolist() == [0, 1, 2]
    assert np.flatnonzero(np.isnan(found.values[:, at["Total/N"]])).tolist() == [5, 7]
    assert np.flatnonzero(np.isnan(found.values[:, at["Total"]])).tolist() == [0, 1, 2, 5, 7]
    zero = from_frame(pl.from_pandas(short), ["state", "region"], on_gap="zero")
    assert zero.values[5, at["Total/N/y"]] == 0
    assert np.isnan(zero.values[7, at["Total/N/x"]])  # a row that says NaN
    with pytest.raises(ParameterError, match=r"'Total/Q/z' has no value at 2020-01"):
        from_frame(short, ["state", "region"], on_gap="refuse")
    everywhere = short[short["ds"] != "2020-03-01"]  # a stamp that no series has
    assert len(from_frame(everywhere, ["state", "region"]).index) == 10


def test_zero_and_constant_series_are_kept():
    frame = long()
    frame.loc[frame["region"] == "x", "y"] = 0.0
    frame.loc[frame["region"] == "z", "y"] = 7.0
    found = from_frame(frame, ["state", "region"], nonnegative=True)
    assert (found.values[:, list(found.names).index("Total/N/x")] == 0).all()
    assert (found.values[:, list(found.names).index("Total/Q/z")] == 7).all()


def edited(row: int, **values) -> pd.DataFrame:
    frame = long()
    for column, value in values.items():
        frame[column] = frame[column].astype(object) if isinstance(value, str) else frame[column]
        frame.loc[row, column] = value
    return frame


TEXT = long().assign(ds=lambda f: f["ds"].dt.strftime("%Y-%m-%d"))


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (pd.concat([long(), long().iloc[[13]]]), {}, r"'Total/N/y' has 2 rows for 2020-04"),
        (edited(13, y=-3.0), {"nonnegative": True}, r"'Total/N/y' is -3 at 2020-04"),
        (edited(13, y=np.inf), {}, r"'Total/N/y' is infinite at 2020-04|'Total.*' is infinite at 2020-04"),
        (edited(13, y="many"), {}, "not numbers"),
        (edited(13, ds=pd.NaT), {}, "Row 13 has no stamp"),
        (TEXT.assign(ds=[*TEXT["ds"][:-1], "soon"]), {}, "Row 39 has the stamp 'soon'"),
        (TEXT.assign(ds=[*TEXT["ds"][:-1], "13/02/2020"]), {}, "Row 39 has the stamp '13/02/2020'"),
        (long().assign(ds=lambda f: f["ds"].dt.strftime("%d/%m/%Y")), {}, "'01/02/2020' can be read as day/month or"),
        (long().assign(ds=lambda f: f["ds"].dt.year * 100 + f["ds"].dt.month), {}, "numbers such as 202001"),
        (long().head(1), {}, "Two are needed"),
        (long().head(0), {"keys": None, "tags": {"u": ["u"], "u/i": ["u/a"]}, "id_col": "state"}, "Row 0 has no stamp"),
        (long().drop(columns="region"), {}, "no column 'region'"),
        (long().drop(columns="y"), {}, "no column 'y'"),
        (long(), {"keys": None}, "no column 'unique_id'"),
        (long().assign(unique_id="a"), {"keys": None}, "Neither keys nor S nor tags"),
        (long().assign(unique_id="d"), {"keys": None, "tags": {"up": ["u"], "up/id": ["u/a"]}}, "'d' is not in the"),
        (long().assign(y=lambda f: f["y"].where(f["region"] != "z")), {}, "'Total/Q/z' has no value at any time"),
        (long(), {"on_gap": "guess"}, "guess"),
        (long(), {"freq": "fortnight"}, "fortnight"),
    ],
)
def test_what_cannot_be_read_is_refused_in_three_parts(frame, options, message):
    with pytest.raises(ParameterError, match=message) as raised:
        from_frame(frame, **({"keys": ["state", "region"]} | options))
    assert raised.value.what
    assert raised.value.why
    assert raised.value.fix


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
        found = from_frame(long(stamps=kept), ["state", "region"])
        assert found.freq == freq
        assert found.season == season
        assert len(found.index) >= len(kept)
        assert (~np.isnan(found.values[:, 0])).sum() == len(kept)


def test_stamps_in_other_forms_give_the_same_table():
    frame = long(stamps=pd.date_range("2020-01-01", periods=10, freq="QS"))
    expected = from_frame(frame, ["state", "region"])
    for stamps in (
        frame["ds"].dt.strftime("%Y-%m-%d"),
        frame["ds"].dt.strftime("%YQ") + frame["ds"].dt.quarter.astype(str),
        frame["ds"].dt.to_period("Q"),
        frame["ds"].dt.date,
        (frame["ds"] + pd.offsets.Day(19)).dt.strftime("%d.%m.%Y"),
        (frame["ds"] + pd.offsets.Day(19)).dt.strftime("%m/%d/%Y"),
    ):
        found = from_frame(frame.assign(ds=stamps), ["state", "region"], freq="QS")
        np.testing.assert_array_equal(found.values, expected.values)
        assert found.index.equals(expected.index)
    years = long(stamps=pd.date_range("2001", periods=6, freq="YS"))
    found = from_frame(years.assign(ds=years["ds"].dt.year), ["state", "region"], freq="Y")
    assert found.index.equals(from_frame(years, ["state", "region"]).index)


@pytest.mark.parametrize("freq", ["QE", "MS", "W-WED", "D", "h"])
def test_long_frames_go_there_and_back(freq):
    frame = long(stamps=pd.date_range("2020-01-01", periods=10, freq=freq))
    frame["unique_id"] = "Total/" + frame["state"] + "/" + frame["region"]
    expected = frame[["unique_id", "ds", "y"]]
    polars = pl.from_pandas(frame).with_columns(pl.col("ds").cast(pl.Date if freq not in "h" else pl.Datetime("us")))
    for kind in (frame, polars):
        found = from_frame(kind, ["state", "region"])
        back = to_long(found.bottom, found.names[-4:], found.index, kind, found.place)
        assert type(back) is type(kind)
        if kind is not frame:
            assert back.schema["ds"] == kind.schema["ds"]
            back = back.to_pandas().assign(ds=lambda f: pd.to_datetime(f["ds"]).astype("datetime64[ns]"))
        pd.testing.assert_frame_equal(back, expected, check_dtype=False)
    both = to_long({"mean": found.values, "low": found.values - 1}, found.names, found.index)
    assert list(both.columns) == ["unique_id", "ds", "mean", "low"]
    with pytest.raises(ShapeError, match="'y' has shape"):
        to_long(found.values.T, found.names, found.index)


# ---------------------------------------------------------------------------------------------- data sets by name


def test_embedded_employment_against_published_totals():
    found = load()
    assert found.values.shape == (120, 21)
    assert load("employment").name == found.name == "us-employment"
    published = {  # January 2006 and December 2015, thousands
        "nonfarm": (135450, 143093),
        "private": (113603, 120993),
        "goods_producing": (22467, 19737),
        "private_service_providing": (91136, 101256),
        "manufacturing": (14210, 12360),
        "trade_transportation_utilities": (26162, 27036),
    }
    for name, values in published.items():
        np.testing.assert_allclose(found.values[[0, -1], found.names.index(name)], values, atol=0.7)
    assert sum(len(v) for v in found.levels.values()) == 21
    assert found.hierarchy.algorithm.startswith("tree")
    assert (found.freq, str(found.index[0]), str(found.index[-1])) == ("M", "2006-01", "2015-12")


@pytest.mark.parametrize(
    ("name", "shape", "ends", "horizon", "freq", "season"),
    [
        ("labour", (514, 57), [1, 9, 25, 57], 8, "M", 12),
        ("tourism", (36, 89), [1, 5, 33, 89], 8, "Q-DEC", 4),
        ("tourism_large", (228, 555), [1, 8, 35, 111, 115, 143, 251, 555], 12, "M", 12),
        ("traffic", (366, 207), [1, 3, 7, 207], 1, "D", 7),
        ("wiki", (366, 199), [1, 7, 25, 49, 199], 1, "D", 7),
    ],
)
def test_benchmark_sets(hierarchical_data, name, shape, ends, horizon, freq, season):
    found = load(name)
    raw = np.genfromtxt(hierarchical_data / name / "data.csv", delimiter=",", skip_header=1)[:, -shape[1] :]
    np.testing.assert_array_equal(found.values[:, -10:], raw[:, -10:])
    assert found.values.shape == shape
    assert [v[-1] + 1 for v in found.levels.values()] == ends
    assert (found.horizon, found.freq, found.season) == (horizon, freq, season)
    total = found.values[:, : shape[1] - found.hierarchy.bottoms]
    np.testing.assert_allclose(total[:, 0], found.bottom.sum(1), rtol=1e-12)


def test_changed_or_absent_files_are_refused(hierarchical_data, tmp_path, monkeypatch):
    folder = tmp_path / "hierarchical" / "tourism"
    shutil.copytree(hierarchical_data / "tourism", folder)
    monkeypatch.setenv("PROBHARD_DATA", str(tmp_path))
    assert load("tourism").name == "tourism"
    text = (folder / "data.csv").read_text()
    (folder / "data.csv").write_text(text.replace("84503", "84504", 1))
    with pytest.raises(ParameterError, match="has the sha256"):
        load("tourism")
    with pytest.raises(ParameterError, match=r"There is no file .*labour"):
        load("labour")
    with pytest.raises(ParameterError, match="'tourism_large'"):
        load("tourismlarge")


def test_download_is_pinned_and_explains_a_missing_network(monkeypatch, tmp_path):
    import pooch

    monkeypatch.delenv("PROBHARD_DATA", raising=False)
    asked = []

    def retrieve(url, known_hash, **options):
        asked.append((url, known_hash))
        raise OSError("no route to host")

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(ParameterError, match="could not be downloaded: no route to host") as raised:
        load("wiki")
    assert "PROBHARD_DATA" in raised.value.fix
    source = named.BENCHMARKS["wiki"]
    assert asked == [(f"{named.SOURCE}wiki2/data.csv", f"sha256:{source.data}")]
    assert "a822a9d7c571e20ef2e1d554e6a678c2404ee2b3" in named.SOURCE


def test_import_needs_no_extra_and_use_names_it(monkeypatch):
    block = "import sys; sys.modules.update(dict.fromkeys(['pandas', 'gluonts', 'statsforecast', 'pooch']));"
    code = block + (
        "import probhard.forecasting as f\ntry: f.load()\nexcept ImportError as e: print(type(e).__name__, e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MissingExtraError")
    assert 'pip install "probhard[forecast]"' in done.stdout
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(MissingExtraError, match="pooch"):
        require("pooch", "Downloading")


def test_a_ready_hierarchy_is_taken_as_it_is():
    hierarchy = Hierarchy(S, names=NAMES, tags=TAGS)
    assert HierarchicalData.from_matrix(table(), hierarchy, MONTHS).hierarchy is hierarchy
