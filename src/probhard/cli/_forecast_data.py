"""Data of ``probhard forecast``: a data set by name, or a CSV or Parquet file whose columns are recognised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from probhard.cli._frames import check_numbers, read
from probhard.cli._outputs import sha256
from probhard.cli.forecast import EMBEDDED
from probhard.errors import ParameterError
from probhard.forecasting.data.frames import from_frame
from probhard.forecasting.data.table import HierarchicalData

TIMES = ("ds", "date", "time", "timestamp", "datetime", "period", "month", "quarter", "week", "day", "year")
TARGETS = ("y", "value", "target")


def read_data(
    name: str, options: Mapping[str, Any], reading: Mapping[str, Any]
) -> tuple[HierarchicalData, dict[str, str]]:
    """Read the series of a run.

    Args:
        name: Path of a file, or the name of a data set.
        options: Options of the run: keys, time_column, target_column.
        reading: Options of ``from_frame``.

    Returns:
        The data, and its name and hash for the certificate.

    Raises:
        ParameterError: The file or one of its columns cannot be read.
    """
    from probhard.forecasting.data import datasets

    path = Path(name)
    if not path.is_file() and not path.suffix:
        data = datasets.load(name)
        if options["keys"] or reading:
            raise ParameterError(
                f"{name} is the name of a data set.",
                "Its hierarchy and calendar are known.",
                "Leave out --keys and the options of reading, or pass a file.",
            )
        checksum = datasets.EMBEDDED_CHECKSUM if data.name == EMBEDDED else datasets.BENCHMARKS[data.name].data
        return data, {"input": data.name, "input_sha256": checksum}
    frame = read(path, options["keys"])
    time, target = _columns(frame, options)
    data = from_frame(frame, options["keys"], time_col=time, target_col=target, **reading)
    return replace(data, name=path.stem), {"input": path.name, "input_sha256": sha256(path)}


def _columns(frame: Any, options: Mapping[str, Any]) -> tuple[str, str]:
    """The columns of time and target: those that options name, otherwise the only candidates."""
    names, keys = list(frame.columns), options["keys"]
    for option, asked in (("--keys", keys), ("--time-column", [options["time_column"]])):
        missing = [name for name in asked if name is not None and name not in names]
        if missing or not asked:
            raise ParameterError(
                f"There is no column {missing[0]!r}." if missing else "No --keys were given.",
                f"{option} says which columns {'tell the series apart' if option == '--keys' else 'hold the time'}.",
                f"Choose among {', '.join(map(str, names))}.",
            )
    time = options["time_column"] or next((name for name in names if str(name).lower() in TIMES), None)
    others = [name for name in names if name not in (*keys, time)]
    usual = [name for name in others if str(name).lower() in TARGETS]
    numeric = [name for name in others if frame[name].dtype.kind in "iuf"]
    target = options["target_column"] or (usual[0] if usual else numeric[0] if len(numeric) == 1 else None)
    if time is not None and target is None:
        for name in others:
            check_numbers(frame[name], "A target is a column of numbers.", "name another with --target-column")
    if time is None or target not in others:
        lost, option = ("time", "--time-column") if time is None else ("target", "--target-column")
        raise ParameterError(
            f"The column of the {lost} was not found among {', '.join(map(str, names))}.",
            f"It is {'one called ' + ', '.join(TIMES[:3]) if time is None else 'y, value, or the only other numbers'}.",
            f"Name it with {option}.",
        )
    return str(time), str(target)
