"""Inferred frequencies, and stamps of forecasts that continue those of the history."""

from __future__ import annotations

import narwhals as nw
import numpy as np
import pandas as pd
import pytest

from probhard.errors import ParameterError
from probhard.forecasting import from_frame, to_long
from probhard.forecasting.data.stamps import Place, read_stamps

KNOWN = {  # frequency of the stamps: frequency of the periods
    "D": "D",
    "2D": "2D",
    "W-SUN": "W-SUN",
    "W-WED": "W-WED",
    "2W-SUN": "2W-SUN",
    "4W-MON": "4W-MON",
    "MS": "M",
    "ME": "M",
    "BME": "M",
    "BMS": "M",
    "2MS": "2M",
    "QE": "Q-DEC",
    "QS": "Q-DEC",
    "BQE": "Q-DEC",
    "QE-FEB": "Q-DEC",
    "QS-FEB": "Q-DEC",
    "6MS": "2Q-DEC",
    "YE": "Y-DEC",
    "YS": "Y-DEC",
    "YS-APR": "Y-DEC",
    "YE-JUN": "Y-DEC",
    "h": "h",
    "6h": "6h",
    "15min": "15min",
}


def column(stamps, name="ds"):
    return nw.from_native(pd.DataFrame({name: stamps}), eager_only=True).get_column(name)


@pytest.mark.parametrize("freq", KNOWN)
def test_forecasts_are_stamped_as_the_history_would_go_on(freq):
    stamps = pd.date_range("2019-01-30", periods=48, freq=freq)
    periods, place = read_stamps(column(stamps[:36]), None)
    assert periods.freqstr == KNOWN[freq]
    future = pd.period_range(periods.max() + 1, periods=12)
    assert (place.stamps(future) == stamps[36:]).all()


def test_the_tenth_of_every_month():
    stamps = pd.date_range("2019-01-10", periods=24, freq=pd.DateOffset(months=1))
    periods, place = read_stamps(column(stamps[:20]), None)
    assert periods.freqstr == "M"
    assert (place.stamps(pd.period_range(periods.max() + 1, periods=4)) == stamps[20:]).all()


def test_a_frequency_that_is_named_wins():
    mondays = pd.date_range("2020-01-06", periods=20, freq="W-MON")
    periods, place = read_stamps(column(mondays), "W")
    assert periods.freqstr == "W-SUN"
    assert place == Place("start")
    noon = pd.date_range("2020-01-06 12:00", periods=20, freq="D")
    periods, place = read_stamps(column(noon), "D")
    assert place == Place("after", days=0.5)
    assert (place.stamps(periods) == noon).all()


def test_years_as_numbers():
    periods, _ = read_stamps(column([2001, 2003, 2002], "year"), None)
    assert periods.freqstr == "Y-DEC"
    assert periods.max().year == 2003
    assert read_stamps(column([2001.0, 2003.0, 2002.0], "year"), None)[0].equals(periods)
    with pytest.raises(ParameterError, match="years are read from a column 'year'"):
        read_stamps(column([2001, 2002]), None)


def frame(stamps):
    rows = [(a, b, stamp) for a, b in (("A", "x"), ("A", "y"), ("B", "z")) for stamp in stamps]
    table = pd.DataFrame(rows, columns=["state", "region", "ds"])
    return table.assign(y=np.arange(float(len(table))))


def test_rows_and_back_keep_their_stamps():
    stamps = pd.date_range("2018-01-01", periods=30, freq="BME")
    data = from_frame(frame(stamps), ["state", "region"])
    assert len(data.index) == 30
    assert data.season == 12
    assert not np.isnan(data.values).any()
    back = to_long(data.values, data.names, data.index, place=data.place)
    assert (back["ds"][:30].to_numpy() == stamps.to_numpy()).all()


def test_stamps_at_no_equal_distances_are_refused():
    irregular = pd.DatetimeIndex(["2020-01-01", "2020-01-02", "2020-03-01", "2020-03-05", "2020-06-11"])
    with pytest.raises(ParameterError, match="Of 163 periods of the frequency D, 5 have rows"):
        from_frame(frame(irregular), ["state", "region"])
    assert len(from_frame(frame(irregular), ["state", "region"], on_gap="zero").index) == 163
    assert len(from_frame(frame(irregular), ["state", "region"], freq="D").index) == 163


def test_days_with_points_come_first():
    stamps = pd.date_range("2020-01-01", periods=12, freq="MS")
    assert read_stamps(column(stamps.strftime("%d.%m.%Y")), None)[0].equals(stamps.to_period("M"))
    with pytest.raises(ParameterError, match="day/month or as month/day"):
        read_stamps(column(stamps.strftime("%d/%m/%Y")), None)


@pytest.mark.parametrize("freq", ["D", "h"])
def test_offsets_that_change_with_daylight_saving_are_local_time(freq: str):
    stamps = pd.date_range("2024-03-20", periods=20 * (1 if freq == "D" else 24), freq=freq, tz="Europe/Zurich")
    periods, _ = read_stamps(column(stamps.astype(str)), None)
    assert periods.equals(stamps.tz_localize(None).to_period(freq))
    assert read_stamps(column(stamps), None)[0].equals(periods)
