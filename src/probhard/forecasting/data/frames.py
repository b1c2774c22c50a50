"""Conversion between long frames (one row per series and stamp) and tables of series, in pandas or polars.

A frame holds either the bottom series with key columns, or all nodes by name together with Nixtla's ``S_df`` and
``tags``. Stamps become periods. Absent rows are filled by the rule of ``data.mending``, 0 or an error. Ambiguous input
is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import narwhals as nw
import numpy as np

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.forecasting.data.keys import Keys
from probhard.forecasting.data.mending import mend
from probhard.forecasting.data.nodes import (
    TOTAL,
    Rows,
    check_columns,
    eager,
    is_total,
    keyed_hierarchy,
    named_hierarchy,
    numbers,
)
from probhard.forecasting.data.regressors import Regressors, read_regressors
from probhard.forecasting.data.stamps import FEW, START, Place, read_stamps, season_of
from probhard.forecasting.data.table import HierarchicalData, node_names, require

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TOTAL", "check_columns", "from_frame", "is_total", "named_hierarchy", "numbers", "to_long"]


def from_frame(
    frame: Any,
    keys: Keys | str | Sequence[str] | Sequence[Sequence[str]] | None = None,
    *,
    S: Any = None,
    tags: Mapping[str, Sequence[str]] | None = None,
    id_col: str = "unique_id",
    time_col: str = "ds",
    target_col: str = "y",
    freq: str | None = None,
    on_gap: str = "mend",
    nonnegative: bool = False,
    coherence: str = "check",
    season: int | None = None,
    regressors: Sequence[str] = (),
    future: Any = None,
    country_holidays: str | None = None,
    **options: Any,
) -> HierarchicalData:
    """Read a long frame of bottom rows with ``keys``, or of named nodes with ``S`` and/or ``tags``.

    Args:
        frame: A pandas or polars DataFrame.
        keys: Key columns from coarse to fine, or levels, in any notation of ``data.keys``.
        S: Nixtla's ``S_df``, or a summation matrix (n, m).
        tags: Node names of each level.
        id_col: Column of the node names.
        time_col: Column of the stamps.
        target_col: Column of the values.
        freq: Pandas alias; inferred from the stamps by default.
        on_gap: Absent rows follow the rule of ``data.mending`` (``"mend"``), are missing and never taken as 0 inside
            a series (``"mask"``), are 0 (``"zero"``), or an error (``"refuse"``).
        nonnegative: Whether negative values are an error.
        coherence: As in ``HierarchicalData.from_matrix``.
        season: Season length in steps; by default that of the frequency.
        regressors: Columns that are known ahead, such as prices.
        future: A frame of their values after the history.
        country_holidays: Country whose public holidays are a regressor, such as ``"CH"``.
        **options: horizon and name.

    Raises:
        ProbhardError: For missing columns, unknown or repeated rows, bad stamps, or sums that do not add up.
    """
    check_choice("on_gap", on_gap, ("mend", "mask", "zero", "refuse"))
    table = eager(frame)
    if keys is not None:
        hierarchy, labels, series = keyed_hierarchy(table, keys)
    else:
        check_columns(table, [id_col])
        rows = Rows.of(table, [id_col])
        hierarchy, series = named_hierarchy(S, tags, id_col), rows.which
        labels = [str(v) for v in table.get_column(id_col)[rows.first.tolist()].to_list()]
    check_columns(table, [time_col, target_col])
    periods, when, place = _read_times(table, time_col, freq)
    targets = numbers(table.get_column(target_col))
    seen = slice(None) if on_gap == "refuse" or np.isnan(targets).all() else ~np.isnan(targets)
    known = periods[np.bincount(when[seen], minlength=len(periods)) > 0]
    index = require("pandas", "from_frame").period_range(known.min(), known.max())
    if freq is None and on_gap != "zero" and FEW <= periods.nunique() < len(index) / 2:
        raise ParameterError(
            f"Of {len(index)} periods of the frequency {index.freqstr}, {periods.nunique()} have rows.",
            "The frequency was inferred from stamps that are not evenly spaced.",
            "Pass freq=... ('freq: M' in YAML), or on_gap='zero' if nothing happened in between.",
        )
    values = _pivot(
        labels, series, index.get_indexer(periods).astype(np.int32)[when], targets, hierarchy, index, on_gap
    )
    del series, targets, seen  # of millions of rows
    if nonnegative and (values < 0).any():
        row, column = np.argwhere(values < 0)[0]
        raise ParameterError(
            f"Series {node_names(hierarchy)[column]!r} is {values[row, column]:.6g} at {index[row]}.",
            "Non-negative forecasts cannot follow a history below zero.",
            "Correct the value, or drop the non-negativity.",
        )
    options |= {"season": season_of(index) if season is None else season, "place": place}
    if regressors or country_holidays:
        options["regressors"] = _regressors(table, periods[when], index, regressors, future, time_col, country_holidays)
    if coherence == "aggregate":
        values[:, : hierarchy.aggregates] = np.nan
    if np.isnan(values[:, hierarchy.aggregates :]).any():
        values, options["mending"] = mend(values, hierarchy.summation, options["season"], on_gap == "mend")
    return HierarchicalData.from_matrix(values, hierarchy, index, **options)


def _read_times(table: Any, time_col: str, freq: str | None) -> tuple[pd.PeriodIndex, np.ndarray, Place]:
    """Return the different periods, which of them every row has, and the position of the stamps in them."""
    column, rows = table.get_column(time_col), Rows.of(table, [time_col])
    try:
        periods, place = read_stamps(column[rows.first.tolist()], freq)
    except ParameterError:
        read_stamps(column, freq)  # its error has the number of the row
        raise
    return periods, rows.which, place


def _regressors(
    table: Any,
    periods: pd.PeriodIndex,
    index: pd.PeriodIndex,
    columns: Sequence[str],
    future: Any,
    time_col: str,
    country: str | None,
) -> Regressors | None:
    """Read regressors from the rows of the history and of the future."""
    frames = [(table, periods)]
    if future is not None:
        ahead = eager(future)
        check_columns(ahead, [time_col], "It has the stamps of the future.", "Name it as in the history")
        frames.append((ahead, read_stamps(ahead.get_column(time_col), index.freqstr)[0]))
    return read_regressors(frames, index, columns, country)


def to_long(
    values: np.ndarray | Mapping[str, np.ndarray],  # (T, n), or several by column name
    names: Sequence[str],
    index: pd.PeriodIndex,
    like: Any = None,
    place: Place = START,
    id_col: str = "unique_id",
    time_col: str = "ds",
    target_col: str = "y",
) -> Any:
    """Write tables of series as one long frame, series by series; stamps have no time zone.

    Args:
        values: A table (T, n), or several tables by column name.
        names: Names of the n series.
        index: The periods, (T,).
        like: A frame whose library and stamp type are used; by default pandas.
        place: Position of the stamps in their periods.
        id_col: Column of the series' names.
        time_col: Column of the stamps.
        target_col: Column of a single table.

    Raises:
        ShapeError: If a table is not (T, n).
    """
    pandas = require("pandas", "to_long")
    columns = values if isinstance(values, Mapping) else {target_col: values}
    for column, array in columns.items():
        if np.shape(array) != (len(index), len(names)):
            raise ShapeError(
                f"{column!r} has shape {np.shape(array)}; there are {len(index)} periods and {len(names)} names.",
                "Rows are periods and columns are series.",
                "Select one draw, or transpose.",
            )
    table = None if like is None else eager(like)
    model = table.get_column(time_col) if table is not None and time_col in table.columns else None
    content = {
        id_col: np.repeat(np.asarray(names, dtype=object), len(index)).tolist(),
        time_col: np.tile(place.stamps(index).to_numpy(), len(names)),
        **{column: np.asarray(array, dtype=np.float64).T.ravel() for column, array in columns.items()},
    }
    library = pandas if table is None else nw.get_native_namespace(table)
    long = nw.from_native(library.DataFrame(content), eager_only=True)
    if model is not None and model.dtype in (nw.Date, nw.Datetime) and not getattr(model.dtype, "time_zone", None):
        long = long.with_columns(nw.col(time_col).cast(model.dtype))
    return long.to_native()


def _pivot(
    labels: Sequence[str],
    series: np.ndarray,
    row: np.ndarray,
    values: np.ndarray,
    hierarchy: Hierarchy,
    index: pd.PeriodIndex,
    on_gap: str,
) -> np.ndarray:
    """Arrange rows of ``series``, which ``labels`` name, as a table (T, n); every bottom series must have a value."""
    names = node_names(hierarchy)
    position = {name: i for i, name in enumerate(names)}
    unknown = [label for label in labels if label not in position]
    if unknown:
        raise ParameterError(
            f"Series {unknown[0]!r} is not in the hierarchy.",
            "Its values would be lost.",
            "Add it to S or tags, or leave out its rows.",
        )
    column = np.array([position[label] for label in labels], dtype=np.int32)[series]
    if (row < 0).any():  # no target after the last row
        row, column, values = (x[row >= 0] for x in (row, column, values))
    count = np.zeros((len(index), hierarchy.variables), dtype=np.int32)
    np.add.at(count, (row, column), 1)
    if (count > 1).any():
        at, node = np.argwhere(count > 1)[0]
        raise ParameterError(
            f"Series {names[node]!r} has {count[at, node]} rows for {index[at]}.",
            "It is ambiguous which row counts, or whether they add up.",
            "Sum or drop the repeated rows, or pass a finer frequency with freq=...",
        )
    table = np.full(count.shape, np.nan)
    table[row, column] = values
    bottom = slice(hierarchy.aggregates, None)
    if on_gap == "zero":
        table[:, bottom] = np.where(count[:, bottom] == 0, 0.0, table[:, bottom])
    missing = np.isnan(table[:, bottom])
    empty = np.flatnonzero(missing.all(0))
    if len(empty) or (on_gap == "refuse" and missing.any()):
        at, bare = (0, empty[0]) if len(empty) else np.argwhere(missing)[0]
        where = "at any time" if len(empty) else f"at {index[at]}"
        raise ParameterError(
            f"Series {names[hierarchy.aggregates + bare]!r} has no value {where}.",
            "There is nothing to learn from." if len(empty) else "on_gap='refuse' allows no gaps.",
            "Leave out the series." if len(empty) else "Fill it, or pass on_gap='mend' or on_gap='zero'.",
        )
    return table
