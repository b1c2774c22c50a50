"""Default lags and time features of a frequency.

    lags:           1 and 12 for months and quarters; 1, 7 and 14 for days (the reference settings of DeepVAR);
    time features:  cos and sin of ``2 pi position / period``, where the position is the ISO week or the weekday.

Other frequencies use the lags of their natural season. The estimator accepts other lags and features.
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
    """Convert a pandas alias to the frequency of a period: "M" for "M", "MS" and "ME".

    Args:
        freq: Any pandas frequency alias.

    Returns:
        The ``freqstr`` of the matching ``pandas.Period``.

    Raises:
        ParameterError: If pandas does not know the frequency.
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
                "It sets the distance between two rows, and with it the lags and time features.",
                "Use a pandas alias such as 'M', 'Q', 'W', 'D' or 'h'.",
            ) from error


def default_lags(freq: str) -> tuple[int, ...]:
    """Return the lags of a frequency, in steps; ``(1,)`` if its season is unknown.

    Raises:
        ParameterError: If pandas does not know the frequency.
    """
    return DEFAULTS.get(_root(freq), ((1,), ()))[0]


def default_time_features(freq: str) -> tuple[str, ...]:
    """Return the names in ``CYCLES`` that a frequency uses by default.

    Raises:
        ParameterError: If pandas does not know the frequency.
    """
    return DEFAULTS.get(_root(freq), ((1,), ()))[1]


def _root(freq: str) -> str:
    return period_frequency(freq).partition("-")[0].upper()


def stamps(start: pd.Period, first: int, length: int) -> pd.PeriodIndex:
    """Return the periods of consecutive rows of a series.

    Args:
        start: Period of row 0.
        first: Number of the first row; negative for rows before the start.
        length: Number of rows.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # business days are deprecated as periods, but used by GluonTS
        return pd.period_range(start + first, periods=length, freq=start.freq)


def cycle_features(names: Sequence[str], index: pd.PeriodIndex) -> np.ndarray:
    """Encode the position of each period in each cycle by its cosine and sine.

    Args:
        names: Names in ``CYCLES``.
        index: The periods, (T,).

    Returns:
        Features, (T, 2 * len(names)).

    Raises:
        ParameterError: If a name is not in ``CYCLES``.
    """
    columns = []
    for name in names:
        check_choice("time feature", name, tuple(CYCLES))
        attribute, period = CYCLES[name]
        angle = 2 * np.pi * np.asarray(getattr(index, attribute), dtype=np.float64) / period
        columns += [np.cos(angle), np.sin(angle)]
    return np.stack(columns, -1) if columns else np.empty((len(index), 0))
