"""``probhard forecast``: a CSV and its hierarchy in; coherent forecasts, a certificate and a report page out.

The last horizon of rows is held out first: what was learned without it is scored on it. Then all rows are learned from
and the future is drawn. A YAML file may hold every option by its name (with "_"), options of ``from_frame`` (freq,
season, on_gap, coherence), of ``HierarchicalForecaster`` (upper, num_samples, changes, calibrate) and of
``DeepVAREstimator``.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer

from probhard.cli.certificate import INFEASIBLE, TOLERANCE, Certificate, sha256
from probhard.cli.frames import SUFFIXES, check_numbers, read, write
from probhard.errors import ParameterError, check_choice
from probhard.forecasting.data.frames import from_frame, to_long
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.report.evaluation import CHUNK, incoherence
from probhard.io.settings import Reader, at_least, listed, number, setting, switch, whole, within, word
from probhard.laws.family import NORMAL, Family
from probhard.laws.student_t import student_t
from probhard.method import METHODS

if TYPE_CHECKING:
    from probhard.forecasting.forecaster import HierarchicalForecaster
    from probhard.forecasting.report.backtest import Backtest

EMBEDDED = "us-employment"
TIMES = ("ds", "date", "time", "timestamp", "datetime", "period", "month", "quarter", "week", "day", "year")
TARGETS = ("y", "value", "target")
INTERRUPTED = 130
PACKAGES = ("gluonts", "lightning", "pandas", "statsforecast", "jinja2")
READING = ("freq", "season", "on_gap", "coherence")
GIVEN = ("freq", "prediction_length", "hierarchy", "constraint", "num_parallel_samples", "trainer_kwargs")  # to DeepVAR
DEFAULTS: dict[str, Any] = {
    "keys": [],
    "horizon": None,
    "nonnegative": False,
    "level": [80.0, 95.0],
    "method": "probhard-or",
    "output": None,
    "draws": None,
    "format": "csv",
    "seed": 0,
    "epochs": None,
    "time_column": None,
    "target_column": None,
    "upper": None,
    "num_samples": 1000,
    "changes": None,
    "calibrate": True,
}


def forecast(
    data: Annotated[
        str, typer.Argument(help="A .csv or .parquet file, one row per bottom series and time, or a data set's name.")
    ] = EMBEDDED,
    keys: Annotated[str | None, typer.Option(help="Key columns, coarse to fine, such as state,region.")] = None,
    horizon: Annotated[int | None, typer.Option(min=1, help="Steps to forecast; default: one season.")] = None,
    nonnegative: Annotated[bool | None, typer.Option("--nonnegative", help="No draw below 0.")] = None,
    level: Annotated[str | None, typer.Option(help="Intervals in percent. Default: 80,95.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with these and further options.")] = None,
    method: Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)}. Default: probhard-or.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: NAME-forecast.")] = None,
    draws: Annotated[int | None, typer.Option(min=2, help="Draws to write; 1000 are made without it.")] = None,
    format: Annotated[str | None, typer.Option(help="csv (the default) or parquet.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, windows and draws. Default: 0.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: by the size of the data.")] = None,
    time_column: Annotated[str | None, typer.Option(help="Default: ds, date, month, ...")] = None,
    target_column: Annotated[str | None, typer.Option(help="Default: y, value, or the only other numbers.")] = None,
) -> None:
    """Train on a hierarchy of series, backtest, and forecast coherently, certified."""
    given = {name: value for name, value in locals().items() if name in DEFAULTS and value is not None}
    job = Job.of(data, given, _configuration(config))
    job.run()


@dataclass
class Job:
    """One run: its data, its options, and what it has so far."""

    data: HierarchicalData
    source: dict[str, str]  # the input and its hash
    options: dict[str, Any]
    network: dict[str, Any]
    output: Path

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any], configured: Mapping[str, Any]) -> Job:
        """Check all options and read the data."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GluonTS's remark on faster readers of JSON
            from probhard.forecasting.models.estimator import DeepVAREstimator

        network = sorted(set(inspect.signature(DeepVAREstimator).parameters) - set(GIVEN) - set(DEFAULTS))
        unknown = [option for option in configured if option not in (*DEFAULTS, *READING, *network)]
        if unknown:
            raise ParameterError(
                f"The configuration has an option {unknown[0]!r}.",
                "It would have no effect.",
                f"Choose among {', '.join((*DEFAULTS, *READING, *network))}.",
            )
        chosen = {name: value for name, value in {**configured, **given}.items() if value is not None}
        options = {**DEFAULTS, **{name: setting(name, value, READERS) for name, value in chosen.items()}}
        check_choice("method", options["method"], tuple(METHODS))
        check_choice("format", options["format"], tuple(suffix[1:] for suffix in SUFFIXES))
        data, source = _read(name, options)
        output = Path(options["output"] or f"{data.name}-forecast")
        if output.exists() and not output.is_dir():
            raise ParameterError(f"--output {output} is a file.", "Several files are written.", "Name a folder.")
        return cls(data, source, options, {name: options.pop(name) for name in network if name in options}, output)

    def run(self) -> None:
        """Backtest, refit, draw, certify, report."""
        from probhard.forecasting.forecaster import default_horizon, defaults, smooth
        from probhard.forecasting.reconciliation.nixtla import probabilities
        from probhard.forecasting.report.backtest import backtest, held_out
        from probhard.forecasting.report.page import Report

        options, data = self.options, self.data
        horizon = options["horizon"] = options["horizon"] or default_horizon(data)
        probabilities(options["level"])  # checked before anything is trained
        count = options["num_samples"] = max(options["num_samples"], options["draws"] or 0)
        train, test = held_out(data, horizon)
        options["changes"] = smooth(train) if options["changes"] is None else options["changes"]
        found = {**defaults(data, horizon, options["changes"]), **self.network}
        options["epochs"] = options["epochs"] or found.pop("max_epochs")
        found.pop("max_epochs", None)
        if (family := found.get("family")) is not None:
            found["family"] = f"{family.name}, df {family.df:g}" if hasattr(family, "df") else family.name
        typer.echo(
            f"{data.name}: {len(data.index)} rows of {len(data.names)} nodes, {data.index[0]} to {data.index[-1]}; "
            f"{horizon} steps ahead by {options['method']}."
        )
        shares = [level / 100 for level in sorted(options["level"])]
        try:
            model = self._forecaster().fit(train, progress="backtest")
            tested = backtest(model.model, model.sample(horizon, count), train, test, shares, options["seed"])
        except KeyboardInterrupt:
            typer.echo("Stopped before the backtest was done: nothing was written.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        typer.echo(_table(tested))
        notes = [f"{name} was left out: {reason}" for name, reason in tested.left_out.items()]
        status = 0
        try:
            model = self._forecaster().fit(data, progress="all rows")
        except KeyboardInterrupt:
            model.update(data)
            notes.append(
                f"Training on all rows was stopped: the forecasts start at {data.index[-1]}, but the network has "
                f"learned from the rows to {train.index[-1]} only."
            )
            status = INTERRUPTED
        for note in notes:
            typer.echo(note, err=True)
        paths = model.sample(horizon, count)
        options = {name: str(x) if isinstance(x, Path) else x for name, x in options.items()}
        options["spread_factor"] = model.spread_factor
        settings = {**self.source, **options, "network": found, "packages": _packages(), "backtest": tested.record()}
        certificate = certify(paths, model, data, settings)
        shown = {**options, **found}
        page = Report(data, model.model, options["level"], paths, tested, certificate.content(), shown, notes)
        self._write(model, paths, certificate, page.html())
        typer.echo(summary(certificate, self.output))
        if not certificate.feasible or status:
            raise typer.Exit(status or INFEASIBLE)

    def _forecaster(self) -> HierarchicalForecaster:
        from probhard.forecasting.forecaster import HierarchicalForecaster

        names = ("method", "nonnegative", "upper", "horizon", "changes", "calibrate", "epochs", "num_samples", "seed")
        return HierarchicalForecaster(**{name: self.options[name] for name in names}, **self.network)

    def _write(self, model: HierarchicalForecaster, draws: np.ndarray, certificate: Certificate, page: str) -> None:
        from probhard.forecasting.forecaster import summary

        self.output.mkdir(parents=True, exist_ok=True)
        data, suffix = self.data, f".{self.options['format']}"
        index = data.future(draws.shape[1])
        columns = summary(draws, model.model, self.options["level"])
        stale = {self.output / f"{name}{ending}" for name in ("forecasts", "draws") for ending in SUFFIXES}
        stale.remove(self.output / f"forecasts{suffix}")
        write(self.output / f"forecasts{suffix}", to_long(columns, data.names, index, place=data.place))
        if asked := self.options["draws"]:
            several = {str(i): draw for i, draw in enumerate(draws[:asked])}
            wide = to_long(several, data.names, index, place=data.place)
            long = wide.melt(["unique_id", "ds"], var_name="draw", value_name=model.model)
            write(self.output / f"draws{suffix}", long.astype({"draw": int}))
            stale.remove(self.output / f"draws{suffix}")
        for path in stale:  # of an earlier run: the certificate is not theirs
            path.unlink(missing_ok=True)
        model.save(self.output / "model")
        certificate.save(self.output / "certificate.json")
        (self.output / "report.html").write_text(page, encoding="utf-8")


def certify(
    draws: np.ndarray, model: HierarchicalForecaster, data: HierarchicalData, setting: dict[str, Any]
) -> Certificate:
    """Check every draw (S, H, n), and their mean, against the constraint."""
    constraint = model.constraint
    size = {"rows": len(data.index), "nodes": len(data.names), "steps": draws.shape[1]}
    gaps = {"gaps": int(np.isnan(data.bottom).sum())}
    levels = {level: len(nodes) for level, nodes in data.levels.items()}
    found = vars(incoherence(draws, data.hierarchy))
    certificate = Certificate({**setting, **size, **gaps, "levels": levels, "incoherence": found})
    points = torch.from_numpy(np.concatenate([draws, draws.mean(0, keepdims=True)]))
    wrong = torch.zeros(draws.shape[1], dtype=torch.int64)
    for part in points.split(max(1, CHUNK // points[0].numel())):
        relative = certificate.after.add(constraint, part, part.abs().amax(-1, keepdim=True))
        wrong += (~(relative <= TOLERANCE)).sum(0)
    certificate.after.points -= int(wrong.sum())  # counted apart
    for step in wrong.nonzero()[:, 0].tolist():
        reason = f"{int(wrong[step])} of {len(points)} draws do not obey the constraints."
        certificate.flag(int(wrong[step]), field=f"{data.future(draws.shape[1])[step]}", reason=reason)
    return certificate


def summary(certificate: Certificate, output: Path) -> str:
    """What was found, and where it is."""
    found, checked = certificate.setting["incoherence"], certificate.after.points + certificate.infeasible
    verdict = "all feasible" if certificate.feasible else f"{certificate.infeasible} NOT feasible"
    return (
        f"{checked} points checked (every draw at every step): {verdict}.\n"
        f"Largest incoherence {found['largest']:.3g} ({found['relative']:.1e} relative); "
        f"smallest value {found['smallest_draw']:.6g}.\n"
        f"Forecasts, certificate.json, report.html and model/ are in {output}."
    )


def _table(tested: Backtest) -> str:
    """The scores by level as text."""
    names, width = list(tested.scores), max(14, *(len(level) + 2 for level in tested.test.levels))
    title = f"CRPS, % of values, on {tested.test.index[0]} to {tested.test.index[-1]}:"
    lines = [title, " " * width + "".join(f"{name:>16s}" for name in names)]
    rows = {"all nodes": [tested.scores[name].crps for name in names]}
    rows |= {level: [tested.scores[name].crps_levels[level] for name in names] for level in tested.test.levels}
    return "\n".join(lines + [f"{row:{width}s}" + "".join(f"{100 * x:16.3f}" for x in rows[row]) for row in rows])


def _read(name: str, options: dict[str, Any]) -> tuple[HierarchicalData, dict[str, str]]:
    """The data and where they are from, with the options of reading taken out."""
    from probhard.forecasting.data import datasets

    reading = {option: options.pop(option) for option in READING if option in options}
    path = Path(name)
    if not path.is_file() and not path.suffix:
        loaded = datasets.load(name)
        if options["keys"] or reading:
            raise ParameterError(
                f"{name} is the name of a data set.",
                "Its hierarchy and calendar are known.",
                "Leave out --keys and the options of reading, or pass a file.",
            )
        known = datasets.EMBEDDED_CHECKSUM if loaded.name == EMBEDDED else datasets.BENCHMARKS[loaded.name].data
        return loaded, {"input": loaded.name, "input_sha256": known}
    frame = read(path, options["keys"])
    time, target = _columns(frame, options)
    loaded = from_frame(frame, options["keys"], time_col=time, target_col=target, **reading)
    return replace(loaded, name=path.stem), {"input": path.name, "input_sha256": sha256(path)}


def _columns(frame: Any, options: Mapping[str, Any]) -> tuple[str, str]:
    """The columns of time and target: as they were named, or the only ones that it can be."""
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


def _configuration(path: Path | None) -> dict[str, Any]:
    """The options of a YAML file."""
    from probhard.io.spec import read_spec

    content = {} if path is None else read_spec(path, "configuration", "epochs: 20")
    if not isinstance(content, dict):
        raise ParameterError(f"{path} holds no options.", "It is a mapping of names to values.", "Write 'epochs: 20'.")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _bounds(value: Any) -> float | dict[str, float]:
    return {str(node): number(x) for node, x in value.items()} if isinstance(value, Mapping) else number(value)


def _family(name: Any) -> Family:
    found = re.fullmatch(r"student_t\((\d+(?:\.\d*)?)\)", word(name).replace(" ", ""))
    if not found and name != NORMAL.name:
        raise ValueError
    return student_t(float(found[1])) if found else NORMAL


def _words(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value or []
    return [str(part).strip() for part in parts]


def _numbers(value: Any) -> list[float]:
    parts: Sequence[Any] = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        return [float(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"--level {value} is not a list of numbers.", "Intervals have levels in percent.", "Pass 80,95."
        ) from error


def _packages() -> dict[str, str]:
    """Versions of the packages that only forecasts need, where they are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


READERS: dict[str, Reader] = {
    **dict.fromkeys(("horizon", "epochs", "season", "num_layers", "hidden_size", "batch_size"), at_least(1)),
    **dict.fromkeys(("context_length", "num_batches_per_epoch"), at_least(1)),
    **dict.fromkeys(("draws", "num_samples"), at_least(2)),
    **dict.fromkeys(("seed", "rank", "num_feat_dynamic_real"), at_least(0)),
    "lr": (within(0, math.inf, inside=False), "a positive number"),
    "weight_decay": (within(0, math.inf), "a number, not negative"),
    "dropout_rate": (within(0, 1), "a number from 0 to below 1"),
    **dict.fromkeys(("nonnegative", "changes", "calibrate"), (switch, "true or false")),
    **dict.fromkeys(("method", "format", "time_column", "target_column", "freq", "on_gap"), (word, "a name")),
    "output": (str, "a folder"),
    "coherence": (word, "a name"),
    "upper": (_bounds, "a number, or numbers by the names of nodes"),
    "lags_seq": (listed(whole), "whole numbers"),
    "time_features": (listed(word), "names"),
    "scaling": (lambda x: x if isinstance(x, bool) else word(x), "mean, centre or none"),
    "family": (_family, "normal, or student_t(5) with its degrees of freedom"),
    "keys": (_words, "names of columns"),
    "level": (_numbers, "numbers, in percent"),
}
