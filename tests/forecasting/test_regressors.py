"""Known futures: columns, a second frame, holidays; windows of the past know their future; unused columns are named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest

from forecasting.helpers import KEYS, assert_three_parts, frame
from probhard.errors import MissingExtraError, ParameterError
from probhard.forecasting import from_frame
from probhard.forecasting.data import regressors


def priced(rows: int = 40) -> pd.DataFrame:
    df = frame(rows)
    month = df.groupby(KEYS).cumcount()
    return df.assign(price=10.0 + month, promo=(month % 5 == 0), size=df["region"].map({"x": 1.0, "y": 2.0, "z": 3.0}))


def ahead(steps: int) -> pd.DataFrame:
    stamps = pd.date_range("2021-05-01", periods=steps, freq="MS")
    return pd.DataFrame({"ds": stamps, "price": 100.0 + np.arange(steps), "promo": [True, False] * (steps // 2)})


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.from_pandas])
def test_columns_and_a_second_frame(kind):
    data = from_frame(kind(priced()), KEYS, regressors=["price", "promo"], future=kind(ahead(6)))
    assert data.feature_names == ("price", "promo")
    np.testing.assert_allclose(data.features[:, 0], 10 + np.arange(40))
    np.testing.assert_allclose(data.future_features, np.stack([100 + np.arange(6), [1, 0] * 3], 1))
    known = data.known_ahead(4)
    assert known.future_features.shape == (4, 2)
    assert known.regressor_notes == []


def test_a_past_window_knows_its_future():
    data = from_frame(priced(), KEYS, regressors=["price"], future=ahead(6))
    train, test = data.train_test(4, origin=1)
    np.testing.assert_allclose(train.features[:, 0], 10 + np.arange(32))
    np.testing.assert_allclose(train.future_features[:4, 0], test.features[:, 0])
    assert train.known_ahead(8).future_features.shape == (8, 1)


def test_rows_without_a_target_hold_the_future():
    df = priced()
    df.loc[df["ds"] >= "2021-02-01", "y"] = np.nan
    data = from_frame(df, KEYS, regressors=["price"])
    assert str(data.index[-1]) == "2021-01"
    np.testing.assert_allclose(data.future_features[:, 0], [47, 48, 49])


def test_what_is_not_used_is_named():
    df = priced().assign(late=lambda f: np.where(f["ds"] > "2021-01-01", 1.0, np.nan))
    data = from_frame(df, KEYS, regressors=["price", "promo", "size", "late"], future=ahead(4)).known_ahead(4)
    assert data.feature_names == ("price", "promo")
    size, late = sorted(data.regressor_notes, reverse=True)
    assert size == "The column 'size' is not used: 4 of the next 4 values are not known."
    assert late.startswith("The column 'late' is not used: 8% of the rows")
    constant = from_frame(priced(), KEYS, regressors=["size"], future=ahead(4).assign(size=2.0)).known_ahead(4)
    assert constant.regressor_notes == ["The column 'size' is not used: it is constant in the history."]
    assert constant.feature_names == ()
    short = from_frame(priced(), KEYS, regressors=["price"], future=ahead(4)).known_ahead(6)
    assert short.regressor_notes == ["The column 'price' is not used: 2 of the next 6 values are not known."]


def test_swiss_holidays_by_hand():
    days = pd.period_range("2024-12-23", periods=5, freq="D")
    np.testing.assert_array_equal(regressors.holiday_counts(days, "CH"), [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(regressors.holiday_counts(days, "CH-ZH"), [0, 0, 1, 1, 0])  # St Stephen's Day
    hours = pd.period_range("2024-12-24 22:00", periods=4, freq="h")
    np.testing.assert_array_equal(regressors.holiday_counts(hours, "ch"), [0, 0, 1, 1])
    months = pd.period_range("2024-03", periods=3, freq="M")
    np.testing.assert_array_equal(regressors.holiday_counts(months, "US"), [0, 0, 1])  # Memorial Day
    weeks = pd.period_range("2024-12-23", periods=2, freq="W-SUN")
    np.testing.assert_array_equal(regressors.holiday_counts(weeks, "CH"), [1, 1])


def test_holidays_reach_any_horizon():
    data = from_frame(frame(), KEYS, country_holidays="US").known_ahead(12)
    assert data.feature_names == ("holidays",)
    assert data.future_features.shape == (12, 1)
    assert data.future_features.sum() == regressors.holiday_counts(data.future(12), "US").sum() > 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regressors": ["cost"]}, "no column 'cost'"),
        ({"regressors": ["region"]}, "'region' holds"),
        ({"country_holidays": "XX"}, "No holidays are known for 'XX'"),
        ({"regressors": ["price"], "future": ahead(4).drop(columns="ds")}, "no column 'ds'"),
    ],
)
def test_refused_in_three_parts(options, message):
    with pytest.raises(ParameterError, match=message) as raised:
        from_frame(priced(), KEYS, **options)
    assert_three_parts(raised.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "holidays", None)
    with pytest.raises(MissingExtraError, match="holidays"):
        from_frame(frame(), KEYS, country_holidays="CH")
