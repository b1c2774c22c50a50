"""New rows after a known history: the same as reading both at once, with what was filled and with regressors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from forecasting.helpers import KEYS, assert_three_parts, frame
from probhard.errors import ParameterError
from probhard.forecasting import from_frame
from probhard.forecasting.data.joined import joined


def without(df: pd.DataFrame, region: str, first: str, last: str) -> pd.DataFrame:
    """Leave out rows of one region."""
    return df[~((df["region"] == region) & (df["ds"] >= first) & (df["ds"] <= last))]


CASES = {
    "nothing": [],
    "a gap before": [("y", "2019-03-01", "2019-04-01")],
    "a gap after": [("y", "2021-01-01", "2021-01-01")],
    "a gap across": [("z", "2020-06-01", "2020-07-01")],
    "ended before": [("y", "2019-06-01", "2021-12-01")],  # no new rows at all
    "ends after": [("z", "2020-09-01", "2021-12-01")],
    "late rows": [("z", "2021-04-01", "2021-04-01")],
    "started late": [("y", "2018-01-01", "2018-12-01")],
}


@pytest.mark.parametrize("case", CASES)
def test_joined_rows_equal_those_read_at_once(case: str) -> None:
    df = frame(40)
    for gap in CASES[case]:
        df = without(df, *gap)
    known = from_frame(df[df["ds"] < "2020-07-01"], KEYS)
    new = from_frame(df[df["ds"] >= "2020-07-01"], KEYS, freq="M", season=12)
    whole, both = from_frame(df, KEYS), joined(known, new)
    np.testing.assert_allclose(both.values, whole.values, rtol=1e-12)
    np.testing.assert_array_equal(both.observed, np.where(np.isnan(whole.observed), np.nan, both.values))
    np.testing.assert_array_equal(both.ended, whole.ended)
    assert both.mended() == whole.mended()
    assert both.notes == whole.notes
    assert both.index.equals(whole.index)


def test_new_rows_replace_those_of_the_same_time() -> None:
    df = without(frame(40), "y", "2020-05-01", "2020-06-01")  # late rows, filled at first
    known = from_frame(df[df["ds"] < "2020-07-01"], KEYS)
    assert known.mending is not None
    assert known.mending.filled.any()
    later = frame(40)
    both = joined(known, from_frame(later[later["ds"] >= "2020-04-01"], KEYS, freq="M", season=12))
    whole = from_frame(later, KEYS)
    np.testing.assert_allclose(both.values, whole.values, rtol=1e-12)
    assert both.mending is None


def test_other_series_and_missing_rows_are_errors() -> None:
    df = frame(40)
    known = from_frame(df[df["ds"] < "2020-07-01"], KEYS)
    later = df[df["ds"] >= "2020-07-01"]
    renamed = later.assign(region=later["region"].replace("z", "w"))
    for new, on_gap in ((renamed, "mend"), (later[later["region"] != "z"], "refuse"), (later.iloc[1:], "mend")):
        rows = new[new["ds"] >= "2020-09-01"] if new is not renamed and on_gap == "mend" else new
        with pytest.raises(ParameterError) as caught:
            joined(known, from_frame(rows, KEYS, freq="M", season=12), on_gap)
        assert_three_parts(caught.value)


def test_absent_series_are_zero_where_asked() -> None:
    df = frame(40)
    known = from_frame(df[df["ds"] < "2020-07-01"], KEYS)
    new = df[(df["ds"] >= "2020-07-01") & (df["region"] != "z")]
    both = joined(known, from_frame(new, KEYS, freq="M", season=12, on_gap="zero"), "zero")
    assert (both.values[30:, -1] == 0).all()
    assert both.mending is None


def test_regressors_of_both() -> None:
    df = frame(40)
    df["price"] = np.cos(np.arange(len(df)) % 40)
    df["staff"] = 1.0 * (np.arange(len(df)) % 40)
    ahead = pd.DataFrame({"ds": pd.date_range("2020-07-01", periods=3, freq="MS"), "price": [7.0, 8.0, 9.0]})
    old, later = df[df["ds"] < "2020-07-01"], df[df["ds"] >= "2020-07-01"]
    known = from_frame(old, KEYS, regressors=["price"], future=ahead)
    new = from_frame(later, KEYS, freq="M", season=12, regressors=["price", "staff"])
    both = joined(known, new)
    assert both.feature_names == ("price",)
    np.testing.assert_allclose(both.features[:, 0], np.cos(np.arange(40)))
    assert "fitted without" in both.regressor_notes[0]
    kept = joined(known, replace(new, regressors=None))  # a file without the column: what was known ahead stays
    np.testing.assert_allclose(kept.regressors.values[30:, 0], [7.0, 8.0, 9.0])
    assert joined(replace(known, regressors=None), new).feature_names == ()
