"""The past of forecasts: errors of a history with fitted values, and past forecasts by ``cutoff``.

| option      | columns                                      | gives                                                 |
|-------------|----------------------------------------------|-------------------------------------------------------|
| `--history` | ids or keys, stamps, `y`, models             | one-step errors `y - model`: the joint law            |
| `--past`    | the same, `cutoff`, intervals or quantiles   | past windows: the metric; errors without a history    |

They are Nixtla's ``Y_df`` with fitted values and the frame of its ``cross_validation``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from probhard.cli._frames import check_numbers
from probhard.cli._nodes import CUTOFF, TARGET, Table, stamp_column
from probhard.errors import ParameterError
from probhard.forecasting.data.frames import check_columns
from probhard.forecasting.data.table import require
from probhard.forecasting.reconciliation.columns import Columns
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.joint_law import PathLaw
from probhard.forecasting.reconciliation.learned import PastForecast


@dataclass(frozen=True, eq=False)
class Past:
    """Frames of the past.

    Args:
        history: Frame of observed and fitted values, if there is one.
        windows: Frame of past forecasts, if there is one.
    """

    history: Any = None
    windows: Any = None

    def check(self, models: list[Columns]) -> None:
        """Check that each frame knows one of the models.

        Raises:
            ParameterError: A frame knows none, so it would not be used.
        """
        names = [columns.mean or columns.model for columns in models]
        for option, frame in (("--history", self.history), ("--past", self.windows)):
            if frame is not None and not set(names) & set(frame.columns):
                raise ParameterError(
                    f"The file of {option} has the columns {', '.join(map(str, frame.columns))}, none of "
                    f"{', '.join(names)}.",
                    "Past values are matched to models by the names of columns, so none would be used.",
                    f"Name them as in the forecasts, or leave out {option}.",
                )

    def of(self, base: Forecasts, table: Table, columns: Columns, summing: Any) -> tuple[Forecasts, list[PastForecast]]:
        """Return the forecasts with their past errors, and past forecasts of one model.

        Args:
            base: Forecasts of the model.
            table: The frame of the forecasts.
            columns: The columns of the model.
            summing: Frame of S, or None.

        Raises:
            ParameterError: A frame does not fit the forecasts.
        """
        model = columns.mean or columns.model
        errors, stamps = self._errors(table, model)
        found = [] if table.bottoms_only else self._windows(table, columns, summing)
        if errors is None and found:
            scaled = [(target - past.mean) / past.spread for _, past, target in found if past.spread is not None]
            errors, stamps = (np.concatenate(scaled), None) if scaled else (None, None)
        if errors is not None:
            base = replace(base, errors=errors)
        windows = []
        for cutoff, past, target in found:
            if past.spread is None or past.mean is None:
                continue
            before = errors if errors is None or stamps is None else errors[stamps <= cutoff]
            rows = None if before is None else torch.from_numpy(before)
            law = PathLaw.of_errors(torch.from_numpy(past.mean), torch.from_numpy(past.spread), rows)
            windows.append(PastForecast(law, torch.from_numpy(target)))
        return base, windows

    def _errors(self, table: Table, model: str) -> tuple[np.ndarray | None, Any]:
        """Errors of the history (T, nodes), NaN where missing, and its stamps (T,)."""
        if self.history is None or model not in self.history.columns:
            return None, None
        frame = self.history
        check_columns(frame, [TARGET], "A history holds what was observed beside fitted values.", "Add it")
        node = table.nodes_of(frame)
        if (node < 0).all():
            raise ParameterError(
                "The history has no node of the forecasts.",
                "Errors are matched to forecasts by ids or keys.",
                "Write the same ids in both files.",
            )
        step, stamps = require("pandas", "probhard reconcile").factorize(_times(frame[_stamp(frame, table)]), sort=True)
        count = table.hierarchy.bottoms if table.bottoms_only else table.hierarchy.variables
        errors = np.full((len(stamps), count), np.nan)
        kept = (node >= 0) & (step >= 0)
        for name in (TARGET, model):
            check_numbers(frame[name], "Errors are differences of numbers.", "leave out --history", expected=True)
        if len(set(zip(step[kept], node[kept]))) < kept.sum():
            raise ParameterError(
                "The history has several rows for a node and stamp.",
                "Only one of them can be the observed value.",
                "Drop the others.",
            )
        values = frame[TARGET].to_numpy(dtype=np.float64) - frame[model].to_numpy(dtype=np.float64)
        errors[step[kept], node[kept]] = values[kept]
        return errors[~np.isnan(errors).all(1)], stamps[~np.isnan(errors).all(1)]

    def _windows(self, table: Table, columns: Columns, summing: Any) -> list[tuple[Any, Forecasts, np.ndarray]]:
        """Cutoff, forecasts and observed values (H, n) of every past window of a model."""
        model = columns.mean or columns.model
        if self.windows is None or model not in self.windows.columns:
            return []
        frame = self.windows
        check_columns(frame, [CUTOFF, TARGET], "Past forecasts have a cutoff and what was observed.", "Add it")
        stamp, found = _stamp(frame, table), []
        given = Columns(columns.model, columns.mean, {k: p for k, p in columns.quantiles.items() if k in frame.columns})
        for cutoff, part in frame.assign(**{CUTOFF: _times(frame[CUTOFF])}).groupby(CUTOFF, sort=True):
            past = Table.of(part.reset_index(drop=True), table.spec, summing, stamp)
            if past.hierarchy.names != table.hierarchy.names or past.bottoms_only:
                raise ParameterError(
                    f"The past forecasts of {cutoff} have other nodes than the forecasts.",
                    "The metric is learned on the same hierarchy.",
                    "Give past forecasts of all nodes, with the same ids.",
                )
            found.append((cutoff, past.forecasts(given), past.values(TARGET)))
        return found


def _stamp(frame: Any, table: Table) -> str:
    return table.stamp if table.stamp in frame.columns else stamp_column(frame, list(table.keys))


def _times(column: Any) -> Any:
    """Stamps that compare in time: dates where text is one."""
    pandas = require("pandas", "probhard reconcile")
    if column.dtype.kind in "iufM":
        return column
    try:
        return pandas.to_datetime(column)
    except (ValueError, TypeError):
        return column
