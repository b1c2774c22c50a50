"""Data of ``probhard forecast``: a data set by name, or a CSV or Parquet file whose columns are recognised.

Further files hold the future values of regressors (``--future``), plans (``--fixed``) and caps (``--upper``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from probhard.cli._frames import SUFFIXES, TIMES, check_numbers, numeric, read, time_columns
from probhard.cli._outputs import sha256
from probhard.cli.forecast import EMBEDDED
from probhard.errors import ParameterError
from probhard.forecasting.data.frames import from_frame
from probhard.forecasting.data.keys import Keys
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.limits import Limits, held, read_plan

TIME_HELP = f"one called {', '.join(TIMES[:3])}, ..., or the only one of dates"
TARGETS = ("y", "value", "target")
ID = "unique_id"
WITHOUT_REGRESSORS = ("smoothing", "bootstrap")  # members that know the series alone


def read_data(
    name: str, options: Mapping[str, Any], reading: Mapping[str, Any]
) -> tuple[HierarchicalData, dict[str, str], list[str]]:
    """Read the series of a run.

    Args:
        name: Path of a file, or the name of a data set.
        options: Options of the run: keys, time_column, target_column, regressors, future, country_holidays, immutable.
        reading: Options of ``from_frame``.

    Returns:
        The data, its name and hash for the certificate, and notes on columns that are not used.

    Raises:
        ParameterError: The file or one of its columns cannot be read.
    """
    from probhard.forecasting.data import datasets

    path = Path(name)
    if not path.is_file() and not path.suffix:
        data = datasets.load(name)
        if options["keys"] or options["regressors"] or options["future"] or reading:
            raise ParameterError(
                f"{name} is the name of a data set.",
                "Its hierarchy and calendar are known.",
                "Leave out --keys and the options of reading, or pass a file.",
            )
        checksum = datasets.EMBEDDED_CHECKSUM if data.name == EMBEDDED else datasets.BENCHMARKS[data.name].data
        return held(data, options["immutable"]), {"input": data.name, "input_sha256": checksum}, []
    keys = Keys.of(options["keys"]) if options["keys"] else Keys(((),))
    frame = read(path, keys.columns)
    future = None if options["future"] is None else read(Path(options["future"]), keys.columns)
    time, target = _columns(frame, options, keys.columns, () if future is None else future.columns)
    others = [name for name in frame.columns if name not in (*keys.columns, time, target)]
    shared = [name for name in others if future is not None and name in future.columns and numeric(frame[name])]
    regressors = options["regressors"] or shared
    known = {"regressors": regressors, "future": future, "country_holidays": options["country_holidays"]}
    data = from_frame(frame, keys, time_col=time, target_col=target, **known, **reading)
    unused = [name for name in others if name not in regressors]
    notes = [f"Columns that are not used: {', '.join(map(str, unused))}; --regressors names columns known ahead."]
    source = {"input": path.name, "input_sha256": sha256(path)}
    for option in ("future", "fixed"):
        if options[option] is not None:
            source[f"{option}_sha256"] = sha256(Path(options[option]))
    return held(replace(data, name=path.stem), options["immutable"]), source, notes if unused else []


def read_limits(options: Mapping[str, Any], data: HierarchicalData, horizon: int) -> Limits:
    """Read the bounds, caps and plans of a run.

    Args:
        options: Options of the run: nonnegative, upper (a number, numbers by node, or a file) and fixed (a file).
        data: The history.
        horizon: Number of steps.

    Raises:
        ParameterError: A file cannot be read, or names an unknown node.
    """

    def plan(value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        frame = read(Path(value), [ID])
        time = next(iter(time_columns(frame, [ID])), "ds")
        return read_plan(frame, data, horizon, time, ID)

    return Limits(options["nonnegative"], plan(options["upper"]), plan(options["fixed"]))


def known_note(data: HierarchicalData, members: Sequence[str]) -> list[str]:
    """Say which members use the regressors; none without regressors."""
    if not data.feature_names:
        return []
    used = [name for name in members if name not in WITHOUT_REGRESSORS]
    by = f"used by {', '.join(used)}" if used else "used by no member"
    return [f"Known ahead: {', '.join(data.feature_names)}; {by}."]


def is_file(value: Any) -> bool:
    """Return whether an option names a file of values by node and stamp."""
    return isinstance(value, str | Path) and Path(value).suffix in SUFFIXES


def _columns(frame: Any, options: Mapping[str, Any], keys: tuple[str, ...], ahead: Sequence[str]) -> tuple[str, str]:
    """The columns of time and target: those that options name, otherwise the only candidates not known ahead."""
    names = list(frame.columns)
    texts = [str(name) for name in names if frame[name].dtype.kind not in "iufM" and str(name).lower() not in TIMES]
    if not keys:
        raise ParameterError(
            "No --keys were given.",
            "They are the columns that tell the series apart, so that these can be added up.",
            f"Choose among {', '.join(texts)}." if texts else "Add a column with the name of the series to each row.",
        )
    for option, asked in (("--keys", keys), ("--time-column", [options["time_column"]])):
        missing = [name for name in asked if name is not None and name not in names]
        if missing:
            raise ParameterError(
                f"There is no column {missing[0]!r}.",
                f"{option} says which columns {'tell the series apart' if option == '--keys' else 'hold the time'}.",
                f"Choose among {', '.join(map(str, names))}.",
            )
    times = time_columns(frame, keys)
    time = options["time_column"] or next((name for name in times if name.lower() in TIMES or len(times) == 1), None)
    others = [name for name in names if name not in (*keys, time, *options["regressors"])]
    usual = [name for name in others if str(name).lower() in TARGETS]
    unknown = [name for name in others if frame[name].dtype.kind in "iuf" and name not in ahead]
    target = options["target_column"] or (usual[0] if usual else unknown[0] if len(unknown) == 1 else None)
    if time is not None and target is None:
        for name in others:
            check_numbers(frame[name], "A target is a column of numbers.", "name another with --target-column")
    if time is None or target not in others:
        lost, option = ("time", "--time-column") if time is None else ("target", "--target-column")
        raise ParameterError(
            f"The column of the {lost} was not found among {', '.join(map(str, names))}.",
            f"It is {TIME_HELP if time is None else 'y, value, or the only other numbers'}.",
            f"Name it with {option}.",
        )
    check_numbers(frame[target], "Its values are summed.", "name another column with --target-column", expected=True)
    return str(time), str(target)
