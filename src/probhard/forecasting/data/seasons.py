"""What a frequency says about a series: the lags to look back to, and the place of a stamp in its cycles.

    lags: 1 and 12 for months and quarters, 1, 7 and 14 for days (the reference settings of DeepVAR);
    time features: cos and sin of ``2 pi position / period``, with the ISO week or the weekday for the position.

Both can be chosen by hand; other frequencies have the lags of their natural season.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd

from probhard.errors import ParameterError, check_choice

CYCLES: dict[str, tuple[str, int]] = {  # name: attribute of a PeriodIndex, length of the cycle
    "minute_of_hour": ("minute", 60),
    "hour_of_day": ("hour", 24),
    "day_of_week": ("dayofweek", 7),
    "day_of_month": ("day", 31),
    "day_of_year": ("dayofyear", 366),
    "week_of_year": ("week", 53),
    "month_of_year": ("month", 12),
}

DEFAULTS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {  # lags and time features
    "Y": ((1,), ()),
    "Q": ((1, 12), ("week_of_year",)),
    "M": ((1, 12), ("week_of_year",)),
    "W": ((1, 52), ("week_of_year",)),
    "B": ((1, 5, 10), ("day_of_week",)),
    "D": ((1, 7, 14), ("day_of_week",)),
    "H": ((1, 24, 168), ("hour_of_day", "day_of_week")),
    "MIN": ((1, 60), ("minute_of_hour", "hour_of_day")),
}


def period_frequency(freq: str) -> str:
    """The frequency of a period in pandas' words: "M" for "M", "MS" and "ME".

    Raises:
        ParameterError: If pandas knows no such frequency.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of aliases that pandas renames
        try:
            return str(pd.Period("2000-01-03", freq=freq).freqstr)
        except ValueError:
            pass
        try:
            return str(pd.date_range("2000-01-03", periods=1, freq=freq).to_period().freqstr)
        except (ValueError, AttributeError, TypeError) as error:
            raise ParameterError(
                f"freq={freq!r} is not a frequency of periods.",
                "It says how far two rows are apart, and so which lags and time features there are.",
                "Use a pandas alias such as 'M', 'Q', 'W', 'D' or 'h'.",
            ) from error


def default_lags(freq: str) -> tuple[int, ...]:
    """Lags of a frequency; only the last value where nothing is known about its season."""
    return DEFAULTS.get(_root(freq), ((1,), ()))[0]


def default_time_features(freq: str) -> tuple[str, ...]:
    """Names of the cycles of a frequency."""
    return DEFAULTS.get(_root(freq), ((1,), ()))[1]


def _root(freq: str) -> str:
    return period_frequency(freq).partition("-")[0].upper()


def stamps(start: pd.Period, first: int, length: int) -> pd.PeriodIndex:
    """``length`` stamps of a series, from its row ``first`` on; rows before its start have negative numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # business days are deprecated as periods, but used by GluonTS
        return pd.period_range(start + first, periods=length, freq=start.freq)


def cycle_features(names: Sequence[str], index: pd.PeriodIndex) -> np.ndarray:
    """Cosine and sine of the stamps' places in the named cycles, (T, 2 * len(names))."""
    columns = []
    for name in names:
        check_choice("time feature", name, tuple(CYCLES))
        attribute, period = CYCLES[name]
        angle = 2 * np.pi * np.asarray(getattr(index, attribute), dtype=np.float64) / period
        columns += [np.cos(angle), np.sin(angle)]
    return np.stack(columns, -1) if columns else np.empty((len(index), 0))
