"""Long frames, one row per series and stamp, to tables of series and back; pandas and polars alike.

A frame holds either the bottom series with their key columns, or all nodes by name together with Nixtla's ``S_df`` and
``tags``. Stamps become periods, absent rows NaN (or 0, or an error); what cannot be read in one way only is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import narwhals as nw
import numpy as np

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.forecasting.data.stamps import FEW, START, Place, read_stamps, season_of
from probhard.forecasting.data.table import HierarchicalData, require

if TYPE_CHECKING:
    import pandas as pd

TOTAL = "Total"
TOTALS = {"total", "all", "<aggregated>", "aggregated"}  # what others call a sum, in any case


def is_total(text: str) -> bool:
    """Whether a key or an id says that it is summed over."""
    return text.strip().lower() in TOTALS


def from_frame(
    frame: Any,
    keys: Sequence[str] | Sequence[Sequence[str]] | None = None,
    *,
    S: Any = None,
    tags: Mapping[str, Sequence[str]] | None = None,
    id_col: str = "unique_id",
    time_col: str = "ds",
    target_col: str = "y",
    freq: str | None = None,
    on_gap: str = "mask",
    nonnegative: bool = False,
    coherence: str = "check",
    season: int | None = None,
    **options: Any,
) -> HierarchicalData:
    """Read a long frame: ``keys`` from coarse to fine for bottom rows, or ``S`` and/or ``tags`` for named nodes.

    Keys may also be the levels themselves, as in ``Hierarchy.from_frame``. ``on_gap`` says what an absent bottom row
    means: ``"mask"`` not observed, ``"zero"`` nothing happened, ``"refuse"`` an error (also for NaN). ``coherence``,
    horizon and name are as in ``HierarchicalData.from_matrix``; ``season`` follows from the frequency unless given.
    """
    check_choice("on_gap", on_gap, ("mask", "zero", "refuse"))
    table = eager(frame)
    if keys is not None:
        table, hierarchy, labels = _keyed(table, keys)
    else:
        check_columns(table, [id_col])
        hierarchy, labels = named_hierarchy(S, tags, id_col), [str(v) for v in table.get_column(id_col).to_list()]
    check_columns(table, [time_col, target_col])
    periods, place = read_stamps(table.get_column(time_col), freq)
    index = require("pandas", "from_frame").period_range(periods.min(), periods.max())
    if freq is None and on_gap == "mask" and FEW <= periods.nunique() < len(index) / 2:
        raise ParameterError(
            f"Of {len(index)} periods of the frequency {index.freqstr}, {periods.nunique()} have rows.",
            "The frequency was found from the stamps, which lie at no equal distances.",
            "Name it with freq=... ('freq: M' in YAML), or pass on_gap='zero' if nothing happened in between.",
        )
    values = _spread(labels, periods, numbers(table.get_column(target_col)), hierarchy, index, on_gap)
    if nonnegative and (values < 0).any():
        row, column = np.argwhere(values < 0)[0]
        raise ParameterError(
            f"Series {_name(hierarchy, column)!r} is {values[row, column]:.6g} at {index[row]}.",
            "Non-negative forecasts cannot follow a history below zero.",
            "Correct the value, or do not ask for non-negativity.",
        )
    options |= {"season": season_of(index) if season is None else season, "place": place}
    return HierarchicalData.from_matrix(values, hierarchy, index, coherence=coherence, **options)


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
    """A long frame, series by series, with the library and stamp type of ``like``, by default pandas.

    ``place`` says where in their periods the stamps lie; they carry no time zone.
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


def eager(frame: Any) -> Any:
    """A frame of any library, in memory."""
    try:
        return nw.from_native(frame, eager_only=True)
    except TypeError as error:
        raise ParameterError(
            f"Got a {type(frame).__name__}.",
            "Rows are read from a data frame in memory.",
            "Pass a pandas or polars DataFrame; collect() a LazyFrame first.",
        ) from error


def check_columns(
    table: Any,
    needed: Sequence[str],
    why: str = "Series, stamps and values are read from columns.",
    fix: str = "Name it with id_col, time_col, target_col or keys",
) -> None:
    """Raise unless a frame has these columns."""
    missing = [column for column in needed if column not in table.columns]
    if missing:
        raise ParameterError(
            f"The frame has no column {missing[0]!r}.", why, f"{fix}; there are {list(table.columns)}."
        )


def _keyed(table: Any, keys: Sequence[str] | Sequence[Sequence[str]]) -> tuple[Any, Hierarchy, list[str]]:
    """The hierarchy of key columns, a total above them, and every row's label."""
    levels = [[key] if isinstance(key, str) else list(key) for key in keys]
    plain = [key for key in keys if isinstance(key, str)]
    if not levels or not all(levels) or len(set(plain)) < len(plain):
        raise ParameterError(
            f"Got keys={list(keys)}.",
            "They are the columns that tell series apart, from coarse to fine.",
            "Name each of them once, such as ['state', 'region'].",
        )
    check_columns(table, [key for level in levels for key in level])
    for key in dict.fromkeys(key for level in levels for key in level):
        _check_key(table.get_column(key))
    if all(isinstance(key, str) for key in keys):
        path = [level[0] for level in levels]
        if len(path) == 1 or table.get_column(path[0]).n_unique() > 1:
            top = next(name for name in ("total", "all", "everything") if name not in table.columns)
            table, path = table.with_columns(nw.lit(TOTAL).alias(top)), [top, *path]
        levels = [path[: i + 1] for i in range(len(path))]
    hierarchy = Hierarchy.from_frame(table.to_native(), levels)
    parts = zip(*(map(str, table.get_column(key).to_list()) for key in levels[-1]))
    return table, hierarchy, ["/".join(part) for part in parts]


