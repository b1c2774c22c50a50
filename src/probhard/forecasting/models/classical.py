"""Classical forecasts: statsforecast fits every series, hierarchicalforecast makes them coherent.

The base forecasts have means ``f`` and standard deviations ``s`` of n series. MinT, with the shrunk covariance of the
in-sample errors, reconciles the bottom means to ``P f``. A row of the benchmark tables is one of

    naivebu:      S f_bottom                                  a point forecast
    mint:         S P f                                       a point forecast
    bu-normal:    S b,   b ~ N(f_bottom, diag(s_bottom^2))    independent bottom series
    mint-normal:  S b,   b ~ N(P f, P C P^T)                  C: base deviations, correlations of the errors
    permbu-mint:  S b,   b ~ N(P f, diag(s_bottom^2)) marginals, reordered from the leaves to the root so that siblings
                  have the ranks of their in-sample errors (Taieb, Taylor and Hyndman, 2017).

The reordering is done here, on the bottom series. hierarchicalforecast's PERMBU shuffles the parents' draws separately,
so that draws do not add up, and permutes unsorted draws, which leaves siblings independent.
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
LONG = 150  # rows above which AutoARIMA compares orders by conditional sums of squares, like R's auto.arima


@dataclass(frozen=True, eq=False)
class BaseForecast:
    """Independent forecasts of every series, not coherent.

    Args:
        data: The fitted history, T rows of n series.
        mean: Means, (H, n).
        stddev: Standard deviations, (H, n).
        fitted: One-step-ahead forecasts within the history, (T, n); NaN before a series starts.
    """

    data: HierarchicalData
    mean: np.ndarray
    stddev: np.ndarray
    fitted: np.ndarray


def base_forecast(data: HierarchicalData, horizon: int, model: str = "ets") -> BaseForecast:
    """Fit a classical model to every series, in one process.

    Args:
        data: The history of n series.
        horizon: Number of steps H.
        model: ``"ets"`` (AutoETS) or ``"arima"`` (AutoARIMA).

    Raises:
        ParameterError: If the model is unknown or cannot be fitted, or a series has gaps.
        MissingExtraError: If statsforecast is not installed.
    """
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
    except Exception as error:  # any type, such as NotImplementedError for few rows
        raise ParameterError(
            f"{MODELS[model]} could not be fitted to {len(data.index)} rows ({error or type(error).__name__}).",
            "It needs several rows of every series, and more with a season.",
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
    """Draw coherent forecasts by one of the classical methods.

    Args:
        base: Independent forecasts of n series over H steps.
        row: One of ``ROWS``.
        samples: Number of draws S, for rows that are not point forecasts.
        seed: Seed of the draws.

    Returns:
        Draws, (S, H, n); a point forecast is one draw.

    Raises:
        ParameterError: If the row is unknown, MinT cannot be fitted, or permbu-mint gets no tree.
    """
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
    """Fit MinT; return the sampler of the reconciled normal law, whose P (m, n) maps base means to bottom means."""
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
    except Exception as error:  # any type, such as a bare Exception for errors that are all 0
        raise ParameterError(
            f"MinT could not be fitted ({str(error).splitlines()[0] if str(error) else type(error).__name__}).",
            "It weights series by the covariance of their in-sample errors, which is degenerate for constant series.",
            "Use the rows naivebu or bu-normal, or leave out the classical rows.",
        ) from error
    return fitted.sampler


def reordered(
    draws: np.ndarray,  # (S, H, m)
    errors: np.ndarray,  # (T, n)
    hierarchy: Hierarchy,
    random: np.random.Generator,
) -> np.ndarray:
    """Reorder independent draws so that siblings have the rank dependence of past errors.

    Args:
        draws: Draws of the bottom series, (S, H, m).
        errors: In-sample errors of all series, (T, n); NaN where unknown.
        hierarchy: Plain sums of a tree.
        random: Picks the errors.

    Returns:
        Draws with the same marginals, (S, H, m).

    Raises:
        ParameterError: If the hierarchy is not a tree, or fewer than two rows of errors are complete.
    """
    nodes = _nested(hierarchy)
    known = errors[~np.isnan(errors).any(1)]
    if len(known) < 2:
        raise ParameterError(
            f"Only {len(known)} rows have in-sample errors of all series.",
            "permbu-mint takes the dependence between series from their ranks.",
            "Use a longer history, or the row mint-normal.",
        )
    count = len(draws)
    picked = random.choice(len(known), size=count, replace=count > len(known))
    ranks = np.argsort(np.argsort(known[picked], axis=0, kind="stable"), axis=0)  # (S, n)
    bottom = draws.copy()
    for node, members in nodes:
        below = bottom[..., members]  # (S, H, members)
        order = np.argsort(below.sum(-1), axis=0)[ranks[:, node]]  # (S, H)
        bottom[..., members] = np.take_along_axis(below, order[..., None], axis=0)
    return bottom


def _nested(hierarchy: Hierarchy) -> list[tuple[int, np.ndarray]]:
    """Return every node below the root with its bottom series, small nodes first; raise unless they form a tree."""
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
    """Raise if a series is empty, or has a gap between its start and the end of the history."""
    seen = ~np.isnan(data.values)
    gaps = np.maximum.accumulate(seen, axis=0) & ~seen
    empty = ~seen.any(0)
    if gaps.any() or empty.any():
        at, series = np.argwhere(gaps)[0] if gaps.any() else (0, int(np.flatnonzero(empty)[0]))
        raise ParameterError(
            f"Series {data.names[series]!r} has no value at {data.index[at]}.",
            "Classical models need every value from the start of a series to the end of the history.",
            "Fill the gap, or leave out the classical rows.",
        )
