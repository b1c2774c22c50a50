"""Rivals of a forecast: what a forecaster would use instead, with intervals.

    seasonal naive:            N(y_(T+h-m k), k s^2),     s^2: mean squared change over a season, k seasons ahead
    AutoETS bottom-up:         N(S f_b, S diag(s_b^2) S^T)
    AutoETS + MinT-shrink:     N(S P f, S P W_h P^T S^T),  W_h = D_h R D_h,  R: shrunk correlation of in-sample errors
    AutoETS + OLS:             the same with P = (S^T S)^-1 S^T and R = I

P and R are hierarchicalforecast's; the laws are those of its intervals by normality. Only margins are scored, so a
rival is a mean and a deviation for every node and step, represented by its quantiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from probhard.errors import MissingExtraError, ParameterError, ProbhardError
from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.models.classical import BaseForecast, base_forecast

NAIVE, BOTTOM_UP = "seasonal naive", "AutoETS bottom-up"
RECONCILED = {"AutoETS + MinT-shrink": "mint_shrink", "AutoETS + OLS": "ols"}
NAMES = (NAIVE, BOTTOM_UP, *RECONCILED)
QUANTILES = 199  # that represent a margin
LARGEST = 3000  # nodes up to which dense matrices are affordable


@dataclass(frozen=True, eq=False)
class Margins:
    """Normal margins of n nodes over H steps.

    Args:
        mean, stddev: (H, n) each.
    """

    mean: np.ndarray
    stddev: np.ndarray

    def draws(self) -> np.ndarray:
        """Return the quantiles at evenly spaced probabilities, (QUANTILES, H, n); in place of draws in scores."""
        levels = ndtri((np.arange(QUANTILES) + 0.5) / QUANTILES)
        return self.mean + self.stddev * levels[:, None, None]


def seasonal_naive(data: HierarchicalData, horizon: int) -> Margins:
    """Forecast the values one season before, with the deviations of past changes over a season.

    Args:
        data: The history of n nodes.
        horizon: Number of steps H.
    """
    values, season = data.values, data.season if len(data.index) > data.season else 1
    filled = np.where(np.isnan(values), _carried(values), values)
    last = np.nan_to_num(filled[-season:])  # of a node that starts later: 0
    changes = values[season:] - values[:-season]
    known = ~np.isnan(changes)
    squares = np.where(known, changes, 0.0) ** 2
    size = np.sqrt(squares.sum(0) / np.maximum(known.sum(0), 1))
    steps = np.arange(horizon)
    return Margins(last[steps % season], size * np.sqrt(steps // season + 1)[:, None])


def bottom_up(base: BaseForecast) -> Margins:
    """Sum independent bottom forecasts."""
    hierarchy = base.data.hierarchy
    bottom, S = slice(hierarchy.aggregates, None), hierarchy.summation
    variance = (S.multiply(S) @ (base.stddev[:, bottom] ** 2).T).T
    return Margins((S @ base.mean[:, bottom].T).T, np.sqrt(variance))


def reconciled(base: BaseForecast, method: str) -> Margins:
    """Reconcile base forecasts by hierarchicalforecast's MinTrace.

    Args:
        base: Forecasts of all n nodes.
        method: ``"mint_shrink"`` or ``"ols"``.

    Raises:
        ParameterError: If it cannot be fitted, or there are more nodes than dense matrices allow.
    """
    methods, hierarchy = require("hierarchicalforecast.methods", "MinT"), base.data.hierarchy
    if hierarchy.variables > LARGEST:
        raise ParameterError(
            f"There are {hierarchy.variables} nodes.",
            f"MinT's dense matrices are made for up to {LARGEST} nodes.",
            "Compare with the other rivals.",
        )
    S, fit = hierarchy.summation.toarray(), methods.MinTrace(method)
    try:
        errors = {"y_insample": base.data.values.T, "y_hat_insample": base.fitted.T}
        fit.fit(S=S, y_hat=base.mean.T, **errors)
    except Exception as error:  # any type, such as a bare Exception for errors that are all 0
        raise ParameterError(
            f"MinTrace({method!r}) could not be fitted ({str(error).splitlines()[0] if str(error) else error!r}).",
            "It needs in-sample errors of all nodes, and errors that are not all 0.",
            "Compare with the other rivals.",
        ) from error
    deviation = np.sqrt(np.diag(fit.W))
    correlation = fit.W / np.outer(deviation, deviation)
    map_ = S @ fit.P  # (n, n)
    variance = []
    for spread in base.stddev:
        moved = map_ * spread
        variance.append(((moved @ correlation) * moved).sum(1))
    return Margins((map_ @ base.mean.T).T, np.sqrt(np.maximum(variance, 0.0)))


def rivals(
    train: HierarchicalData, horizon: int, base: BaseForecast | None = None
) -> Iterator[tuple[str, np.ndarray | str]]:
    """Forecast with all rivals.

    Args:
        train: The history.
        horizon: Number of steps H.
        base: AutoETS forecasts of all nodes, if they are at hand.

    Yields:
        Name, and draws (S, H, n) or the reason why it is left out.
    """
    yield NAIVE, seasonal_naive(train, horizon).draws()
    try:
        base = base_forecast(train, horizon) if base is None else base
    except (ProbhardError, MissingExtraError) as error:
        for name in NAMES[1:]:
            yield name, str(error)
        return
    yield BOTTOM_UP, bottom_up(base).draws()
    for name, method in RECONCILED.items():
        try:
            yield name, reconciled(base, method).draws()
        except (ProbhardError, MissingExtraError) as error:
            yield name, str(error)


def _carried(values: np.ndarray) -> np.ndarray:
    """Carry the last value of each column forward, (T, n)."""
    seen = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))[:, None]), axis=0)
    return np.where(seen < 0, np.nan, np.take_along_axis(values, np.maximum(seen, 0), axis=0))
