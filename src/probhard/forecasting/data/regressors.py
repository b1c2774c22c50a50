"""Known futures: columns whose values are known ahead, such as prices, plans, campaigns and public holidays.

A regressor has one value per period, x_t. Where a column differs between series, x_t is its mean over them. Rows after
the history come from a second frame, or from rows of the same frame without a target. Holidays are counted:

    days and shorter periods:  1 on a public holiday, else 0;
    longer periods:            the number of public holidays on weekdays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import narwhals as nw
import numpy as np

from probhard.errors import ParameterError, optional
from probhard.forecasting.data.nodes import check_columns

if TYPE_CHECKING:
    import pandas as pd

HOLIDAYS = "holidays"  # name of the regressor
FEWEST = 0.5  # share of the rows of the history that must be known
SATURDAY = 5


@dataclass(frozen=True, eq=False)
class Regressors:
    """Regressors of the T rows of a history and of F rows after it.

    Args:
        names: Names of the k regressors.
        values: Their values, (T + F, k); NaN where a row after the history is not known.
        unused: Columns that are not used, with the reason.
    """

    names: tuple[str, ...]
    values: np.ndarray
    unused: dict[str, str] = field(default_factory=dict)

    def after(self, first: int) -> Regressors:
        """Return the rows from ``first`` on."""
        return replace(self, values=self.values[first:])

    def known(self, rows: int, horizon: int) -> Regressors:
        """Keep the regressors that are known for some rows and ``horizon`` rows after them, and vary.

        Args:
            rows: Rows of the history, T.
            horizon: Number of steps.

        Returns:
            Regressors of ``rows + horizon`` rows; those left out are named in ``unused``.
        """
        values = self.values[: rows + horizon]
        unused, kept = dict(self.unused), []
        for i, name in enumerate(self.names):
            missing = rows + horizon - len(values) + int(np.isnan(values[:, i]).sum())
            if missing:
                unused[name] = f"{missing} of the next {horizon} values are not known"
            elif np.ptp(values[:rows, i]) == 0:
                unused[name] = "it is constant in the history"
            else:
                kept.append(i)
        return Regressors(tuple(self.names[i] for i in kept), values[:, kept], unused)

    def only(self, names: Sequence[str], rows: int, horizon: int) -> Regressors:
        """Return some regressors of some rows and ``horizon`` rows after them.

        Raises:
            ParameterError: If one is not known for all of these rows.
        """
        values = self.values[: rows + horizon, [self.names.index(name) for name in names if name in self.names]]
        if values.shape != (rows + horizon, len(names)) or np.isnan(values).any():
            raise ParameterError(
                f"The regressors {', '.join(names)} are not known for {horizon} steps after the history.",
                "The model was fitted with them.",
                "Pass their future values, or a shorter horizon.",
            )
        return Regressors(tuple(names), values)

    def notes(self) -> list[str]:
        """Say which columns are not used, a sentence each."""
        return [f"The column {name!r} is not used: {reason}." for name, reason in self.unused.items()]


def read_regressors(
    frames: Sequence[tuple[Any, pd.PeriodIndex]], index: pd.PeriodIndex, columns: Sequence[str], country: str | None
) -> Regressors | None:
    """Read regressors of a history and the rows after it.

    Args:
        frames: The history and the future as narwhals frames, with the period of every row; later ones take precedence.
        index: Periods of the history, (T,).
        columns: Names of the columns.
        country: Country whose holidays are added, such as ``"CH"`` or ``"CH-ZH"``.

    Returns:
        The regressors; None if there are none.

    Raises:
        ParameterError: If a column is missing or not numeric, or the country is unknown.
        MissingExtraError: If holidays are asked for and the package is not installed.
    """
    if not columns and country is None:
        return None
    pandas = optional("pandas", "forecast", "Regressors")
    last = max([index[-1], *(periods.max() for _, periods in frames if len(periods))])
    if country is not None:
        last = max(last, index[-1] + len(index))  # as far as anyone forecasts
    whole = pandas.period_range(index[0], last)
    values, unused, names = [], {}, []
    for name in columns:
        if not any(name in table.columns for table, _ in frames):
            check_columns(frames[0][0], [name], "It is named as a regressor.", "Correct the name")
        column = np.full(len(whole), np.nan)
        for table, periods in frames:
            if name in table.columns:
                seen = pandas.Series(_numbers(table.get_column(name))).groupby(periods).mean()
                seen = seen.reindex(whole).to_numpy()
                column = np.where(np.isnan(seen), column, seen)
        history = column[: len(index)]
        share = float((~np.isnan(history)).mean())
        if share < FEWEST:
            unused[name] = f"{share:.0%} of the rows have a value"
            continue
        column[: len(index)] = pandas.Series(history).ffill().bfill().to_numpy()
        names.append(name)
        values.append(column)
    if country is not None:
        names.append(HOLIDAYS)
        values.append(holiday_counts(whole, country))
    table = np.stack(values, 1) if values else np.empty((len(whole), 0))
    return Regressors(tuple(names), table, unused)


def holiday_counts(index: pd.PeriodIndex, country: str) -> np.ndarray:
    """Count the public holidays of each period, (T,).

    Args:
        index: The periods.
        country: ISO code of a country, with a subdivision after "-" if wanted: ``"CH"``, ``"CH-ZH"``.

    Raises:
        ParameterError: If the country or subdivision is unknown.
        MissingExtraError: If the package ``holidays`` is not installed.
    """
    package, pandas = optional("holidays", "forecast", "Public holidays"), optional("pandas", "forecast", "Holidays")
    code, _, part = country.partition("-")
    years = range(index[0].start_time.year, index[-1].end_time.year + 1)
    try:
        known = package.country_holidays(code.upper(), subdiv=part.upper() or None, years=years)
    except NotImplementedError as error:
        raise ParameterError(
            f"No holidays are known for {country!r}.",
            "Countries are ISO codes of two letters, with a subdivision after '-' if wanted.",
            "Write CH, DE-BY or US-CA, or give the holidays as a column.",
        ) from error
    days = pandas.DatetimeIndex(sorted(known))
    if index.freq.n == 1 and pandas.Timedelta(index[0].end_time - index[0].start_time) < pandas.Timedelta(days=1):
        return np.isin(index.start_time.normalize(), days).astype(np.float64)  # a day or less
    days = days[days.dayofweek < SATURDAY]
    return np.asarray(days.searchsorted(index.end_time, "right") - days.searchsorted(index.start_time), dtype=float)


def _numbers(column: Any) -> np.ndarray:
    """Convert a column of numbers or of true and false, (rows,)."""
    if not (column.dtype.is_numeric() or column.dtype == nw.Boolean):
        raise ParameterError(
            f"The regressor {column.name!r} holds {column.dtype}, not numbers.",
            "Models multiply regressors by coefficients.",
            "Encode it as numbers, such as 0 and 1.",
        )
    return np.asarray(column.cast(nw.Float64).to_numpy(), dtype=np.float64)
