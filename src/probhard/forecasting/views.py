"""Views of a forecaster: cross-validation as Nixtla's ``cutoff`` frame, and a picture of one node.

cutoff c:  fitted (or updated) on the rows up to c, compared with the h rows after it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from probhard.errors import ParameterError
from probhard.forecasting.data.frames import to_long
from probhard.forecasting.data.table import require
from probhard.forecasting.models.defaults import default_horizon
from probhard.forecasting.models.estimator import check_count
from probhard.forecasting.reconciliation.columns import probabilities, summary
from probhard.forecasting.saved import COLUMNS

if TYPE_CHECKING:
    from probhard.forecasting.forecaster import HierarchicalForecaster

SEASONS = 4  # of history that a picture shows


def cross_validation(
    forecaster: HierarchicalForecaster,
    df: Any,
    h: int | None = None,
    n_windows: int = 3,
    step_size: int | None = None,
    level: Sequence[float] | None = (80, 95),
    refit: bool = True,
    **reading: Any,
) -> Any:
    """Forecast past windows of a history from the rows before each.

    Args:
        forecaster: Its settings are used; it is not changed.
        df: A long frame, or ``HierarchicalData``.
        h: Steps of a window; by default the forecaster's horizon.
        n_windows: Number of windows; the last one ends with the history.
        step_size: Rows between windows; by default h.
        level: Interval levels in percent.
        refit: Whether every window has a fit of its own; otherwise the first fit is updated.
        **reading: Options of ``from_frame``.

    Returns:
        A pandas frame: node, stamp, cutoff, observed value, mean and interval ends; the columns of Nixtla.

    Raises:
        ProbhardError: If the history is too short, or a count or level is invalid.
    """
    pandas = require("pandas", "cross_validation")
    probabilities(level or ())
    data = forecaster._read(df, reading)
    steps = h or forecaster.horizon or default_horizon(data)
    for name, value in {"h": steps, "n_windows": n_windows, "step_size": step_size or steps}.items():
        check_count(name, value)
    names = {**COLUMNS, **{name: reading[name] for name in COLUMNS if name in reading}}
    model, frames = None, []
    for origin in range(n_windows - 1, -1, -1):
        train, test = data.train_test(steps, origin, step_size or steps)
        if model is None or refit:
            model = copy.copy(forecaster)
            model.horizon = steps
            model.fit(train)
        else:
            model.update(train)
        columns = {names["target_col"]: test.observed, **summary(model.sample(steps), model.model, level or ())}
        table = to_long(columns, data.names, test.index, None, data.place, **names)
        stamps = to_long(np.zeros((1, 1)), data.names[:1], train.index[-1:], None, data.place, **names)
        table.insert(2, "cutoff", stamps[names["time_col"]].iloc[0])
        frames.append(table)
    return pandas.concat(frames, ignore_index=True)


def plot(forecaster: HierarchicalForecaster, node: str, h: int | None = None, level: float = 80, ax: Any = None) -> Any:
    """Draw the last seasons of a node, its mean forecast and one interval, with matplotlib.

    Args:
        forecaster: A fitted forecaster.
        node: Name of a node.
        h: Number of steps; by default the horizon of the fit.
        level: Level of the interval in percent.
        ax: Axes of matplotlib to draw on; by default new ones.

    Returns:
        The axes.

    Raises:
        ParameterError: Before ``fit``, or if there is no such node.
    """
    probabilities([level])  # raises if it is none
    data = forecaster.data
    if node not in data.names:
        close = [name for name in data.names if node.lower() in name.lower()][:3]
        raise ParameterError(
            f"There is no node {node!r}.",
            f"The history has {len(data.names)} nodes.",
            f"Choose {' or '.join(map(repr, close or data.names[:3]))}.",
        )
    ax = require("matplotlib.pyplot", "plot").subplots(figsize=(8, 3))[1] if ax is None else ax
    at, rows = data.names.index(node), max(SEASONS * data.season, 24)
    draws = forecaster.sample(h)[..., at]
    past, future = data.index[-rows:].to_timestamp(), data.future(draws.shape[1]).to_timestamp()
    ax.plot(past, data.values[-rows:, at], color="0.2", label="history")
    ax.plot(future, draws.mean(0), color="C0", label=forecaster.model)
    ends = np.quantile(draws, [(1 - level / 100) / 2, (1 + level / 100) / 2], axis=0)
    ax.fill_between(future, *ends, color="C0", alpha=0.25, label=f"{level:g} %")
    ax.set_title(node)
    ax.legend(frameon=False)
    return ax
