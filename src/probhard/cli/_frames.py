"""Frames in files: CSV as spreadsheets of any country write it, and Parquet."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from probhard._util.atomic import replacing
from probhard.errors import ParameterError
from probhard.forecasting.data.table import require

WRITTEN = {  # what a file must be, and what to do where it is not
    ".csv": (
        "It must be text in UTF-8, a row a line, its columns separated by commas, semicolons or tabs.",
        'Save it again as "CSV UTF-8", with as many values in each row as there are columns.',
    ),
    ".parquet": ("It must be a whole file as pandas or polars write it.", "Write it again."),
}
SUFFIXES = tuple(WRITTEN)
SEPARATORS = (",", ";", "\t")
LOOKED_AT = 100  # lines that say how numbers are written


def read(path: Path, texts: Sequence[str]) -> Any:
    """A pandas frame from CSV or Parquet; columns of texts stay texts."""
    if path.suffix not in SUFFIXES or not path.is_file():
        raise ParameterError(
            f"{path} cannot be read.",
            f"It must be a file that ends in {' or '.join(SUFFIXES)}.",
            "Check the path, or convert the file.",
        )
    try:
        return _csv(path, texts) if path.suffix == ".csv" else _parquet(path)
    except (ValueError, OSError) as error:
        raise ParameterError(
            f"{path} cannot be read: {str(error).strip().splitlines()[0].rstrip('.')}.",
            *WRITTEN[path.suffix],
        ) from error


def write(path: Path, frame: Any) -> None:
    """Write CSV or Parquet, replacing the file in one step."""
    with replacing(path) as partial:
        if path.suffix == ".csv":
            frame.to_csv(partial, index=False)
        elif (engine := _polars()) is None:
            frame.to_parquet(partial, index=False)
        else:
            engine.DataFrame({name: frame[name].to_list() for name in frame.columns}).write_parquet(partial)


def _csv(path: Path, texts: Sequence[str]) -> Any:
    """Separator and decimal mark are seen in the first lines: where commas do not separate, they may be the mark."""
    pandas = require("pandas", "Reading a .csv file")
    with path.open(encoding="utf-8-sig") as file:
        head = list(islice(file, LOOKED_AT))
    separator = max(SEPARATORS, key=head[0].count) if head else ","
    comma = separator != "," and any(re.search(r"\d,\d", line) for line in head)
    options = {"sep": separator, "decimal": "," if comma else ".", "encoding": "utf-8-sig"}
    frame = pandas.read_csv(path, dtype=dict.fromkeys(texts, str), float_precision="round_trip", **options)
    words = [name for name in frame.columns if not numeric(frame[name])]
    plain = pandas.read_csv(path, dtype=str, keep_default_na=False, usecols=words, **options)  # "NA" may be a name
    return frame.assign(**{name: plain[name] for name in words})


def numeric(column: Any) -> bool:
    """Whether a column of a pandas frame holds numbers, at least one."""
    return column.dtype.kind in "iuf" and bool(column.notna().any())


def texts(column: Any) -> list[str]:
    """A column of a pandas frame as text, "" where there is nothing."""
    return [str(value) for value in column.astype(object).where(column.notna(), "")]


def check_numbers(column: Any, why: str, otherwise: str, expected: bool = False) -> None:
    """Raise for a column that is of numbers by most of its rows, or ``expected`` to be, but not read as such."""
    if numeric(column):
        return
    found = {row: text.strip() for row, text in enumerate(texts(column)) if text.strip()}
    meant = [row for row, text in found.items() if _is_number(re.sub(r"[,' ]", "", text))]
    if 2 * len(meant) <= len(found) and not (found and expected):
        return
    row = next((row for row, text in found.items() if not _is_number(text)), meant[0] if meant else 0)
    raise ParameterError(
        f"The column {column.name!r} has the text {found[row]!r} in row {row + 1}.",
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
        return pandas.read_parquet(path)
    try:
        return pandas.DataFrame(engine.read_parquet(path).to_dict(as_series=False))
    except engine.exceptions.PolarsError as error:
        raise ValueError(str(error)) from error


def _polars() -> Any:
    """None where pandas reads and writes Parquet by itself, with pyarrow."""
    try:
        importlib.import_module("pyarrow")
    except ImportError:
        return require("polars", "A Parquet file")
    return None
