"""Any honest history gives a forecast that adds up and that the history supports: the default members, small series."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from forecasting.helpers import KEYS, frame
from probhard.forecasting import HierarchicalForecaster, from_frame
from probhard.forecasting.data.support import unsupported

Change = Callable[[pd.DataFrame], pd.DataFrame]


def only(df: pd.DataFrame, region: str) -> pd.Series:
    return df["region"] == region


def random(df: pd.DataFrame) -> np.ndarray:
    return np.random.default_rng(0).random(len(df))


HISTORIES: dict[str, Change] = {
    "as it is": lambda df: df,
    "ended": lambda df: df[~(only(df, "z") & (df["ds"] >= "2019-10-01"))],
    "all but one ended": lambda df: df[(df["state"] == "A") & only(df, "x") | (df["ds"] < "2020-06-01")],
    "late": lambda df: df[~(only(df, "z") & (df["ds"] < "2020-10-01"))],
    "just started": lambda df: df[~(only(df, "y") & (df["ds"] < "2021-03-01"))],
    "gaps": lambda df: df[random(df) > 0.1],
    "sparse": lambda df: df[~only(df, "y") | (random(df) > 0.7)],
    "stamps without rows": lambda df: df[~df["ds"].isin(pd.to_datetime(["2019-03-01", "2020-11-01"]))],
    "zeros": lambda df: df.assign(y=df["y"].where(~only(df, "y"), 0.0)),
    "constants": lambda df: df.assign(y=df["y"].where(~only(df, "z"), 7.0)),
    "all constant": lambda df: df.assign(y=5.0),
    "counts": lambda df: df.assign(y=np.random.default_rng(1).poisson(0.3 + 3 * only(df, "x"))),
    "negative": lambda df: df.assign(y=df["y"].where(only(df, "x"), -df["y"])),
    "short": lambda df: df[df["ds"] >= "2020-10-01"],
    "huge and tiny": lambda df: df.assign(y=df["y"] * np.where(only(df, "z"), 1e9, 1e-6)),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_forecasts_add_up_and_are_supported(name: str) -> None:
    data = from_frame(HISTORIES[name](frame()), KEYS)
    assert not np.isnan(data.values[:, 0]).any()
    draws = HierarchicalForecaster(KEYS, horizon=3, num_samples=60, models=["ets", "naive"]).fit(data).sample()
    assert np.isfinite(draws).all()
    S = data.hierarchy.summation.toarray()
    np.testing.assert_allclose(draws, draws[..., -S.shape[1] :] @ S.T, rtol=1e-9, atol=1e-9 * np.abs(draws).max())
    assert (draws[..., data.ended] == 0).all()
    assert not unsupported(data, draws)
    assert data.ended.any() == ("ended" in name)


def test_two_seasons_of_hours() -> None:
    hours = pd.date_range("2024-01-01", periods=24 * 7 * 4, freq="h")
    base = 50 + 20 * np.sin(2 * np.pi * hours.hour / 24) - 15 * (hours.dayofweek > 4)
    noise = np.random.default_rng(0).normal(size=(2, len(hours)))
    df = pd.concat([pd.DataFrame({"zone": z, "ds": hours, "y": base + e}) for z, e in zip("ab", noise)])
    data = from_frame(df, ["zone"])
    assert data.seasons == (24, 168)
    draws = HierarchicalForecaster(["zone"], horizon=24, num_samples=60, models=["naive", "mstl"], windows=2)
    mean = draws.fit(data).sample().mean(0)
    monday = 2 * (50 + 20 * np.sin(2 * np.pi * np.arange(24) / 24))
    assert np.abs(mean[:, 0] - monday).mean() < 6  # a week before, not the Sunday before: 30 lower
