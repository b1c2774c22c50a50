"""The hierarchy behind the rows of a frame: from key columns, or from Nixtla's ``S_df`` and ``tags``.

With keys, the name of a node joins its keys by "/", below the total: "Total/A/x".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import narwhals as nw
import numpy as np

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, optional
from probhard.forecasting.data.keys import Keys

TOTAL = "Total"
LOOKED_UP = 1 << 24  # most codes that are renumbered by a table
SMALL = 1 << 31  # codes below are 32-bit numbers
TOTALS = {"total", "all", "<aggregated>", "aggregated"}  # names of a sum over everything, in lower case


def is_total(text: str) -> bool:
    """Return whether a key or an id names a sum over everything, such as "Total"."""
    return text.strip().lower() in TOTALS


def eager(frame: Any) -> Any:
    """Wrap a frame of any library for narwhals.

    Raises:
        ParameterError: If it is not a data frame in memory.
    """
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
    """Check that a frame has some columns.

    Args:
        table: A narwhals frame.
        needed: Names of the columns.
        why: Second part of the error text.
        fix: Third part of the error text.

    Raises:
        ParameterError: If one is missing.
    """
    missing = [column for column in needed if column not in table.columns]
    if missing:
        raise ParameterError(
            f"The frame has no column {missing[0]!r}.", why, f"{fix}; there are {list(table.columns)}."
        )


def numbers(column: Any) -> np.ndarray:
    """Convert a column of numbers to a float64 array, (T,).

    Raises:
        ParameterError: If it does not hold numbers.
    """
    if not column.dtype.is_numeric():
        raise ParameterError(
            f"The column {column.name!r} holds {column.dtype}, not numbers.",
            "Values are summed.",
            "Convert the column, for instance decimal commas to points.",
        )
    return np.asarray(column.cast(nw.Float64).to_numpy(), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Rows:
    """Which of k different values every row of a frame has.

    Args:
        first: The first row of each value, (k,).
        which: Number of the value of every row, (T,).
    """

    first: np.ndarray
    which: np.ndarray

    @classmethod
    def of(cls, table: Any, columns: Sequence[str]) -> Rows:
        """Number the different values of some columns; no texts are made of rows."""
        which, size = np.zeros(len(table), dtype=np.int32), 1
        for name in columns:
            codes = _codes(table.get_column(name))
            span = int(codes.max(initial=-1)) + 2
            joined: np.ndarray = which.astype(np.int32 if size * span < SMALL else np.int64)  # millions of rows
            joined *= span
            joined += codes
            joined += 1
            which, size = _dense(joined, size * span)
        first = np.zeros(size, dtype=np.int64)
        first[which[::-1]] = np.arange(len(which) - 1, -1, -1)
        return cls(first, which)


def _codes(column: Any) -> np.ndarray:
    """Numbers from 0 on for the values of a column, -1 for missing ones."""
    pandas = optional("pandas", "forecast", "A table of series")
    native = column.to_native()
    if isinstance(getattr(native, "dtype", None), pandas.CategoricalDtype):
        codes: np.ndarray = native.cat.codes.to_numpy()
        return codes
    return np.asarray(pandas.factorize(column.to_numpy())[0])


def _dense(codes: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """Renumber codes below ``size`` without gaps; return them with their number."""
    if size > max(LOOKED_UP, 4 * len(codes)):
        found, codes = np.unique(codes, return_inverse=True)
        return codes.reshape(-1).astype(np.int32), len(found)
    seen = np.zeros(size, dtype=bool)
    seen[codes] = True
    number = np.cumsum(seen, dtype=np.int32) - 1
    return number[codes], int(number[-1]) + 1


def keyed_hierarchy(table: Any, keys: Any) -> tuple[Hierarchy, list[str], np.ndarray]:
    """Build the hierarchy of key columns, under a total unless a level of one node is its top.

    Args:
        table: Bottom rows, as a narwhals frame.
        keys: Key columns in any notation of ``Keys``.

    Returns:
        The hierarchy, the names of its k bottom series in the order of the rows, and the number of every row's.

    Raises:
        ParameterError: If keys are empty, repeated or not columns, or rows of aggregates are among the bottom rows.
    """
    spec = Keys.of(keys)
    check_columns(table, spec.columns)
    rows = Rows.of(table, spec.columns)
    distinct = table.select(list(spec.columns))[rows.first.tolist()]
    for key in spec.columns:
        _check_key(distinct.get_column(key))
    levels = spec.within([key for key in spec.columns if distinct.get_column(key).n_unique() == 1]).levels
    if () in levels:
        top = next(name for name in ("total", "all", "everything") if name not in table.columns)
        distinct, levels = distinct.with_columns(nw.lit(TOTAL).alias(top)), tuple((top, *level) for level in levels)
    hierarchy = Hierarchy.from_frame(distinct.to_native(), levels)
    parts = zip(*(map(str, distinct.get_column(key).to_list()) for key in levels[-1]))
    return hierarchy, ["/".join(part) for part in parts], rows.which


def _check_key(column: Any) -> None:
    """Raise if rows of aggregates are among the bottom rows: their values would count twice."""
    labels = [str(value) for value in column.unique().to_list()]
    aggregates = [label for label in labels if not label.strip() or (len(labels) > 1 and is_total(label))]
    if aggregates:
        raise ParameterError(
            f"The key column {column.name!r} holds {aggregates[0]!r} beside names.",
            "Aggregates are summed from the bottom series; their rows would count twice.",
            "Leave out the rows of aggregates, or rename the series if it is a bottom series.",
        )


def named_hierarchy(S: Any, tags: Mapping[str, Sequence[str]] | None, id_col: str) -> Hierarchy:
    """Build a hierarchy from Nixtla's ``S_df`` and tags.

    Args:
        S: ``S_df`` as a frame or ``SMatrix``, or a matrix (n, m) whose rows are named by the tags.
        tags: Node names of each level.
        id_col: Column of ``S`` with the names of its rows.

    Raises:
        ParameterError: If both are None, or a bottom series has no row in ``S``.
    """
    if S is None:
        if tags is None:
            raise ParameterError(
                "Neither keys nor S nor tags were given.",
                "They define which series add up to which.",
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
    position, bottoms = {row: i for i, row in enumerate(rows)}, set(columns)
    if len(position) < len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise ParameterError(f"S has more than one row {twice!r}.", "Only one can be its sum.", "Drop the others.")
    absent = [column for column in columns if column not in position]
    if absent:
        raise ParameterError(
            f"The bottom series {absent[0]!r} has no row of its own in S.",
            "The rows of S are all series, its columns the bottom series.",
            f"Give every column of S a row of the same name in the column {id_col!r}.",
        )
    names = [row for row in rows if row not in bottoms] + columns
    return Hierarchy(matrix[[position[name] for name in names]], names=names, tags=tags)
