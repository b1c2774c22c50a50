"""``probhard forecast``: reads series and their hierarchy, writes coherent forecasts, a certificate and a report page.

Past windows are held out first, and models that were trained without them are scored there, beside their rivals. The
last model is trained on all rows and draws the future. Its draws are projected onto bounds, plans and caps.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from probhard._util.atomic import write_text
from probhard.cli._certificate import IMPLAUSIBLE, INFEASIBLE, Certificate
from probhard.cli._forecast_checks import check_room, summary
from probhard.cli._forecast_data import is_file, known_note, read_data, read_limits
from probhard.cli._forecast_options import FORECASTER, ForecastOptions
from probhard.cli._forecast_paths import Paths
from probhard.cli._forecast_saved import COLUMNS, SavedRun, key_columns, with_keys
from probhard.cli._frames import SUFFIXES, write, write_parts
from probhard.cli._outputs import check_certificate, check_folder, check_writable, seal
from probhard.cli.demo import INTERRUPTED
from probhard.errors import ParameterError
from probhard.forecasting.data.frames import to_long
from probhard.forecasting.data.support import unsupported
from probhard.forecasting.data.table import HierarchicalData

if TYPE_CHECKING:
    from probhard.forecasting.forecaster import HierarchicalForecaster
    from probhard.forecasting.report.backtest import Backtest, Made, Window

CERTIFICATE, PAGE, TABLES = "certificate.json", "report.html", ("forecasts", "draws")
OURS = (CERTIFICATE, "model/forecaster.json", "fits")  # one of them is in every folder of an earlier run
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
        notes: Remarks for the reader.
        saved: A fitted forecaster of these series; it is not trained again, and not backtested.
    """

    data: HierarchicalData
    source: dict[str, str]
    options: dict[str, Any]
    network: dict[str, Any]
    output: Path
    notes: list[str] = field(default_factory=list)
    saved: HierarchicalForecaster | None = None

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
        saved = None
        if options.run["model"] is not None:
            saved = SavedRun.of(options)
            options = saved.options
        data, source, notes = read_data(name, options.run, options.reading)
        data = data if saved is None else saved.joined(data)
        output = Path(options.run["output"] or f"{data.name}-forecast")
        if output.exists() and not output.is_dir():
            raise ParameterError(f"--output {output} is a file.", "Several files are written.", "Name a folder.")
        check_writable(output, "--output")
        check_certificate(output / CERTIFICATE)
        check_folder(output, OURS, [f"{name}{ending}" for name in TABLES for ending in SUFFIXES] + [PAGE])
        return cls(data, source, options.run, options.network, output, notes, None if saved is None else saved.model)

    def run(self) -> None:
        """Backtest, train on all rows, draw, certify, and write all files.

        Raises:
            ProbhardError: The data do not allow these options.
            typer.Exit: Some points are not feasible (status 3), the forecast is far outside what the history supports
                (4), or training was stopped (130).
        """
        from probhard.forecasting.forecaster import default_horizon
        from probhard.forecasting.members.streamed import fits_at_once
        from probhard.forecasting.reconciliation.nixtla import probabilities
        from probhard.forecasting.report.backtest import held_out
        from probhard.forecasting.report.moves import moves_of
        from probhard.forecasting.report.page import Report

        options = self.options
        horizon = options["horizon"] = options["horizon"] or default_horizon(self.data)
        data = self.data = self.data.known_ahead(horizon)
        probabilities(options["level"])  # checked before anything is trained
        options["num_samples"] = max(options["num_samples"], options["draws"] or 0)
        check_room(data, horizon, options, self.output)
        limits = read_limits(options, data, horizon)
        tests = options["backtest"] and self.saved is None
        if tests and not fits_at_once(options["num_samples"], horizon, len(data.names)):
            tests = False
            self.notes.append(
                f"No backtest: {options['num_samples']} draws of {len(data.names)} nodes are not kept for past windows."
            )
        windows = held_out(data, horizon, options["windows"]) if tests else []
        network = self._resolve(windows[0][0] if windows else data)
        typer.echo(
            f"{data.name}: {len(data.index)} rows of {len(data.names)} nodes, {data.index[0]} to {data.index[-1]}; "
            f"{horizon} steps ahead by {self._label()}."
        )
        self.notes += [*data.notes, *data.regressor_notes]
        model, tested = self._backtest(windows)
        if tested is not None:
            typer.echo(tested.table())
            self.notes += [f"{name} was left out: {reason}" for name, reason in tested.left_out.items()]
        model, status = self._trained(model, windows)
        page = Report(data, model.model, options["level"], np.empty((0, horizon, 0)), tested, {}, {})
        paths = Paths.of(model, data, limits, options, page.charted)
        warnings = unsupported(data, paths.mean)
        self.notes += [] if model.network_only else model.pool.notes
        self.notes += known_note(data, ["deepvar"] if model.network_only else list(model.weights_))
        for note in [*self.notes, *(warning.sentence for warning in warnings)]:
            typer.echo(note, err=True)
        options = {name: str(x) if isinstance(x, Path) else x for name, x in options.items()}
        options["spread_factor"] = model.spread_factor
        settings = {**self.source, **options, "network": network, "packages": _packages()}
        settings["backtest"] = None if tested is None else tested.record()
        settings["warnings"] = [warning.record() for warning in warnings]
        certificate = paths.certificate(settings)
        page = replace(
            page,
            draws=paths.charted,
            certificate=certificate.content(),
            settings={**options, **network},
            notes=self.notes,
            warnings=[warning.sentence for warning in warnings],
            learned=model.explanation_,
            weights={} if model.network_only else model.weights_,
            moves={} if model.network_only else moves_of(model.pool, data, paths.mean, limits.active(data)),
            drawn=page.charted,
        )
        self._write(model, paths, certificate, page.html())
        typer.echo(summary(certificate, self.output))
        status = status or (0 if certificate.feasible else INFEASIBLE) or (IMPLAUSIBLE if warnings else 0)
        if status:
            raise typer.Exit(status)

    def _trained(
        self, before: HierarchicalForecaster | None, windows: list[Window]
    ) -> tuple[HierarchicalForecaster, int]:
        """A model of all rows, and the exit status; if its training was stopped, the one of the last window."""
        data = self.data
        if self.saved is not None:
            return self.saved.update(data), 0
        try:
            return self._named(self._forecaster().fit(data, progress="all rows")), 0
        except KeyboardInterrupt:
            if before is None:
                typer.echo("Stopped before the training was done: nothing was written.", err=True)
                raise typer.Exit(INTERRUPTED) from None
            self.notes.append(
                f"Training on all rows was stopped: the forecasts start at {data.index[-1]}, but the network has "
                f"learned from the rows to {windows[-1][0].index[-1]} only."
            )
            return before.update(data), INTERRUPTED

    def _resolve(self, train: HierarchicalData) -> dict[str, Any]:
        """Fill in options that depend on the data; returns those of the network, as plain values."""
        from probhard.forecasting.forecaster import defaults, smooth

        options = self.options
        if not self._has_network():
            return {}
        options["method"] = options["method"] or "probhard-or"
        options["changes"] = smooth(train) if options["changes"] is None else options["changes"]
        network = {**defaults(self.data, options["horizon"], options["changes"]), **self.network}
        epochs = network.pop("max_epochs", None)
        options["epochs"] = options["epochs"] or epochs
        if (family := network.get("family")) is not None:
            network["family"] = f"{family.name}, df {family.df:g}" if hasattr(family, "df") else family.name
        return network

    def _backtest(self, windows: list[Window]) -> tuple[HierarchicalForecaster | None, Backtest | None]:
        """The model of the last window, and the scores of all; None without windows."""
        from probhard.forecasting.report.backtest import backtest

        options = self.options
        shares = [level / 100 for level in sorted(options["level"])]
        models = []

        def forecast(train: HierarchicalData) -> Made:
            models.append(self._forecaster().fit(train, progress=f"backtest to {train.index[-1]}"))
            return models[-1].sample(options["horizon"], options["num_samples"]), models[-1].base("ets")

        if not windows:
            return None, None
        try:
            tested = backtest(self._forecaster().model, forecast, windows, shares)
            return models[-1], tested
        except KeyboardInterrupt:
            typer.echo("Stopped before the backtest was done: nothing was written.", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def _has_network(self) -> bool:
        """Whether DeepVAR is a member, or the only one: its options were given and no models were."""
        options = self.options
        if self.saved is not None or options["fast"] or options["models"] is not None:
            return "deepvar" in (options["models"] or ())
        asked = [options[name] is not None for name in ("method", "epochs", "changes")]
        return any(asked) or bool(self.network)

    def _label(self) -> str:
        options = self.options
        if self.saved is not None:
            return f"the model in {options['model']}"
        if options["models"] is not None:
            return ", ".join(options["models"])
        return str(options["method"]) if self._has_network() else "a pool of members"

    def _named(self, model: HierarchicalForecaster) -> HierarchicalForecaster:
        """The model with the columns of the input file, which a saved folder keeps."""
        options = self.options
        model.keys = options["keys"] or None
        model.reading = {name: options[column] for name, column in COLUMNS.items() if options[column] is not None}
        return model

    def _forecaster(self) -> HierarchicalForecaster:
        from probhard.forecasting.forecaster import HierarchicalForecaster

        chosen = {name: self.options[name] for name in FORECASTER}
        if is_file(chosen["upper"]):  # caps by step are left to the last projection
            chosen["upper"] = None
        return HierarchicalForecaster(**chosen, cache=self.output / "fits", **self.network)

    def _write(self, model: HierarchicalForecaster, paths: Paths, certificate: Certificate, page: str) -> None:
        """Write all files, and remove those of an earlier run, which the certificate does not cover."""
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / CERTIFICATE).unlink(missing_ok=True)
        data, suffix = self.data, f".{self.options['format']}"
        index = data.future(self.options["horizon"])
        stale = {self.output / f"{name}{ending}" for name in TABLES for ending in SUFFIXES}
        files = [self.output / f"forecasts{suffix}"]
        keys = key_columns(data, self.options["keys"])
        model.save(self.output / "model")  # first: it marks the folder as ours
        table = to_long(paths.columns, data.names, index, place=data.place)
        write(files[0], with_keys(table, keys))
        if self.options["draws"]:
            files.append(self.output / f"draws{suffix}")
            write_parts(files[-1], (with_keys(part, keys) for part in self._draws(paths)))
        for path in stale - set(files):
            path.unlink(missing_ok=True)
        files += [self.output / "model", self.output / PAGE]
        write_text(files[-1], page)
        seal(certificate, self.output / CERTIFICATE, files)

    def _draws(self, paths: Paths) -> Iterator[Any]:
        """Long frames of the draws that are written, one after the other."""
        data = self.data
        for number, draw in paths.draws():
            part = to_long({paths.model: draw}, data.names, data.future(len(draw)), place=data.place)
            part.insert(2, "draw", number)
            yield part


def _packages() -> dict[str, str]:
    """Versions of the packages that only forecasts need, where they are installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
