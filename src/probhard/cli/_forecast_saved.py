"""``probhard forecast --model DIR new.csv``: a saved model, the rows that are new, and key columns in all outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from probhard.cli._forecast_options import DEFAULTS, ForecastOptions
from probhard.errors import ParameterError
from probhard.forecasting.data.joined import joined
from probhard.forecasting.data.keys import Keys
from probhard.forecasting.data.regressors import HOLIDAYS
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.limits import held

if TYPE_CHECKING:
    from probhard.forecasting.forecaster import HierarchicalForecaster

COLUMNS = {"time_col": "time_column", "target_col": "target_column"}  # options of reading, and of the command
FITTED = ("models", "fast", "method", "epochs", "changes", "keys")  # options of a fit, which a saved model has


@dataclass(frozen=True)
class SavedRun:
    """A saved model, and the options of a run that are taken from it.

    Args:
        model: The fitted forecaster.
        options: Options of the run, completed.
    """

    model: HierarchicalForecaster
    options: ForecastOptions

    @classmethod
    def of(cls, options: ForecastOptions) -> SavedRun:
        """Load the folder of ``--model``.

        Raises:
            ParameterError: The folder cannot be read, or options of a fit were given.
        """
        from probhard.forecasting.forecaster import HierarchicalForecaster

        given = [name for name in FITTED if options.run[name] != DEFAULTS[name]]
        if given:
            raise ParameterError(
                f"--model was given with --{given[0]}.",
                "A saved model is fitted already, and knows its keys.",
                "Leave out one of them.",
            )
        folder = Path(options.run["model"])
        model = HierarchicalForecaster.load(folder if (folder / "forecaster.json").exists() else folder / "model")
        run = {**options.run, "keys": model.keys or [], "horizon": options.run["horizon"] or model.horizon}
        run |= {column: model.reading.get(name) or run[column] for name, column in COLUMNS.items()}
        bounds = {"nonnegative": model.nonnegative, "upper": model.upper}
        run |= {name: value for name, value in bounds.items() if run[name] == DEFAULTS[name]}
        run["regressors"] = run["regressors"] or [name for name in model.data.feature_names if name != HOLIDAYS]
        model.nonnegative = run["nonnegative"]
        model.upper = run["upper"] if not isinstance(run["upper"], str) else None
        reading = {"freq": model.data.freq, "season": model.data.season, **options.reading}
        return cls(model, replace(options, run=run, reading=reading))

    def joined(self, new: HierarchicalData) -> HierarchicalData:
        """Put new rows after the fitted history (``data.joined``); a file that starts as early replaces it.

        Raises:
            ParameterError: Rows are missing between the two, or there are other series.
        """
        known = self.model.data
        if new.freq != known.freq or new.index[0] <= known.index[0]:
            return new
        return held(joined(known, new, self.options.reading.get("on_gap", "mend")), self.options.run["immutable"])


def key_columns(data: HierarchicalData, keys: Any) -> dict[str, list[str]]:
    """Values of the key columns for every node, (n,) each; empty where a node is summed over a key.

    Args:
        data: The series; levels and nodes are named by their keys.
        keys: The keys as given; none gives no columns.
    """
    if not keys:
        return {}
    columns = {key: [""] * len(data.names) for key in Keys.of(keys).columns}
    position = {name: i for i, name in enumerate(data.names)}
    for level, nodes in data.hierarchy.tags.items():
        names = level.split("/")
        for node in nodes:
            parts = node.split("/", len(names) - 1)
            for name, part in zip(names, parts):
                if name in columns and len(parts) == len(names):
                    columns[name][position[node]] = part
    return columns


def with_keys(table: Any, keys: dict[str, list[str]]) -> Any:
    """Add key columns to a long frame whose rows run node by node, after the names of the nodes."""
    if not keys:
        return table
    nodes = {name: i for i, name in enumerate(dict.fromkeys(table["unique_id"]))}
    at = table["unique_id"].map(nodes).to_numpy()
    for number, (key, values) in enumerate(keys.items()):
        if key not in table.columns:
            table.insert(1 + number, key, np.asarray(values, dtype=object)[at])
    return table
