"""Data frames in files: CSV with any usual separator and decimal mark, and Parquet."""

from __future__ import annotations

import csv
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np

from probhard._util.atomic import replacing
from probhard.errors import MissingExtraError, ParameterError
from probhard.forecasting.data.stamps import parsed
from probhard.forecasting.data.table import require

FORMAT_HELP = {  # what a file must be, and what to do if it is not
    ".csv": (
        "It must be text in UTF-8, a row a line, its columns separated by commas, semicolons or tabs.",
        'Save it again as "CSV UTF-8", with as many values in each row as there are columns.',
    ),
    ".parquet": ("It must be a whole file as pandas or polars write it.", "Write it again."),
}
SUFFIXES = tuple(FORMAT_HELP)
SEPARATORS = (",", ";", "\t")
SNIFFED_LINES = 100  # lines that tell how numbers are written
LARGE_FILE, TYPED_ROWS = 1 << 28, 10_000  # bytes of a file that is read once, and rows that tell its columns' types
TIMES = ("ds", "date", "time", "timestamp", "datetime", "period", "month", "quarter", "week", "day", "year")
DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?([./-])\d\d?\2\d{4}|\d{4}[- ]?Q[1-4]")
STR_NA_VALUES = {"", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "<NA>", "n/a", "#N/A"}


def read(path: Path, texts: Sequence[str]) -> Any:
    """Read a CSV or Parquet file.

    Args:
        path: Path of the file.
        texts: Columns to read as text.

    Returns:
        A pandas frame.

    Raises:
        ParameterError: The file is missing, damaged or of another format.
        MissingExtraError: pandas or polars is not installed.
    """
    if path.suffix not in SUFFIXES or not path.is_file():
        raise ParameterError(
            f"{path} cannot be read.",
            f"It must be a file that ends in {' or '.join(SUFFIXES)}.",
            "Check the path, or convert the file.",
        )
    try:
        frame = _csv(path, texts) if path.suffix == ".csv" else _parquet(path)
    except (ParameterError, MissingExtraError):
        raise
    except Exception as error:  # damaged files make the libraries raise errors of any type
        reason = str(error).strip() or type(error).__name__
        raise ParameterError(
            f"{path} cannot be read: {reason.splitlines()[0].rstrip('.')}.",
            *FORMAT_HELP[path.suffix],
        ) from error
    if not len(frame):
        raise ParameterError(
            f"{path} has no rows.", "Only the names of its columns were found.", "Check how the file was exported."
        )
    return frame


def write(path: Path, frame: Any) -> None:
    """Write a pandas frame as CSV or Parquet, atomically."""
    with replacing(path) as partial:
        if path.suffix == ".csv":
            frame.to_csv(partial, index=False)
        elif (engine := _polars()) is None:
            frame.to_parquet(partial, index=False)
        else:
            engine.DataFrame({name: frame[name].to_list() for name in frame.columns}).write_parquet(partial)


def write_parts(path: Path, frames: Iterable[Any]) -> None:
    """Write pandas frames of the same columns one after the other, as one file, atomically."""
    if path.suffix != ".csv":
        engine = _polars()
        write(path, require("pandas", "A Parquet file").concat(list(frames))) if engine else _row_groups(path, frames)
        return
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        for number, frame in enumerate(frames):
            frame.to_csv(file, index=False, header=number == 0)


def _row_groups(path: Path, frames: Iterable[Any]) -> None:
    """Write Parquet with a group of rows for each frame, by pyarrow."""
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    with replacing(path) as partial, ExitStack() as stack:
        file = None
        for frame in frames:
            table = arrow.Table.from_pandas(frame, preserve_index=False)
            file = stack.enter_context(parquet.ParquetWriter(partial, table.schema)) if file is None else file
            file.write_table(table)


def _csv(path: Path, texts: Sequence[str]) -> Any:
    """Read CSV; separator and decimal mark follow from the first lines."""
    pandas = require("pandas", "Reading a .csv file")
    with path.open(encoding="utf-8-sig") as file:
        head = list(islice(file, SNIFFED_LINES))
    separator = max(SEPARATORS, key=head[0].count) if head else ","
    _check_titles(path, head[0] if head else "", separator)
    comma = separator != "," and any(re.search(r"\d,\d", line) for line in head)
    options = {"sep": separator, "decimal": "," if comma else ".", "encoding": "utf-8-sig"}
    if path.stat().st_size > LARGE_FILE:
        return _large_csv(path, texts, options)
    frame = pandas.read_csv(path, dtype=dict.fromkeys(texts, str), float_precision="round_trip", **options)
    textual = [name for name in frame.columns if not numeric(frame[name])]
    plain = pandas.read_csv(path, dtype=str, keep_default_na=False, usecols=textual, **options)  # "NA" may be a name
    return frame.assign(**{name: plain[name] for name in textual})


def _large_csv(path: Path, texts: Sequence[str], options: dict[str, Any]) -> Any:
    """Read CSV once, with texts as categories: millions of rows repeat few of them."""
    pandas = require("pandas", "Reading a .csv file")
    head = pandas.read_csv(path, dtype=dict.fromkeys(texts, str), nrows=TYPED_ROWS, **options)
    textual = [name for name in head.columns if name in texts or not numeric(head[name])]
    numbers = [name for name in head.columns if name not in textual]
    return pandas.read_csv(
        path,
        dtype=dict.fromkeys(textual, "category"),
        float_precision="round_trip",
        keep_default_na=False,
        na_values={name: sorted(STR_NA_VALUES) for name in numbers},  # "NA" may be a name
        **options,
    )


