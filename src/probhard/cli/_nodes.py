"""A long frame of forecasts, its nodes, and the position of each row.

There is one row per node and stamp, ``unique_id, ds, <model>`` with intervals or quantiles (named as in
``forecasting.reconciliation.nixtla``), or one row per node, stamp and ``sample`` or ``draw``. Stamps may have another
usual name, such as ``date``. A node is a tuple of keys. An aggregate has "" for keys that it sums over; it is the sum
of the bottom nodes that share its other keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import narwhals as nw
import numpy as np

from probhard.cli._frames import TIMES, check_numbers, in_time, numeric, texts, time_columns
from probhard.constraints import Hierarchy
from probhard.errors import ParameterError
from probhard.forecasting.data.frames import TOTAL, check_columns, is_total, named_hierarchy, numbers
from probhard.forecasting.data.keys import Keys
from probhard.forecasting.data.table import require
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.nixtla import LONE, Columns, is_quantile, split, tree

ID, SAMPLES, TARGET, CUTOFF = "unique_id", ("sample", "draw"), "y", "cutoff"
CROSSING = 1e-6  # of quantiles that counts as rounding, relative to their size
SHOWN = 5  # missing rows that an error names
NOT_FORECASTS = (CUTOFF, "horizon", "h", "step", "fold", "index")  # columns of numbers, unless --models names them


@dataclass(frozen=True, eq=False)
class Table:
    """A long frame and the position of each row: its draw, stamp and node.

    Args:
        frame: pandas frame.
        hierarchy: Hierarchy of the nodes.
        keys: Key columns of every node by name.
        stamps: Sorted stamps, (H,).
        samples: Sorted labels of the draws, (S,).
        draw: Name of the column of draws, if there is one.
        place: Indices of draw, stamp and node, each (rows,).
        bottoms_only: Whether the frame has bottom nodes alone.
        stamp: Name of the column of stamps.
        known: Node of each id, or of each tuple of keys.
        spec: The keys as they were asked for.
    """

    frame: Any
    hierarchy: Hierarchy
    keys: dict[str, list[str]]
    stamps: Any
    samples: Any
    draw: str | None
    place: tuple[np.ndarray, np.ndarray, np.ndarray]
    bottoms_only: bool
    stamp: str
    known: dict[Any, int]
    spec: Keys | None = None

    @classmethod
    def of(cls, frame: Any, spec: Keys | None, summing: Any, stamp: str | None = None) -> Table:
        """Find the nodes of a frame: by the summing matrix, by key columns, or by ids.

        Args:
            frame: pandas frame.
            spec: Key columns, nested or crossed; they need not be in the frame.
            summing: Frame of S, or None.
            stamp: Column of the stamps; None finds it.

        Raises:
            ParameterError: Columns are missing, or rows do not form a hierarchy.
        """
        pandas = require("pandas", "probhard reconcile")
        if not len(frame):
            raise ParameterError("The file has no rows.", "There is nothing to reconcile.", "Check the file.")
        keys = () if spec is None else spec.columns
        keyed = bool(keys) and bool(set(keys) & set(frame.columns))
        stamp = stamp_column(frame, keys) if stamp is None else stamp
        need = [*keys, stamp] if keyed and summing is None else [ID, stamp]
        why = "Nodes are read from 'unique_id' or the columns of --keys, stamps from 'ds' or 'date'."
        absent = [key for key in keys if key not in frame.columns] if keyed or ID not in frame.columns else []
        check_columns(frame, [*absent, *need], why, "Rename a column, or correct --keys" if keys else "Rename a column")
        if summing is not None:
            hierarchy, key_columns = named_hierarchy(summing, None, ID), {}
            nodes: list[tuple[str, ...]] = [(name,) for name in hierarchy.names or ()]
            rows: list[tuple[str, ...]] = [(name,) for name in frame[ID].astype(str)]
            bottoms_only = set(rows) <= set(nodes[hierarchy.aggregates :])
        else:
            ids = texts(frame[ID]) if ID in frame.columns else []
            rows = list(zip(*(_keys(frame[key]) for key in keys))) if keyed else split(ids, len(keys))
            matrix, nodes, bottoms_only = tree(rows, spec)
            label = dict(zip(rows, ids))
            hierarchy = Hierarchy(matrix, [label.get(node) or "/".join(filter(None, node)) or TOTAL for node in nodes])
            key_columns = {key: [node[i] for node in nodes] for i, key in enumerate(keys)} if keyed else {}
        draw = next((name for name in SAMPLES if name in frame.columns), None)
        step, stamps, _ = in_time(frame[stamp])
        sample, samples = pandas.factorize(frame[draw], sort=True) if draw else (np.zeros(len(frame), int), [0])
        number = {node: i for i, node in enumerate(nodes)}
        unknown = [row for row in rows if row not in number]
        if unknown or (step < 0).any() or (sample < 0).any():
            raise ParameterError(
                f"The node {'/'.join(unknown[0])!r} has no bottom node." if unknown else "A row has no stamp or draw.",
                "Its forecast has no place in the sums.",
                "Add what is missing, leave out its rows, or pass --summing where bottom nodes lie at several depths.",
            )
        node = np.array([number[row] for row in rows]) - bottoms_only * hierarchy.aggregates
        place = sample, step, node
        known = dict(zip(rows if keyed and summing is None else frame[ID].astype(str), node))
        table = cls(frame, hierarchy, key_columns, stamps, samples, draw, place, bottoms_only, stamp, known, spec)
        table.check()
        return table

    def check(self) -> None:
        """Check that every node has one row for each stamp and draw.

        Raises:
            ParameterError: Rows are missing or repeated.
        """
        names = (self.hierarchy.names or ())[self.hierarchy.aggregates * self.bottoms_only :]
        count = np.zeros((len(self.samples), len(self.stamps), len(names)), dtype=np.int64)
        np.add.at(count, self.place, 1)
        wrong = np.argwhere(count != 1)
        if len(wrong):
            listed = [f"{names[k]!r} at {self.stamps[j]}" for _, j, k in wrong[:SHOWN]]
            sample, step, node = wrong[0]
            repeats = int(count[sample, step, node])
            rows = f"are {repeats} rows" if repeats else "is no row"
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ParameterError(
                f"There {rows} for {', '.join(listed)}{more}.",
                "Every node needs one forecast at each stamp (and draw), or give bottom nodes alone.",
                "Add or drop the rows; for trees of unequal depth or crossed ids, pass --summing.",
            )

    def values(self, column: str) -> np.ndarray:
        """Read a column of bounds or fixed values, (H, n), NaN where it is empty.

        Raises:
            ParameterError: There is no such column, or it is not numeric.
        """
        check_columns(self.frame, [column], "An option names it.", "Choose another")
        table = np.full((len(self.stamps), self.hierarchy.variables), np.nan)
        node = self.place[2] + self.bottoms_only * self.hierarchy.aggregates
        table[self.place[1], node] = numbers(nw.from_native(self.frame[column], series_only=True))
        return table

    def models(self, asked: str | None, used: Sequence[str | None]) -> list[Columns]:
        """The models to reconcile.

        Args:
            asked: Comma-separated names; None for all columns of numbers.
            used: Columns that other options name.

        Raises:
            ParameterError: A model is unknown, there is none, or a column holds text.
        """
        wanted = [] if asked is None else [name.strip() for name in asked.split(",")]
        others = {ID, self.stamp, TARGET, self.draw, *self.keys, *used, *(() if wanted else NOT_FORECASTS)}
        columns = [name for name in self.frame.columns if name not in others]
        if wanted and LONE not in wanted:
            columns = [name for name in columns if name.startswith(tuple(wanted))]
        for name in columns:
            why = "A column is reconciled as a whole or not at all."
            check_numbers(self.frame[name], why, "choose other columns with --models", is_quantile(name))
        known = {group.model: group for group in Columns.of([name for name in columns if numeric(self.frame[name])])}
        unknown = [name for name in wanted if name not in known]
        if unknown or not known:
            raise ParameterError(
                f"There is no model {unknown[0]!r}." if unknown else "There is no column of numbers to reconcile.",
                f"A model is a column of its name, or quantiles (NAME-lo-80, NAME-q0.1); {TARGET!r} is what was seen.",
                f"Name or rename a column; there are {list(self.frame.columns)}.",
            )
        return [known[name] for name in wanted or known]

    def others(self, models: Sequence[Columns]) -> list[str]:
        """Columns that are neither forecasts of these models nor identify a row."""
        used = {ID, self.stamp, self.draw, *self.keys}
        used |= {name for columns in models for name in (columns.mean, *columns.quantiles)}
        return [name for name in self.frame.columns if name not in used]

    def forecasts(self, columns: Columns) -> Forecasts:
        """The base forecasts of one model, for all nodes or for bottom nodes alone.

        Raises:
            ParameterError: A forecast is missing.
        """
        if self.draw is not None:
            check_columns(self.frame, [columns.model], "It holds the draws.", "Give draws no quantiles beside them")
            return Forecasts(draws=self._cube(columns.model))
        mean = None if columns.mean is None else self._cube(columns.mean)[0]
        given = [name for name in columns.quantiles if name in self.frame.columns]
        if not given:
            return Forecasts(mean)
        values = np.stack([self._cube(name)[0] for name in given])
        self._check_crossed(given, [columns.quantiles[name] for name in given], values)
        return Forecasts.of_quantiles([columns.quantiles[name] for name in given], values, mean)

    def _check_crossed(self, names: Sequence[str], probabilities: Sequence[float], values: np.ndarray) -> None:
        """Check that quantiles (Q, H, nodes) rise with their probability.

        Raises:
            ParameterError: One lies above another of higher probability, by more than rounding.
        """
        order = np.argsort(probabilities)
        lower, upper = values[order[:-1]], values[order[1:]]
        wrong = np.argwhere(lower > upper + CROSSING * np.maximum(np.abs(lower), np.abs(upper)))
        if len(wrong):
            quantile, step, node = wrong[0]
            low, high = names[order[quantile]], names[order[quantile + 1]]
            nodes = (self.hierarchy.names or ())[self.hierarchy.aggregates * self.bottoms_only :]
            raise ParameterError(
                f"{low!r} is above {high!r} for {nodes[node]!r} at {self.stamps[step]}, and in {len(wrong)} places.",
                "A quantile of higher probability cannot be lower; the columns may be swapped.",
                "Swap the columns back, or sort the quantiles of every row.",
            )

    def _cube(self, column: str) -> np.ndarray:
        """A column as (S, H, nodes)."""
        nodes = self.hierarchy.bottoms if self.bottoms_only else self.hierarchy.variables
        cube = np.empty((len(self.samples), len(self.stamps), nodes))
        values = self.frame[column].to_numpy(dtype=np.float64)
        if not np.isfinite(values).all():
            wrong = np.flatnonzero(~np.isfinite(values))
            raise ParameterError(
                f"The column {column!r} is {values[wrong[0]]} in row {wrong[0] + 1}, one of {len(wrong)} such rows.",
                "Nothing can be projected from there.",
                "Fill in the missing forecasts.",
            )
        cube[self.place] = values
        return cube

    def nodes_of(self, frame: Any) -> np.ndarray:
        """Return the node of every row of another frame with the same ids or keys, -1 for others.

        Raises:
            ParameterError: It has neither ids nor keys.
        """
        if self.keys:
            check_columns(frame, list(self.keys), "It tells the nodes apart.", "Add it")
            rows: list[Any] = list(zip(*(_keys(frame[key]) for key in self.keys)))
        else:
            check_columns(frame, [ID], "It tells the nodes apart.", "Add it")
            rows = list(frame[ID].astype(str))
        return np.array([self.known.get(row, -1) for row in rows])

    def written(self, results: dict[str, np.ndarray]) -> Any:
        """The frame with reconciled columns, and rows for aggregates that it lacked."""
        pandas = require("pandas", "probhard reconcile")
        sample, step, node = self.place
        node = node + self.bottoms_only * self.hierarchy.aggregates
        values = {name: cube[sample * (len(cube) > 1), step, node] for name, cube in results.items()}
        frame = self.frame.assign(**values)
        if not self.bottoms_only:
            return frame
        return pandas.concat([frame, self.long(results, self.hierarchy.aggregates)], ignore_index=True)[frame.columns]

    def long(self, results: dict[str, np.ndarray], nodes: int | None = None) -> Any:
        """All draws of the first ``nodes`` nodes, or of all, as a long frame."""
        pandas = require("pandas", "probhard reconcile")
        count, names = max(len(cube) for cube in results.values()), (self.hierarchy.names or ())[:nodes]
        shape = len(names), len(self.stamps), count
        node, step, sample = (x.ravel() for x in np.indices(shape))
        labels = {key: [column[i] for i in node] for key, column in self.keys.items()}
        if ID in self.frame.columns or not labels:
            labels = {ID: [names[i] for i in node], **labels}
        samples = {self.draw or SAMPLES[1]: np.asarray(self.samples)[sample] if self.draw else sample}
        values = {name: cube[sample * (len(cube) > 1), step, node] for name, cube in results.items()}
        return pandas.DataFrame({**labels, self.stamp: np.asarray(self.stamps)[step], **samples, **values})


def stamp_column(frame: Any, keys: Sequence[str]) -> str:
    """Find the column of the stamps: ``ds``, the only one with a usual name, or else the only one of dates.

    Raises:
        ParameterError: There is none, or more than one.
    """
    names = [str(name) for name in frame.columns if name not in keys]
    found = ["ds"] if "ds" in names else time_columns(frame, [*keys, ID, CUTOFF])
    if len(found) != 1:
        raise ParameterError(
            f"{'No column' if not found else 'More than one column'} of the stamps among {', '.join(names)}.",
            f"It is called 'ds', or one of them {', '.join(TIMES[1:4])}, ..., or it is the only one of dates.",
            "Rename it to 'ds'.",
        )
    return found[0]


def _keys(column: Any) -> list[str]:
    """A key column as text, "" for keys that are summed over."""
    return ["" if is_total(text) else text for text in texts(column)]
