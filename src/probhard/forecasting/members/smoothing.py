"""Damped additive Holt-Winters of all series at once, for histories with very many series.

    y_t = l + phi b + s_(t-m) + e_t
    l <- l + phi b + alpha e_t,      b <- phi b + beta e_t,      s_t = s_(t-m) + gamma e_t
    var_h = sigma^2 (1 + sum_(j<h) c_j^2),      c_j = alpha + beta (phi + ... + phi^j) + gamma [m divides j]

The form is fixed; each series takes the parameters of a small grid that have the smallest one-step errors. A pass over
the rows treats all series as one vector.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import MemberForecast
from probhard.forecasting.members.series import LONGEST
from probhard.forecasting.models.classical import BaseForecast

DAMPING = 0.95
GRID = tuple(
    (a, b, g) for a, b, g in itertools.product((0.05, 0.2, 0.5), (0.0, 0.1), (0.05, 0.2))
)  # alpha, beta / alpha
BURN_IN = 1  # seasons whose errors do not choose


@dataclass
class States:
    """Level, trend (n,) and seasonal values (m, n) before a row; ``seasonal[0]`` is that of the row."""

    level: np.ndarray
    trend: np.ndarray
    seasonal: np.ndarray

    def forecast(self, horizon: int) -> np.ndarray:
        """Means of the next steps, (H, n)."""
        damped = np.cumsum(DAMPING ** np.arange(1, horizon + 1))[:, None]
        repeated = self.seasonal[np.arange(horizon) % len(self.seasonal)]
        return self.level + damped * self.trend + repeated


@dataclass(frozen=True)
class SmoothingMember:
    """Holt-Winters of a fixed form for every series."""

    name: str = "smoothing"
    settings: dict[str, Any] = field(default_factory=lambda: {"grid": GRID, "damping": DAMPING})
    kept: bool = True

    def forecast(self, data: HierarchicalData, horizon: int, origins: Sequence[int], jobs: int = 1) -> MemberForecast:
        """Choose parameters twice, and run over the rows. See ``Member``."""
        del jobs
        started = time.process_time()
        final = _chosen(data.values, data.season)
        bases = [*_bases(data, horizon, [len(data.index)], final)]
        if origins:
            past = _chosen(data.values[: origins[0]], data.season)
            bases = [*_bases(data, horizon, origins, past), *bases]
        return MemberForecast(self.name, bases, None, [], final.tolist(), time.process_time() - started)

    def resume(self, data: HierarchicalData, horizon: int, state: Any) -> MemberForecast:
        """Run over a new history with the chosen parameters. See ``Member``."""
        return MemberForecast(self.name, _bases(data, horizon, [len(data.index)], np.asarray(state)), None, [], state)


def _chosen(values: np.ndarray, season: int) -> np.ndarray:
    """Positions in the grid of smallest squared one-step errors, (n,)."""
    rows = values[-LONGEST:]
    burn = min(BURN_IN * season, len(rows) // 2)
    losses = []
    for point in range(len(GRID)):
        fitted, _ = run(rows, season, np.full(rows.shape[1], point), [])
        np.subtract(rows, fitted, out=fitted)
        losses.append(np.nansum(np.square(fitted, out=fitted)[burn:], axis=0))
    return np.argmin(losses, axis=0)


def _bases(data: HierarchicalData, horizon: int, ends: Sequence[int], chosen: np.ndarray) -> list[BaseForecast]:
    start = max(0, ends[0] - LONGEST)
    rows = data.values[start : ends[-1]]
    fitted, states = run(rows, data.season, chosen, [end - start for end in ends])
    spread = _growth(horizon, data.season)[:, chosen]
    inside = np.concatenate([np.full((start, rows.shape[1]), np.nan), fitted]) if start else fitted
    fitted = rows - inside[start:]  # errors
    np.square(fitted, out=fitted)
    bases = []
    for end, state in zip(ends, states):
        squares = fitted[: end - start]
        size = np.sqrt(np.nansum(squares, axis=0) / np.maximum(1, (~np.isnan(squares)).sum(0) - 1))
        bases.append(BaseForecast(data.window(0, end), state.forecast(horizon), size * spread, inside[:end]))
    return bases


def _growth(horizon: int, season: int) -> np.ndarray:
    """Deviation of each step relative to the first, for each point of the grid, (H, points)."""
    steps = np.arange(1, horizon)
    columns = []
    for alpha, share, gamma in GRID:
        weights = alpha + alpha * share * np.cumsum(DAMPING**steps) + gamma * (steps % season == 0)
        columns.append(np.sqrt(1 + np.concatenate([[0.0], np.cumsum(weights**2)])))
    return np.stack(columns, axis=1)


def run(rows: np.ndarray, season: int, chosen: np.ndarray, ends: Sequence[int]) -> tuple[np.ndarray, list[States]]:
    """Filter all series.

    Args:
        rows: Series, (T, n); NaN where missing, which leaves the states as they are.
        season: Season length m; 1 for none.
        chosen: Position in ``GRID`` for each series, (n,).
        ends: Numbers of rows after which the states are returned, ascending.

    Returns:
        One-step forecasts (T, n), NaN until a series has started, and the states.
    """
    alpha, share, gamma = (np.array(column)[chosen] for column in zip(*GRID))
    gamma = gamma if season > 1 else 0.0 * gamma
    beta = alpha * share
    seen = ~np.isnan(rows)
    first = np.where(seen.any(0), seen.argmax(0), len(rows))
    state = States(np.zeros(rows.shape[1]), np.zeros(rows.shape[1]), _first_season(rows, season))
    fitted, states, wanted = np.full(rows.shape, np.nan), [], set(ends)
    for t, y in enumerate(rows):
        seasonal = state.seasonal[t % season]
        starts = first == t
        expected = state.level + DAMPING * state.trend + seasonal
        error = np.where(seen[t] & ~starts, y - expected, 0.0)
        fitted[t] = np.where(first < t, expected, np.nan)
        state.level = np.where(starts, y - seasonal, state.level + DAMPING * state.trend + alpha * error)
        state.trend = DAMPING * state.trend + beta * error
        state.seasonal[t % season] = seasonal + gamma * error
        if t + 1 in wanted:
            turned = np.roll(state.seasonal, -((t + 1) % season), axis=0)
            states.append(States(state.level.copy(), state.trend.copy(), turned))
    return fitted, states


def _first_season(rows: np.ndarray, season: int) -> np.ndarray:
    """Seasonal values at the start, (m, n): mean deviations from yearly means over three seasons; 0 where unknown."""
    head = rows[: 3 * season]
    if season < 2 or len(head) < 2 * season:
        return np.zeros((season, rows.shape[1]))
    whole = head[: len(head) // season * season].reshape(-1, season, rows.shape[1])
    known = ~np.isnan(whole)
    total = np.where(known, whole, 0.0).sum(1, keepdims=True) / np.maximum(1, known.sum(1, keepdims=True))
    apart = np.where(known, whole - total, 0.0).sum(0) / np.maximum(1, known.sum(0))
    complete = known.all((0, 1))  # late starts have no pattern yet
    return np.where(complete, apart, 0.0)