def _check_key(column: Any) -> None:
    """Raise if rows of aggregates are among the bottom ones: their values would count twice."""
    found = [str(value) for value in column.unique().to_list()]
    wrong = [text for text in found if not text.strip() or (len(found) > 1 and is_total(text))]
    if wrong:
        raise ParameterError(
            f"The key column {column.name!r} holds {wrong[0]!r} beside names.",
            "Sums are made from the bottom series; rows of sums would count twice.",
            "Leave out the rows of aggregates, or name series that are not.",
        )


def named_hierarchy(S: Any, tags: Mapping[str, Sequence[str]] | None, id_col: str) -> Hierarchy:
    """The hierarchy of Nixtla's ``S_df`` (dense or ``SMatrix``) and tags, or of an array whose rows the tags name."""
    if S is None:
        if tags is None:
            raise ParameterError(
                "Neither keys nor S nor tags were given.",
                "They say which series add up to which.",
                "Pass keys=['state', 'region'], or S_df and tags as hierarchicalforecast's aggregate returns them.",
            )
        return Hierarchy.from_tags(tags)
    if hasattr(S, "to_csr"):
        matrix, rows, columns = S.to_csr(), list(map(str, S.row_labels)), list(map(str, S.col_labels))
    elif hasattr(S, "columns"):
        summation = nw.from_native(S, eager_only=True)
        labelled = id_col in summation.columns
        rows = [str(v) for v in (summation.get_column(id_col).to_list() if labelled else getattr(S, "index", []))]
        summation = summation.drop(id_col) if labelled else summation
        matrix, columns = summation.to_numpy(), [str(column) for column in summation.columns]
    else:
        return Hierarchy.from_tags(tags, S) if tags is not None else Hierarchy(S)
    place, bottoms = {row: i for i, row in enumerate(rows)}, set(columns)
    absent = [column for column in columns if column not in place]
    if absent:
        raise ParameterError(
            f"The bottom series {absent[0]!r} has no row of its own in S.",
            "Rows of S are all series, columns the bottom ones.",
            f"Give every column of S a row of the same name in the column {id_col!r}.",
        )
    names = [row for row in rows if row not in bottoms] + columns
    return Hierarchy(matrix[[place[name] for name in names]], names=names, tags=tags)


def _name(hierarchy: Hierarchy, column: int) -> str:
    return str(column) if hierarchy.names is None else hierarchy.names[column]


def numbers(column: Any) -> np.ndarray:
    """A column of numbers as an array."""
    if not column.dtype.is_numeric():
        raise ParameterError(
            f"The column {column.name!r} holds {column.dtype}, not numbers.",
            "Values are summed.",
            "Convert it, for instance decimal commas to points.",
        )
    return np.asarray(column.cast(nw.Float64).to_numpy(), dtype=np.float64)


def _spread(
    labels: Sequence[str],
    periods: pd.PeriodIndex,
    values: np.ndarray,
    hierarchy: Hierarchy,
    index: pd.PeriodIndex,
    on_gap: str,
) -> np.ndarray:
    """The table (T, n) of all nodes from rows, with every bottom series present."""
    position = {_name(hierarchy, i): i for i in range(hierarchy.variables)}
    unknown = [label for label in labels if label not in position]
    if unknown:
        raise ParameterError(
            f"Series {unknown[0]!r} is not in the hierarchy.",
            "Its values would be lost.",
            "Add it to S or tags, or leave out its rows.",
        )
    row, column = index.get_indexer(periods), np.array([position[label] for label in labels])
    count = np.zeros((len(index), hierarchy.variables), dtype=np.int64)
    np.add.at(count, (row, column), 1)
    if (count > 1).any():
        at, series = np.argwhere(count > 1)[0]
        raise ParameterError(
            f"Series {_name(hierarchy, series)!r} has {count[at, series]} rows for {index[at]}.",
            "Which one is meant, or whether to add them, is not known.",
            "Sum or drop the repeated rows, or name the frequency with freq=... if stamps are finer.",
        )
    table = np.full(count.shape, np.nan)
    table[row, column] = values
    bottom = slice(hierarchy.aggregates, None)
    if on_gap == "zero":
        table[:, bottom] = np.where(count[:, bottom] == 0, 0.0, table[:, bottom])
    missing = np.isnan(table[:, bottom])
    empty = np.flatnonzero(missing.all(0))
    if len(empty) or (on_gap == "refuse" and missing.any()):
        at, series = (0, empty[0]) if len(empty) else np.argwhere(missing)[0]
        where = "at any time" if len(empty) else f"at {index[at]}"
        raise ParameterError(
            f"Series {_name(hierarchy, hierarchy.aggregates + series)!r} has no value {where}.",
            "There is nothing to learn from." if len(empty) else "Gaps were to be refused.",
            "Leave out the series." if len(empty) else "Fill it, or pass on_gap='mask' or on_gap='zero'.",
        )
    return table
