"""Models of other libraries as members.

| object                                        | how it forecasts past windows                               |
|-----------------------------------------------|-------------------------------------------------------------|
| model of statsforecast                        | fitted before the first window, carried forward             |
| ``StatsForecast``, ``MLForecast``, ``NeuralForecast`` | its own ``cross_validation``, fitted before the first window |
| GluonTS estimator                             | trained on the rows before the first window                 |

The last two give no one-step errors. Their errors on past windows take that place, and give the deviations of means
that come without intervals: of a window, from the errors of the others.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from probhard.errors import ParameterError, ProbhardError
from probhard.forecasting.data.frames import to_long
from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.members.base import Member, MemberForecast, filled
from probhard.forecasting.members.catalogue import NAMES, named_member
from probhard.forecasting.members.network import NetworkForecast
from probhard.forecasting.members.series import SeriesMember, SeriesModel, seasonal_naive
from probhard.forecasting.models.classical import BaseForecast
from probhard.forecasting.reconciliation.columns import is_quantile

SAMPLES = 200  # of a GluonTS predictor, for each series
WIDTH = 2.5631031310892007  # of a normal law's 80 % interval, in deviations


def member_of(model: Any, data: HierarchicalData, network: NetworkForecast | None = None) -> Member:
    """Make a member of a name or of a model of another library.

    Args:
        model: A name in ``catalogue``, a model or engine of Nixtla, a GluonTS estimator, or a member.
        data: The history.
        network: Settings of ``deepvar``.

    Raises:
        ParameterError: If the name is unknown, or the object is of another kind.
    """
    if isinstance(model, str):
        return named_member(model, data, network)
    if hasattr(model, "resume"):
        return model  # a member
    name = type(model).__name__
    if type(model).__module__.startswith("statsforecast") and hasattr(model, "new") and hasattr(model, "fit"):
        return SeriesMember(str(model), SeriesModel(partial(_again, model), data.season), {}, kept=False)
    if hasattr(model, "cross_validation"):
        return WindowMember(name, partial(_engine_means, model))
    if hasattr(model, "train"):
        return WindowMember(name, partial(_gluonts_means, model))
    raise ParameterError(
        f"models has a {name}.",
        "A member is a name, a model or engine of Nixtla, or a GluonTS estimator.",
        f"Choose among {', '.join(NAMES)}, or pass a model such as statsforecast.models.AutoETS(season_length=12).",
    )


def _again(model: Any, season: int) -> Any:
    """An unfitted copy of a statsforecast model; it has a season length of its own."""
    del season
    return model.new()


@dataclass(frozen=True, eq=False)
class WindowMember:
    """A member that forecasts windows, without one-step errors.

    Args:
        name: Name of the member.
        means: Maps (data, horizon, origins) to means and deviations at every origin and at the end, (K + 1, H, n)
            each; deviations may be None.
    """

    name: str
    means: Any
    settings: dict[str, Any] = field(default_factory=dict)
    kept: bool = False

    def forecast(self, data: HierarchicalData, horizon: int, origins: Sequence[int], jobs: int = 1) -> MemberForecast:
        """Forecast all windows. See ``Member``."""
        del jobs
        started = time.process_time()
        try:
            mean, stddev = self.means(data, horizon, tuple(origins))
        except ProbhardError:
            raise
        except Exception as error:  # any type; the pool then leaves the member out
            text = next(iter(str(error).strip().splitlines()), "")
            raise ParameterError(
                f"{self.name} failed: {type(error).__name__}: {text}",
                "Its forecasts of past windows and of the future are the member.",
                "Fit it alone to see why, or leave it out.",
            ) from error
        errors = [data.values[end : end + horizon] - mean[k] for k, end in enumerate(origins)]
        bases, fitted = [], np.full(data.values.shape, np.nan)
        for k, end in enumerate((*origins, len(data.index))):
            known = data.window(0, end)
            others = [error for j, error in enumerate(errors) if j != k]
            spread = _spread(known, horizon, others) if stddev is None else stddev[k]
            bases.append(BaseForecast(known, mean[k], spread, fitted[:end].copy()))
            if k < len(errors):
                fitted[end : end + horizon] = mean[k]
        return MemberForecast(self.name, bases, None, [], None, time.process_time() - started)

    def resume(self, data: HierarchicalData, horizon: int, state: Any) -> MemberForecast:
        """Forecast a new history; the model is fitted again, since its parameters are its own. See ``Member``."""
        del state
        return self.forecast(data, horizon, ())


def _spread(known: HierarchicalData, horizon: int, errors: Sequence[np.ndarray]) -> np.ndarray:
    """Deviations (H, n) from errors of windows, (H, n) each; from seasonal naive without any."""
    if errors:
        return np.tile(np.sqrt(np.nanmean(np.square(errors), axis=(0, 1))), (horizon, 1))
    return np.stack([seasonal_naive(values, horizon, known.season)[1] for values in known.values.T], axis=1)


def _engine_means(
    engine: Any, data: HierarchicalData, horizon: int, origins: tuple[int, ...]
) -> tuple[np.ndarray, None]:
    """Means of an engine of Nixtla, over its models."""
    shape, stamps = (horizon, len(data.names)), _stamps(engine, data)
    frame, means = _long(data, stamps), []
    if origins:
        step = origins[1] - origins[0] if len(origins) > 1 else horizon
        known = frame[frame["ds"].isin(stamps[: origins[-1] + horizon])]
        windows = {"h": horizon, "n_windows": len(origins), "step_size": step, "refit": False}
        made = copy.deepcopy(engine).cross_validation(df=known, **windows)
        means = [_table(made[made["cutoff"] == stamps[origin - 1]], shape) for origin in origins]
    final = copy.deepcopy(engine)
    fitted = final.fit(df=frame)
    return np.stack([*means, _table((final if fitted is None else fitted).predict(h=horizon), shape)]), None


def _stamps(engine: Any, data: HierarchicalData) -> Any:
    """Stamps of the rows as the engine counts them: whole numbers, or those of the history."""
    if isinstance(getattr(engine, "freq", 1), int):
        return np.arange(len(data.index))
    return to_long(np.zeros((len(data.index), 1)), data.names[:1], data.index, None, data.place)["ds"].to_numpy()


def _long(data: HierarchicalData, stamps: Any) -> Any:
    """All series without gaps, as Nixtla's frame."""
    pandas = require("pandas", "An engine of Nixtla")
    parts = []
    for number, values in enumerate(data.values.T):
        series, first = filled(values, data.season)
        parts.append(pandas.DataFrame({"unique_id": f"{number:06d}", "ds": stamps[first:], "y": series}))
    return pandas.concat(parts, ignore_index=True)


