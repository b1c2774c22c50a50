"""Members that fit one model to every series, with the models of statsforecast.

The form of a model (such as ETS(A,Ad,M)) is chosen on all rows. Its parameters are fitted twice: on all rows, for the
forecast, and on the rows before the first past origin, from where they are carried forward to the later ones. Rows that
are too few for the form choose their own. A series that a model cannot be fitted to is forecast by seasonal naive.
Effects of regressors are subtracted first and added to the forecasts (``data.effects``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probhard.forecasting.data.effects import effects
from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.members.base import MemberForecast, filled
from probhard.forecasting.members.plain import from_plain
from probhard.forecasting.members.workers import run_series
from probhard.forecasting.models.classical import BaseForecast

LONGEST = 1008  # rows that a model is fitted to: six weeks of hours, nearly three years of days
QUANTILE, LEVEL = 1.6448536269514722, 90  # of the normal law; the interval that deviations are read from
FARTHEST = 10.0  # largest forecast, relative to the largest value of the history: a model beyond it has diverged

Fitted = tuple[np.ndarray, np.ndarray, np.ndarray]  # mean (H,), stddev (H,), one-step forecasts (T,)


@dataclass(frozen=True)
class SeriesModel:
    """Fits one model to one series.

    Args:
        build: Makes an unfitted model of statsforecast for a season length.
        season: Season length in steps.
        refit: Makes an unfitted model of the form that a fitted one has chosen; None if it is cheap to choose again.
        forwards: Whether fitted parameters can be applied to more rows; otherwise every origin has a fit of its own.
        intermittent: Makes the model of series that are 0 in most rows; None for no other.
    """

    build: Callable[[int], Any]
    season: int
    refit: Callable[[int, Any], Any] | None = None
    forwards: bool = True
    intermittent: Callable[[int], Any] | None = None

    def run(self, values: np.ndarray, horizon: int, origins: Sequence[int]) -> tuple[list[Fitted], Any, bool]:
        """Forecast one series (T,) at every origin and at its end; also the model, and whether it could be fitted."""
        try:
            final = self._model(values).fit(filled(values[-LONGEST:], self.season)[0])
            results = [_read(final, values, horizon)]
            if origins:
                results = [*self._past(values, horizon, origins, final), *results]
            largest = FARTHEST * np.nanmax(np.abs(values)) + 1
            if all((np.abs(x) <= largest).all() for mean, stddev, _ in results for x in (mean, stddev)):
                return results, final, True  # NaN is not
        except Exception:  # whatever a model raises: the caller counts the series as not fitted
            pass
        return self.stand_in(values, horizon, origins), None, False

    def stand_in(self, values: np.ndarray, horizon: int, origins: Sequence[int]) -> list[Fitted]:
        """Forecast one series by seasonal naive, at every origin and at its end."""
        return [seasonal_naive(values[:end], horizon, self.season) for end in (*origins, len(values))]

    def _model(self, values: np.ndarray) -> Any:
        known = values[~np.isnan(values)]
        if self.intermittent is not None and (known == 0).mean() > 0.5:
            return self.intermittent(self.season)
        return self.build(self.season)

    def _past(self, values: np.ndarray, horizon: int, origins: Sequence[int], final: Any) -> list[Fitted]:
        """Fit before the first origin, and carry the parameters forward."""
        known, start = values[: origins[0]], max(0, origins[0] - LONGEST)
        rows = filled(known[start:], self.season)[0]
        model = None if np.isnan(known).all() else self._before(values, rows, final)
        if model is None:  # starts later, or too few rows
            return self.stand_in(values, horizon, origins)[:-1]
        if self.forwards and hasattr(model, "forward"):
            return [carried(model, values[start:end], horizon, self.season, start) for end in origins]
        results = [_read(model, known, horizon)]
        for end in origins[1:]:
            rows = filled(values[max(0, end - LONGEST) : end], self.season)[0]
            results.append(_read(self._before(values, rows, final) or model, values[:end], horizon))
        return results

    def _before(self, values: np.ndarray, rows: np.ndarray, final: Any) -> Any:
        """Fit the first rows of a series: in the form of all rows, or in their own where they are too few for it.

        Returns:
            The model, or None where they are too few for any.
        """
        forms = [self._model(values)] if self.refit is None else [self.refit(self.season, final), self._model(values)]
        for model in forms:
            try:
                return model.fit(rows)
            except Exception:  # whatever a model raises
                continue
        return None


def carried(model: Any, rows: np.ndarray, horizon: int, season: int, before: int = 0) -> Fitted:
    """Apply a fitted model to a longer series with its parameters.

    Args:
        model: Of statsforecast, fitted to the first of these rows.
        rows: The series, (T,); NaN where missing.
        horizon: Number of steps.
        season: Season length.
        before: Rows before these, which get no one-step forecasts.
    """
    series, first = filled(rows, season)
    made = model.forward(y=series, h=horizon, level=[LEVEL], fitted=True)
    inside = np.concatenate([np.full(before + first, np.nan), made["fitted"]])
    return made["mean"], _deviation(made, rows, inside[before:], horizon), inside


def _read(model: Any, values: np.ndarray, horizon: int) -> Fitted:
    """Read the forecasts of a fitted model."""
    try:
        made = model.predict(h=horizon, level=[LEVEL])
    except Exception:  # of a model without intervals
        made = model.predict(h=horizon)
    fitted = np.asarray(model.predict_in_sample()["fitted"], dtype=np.float64)
    inside = np.full(len(values), np.nan)
    inside[len(values) - len(fitted) :] = fitted
    return made["mean"], _deviation(made, values, inside, horizon), inside


def _deviation(made: dict[str, np.ndarray], values: np.ndarray, fitted: np.ndarray, horizon: int) -> np.ndarray:
    """Deviations of all steps, (H,): from an interval, or the size of past errors for models without intervals."""
    if f"hi-{LEVEL}" in made:
        return np.maximum(made[f"hi-{LEVEL}"] - made[f"lo-{LEVEL}"], 0.0) / (2 * QUANTILE)
    errors = (values - fitted)[1:]
    errors = errors[np.isfinite(errors)]
    return np.full(horizon, np.sqrt(np.mean(errors**2)) if len(errors) else 0.0)


def seasonal_naive(values: np.ndarray, horizon: int, season: int) -> Fitted:
    """Forecast the values one season before, with deviations that grow from season to season.

    Args:
        values: One series, (T,); NaN where missing.
        horizon: Number of steps H.
        season: Season length in steps; shorter series repeat their last value.
    """
    series, first = filled(values, season)
    lag = season if len(series) > season else 1
    repeats = np.arange(horizon) // lag + 1
    mean = series[-lag:][np.arange(horizon) % lag]
    inside = np.full(len(values), np.nan)
    inside[first + lag :] = series[:-lag] if len(series) > lag else []
    errors = (values - inside)[np.isfinite(values - inside)]
    size = np.sqrt(np.mean(errors**2)) if len(errors) else np.abs(series).mean()
    return mean, size * np.sqrt(repeats), inside


@dataclass(frozen=True)
class SeriesMember:
    """A model of statsforecast for every series.

    Args:
        name: Name of the member.
        model: How one series is fitted; its season is replaced by that of the data.
        settings: What the forecasts depend on besides the data.
        kept: Whether the settings say all of it.
    """

    name: str
    model: SeriesModel
    settings: dict[str, Any]
    kept: bool = True

    def forecast(self, data: HierarchicalData, horizon: int, origins: Sequence[int], jobs: int = 1) -> MemberForecast:
        """Fit every series once; equal series share a fit. See ``Member``."""
        require("statsforecast", f"The member {self.name!r}")
        started, effect = time.process_time(), effects(data, horizon)
        values = data.values if effect is None else data.values - effect[: len(data.index)]
        _, first, same = np.unique(np.nan_to_num(values.T, nan=np.inf), axis=0, return_index=True, return_inverse=True)
        columns = [values[:, i] for i in first]
        made = run_series(self.model, columns, horizon, tuple(origins), max(1, jobs))
        same = np.asarray(same).reshape(-1)
        ends = [*origins, len(values)]
        bases = [_stacked(data.window(0, end), [made[i][0][k] for i in same], effect) for k, end in enumerate(ends)]
        failed = [data.names[j] for j, i in enumerate(same) if made[i][2] is False]
        lost = [data.names[j] for j, i in enumerate(same) if made[i][2] is None]
        notes = [*_notes(self.name, failed), *_notes(self.name, lost, ", since a process died")]
        state = [made[i][1] for i in same]
        seconds = time.process_time() - started
        return MemberForecast(self.name, bases, None, notes, state, seconds, complete=not lost)

    def resume(self, data: HierarchicalData, horizon: int, state: Any) -> MemberForecast:
        """Apply the fitted parameters to a new history. See ``Member``."""
        season, results, failed, effect = self.model.season, [], [], effects(data, horizon)
        table = data.values if effect is None else data.values - effect[: len(data.index)]
        for name, values, plain in zip(data.names, table.T, state):
            try:
                model, start = from_plain(plain), max(0, len(values) - LONGEST)
                if self.model.forwards and hasattr(model, "forward"):
                    made = carried(model, values[start:], horizon, season, start)
                else:
                    made = _read(model.new().fit(filled(values[start:], season)[0]), values, horizon)
            except Exception:
                made = seasonal_naive(values, horizon, season)
                failed.append(name)
            results.append(made)
        return MemberForecast(self.name, [_stacked(data, results, effect)], None, _notes(self.name, failed), state)


def _stacked(known: HierarchicalData, series: Sequence[Fitted], effect: np.ndarray | None) -> BaseForecast:
    """Forecasts of all series, with the effects (T + H, n) of regressors added."""
    mean, stddev, fitted = (np.stack([one[k] for one in series], axis=1) for k in range(3))
    if effect is not None:
        end = len(known.index)
        mean, fitted = mean + effect[end : end + len(mean)], fitted + effect[:end]
    return BaseForecast(known, mean, stddev, fitted)


def _notes(name: str, failed: Sequence[str], why: str = "") -> list[str]:
    if not failed:
        return []
    some = ", ".join(failed[:3]) + (", ..." if len(failed) > 3 else "")
    return [f"{name} could not be fitted to {len(failed)} series ({some}){why}; seasonal naive stands in there."]
