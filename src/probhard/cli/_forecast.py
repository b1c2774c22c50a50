"""``probhard forecast``: reads series and their hierarchy, writes coherent forecasts, a certificate and a report page.

The last horizon of rows is held out first, and a model that was trained without it is scored on it. A second model is
trained on all rows and draws the future.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import typer

from probhard.cli._certificate import INFEASIBLE, TOLERANCE, Certificate
from probhard.cli._forecast_data import read_data
from probhard.cli._forecast_options import FORECASTER, ForecastOptions
from probhard.cli._frames import SUFFIXES, write
from probhard.cli.demo import INTERRUPTED
from probhard.errors import ParameterError
from probhard.forecasting.data.frames import to_long
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.report.evaluation import CHUNK, incoherence

if TYPE_CHECKING:
    from probhard.forecasting.forecaster import HierarchicalForecaster
    from probhard.forecasting.report.backtest import Backtest

PACKAGES = ("gluonts", "lightning", "pandas", "statsforecast", "jinja2")


@dataclass
class ForecastRun:
    """One run of the command.

    Args:
        data: Series and their hierarchy.
        source: Name and hash of the input, for the certificate.
        options: Options of the run by name; ``run`` fills in those that depend on the data.
        network: Options of ``DeepVAREstimator``.
        output: Folder to write to.
    """

    data: HierarchicalData
    source: dict[str, str]
    options: dict[str, Any]
    network: dict[str, Any]
    output: Path

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any], configured: Mapping[str, Any]) -> ForecastRun:
        """Check all options and read the data.

        Args:
            name: Path of a file, or the name of a data set.
            given: Options of the command line.
            configured: Options of the YAML file.

        Raises:
            ProbhardError: Invalid options or data.
        """
        options = ForecastOptions.of(given, configured)
        data, source = read_data(name, options.run, options.reading)
        output = Path(options.run["output"] or f"{data.name}-forecast")
        if output.exists() and not output.is_dir():
            raise ParameterError(f"--output {output} is a file.", "Several files are written.", "Name a folder.")
        return cls(data, source, options.run, options.network, output)

    def run(self) -> None:
        """Backtest, train on all rows, draw, certify, and write all files.

        Raises:
            ProbhardError: The data do not allow these options.
            typer.Exit: Some points are not feasible (status 3), or training was stopped (130).
        """
        from probhard.forecasting.forecaster import default_horizon
        from probhard.forecasting.reconciliation.nixtla import probabilities
        from probhard.forecasting.report.backtest import held_out
        from probhard.forecasting.report.page import Report

        options, data = self.options, self.data
        horizon = options["horizon"] = options["horizon"] or default_horizon(data)
        probabilities(options["level"])  # checked before anything is trained
        count = options["num_samples"] = max(options["num_samples"], options["draws"] or 0)
        train, test = held_out(data, horizon)
        network = self._resolve(train)
        typer.echo(
            f"{data.name}: {len(data.index)} rows of {len(data.names)} nodes, {data.index[0]} to {data.index[-1]}; "
            f"{horizon} steps ahead by {options['method']}."
        )
        model, tested = self._backtest(train, test)
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
        settings = {**self.source, **options, "network": network, "packages": _packages(), "backtest": tested.record()}
        certificate = certify(paths, model, data, settings)
        shown = {**options, **network}
        page = Report(data, model.model, options["level"], paths, tested, certificate.content(), shown, notes)
        self._write(model, paths, certificate, page.html())
        typer.echo(summary(certificate, self.output))
        if not certificate.feasible or status:
            raise typer.Exit(status or INFEASIBLE)

    def _resolve(self, train: HierarchicalData) -> dict[str, Any]:
        """Fill in options that depend on the data; returns those of the network, as plain values."""
        from probhard.forecasting.forecaster import defaults, smooth

        options = self.options
        options["changes"] = smooth(train) if options["changes"] is None else options["changes"]
        network = {**defaults(self.data, options["horizon"], options["changes"]), **self.network}
        epochs = network.pop("max_epochs", None)
        options["epochs"] = options["epochs"] or epochs
        if (family := network.get("family")) is not None:
            network["family"] = f"{family.name}, df {family.df:g}" if hasattr(family, "df") else family.name
        return network

    def _backtest(self, train: HierarchicalData, test: HierarchicalData) -> tuple[HierarchicalForecaster, Backtest]:
        """A model that was trained without the last rows, and its scores on them."""
        from probhard.forecasting.report.backtest import backtest

        options = self.options
        shares = [level / 100 for level in sorted(options["level"])]
        try:
            model = self._forecaster().fit(train, progress="backtest")
            draws = model.sample(options["horizon"], options["num_samples"])
            return model, backtest(model.model, draws, train, test, shares, options["seed"])
        except KeyboardInterrupt:
            typer.echo("Stopped before the backtest was done: nothing was written.", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def _forecaster(self) -> HierarchicalForecaster:
        from probhard.forecasting.forecaster import HierarchicalForecaster

        return HierarchicalForecaster(**{name: self.options[name] for name in FORECASTER}, **self.network)

    def _write(self, model: HierarchicalForecaster, draws: np.ndarray, certificate: Certificate, page: str) -> None:
        """Write all files, and remove those of an earlier run, which the certificate does not cover."""
        from probhard.forecasting.forecaster import summary

        self.output.mkdir(parents=True, exist_ok=True)
        data, suffix = self.data, f".{self.options['format']}"
        index = data.future(draws.shape[1])
        columns = summary(draws, model.model, self.options["level"])
        stale = {self.output / f"{name}{ending}" for name in ("forecasts", "draws") for ending in SUFFIXES}
        stale.remove(self.output / f"forecasts{suffix}")
        write(self.output / f"forecasts{suffix}", to_long(columns, data.names, index, place=data.place))
        if count := self.options["draws"]:
            written = {str(i): draw for i, draw in enumerate(draws[:count])}
            wide = to_long(written, data.names, index, place=data.place)
            long = wide.melt(["unique_id", "ds"], var_name="draw", value_name=model.model)
            write(self.output / f"draws{suffix}", long.astype({"draw": int}))
            stale.remove(self.output / f"draws{suffix}")
        for path in stale:
            path.unlink(missing_ok=True)
        model.save(self.output / "model")
        certificate.save(self.output / "certificate.json")
        (self.output / "report.html").write_text(page, encoding="utf-8")


def certify(
    draws: np.ndarray, model: HierarchicalForecaster, data: HierarchicalData, setting: dict[str, Any]
) -> Certificate:
    """Check every draw (S, H, n), and their mean, against the constraint."""
    certificate = Certificate(
        {
            **setting,
            "rows": len(data.index),
            "nodes": len(data.names),
            "steps": draws.shape[1],
            "gaps": int(np.isnan(data.bottom).sum()),
            "levels": {level: len(nodes) for level, nodes in data.levels.items()},
            "incoherence": vars(incoherence(draws, data.hierarchy)),
        }
    )
    points = torch.from_numpy(np.concatenate([draws, draws.mean(0, keepdims=True)]))
    wrong = torch.zeros(draws.shape[1], dtype=torch.int64)
    for chunk in points.split(max(1, CHUNK // points[0].numel())):
        relative = certificate.after.add(model.constraint, chunk, chunk.abs().amax(-1, keepdim=True))
        wrong += (~(relative <= TOLERANCE)).sum(0)
    certificate.after.points -= int(wrong.sum())  # counted apart
    for step in wrong.nonzero()[:, 0].tolist():
        reason = f"{int(wrong[step])} of {len(points)} draws do not obey the constraints."
        certificate.flag(int(wrong[step]), field=f"{data.future(draws.shape[1])[step]}", reason=reason)
    return certificate


def summary(certificate: Certificate, output: Path) -> str:
    """The verdict, the incoherence, and where the files are."""
    gap = certificate.setting["incoherence"]
    verdict = "all feasible" if certificate.feasible else f"{certificate.infeasible} NOT feasible"
    return (
        f"{certificate.checked} points checked (every draw at every step): {verdict}.\n"
        f"Largest incoherence {gap['largest']:.3g} ({gap['relative']:.1e} relative); "
        f"smallest value {gap['smallest_draw']:.6g}.\n"
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


def _packages() -> dict[str, str]:
    """Versions of the packages that only forecasts need, where they are installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
