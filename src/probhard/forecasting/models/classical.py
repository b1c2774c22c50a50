"""Classical rows: base forecasts of every series by statsforecast, made coherent with hierarchicalforecast.

With base means ``f`` and standard deviations ``s`` (n series), and the reconciled bottom means ``P f`` of MinT (shrunk
covariance of the in-sample errors), a row is one of

    naivebu:      S f_bottom                                  a point forecast, as the benchmark tables score it
    mint:         S P f                                       a point forecast
    bu-normal:    S b,   b ~ N(f_bottom, diag(s_bottom^2))    independent bottom series
    mint-normal:  S b,   b ~ N(P f, P C P^T)                  C: base deviations with the errors' correlations
    permbu-mint:  S b,   b ~ N(P f, diag(s_bottom^2)) margins, reordered from the leaves to the root so that siblings
                  have the ranks of their in-sample errors (Taieb, Taylor and Hyndman, 2017).

hierarchicalforecast's PERMBU shuffles the parents' draws on their own, so that draws do not add up, and permutes draws
that were not sorted, which leaves siblings independent. The reordering is therefore done here, on the bottom series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, check_choice
from probhard.forecasting.data.table import HierarchicalData, require, summed

MODELS = {"ets": "AutoETS", "arima": "AutoARIMA"}
ROWS = ("naivebu", "mint", "bu-normal", "mint-normal", "permbu-mint")
LONG = 150  # rows; beyond, AutoARIMA compares orders by conditional sums of squares, as R's auto.arima does by default


@dataclass(frozen=True, eq=False)
class BaseForecast:
    """Forecasts of every series on its own, not coherent.

    Args:
        data: The history that they were fitted to, T rows of n series.
        mean: (H, n).
        stddev: (H, n).
        fitted: One step ahead within the history, (T, n), NaN before a series starts.
    """

    data: HierarchicalData
    mean: np.ndarray
    stddev: np.ndarray
    fitted: np.ndarray


def base_forecast(data: HierarchicalData, horizon: int, model: str = "ets") -> BaseForecast:
    """Fit ``"ets"`` (AutoETS) or ``"arima"`` (AutoARIMA) to every series, in one process."""
    check_choice("model", model, tuple(MODELS))
    pandas, statsforecast = (require(name, "A classical forecast") for name in ("pandas", "statsforecast"))
    models = require("statsforecast.models", "A classical forecast")
    steps, series = np.nonzero(~np.isnan(data.values))
    _check_runs(data)
    order = np.lexsort((steps, series))
    steps, series = steps[order], series[order]
    frame = pandas.DataFrame({"unique_id": series, "ds": steps, "y": data.values[steps, series]})
    search = {"approximation": len(data.index) > LONG} if model == "arima" else {}
    automatic = getattr(models, MODELS[model])(season_length=data.season, alias="model", **search)
    engine = statsforecast.StatsForecast(models=[automatic], freq=1, n_jobs=1)
    try:
        table = engine.forecast(df=frame, h=horizon, level=[90], fitted=True)
    except Exception as error:  # of any kind, such as NotImplementedError for few rows
        raise ParameterError(
            f"{MODELS[model]} could not be fitted to {len(data.index)} rows ({error or type(error).__name__}).",
            "It needs several rows of every series, and more for seasons.",
            "Use a longer history, or a shorter season.",
        ) from error
    inside = engine.forecast_fitted_values()
    count = len(data.names)
    mean = table["model"].to_numpy().reshape(count, horizon).T  # rows come back by series, then by step
    upper = table["model-hi-90"].to_numpy().reshape(count, horizon).T
    fitted = np.full(data.values.shape, np.nan)
    fitted[inside["ds"].to_numpy(), inside["unique_id"].to_numpy()] = inside["model"].to_numpy()
    return BaseForecast(data, mean, np.maximum(upper - mean, 0.0) / norm.ppf(0.95), fitted)


def reconcile(base: BaseForecast, row: str, samples: int = 200, seed: int = 0) -> np.ndarray:
    """Draws (S, H, n) of one of ``ROWS``, coherent each; point forecasts are one draw."""
    check_choice("row", row, ROWS)
    hierarchy, random = base.data.hierarchy, np.random.default_rng(seed)
    bottoms = slice(hierarchy.aggregates, None)
    shape = (samples, len(base.mean), hierarchy.bottoms)
    if row == "naivebu":
        bottom = base.mean[None, :, bottoms]
    elif row == "bu-normal":
        bottom = base.mean[:, bottoms] + base.stddev[:, bottoms] * random.standard_normal(shape)
    else:
        sampler = _minimum_trace(base, seed)
        if row == "mint-normal":
            bottom = sampler.get_samples(samples)[bottoms].transpose(2, 1, 0)
        else:
            bottom = (sampler.P @ base.mean.T).T[None]  # (1, H, m)
            if row == "permbu-mint":
                drawn = bottom + base.stddev[:, bottoms] * random.standard_normal(shape)
                bottom = reordered(drawn, base.data.values - base.fitted, hierarchy, random)
    return summed(hierarchy, bottom)


def _minimum_trace(base: BaseForecast, seed: int) -> Any:
    """The sampler of the reconciled normal law; its P (m, n) maps base to bottom means."""
    methods = require("hierarchicalforecast.methods", "MinT")
    try:
        fitted = methods.MinTrace("mint_shrink").fit(
            S=base.data.hierarchy.summation.toarray(),
            y_hat=base.mean.T,
            y_insample=base.data.values.T,
            y_hat_insample=base.fitted.T,
            sigmah=base.stddev.T,
            intervals_method="normality",
            seed=seed,
        )
    except Exception as error:  # of any kind, such as a bare one for errors that are all 0
        raise ParameterError(
            f"MinT could not be fitted ({str(error).splitlines()[0] if str(error) else type(error).__name__}).",
            "It weighs series by the covariance of their in-sample errors, which constant series do not have.",
            "Use the rows naivebu or bu-normal, or leave out the classical rows.",
        ) from error
    return fitted.sampler


def reordered(
    draws: np.ndarray,  # (S, H, m), margins of the bottom series
    errors: np.ndarray,  # (T, n), in-sample, NaN where unknown
    hierarchy: Hierarchy,
    random: np.random.Generator,
) -> np.ndarray:
    """The same margins with the rank dependence of past errors among siblings, (S, H, m)."""
    nodes = _nested(hierarchy)
    known = errors[~np.isnan(errors).any(1)]
    if len(known) < 2:
        raise ParameterError(
            f"Only {len(known)} rows have in-sample errors of all series.",
            "Their ranks are the dependence that permbu-mint restores.",
            "Use a longer history, or the row mint-normal.",
        )
    count = len(draws)
    picked = random.choice(len(known), size=count, replace=count > len(known))
    ranks = np.argsort(np.argsort(known[picked], axis=0, kind="stable"), axis=0)  # (S, n)
    bottom = draws.copy()
    for node, members in nodes:
        part = bottom[..., members]  # (S, H, members)
        order = np.argsort(part.sum(-1), axis=0)[ranks[:, node]]  # (S, H)
        bottom[..., members] = np.take_along_axis(part, order[..., None], axis=0)
    return bottom


def _nested(hierarchy: Hierarchy) -> list[tuple[int, np.ndarray]]:
    """Every node but the largest with its bottom series, small ones first; refused unless these nest like a tree."""
    summation = hierarchy.summation
    sizes = np.diff(summation.indptr)
    overlap = (summation @ summation.T).tocoo()
    row, column = overlap.coords
    if (overlap.data != np.minimum(sizes[row], sizes[column])).any():
        raise ParameterError(
            "The hierarchy is not a tree of plain sums.",
            "permbu-mint reorders draws from the leaves to the root of a tree.",
            "Use the row mint-normal.",
        )
    members = np.split(summation.indices, summation.indptr[1:-1])
    small = [int(node) for node in np.argsort(sizes, kind="stable") if sizes[node] < hierarchy.bottoms]
    return [(node, members[node]) for node in small]


def _check_runs(data: HierarchicalData) -> None:
    """Raise where a series has a gap after its start, or does not reach the end."""
    seen = ~np.isnan(data.values)
    gaps = np.maximum.accumulate(seen, axis=0) & ~seen
    empty = ~seen.any(0)
    if gaps.any() or empty.any():
        at, series = np.argwhere(gaps)[0] if gaps.any() else (0, int(np.flatnonzero(empty)[0]))
        raise ParameterError(
            f"Series {data.names[series]!r} has no value at {data.index[at]}.",
            "The classical models need every value from a series' start to the end of the history.",
            "Fill the gap, or leave out the classical rows.",
        )