def _table(made: Any, shape: tuple[int, int]) -> np.ndarray:
    """Means over an engine's models, (H, n)."""
    made = made.reset_index() if "unique_id" not in made.columns else made
    models = [name for name in made.columns if name not in ("unique_id", "ds", "cutoff", "y", "index")]
    models = [name for name in models if name.endswith("-median") or not is_quantile(name)]
    ordered = made.sort_values(["unique_id", "ds"])
    return ordered[models].mean(axis=1).to_numpy().reshape(shape[1], shape[0]).T


def _gluonts_means(
    estimator: Any, data: HierarchicalData, horizon: int, origins: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Means and deviations of a GluonTS estimator of single series."""
    if getattr(estimator, "prediction_length", horizon) != horizon:
        raise ParameterError(
            f"The estimator has prediction_length={estimator.prediction_length}, the horizon is {horizon}.",
            "Past windows are as long as the forecast.",
            f"Build it with prediction_length={horizon}, or pass horizon=... to the forecaster.",
        )
    ends, means, spreads, predictor = (*origins, len(data.index)), [], [], None
    for k, end in enumerate(ends):
        entries = [
            {"start": data.index[first], "target": series.astype(np.float32), "item_id": name}
            for name, (series, first) in zip(
                data.names, (filled(values[:end], data.season) for values in data.values.T)
            )
        ]
        if predictor is None or k == len(origins):
            predictor = _trained(estimator, entries)
        made = [_moments(forecast) for forecast in predictor.predict(entries, num_samples=SAMPLES)]
        means.append(np.stack([mean for mean, _ in made], axis=1))
        spreads.append(np.stack([stddev for _, stddev in made], axis=1))
    return np.stack(means), np.stack(spreads)


def _trained(estimator: Any, entries: list[dict[str, Any]]) -> Any:
    """Train a GluonTS estimator; checkpoints of Lightning go to a folder of their own, unless it names one."""
    settings = getattr(estimator, "trainer_kwargs", None)
    if settings is None or "default_root_dir" in settings:
        return estimator.train(entries)
    with tempfile.TemporaryDirectory(prefix="probhard-") as folder:
        apart = copy.copy(estimator)
        apart.trainer_kwargs = {**settings, "default_root_dir": folder}
        return apart.train(entries)


def _moments(forecast: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation (H,) of a GluonTS forecast by samples, a distribution or quantiles."""
    if hasattr(forecast, "samples"):
        return np.asarray(forecast.samples).mean(0), np.asarray(forecast.samples).std(0)
    lower, upper = (np.asarray(forecast.quantile(level)) for level in ("0.1", "0.9"))
    return np.asarray(forecast.mean), np.maximum(upper - lower, 0.0) / WIDTH