def _check_titles(path: Path, line: str, separator: str) -> None:
    """Check that no two columns of a CSV file have one name; pandas would rename the second."""
    titles = [title.strip() for title in next(csv.reader([line], delimiter=separator), [])]
    twice = [title for title, count in Counter(titles).items() if title and count > 1]
    if twice:
        raise ParameterError(
            f"{path} has more than one column {twice[0]!r}.",
            "Nothing says which of them is meant.",
            "Rename or drop the others.",
        )


def numeric(column: Any) -> bool:
    """Whether a column of a pandas frame is numeric and has at least one value."""
    return column.dtype.kind in "iuf" and bool(column.notna().any())


def texts(column: Any) -> list[str]:
    """A column of a pandas frame as text, "" for missing values."""
    return [str(value) for value in column.astype(object).where(column.notna(), "")]


def time_columns(frame: Any, others: Sequence[str]) -> list[str]:
    """Columns of a pandas frame that may hold stamps: those of a usual name, else those that hold dates.

    Args:
        frame: The frame.
        others: Columns that hold something else.
    """
    names = [name for name in frame.columns if name not in others]
    usual = [str(name) for name in names if str(name).lower() in TIMES]
    return usual or [str(name) for name in names if _dates(frame[name])]


def _dates(column: Any) -> bool:
    """Whether a column holds dates, by its type or by its first texts."""
    if column.dtype.kind in "iufb":
        return False
    head = [text.strip() for text in texts(column.head(SNIFFED_LINES))]
    return column.dtype.kind == "M" or (bool(head) and all(DATE.fullmatch(text) for text in head))


def in_time(column: Any) -> tuple[np.ndarray, Any, Any]:
    """Number the stamps of a pandas column in the order of time.

    Args:
        column: Dates in any usual format, numbers, or texts, which are sorted as such.

    Returns:
        The number of every row's stamp, -1 where missing; the stamps as they are written, (H,); and as values that
        compare in time, (H,).

    Raises:
        ParameterError: If dates can be read in two ways.
    """
    code, written = require("pandas", "Stamps").factorize(column)
    dated = len(written) > 0 and _dates(column) and column.dtype.kind != "M"
    times = parsed(nw.new_series(str(column.name), [str(x) for x in written], backend="pandas")) if dated else written
    times, first, place = np.unique(np.asarray(times), return_index=True, return_inverse=True)
    return np.where(code < 0, -1, np.append(place, -1)[code]), np.asarray(written)[first], times


def check_numbers(column: Any, why: str, otherwise: str, expected: bool = False) -> None:
    """Check that a column of numbers was read as such.

    Args:
        column: Column of a pandas frame.
        why: Why it must be numeric, for the error.
        otherwise: What else the user can do, for the error.
        expected: Whether the column must be numeric; otherwise it must if most of its rows are numbers.

    Raises:
        ParameterError: Some row holds text, or none holds anything where numbers are expected.
    """
    if numeric(column):
        return
    values = {row: text.strip() for row, text in enumerate(texts(column)) if text.strip()}
    numbers = [row for row, text in values.items() if _is_number(re.sub(r"[,' ]", "", text))]
    if expected and not values:
        raise ParameterError(f"The column {column.name!r} is empty.", why, f"Fill it in, or {otherwise}.")
    if 2 * len(numbers) <= len(values) and not expected:
        return
    row = next((row for row, text in values.items() if not _is_number(text)), numbers[0] if numbers else 0)
    raise ParameterError(
        f"The column {column.name!r} has the text {values[row]!r} in row {row + 1}.",
        why,
        f"Write plain numbers, without separators of thousands, or {otherwise}.",
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet(path: Path) -> Any:
    pandas = require("pandas", "Reading a .parquet file")
    engine = _polars()
    if engine is None:
        return _categories(path) if _tall(path) else pandas.read_parquet(path)
    try:
        table = engine.read_parquet(path)
        if len(table) > TYPED_ROWS:  # texts as categories, without a Python object for each row
            return pandas.DataFrame({column.name: _plain_column(column, engine, pandas) for column in table})
        return pandas.DataFrame(table.to_dict(as_series=False))
    except engine.exceptions.PolarsError as error:
        raise ValueError(str(error)) from error


def _tall(path: Path) -> bool:
    """Whether a Parquet file has many rows."""
    return importlib.import_module("pyarrow.parquet").read_metadata(path).num_rows > TYPED_ROWS


def _categories(path: Path) -> Any:
    """Read Parquet by pyarrow with texts as categories: column by column, without a Python object for each row."""
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    pandas = require("pandas", "Reading a .parquet file")
    schema = parquet.read_schema(path)
    indexes = (schema.pandas_metadata or {}).get("index_columns", [])
    texts = [field.name for field in schema if arrow.types.is_string(field.type) or _large(arrow, field.type)]
    columns = {}
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        for name in (name for name in schema.names if name not in indexes):
            columns[name] = file.read([name], use_threads=False).column(name).to_pandas(date_as_object=False)
            arrow.default_memory_pool().release_unused()  # it would keep several times the frame
    return pandas.DataFrame(columns, copy=False)


def _large(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind))


def _plain_column(column: Any, engine: Any, pandas: Any) -> Any:
    """A column of polars for pandas; texts as categories."""
    if column.dtype not in (engine.String, engine.Categorical):
        return column.to_numpy()
    values = column.drop_nulls().unique().sort().cast(engine.String)
    codes = column.cast(engine.Enum(values)).to_physical().cast(engine.Int32).fill_null(-1)
    return pandas.Categorical.from_codes(codes.to_numpy(), values.to_list())


def _polars() -> Any:
    """polars, or None where pandas handles Parquet through pyarrow."""
    try:
        importlib.import_module("pyarrow")
    except ImportError:
        return require("polars", "A Parquet file")
    return None
