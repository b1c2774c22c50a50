"""Conversion of time stamps to periods and back.

The frequency is inferred from the stamps. If no month holds two stamps, it is monthly, quarterly or yearly; otherwise
it is the greatest common divisor of the distances. The position of a stamp in its period (first day, last weekday, the
tenth) is kept, so that forecasts are stamped like the history.
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

SEASONS = {"Y": 1, "Q": 4, "M": 12, "W": 52, "D": 7, "B": 5, "h": 24, "min": 1440, "s": 86400}  # steps per season
LONGER = {"D": (365,), "B": (261,), "h": (168, 8760), "min": (10080,), "s": (604800,)}  # a week or a year
DAY = 86400  # seconds
OFFSET = r"(:\d\d(?:\.\d+)?) ?(?:Z|[+-]\d\d(?::?\d\d)?)$"  # after a time of day; it changes with daylight saving
CLOSEST = 7  # smallest distance in days between the stamps of two months
FEW = 4  # fewest stamps that show a distance of several units


def _pandas() -> Any:
    return optional("pandas", "forecast", "A column of stamps")


def season_of(index: pd.PeriodIndex) -> int:
    """Return the season length of an index in steps; 1 if its frequency has no season."""
    return max(1, SEASONS.get(re.sub(r"^\d+|-.*$", "", index.freqstr), 1) // index.freq.n)


def seasons_of(index: pd.PeriodIndex) -> tuple[int, ...]:
    """Return all season lengths of an index in steps, shortest first; such as a day, a week and a year of hours."""
    unit = re.sub(r"^\d+|-.*$", "", index.freqstr)
    longer = (length // index.freq.n for length in LONGER.get(unit, ()))
    return (season_of(index), *(length for length in longer if length > season_of(index)))


@dataclass(frozen=True)
class Place:
    """Position of a stamp in its period.

    Args:
        kind: ``"start"``, ``"end"`` (last day), ``"first weekday"``, ``"last weekday"``, ``"day"`` or ``"after"``.
        months: For ``"day"``: months after the first month of the period.
        days: For ``"day"``: day of that month, capped at its last day. For ``"after"``: days after the start.
    """

    kind: str = "start"
    months: int = 0
    days: float = 0.0

    @classmethod
    def of(cls, stamps: pd.DatetimeIndex, periods: pd.PeriodIndex) -> Place:
        """Find the position that all stamps share in their periods.

        Args:
            stamps: Sorted stamps, (T,).
            periods: The period of each stamp, (T,).

        Returns:
            The shared position, or ``START`` if there is none.
        """
        start = periods[:1].to_timestamp()
        places = [START]
        if re.match(r"\d*[YAQM]", periods.freqstr):
            months = int((stamps[0].month - start[0].month) % 12)
            last = 31 if stamps.is_month_end.all() else int(stamps.day.max())
            places += [cls("end"), cls("day", months, last), cls("first weekday"), cls("last weekday")]
        places.append(cls("after", days=(stamps[0] - start[0]) / _pandas().Timedelta(days=1)))
        return next((place for place in places if (place.stamps(periods) == stamps).all()), START)

    def stamps(self, periods: pd.PeriodIndex) -> pd.DatetimeIndex:
        """Return the stamp of each period, (T,)."""
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
    """Convert a column of stamps to periods.

    Args:
        column: Dates, texts, periods or years, (T,), as a narwhals series.
        freq: Pandas alias; None infers the coarsest frequency that keeps the stamps distinct.

    Returns:
        The periods, (T,), and the position of the stamps in them.

    Raises:
        ParameterError: If a stamp is missing, cannot be parsed or is ambiguous.
    """
    pandas = _pandas()
    if len(column) == 0 or column.is_null().any():
        row = int(np.argmax(column.is_null().to_numpy())) if len(column) else 0
        raise ParameterError(
            f"Row {row} has no stamp in {column.name!r}.",
            "Its value cannot be placed in time.",
            "Fill or drop the row.",
        )
    if freq is not None:
        from probhard.forecasting.data.seasons import period_frequency  # imports pandas

        freq = period_frequency(freq)
    years = column.name.lower() in ("year", "years") if freq is None else freq.lstrip("0123456789").startswith("Y")
    if years and column.dtype.is_numeric() and (column % 1 == 0).all():
        column = column.cast(nw.Int64).cast(nw.String)
    stamps = parsed(column)
    if isinstance(stamps, pandas.PeriodIndex):
        return stamps, START
    distinct = stamps.unique().sort_values()
    freq = freq or _infer(distinct)
    return stamps.to_period(freq), Place.of(distinct, distinct.to_period(freq))


def _infer(stamps: pd.DatetimeIndex) -> str:
    """Infer the frequency of sorted stamps."""
    if len(stamps) < 2:
        raise ParameterError(
            f"All rows have the stamp {stamps[0]}.",
            "Two are needed to infer the frequency.",
            "Pass freq=..., such as 'M'.",
        )
    midnight = (stamps == stamps.normalize()).all()
    distances = np.diff(stamps.to_numpy().astype("datetime64[s]").astype(np.int64))
    seconds = int(np.gcd.reduce(distances))
    aligned = stamps.is_month_end.all() or len(set(stamps.day)) == 1
    months = np.diff(12 * stamps.year.to_numpy() + stamps.month.to_numpy())
    apart = seconds % (7 * DAY) and (months > 0).all() and distances.min() > CLOSEST * DAY  # such as last weekdays
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
    """Frequency of several units, such as every second month; few stamps may show one by chance."""
    return unit if count == 1 or len(stamps) < FEW else f"{count}{unit}"


def parsed(column: Any) -> Any:
    """Parse stamps to a DatetimeIndex without time zone, or quarters to a PeriodIndex."""
    pandas = _pandas()
    if isinstance(getattr(column.to_native(), "dtype", None), pandas.PeriodDtype):
        return pandas.PeriodIndex(column.to_native())
    if column.dtype in (nw.Date, nw.Datetime):
        return pandas.DatetimeIndex(pandas.to_datetime(column.to_list())).tz_localize(None)  # local time
    if column.dtype.is_numeric():
        raise ParameterError(
            f"The stamps {column.name!r} are numbers such as {column[0]}.",
            "Numbers do not say which dates they stand for.",
            "Convert them to dates; years are read from a column 'year', or with freq='Y' ('freq: Y' in YAML).",
        )
    texts = pandas.Series([str(v).strip() for v in column.to_list()])
    texts = texts.str.replace(OFFSET, r"\1", regex=True)  # local time
    if texts.str.fullmatch(r"\d{4}[- ]?Q[1-4]").all():
        return pandas.PeriodIndex(texts.str.replace(r"[- ]", "", regex=True), freq="Q")
    parsed = [pandas.to_datetime(texts, format="ISO8601", errors="coerce")]
    if parsed[0].isna().any():
        plain = texts.str.replace(r"[.-]", "/", regex=True)
        dotted = texts.str.contains(".", regex=False).all()  # nobody writes the month first with points
        formats = ("%d/%m/%Y",) if dotted else ("%d/%m/%Y", "%m/%d/%Y")
        parsed += [pandas.to_datetime(plain, format=f, errors="coerce") for f in formats]
    whole = [stamps for stamps in parsed if not stamps.isna().any()]
    if len(whole) == 2 and (whole[0] != whole[1]).any():
        example = texts[int(np.flatnonzero(whole[0] != whole[1])[0])]
        raise ParameterError(
            f"The stamp {example!r} can be read as day/month or as month/day.",
            "All stamps fit both formats.",
            "Write dates as YYYY-MM-DD, or pass a column of dates.",
        )
    if not whole:
        row = int(np.flatnonzero(min(parsed, key=lambda stamps: stamps.isna().sum()).isna())[0])
        raise ParameterError(
            f"Row {row} has the stamp {texts[row]!r}, which does not have the date format of the other rows.",
            "Mixed date formats can be misread without any sign of it.",
            "Write all dates as YYYY-MM-DD, or pass a column of dates.",
        )
    return pandas.DatetimeIndex(whole[0]).tz_localize(None)
