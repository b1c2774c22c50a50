"""Members: forecasters of all n series of a history, at its end and at past origins.

    origins:  t_1 < ... < t_K < T,      the rows that were known when a past window was forecast,

and T itself, the end of the history. A member gives independent base forecasts (means, deviations, one-step errors) at
every origin, or paths that are drawn jointly. Parameters of past origins never see the rows after the first origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.models.classical import BaseForecast

STEPS = 72  # steps that the past windows hold together
FEWEST, LEAST, MOST = 3, 6, 24  # windows: without overlap, wanted for long horizons and for short ones
MANY = 5_000  # series above which there are few windows
SEASONS = 2  # whole seasons before the first origin
LONG = 300  # rows that a network learns enough from: it is then trained once, before the first origin


@dataclass(frozen=True, eq=False)
class MemberForecast:
    """What a member says at past origins and at the end of the history.

    Args:
        name: Name of the member.
        bases: Base forecasts at the origins, the end of the history last.
        draws: Paths at the same origins, (S, H, n) each, of a member that draws jointly.
        notes: Sentences for the reader, such as series that could not be fitted.
        state: Fitted parameters as plain values, from which ``resume`` forecasts without fitting.
        seconds: CPU time of the fit; 0 if it was kept.
        complete: Whether all series were tried; others are not kept.
    """

    name: str
    bases: list[BaseForecast]
    draws: list[np.ndarray] | None = None
    notes: list[str] = field(default_factory=list)
    state: Any = None
    seconds: float = 0.0
    complete: bool = True


class Member(Protocol):
    """A forecaster of all series."""

    @property
    def name(self) -> str:
        """Name of the member."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the forecasts depend on besides the data, as plain values."""

    @property
    def kept(self) -> bool:
        """Whether its fits can be kept in files."""

    def forecast(self, data: HierarchicalData, horizon: int, origins: Sequence[int], jobs: int = 1) -> MemberForecast:
        """Fit, and forecast from every origin and from the end of the history.

        Args:
            data: The history.
            horizon: Number of steps H.
            origins: Numbers of rows known at past origins, ascending.
            jobs: Number of processes.
        """

    def resume(self, data: HierarchicalData, horizon: int, state: Any) -> MemberForecast:
        """Forecast from the end of a history with parameters that were fitted before.

        Args:
            data: The history.
            horizon: Number of steps H.
            state: Of the earlier ``MemberForecast``.
        """


def past_origins(data: HierarchicalData, horizon: int, count: int | None = None) -> tuple[int, ...]:
    """Choose the origins of past windows, the earliest first.

    Windows follow each other without overlap, as long as that leaves three of them; shorter histories have windows that
    overlap. At least half of the rows and two seasons come before the first. Very short histories have no windows.

    Args:
        data: The history.
        horizon: Rows of a window.
        count: Number of windows; by default from 6 to 24, by the horizon, and 3 for very many series.
    """
    rows = len(data.index)
    usual = int(np.clip(-(-STEPS // horizon), LEAST, MOST)) if len(data.names) <= MANY else FEWEST
    wanted = count or usual
    first = max(rows // 2, SEASONS * data.season + 2)
    span = rows - horizon - first
    if span < 0:
        return ()
    step = horizon if span >= (min(wanted, FEWEST) - 1) * horizon else max(1, span // max(1, wanted - 1))
    origins = [rows - horizon - k * step for k in range(wanted)]
    return tuple(sorted(origin for origin in origins if origin >= first))


def filled(values: np.ndarray, season: int) -> tuple[np.ndarray, int]:
    """Fill the gaps of one series, for models that need every value.

    Args:
        values: One series, (T,); NaN where missing.
        season: Season length in steps.

    Returns:
        The series from its first value on, gaps filled with the value a season before or else the one before, and
        the row of its first value.
    """
    seen = np.flatnonzero(~np.isnan(values))
    if not len(seen):
        return np.zeros(1), len(values) - 1
    series = values[seen[0] :].copy()
    for row in np.flatnonzero(np.isnan(series)):
        series[row] = series[row - season] if row >= season else series[row - 1]
    return series, int(seen[0])
