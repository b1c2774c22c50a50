"""Stamps of rows as periods, and periods as stamps.

The frequency is found from the stamps: months, quarters or years where no month has two of them, else the greatest
common divisor of their distances. Where in its period a stamp lies (its first day, its last weekday, the tenth) is kept
for the stamps of forecasts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import narwhals as nw
import numpy as np

from probhard.errors import ParameterError, optional

if TYPE_CHECKING:
    import pandas as pd

SEASONS = {"Y": 1, "Q": 4, "M": 12, "W": 52, "D": 7, "B": 5, "h": 24, "min": 1440, "s": 86400}  # years, weeks, days
DAY = 86400  # seconds
CLOSEST = 7  # days between stamps of two months, at least
FEW = 4  # stamps from which their distance is seen


def _pandas() -> Any:
    return optional("pandas", "forecast", "A column of stamps")


def season_of(index: pd.PeriodIndex) -> int:
    """Steps after which the seasons of this frequency repeat, 1 where it has none."""
    return max(1, SEASONS.get(re.sub(r"^\d+|-.*$", "", index.freqstr), 1) // index.freq.n)


@dataclass(frozen=True)
class Place:
    """Where in its period a stamp lies.

    Args:
        kind: ``"start"``, ``"end"`` (the last day), ``"first weekday"``, ``"last weekday"``, ``"day"`` or ``"after"``.
        months: Of a day: how many months after the first one of the period.
        days: The day of that month, or the last one of a shorter month; or days after the start.
    """

    kind: str = "start"
    months: int = 0
    days: float = 0.0

    @classmethod
    def of(cls, stamps: pd.DatetimeIndex, periods: pd.PeriodIndex) -> Place:
        """The place that all these stamps of periods have in common; the start if they have none."""
        start = periods[:1].to_timestamp()
        places = [START]
        if re.match(r"\d*[YAQM]", periods.freqstr):
            months = int((stamps[0].month - start[0].month) % 12)
            last = 31 if stamps.is_month_end.all() else int(stamps.day.max())
            places += [cls("end"), cls("day", months, last), cls("first weekday"), cls("last weekday")]
        places.append(cls("after", days=(stamps[0] - start[0]) / _pandas().Timedelta(days=1)))
        return next((place for place in places if (place.stamps(periods) == stamps).all()), START)

    def stamps(self, periods: pd.PeriodIndex) -> pd.DatetimeIndex:
        """The stamps of periods."""
        pandas, start = _pandas(), periods.to_timestamp()
        if self.kind == "after":
            return start + pandas.Timedelta(days=self.days)
        if self.kind == "day":
            month = start + pandas.DateOffset(months=self.months)
            return month + pandas.to_timedelta(np.minimum(self.days, month.days_in_month) - 1, "D")
        if self.kind == "first weekday":
            return start + pandas.to_timedelta((7 - start.dayofweek) * (start.dayofweek > 4), "D")
        if self.kind == "start":
            return start
        end = periods.to_timestamp(how="end").normalize()
        return end if self.kind == "end" else end - pandas.to_timedelta(np.maximum(end.dayofweek - 4, 0), "D")


START = Place()


def read_stamps(column: Any, freq: str | None) -> tuple[pd.PeriodIndex, Place]:
    """The periods of a column of stamps, of a given frequency or of the coarsest that tells them apart."""
    pandas = _pandas()
    if len(column) == 0 or column.is_null().any():
        row = int(np.argmax(column.is_null().to_numpy())) if len(column) else 0
        raise ParameterError(
            f"Row {row} has no stamp in {column.name!r}.", "Its value has no place in time.", "Fill or drop the row."
        )
    if freq is not None:
        from probhard.forecasting.data.seasons import period_frequency  # it needs pandas

        freq = period_frequency(freq)
    years = column.name.lower() in ("year", "years") if freq is None else freq.lstrip("0123456789").startswith("Y")
    if column.dtype.is_integer() and years:
        column = column.cast(nw.String)
    stamps = _parsed(column)
    if isinstance(stamps, pandas.PeriodIndex):
        return stamps, START
    distinct = stamps.unique().sort_values()
    freq = freq or _infer(distinct)
    return stamps.to_period(freq), Place.of(distinct, distinct.to_period(freq))


def _infer(stamps: pd.DatetimeIndex) -> str:
    """The frequency of sorted stamps."""
    if len(stamps) < 2:
        raise ParameterError(
            f"All rows have the stamp {stamps[0]}.", "Two are needed to see a frequency.", "Pass freq=..., such as 'M'."
        )
    midnight = (stamps == stamps.normalize()).all()
    distances = np.diff(stamps.to_numpy().astype("datetime64[s]").astype(np.int64))
    seconds = int(np.gcd.reduce(distances))
    aligned = stamps.is_month_end.all() or len(set(stamps.day)) == 1
    months = np.diff(12 * stamps.year.to_numpy() + stamps.month.to_numpy())
    apart = seconds % (7 * DAY) and (months > 0).all() and distances.min() > CLOSEST * DAY  # the last weekdays, say
    if midnight and (aligned or apart):
        count = int(np.gcd.reduce(months))
        size, unit = (12, "Y") if count % 12 == 0 else (3, "Q") if count % 3 == 0 else (1, "M")
        return _several(stamps, count // size, unit)
    if midnight and seconds % (7 * DAY) == 0:
        return _several(stamps, seconds // (7 * DAY), f"W-{stamps[0].day_name()[:3].upper()}")
    if midnight:
        return _several(stamps, seconds // DAY, "D")
    size, unit = (3600, "h") if seconds % 3600 == 0 else (60, "min") if seconds % 60 == 0 else (1, "s")
    return _several(stamps, seconds // size, unit)


def _several(stamps: pd.DatetimeIndex, count: int, unit: str) -> str:
    """Every second month, say; of few stamps it may be chance."""
    return unit if count == 1 or len(stamps) < FEW else f"{count}{unit}"


def _parsed(column: Any) -> Any:
    """Stamps as a DatetimeIndex without time zone, quarters as a PeriodIndex."""
    pandas = _pandas()
    if isinstance(getattr(column.to_native(), "dtype", None), pandas.PeriodDtype):
        return pandas.PeriodIndex(column.to_native())
    if column.dtype in (nw.Date, nw.Datetime):
        return pandas.DatetimeIndex(pandas.to_datetime(column.to_list())).tz_localize(None)  # the clock on the wall
    if column.dtype.is_numeric():
        raise ParameterError(
            f"The stamps {column.name!r} are numbers such as {column[0]}.",
            "Which dates they stand for is not known.",
            "Convert them to dates; years are read from a column 'year', or with freq='Y' ('freq: Y' in YAML).",
        )
    texts = pandas.Series([str(v).strip() for v in column.to_list()])
    if texts.str.fullmatch(r"\d{4}[- ]?Q[1-4]").all():
        return pandas.PeriodIndex(texts.str.replace(r"[- ]", "", regex=True), freq="Q")
    parsed = [pandas.to_datetime(texts, format="ISO8601", errors="coerce")]
    if parsed[0].isna().any():
        plain = texts.str.replace(r"[.-]", "/", regex=True)
        parsed += [pandas.to_datetime(plain, format=f, errors="coerce") for f in ("%d/%m/%Y", "%m/%d/%Y")]
    whole = [stamps for stamps in parsed if not stamps.isna().any()]
    if len(whole) == 2 and (whole[0] != whole[1]).any():
        example = texts[int(np.flatnonzero(whole[0] != whole[1])[0])]
        raise ParameterError(
            f"The stamp {example!r} can be read as day/month or as month/day.",
            "All stamps fit both.",
            "Write dates as YYYY-MM-DD, or pass a column of dates.",
        )
    if not whole:
        row = int(np.flatnonzero(min(parsed, key=lambda stamps: stamps.isna().sum()).isna())[0])
        raise ParameterError(
            f"Row {row} has the stamp {texts[row]!r}, which is no date like the others.",
            "Dates in several forms are read wrongly without notice.",
            "Write all dates as YYYY-MM-DD, or pass a column of dates.",
        )
    return pandas.DatetimeIndex(whole[0]).tz_localize(None)
