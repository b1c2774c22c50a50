"""Hierarchical time series: one table of all series over time, and the sums that they obey.

    y_t = S b_t,      t = 1, ..., T,

with the aggregates first and the bottom series ``b_t`` last. NaN marks missing values; ``from_frame`` fills them by
one rule (``data.mending``). A history that does not add up is rejected, because no coherent forecast can match it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError, check_choice, optional
from probhard.forecasting.data.checks import check_coherence, check_index, check_names, check_sizes
from probhard.forecasting.data.mending import Mending, listing, zero_since
from probhard.forecasting.data.regressors import Regressors
from probhard.forecasting.data.stamps import START, Place, season_of, seasons_of

if TYPE_CHECKING:
    import pandas as pd


def require(module: str, purpose: str) -> Any:
    """Import an optional module of the extra ``forecast``.

    Args:
        module: Dotted name.
        purpose: Subject of the error text, such as ``"A report"``.

    Raises:
        MissingExtraError: If it is not installed; the text has the pip line.
    """
    return optional(module, "forecast", purpose)


def summed(hierarchy: Hierarchy, bottom: np.ndarray) -> np.ndarray:
    """Sum bottom series to all series.

    Args:
        hierarchy: n nodes, m of them bottom nodes.
        bottom: Bottom series, (*batch, m).

    Returns:
        All series, (*batch, n); an aggregate is NaN only if one of its bottom series is.
    """
    flat = np.asarray(bottom, dtype=np.float64).reshape(-1, hierarchy.bottoms)
    return (hierarchy.summation @ flat.T).T.reshape(*bottom.shape[:-1], hierarchy.variables)


def node_names(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Return the names of all n nodes; their numbers as text if the hierarchy has no names."""
    return hierarchy.names or tuple(map(str, range(hierarchy.variables)))


@dataclass(frozen=True, eq=False)
class HierarchicalData:
    """A coherent history of n series.

    Args:
        values: All series, (T, n), aggregates first; NaN where missing.
        index: Consecutive periods as a ``pandas.PeriodIndex``, (T,).
        hierarchy: The sums; its tags name the levels, top first.
        horizon, season: Usual number of steps to forecast, and season length in steps.
        name: Label of the data set.
        place: Position of the stamps in their periods; forecasts are stamped alike.
        mending: What was done to missing values; None if nothing.
        regressors: Values that are known ahead, such as prices and holidays.

    Raises:
        ProbhardError: If shapes, index, names or tags do not fit, a value is infinite, or sums do not add up.
    """

    values: np.ndarray  # (T, n)
    index: pd.PeriodIndex  # (T,)
    hierarchy: Hierarchy
    horizon: int | None = None
    season: int = 1
    name: str = "data"
    place: Place = START
    mending: Mending | None = None
    regressors: Regressors | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", np.asarray(self.values, dtype=np.float64))
        check_index(self.index)
        expected = (len(self.index), self.hierarchy.variables)
        if self.values.shape != expected:
            raise ShapeError(
                f"values have shape {self.values.shape}, but the index and the hierarchy need {expected}.",
                "Rows are periods and columns are series, aggregates first.",
                "Transpose the values, or leave out the series that the hierarchy does not have.",
            )
        if self.season < 1:
            raise ParameterError(
                f"Got season={self.season}.", "It is a season length in rows.", "Pass 1 or more; 1 means no season."
            )
        check_names(self.names, self.hierarchy.tags)
        check_sizes(self.values, self.names, self.index)
        known = self.observed[:, self.hierarchy.aggregates :]
        if self.mending is not None:  # rows after the end of a series are 0, not observed
            known = np.where(np.arange(len(self.index))[:, None] > self.mending.last, np.nan, known)
        check_coherence(self.values, known, self.hierarchy, self.names, self.index)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the n series."""
        return node_names(self.hierarchy)

    @property
    def freq(self) -> str:
        """Frequency of the periods as a pandas alias."""
        return str(self.index.freqstr)

    @property
    def bottom(self) -> np.ndarray:
        """The bottom series, (T, m)."""
        return self.values[:, self.hierarchy.aggregates :]

    @property
    def observed(self) -> np.ndarray:
        """All series, (T, n), NaN where a value is missing or was filled; scores are taken on these."""
        return self.values if self.mending is None else np.where(self.mending.filled, np.nan, self.values)

    @property
    def ended(self) -> np.ndarray:
        """Which series have ended, (n,): their values are 0 from now on."""
        if self.mending is None:
            return np.zeros(len(self.names), dtype=bool)
        return np.asarray(abs(self.hierarchy.summation) @ ~self.mending.ended == 0)

    @property
    def notes(self) -> list[str]:
        """What was done to missing values, a sentence for each kind, and which series are 0 at their end."""
        names = self.names[self.hierarchy.aggregates :]
        done = [] if self.mending is None else self.mending.notes(names, self.index)
        zeros = {names[j]: self.index[row] for j, row in self._zero_since().items()}
        if zeros:
            listed = listing([f"{name} from {since} on" for name, since in zeros.items()])
            done.append(
                f"{len(zeros):,} series {'is' if len(zeros) == 1 else 'are'} 0 at the end and forecast as usual: "
                f"{listed}. Leave out these rows of a series that has ended, and its forecast is 0."
            )
        return done

    def mended(self) -> dict[str, Any]:
        """What was done to missing values, and series that are 0 at their end, as plain values for a certificate."""
        names = self.names[self.hierarchy.aggregates :]
        done = {} if self.mending is None else self.mending.record(names, self.index)
        zeros = {names[j]: str(self.index[row]) for j, row in self._zero_since().items()}
        return done | ({"zero_since": zeros} if zeros else {})

    def _zero_since(self) -> dict[int, int]:
        """First row of the zeros at the end of series that are observed there, by number of the bottom series."""
        first = self.hierarchy.aggregates
        found = zero_since(self.values[:, first:], self.season)
        return {j: row for j, row in found.items() if not self.ended[first + j]}

    @property
    def seasons(self) -> tuple[int, ...]:
        """Season lengths in rows that the history holds twice, such as a day and a week of hours; at least one."""
        return (self.season, *(x for x in seasons_of(self.index) if self.season < x <= len(self.index) // 2))

    @property
    def features(self) -> np.ndarray:
        """Regressors of the T rows, (T, k)."""
        return np.empty((len(self.index), 0)) if self.regressors is None else self.regressors.values[: len(self.index)]

    @property
    def future_features(self) -> np.ndarray:
        """Regressors of the rows after the last one that are known, (F, k)."""
        return np.empty((0, 0)) if self.regressors is None else self.regressors.values[len(self.index) :]

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the k regressors."""
        return () if self.regressors is None else self.regressors.names

    @property
    def regressor_notes(self) -> list[str]:
        """Columns that are not used as regressors, a sentence each."""
        return [] if self.regressors is None else self.regressors.notes()

    def known_ahead(self, horizon: int) -> HierarchicalData:
        """Keep the regressors that are known for ``horizon`` steps; ``regressor_notes`` names the others."""
        known = None if self.regressors is None else self.regressors.known(len(self.index), horizon)
        return replace(self, regressors=known)

    @property
    def levels(self) -> dict[str, np.ndarray]:
        """Positions of each level's series, by level name, top first."""
        if not self.hierarchy.tags:
            ends = (0, self.hierarchy.aggregates, self.hierarchy.variables)
            return {"aggregates": np.arange(*ends[:2]), "bottom": np.arange(*ends[1:])}
        position = {name: i for i, name in enumerate(self.names)}
        return {level: np.array([position[node] for node in nodes]) for level, nodes in self.hierarchy.tags.items()}

    def future(self, horizon: int) -> pd.PeriodIndex:
        """Return the ``horizon`` periods after the last row."""
        pandas = require("pandas", "HierarchicalData")
        return pandas.period_range(self.index[-1] + 1, periods=horizon)

    def window(self, start: int | None = None, stop: int | None = None) -> HierarchicalData:
        """Return the rows ``start:stop``, with the meaning of a Python slice."""
        first, last, _ = slice(start, stop).indices(len(self.index))
        return replace(
            self,
            values=self.values[start:stop],
            index=self.index[start:stop],
            mending=None if self.mending is None else self.mending.window(first, last),
            regressors=None if self.regressors is None else self.regressors.after(first),
        )

    def train_test(
        self, horizon: int | None = None, origin: int = 0, step: int | None = None
    ) -> tuple[HierarchicalData, HierarchicalData]:
        """Split into a training history and the next ``horizon`` rows.

        Args:
            horizon: Rows of the test window; by default ``self.horizon``.
            origin: 0 tests on the last rows; origin k ends ``k * step`` rows earlier. Later rows are dropped.
            step: Rows between origins; by default the horizon, so that test windows do not overlap.

        Returns:
            The training rows and the test rows. A series that starts later is 0 in the training rows.

        Raises:
            ParameterError: If no horizon is known or no training row is left.
        """
        steps = self.horizon if horizon is None else horizon
        if steps is None:
            raise ParameterError("No horizon is known.", "It is the length of the test window.", "Pass horizon=...")
        stop = len(self.index) - origin * (steps if step is None else step)
        if steps < 1 or origin < 0 or stop - steps < 1 or stop > len(self.index):
            raise ParameterError(
                f"Origin {origin} with horizon {steps} leaves {stop - steps} of {len(self.index)} rows to learn from.",
                "A backtest needs training rows and a whole test window.",
                "Choose an earlier origin number, a smaller step or a shorter horizon.",
            )
        train, test = self.window(0, stop - steps), self.window(stop - steps, stop)
        if self.mending is not None:  # a series that starts later is 0, as in sums
            train = replace(train, values=np.where(np.isnan(train.values).all(0), 0.0, train.values))
        return train, test

    def to_gluonts(self) -> list[dict[str, Any]]:
        """Convert to a GluonTS dataset: one multivariate entry with a target (n, T) and standardised regressors."""
        entry = {"start": self.index[0], "target": self.observed.T.copy(), "item_id": self.name}
        if self.feature_names:
            mean, size = self.features.mean(0), self.features.std(0)
            features = np.concatenate([self.features, self.future_features])
            entry["feat_dynamic_real"] = ((features - mean) / np.where(size > 0, size, 1.0)).T
        return [entry]

    @classmethod
    def from_gluonts(cls, series: Any, **options: Any) -> HierarchicalData:
        """Convert GluonTS's ``HierarchicalTimeSeries``.

        Args:
            series: The hierarchical series.
            **options: As for ``from_matrix``.

        Raises:
            ProbhardError: As for ``HierarchicalData``.
        """
        bottom = series.ts_at_bottom_level
        names = [*map(str, series.ts_aggregated.columns), *map(str, bottom.columns)]
        options = {"season": season_of(bottom.index), **options}
        return cls.from_matrix(bottom.to_numpy(), series.S, bottom.index, names, **options)

    @classmethod
    def from_matrix(
        cls,
        values: Any,  # (T, n), or the bottom series only, (T, m)
        S: Any,
        index: Any,
        names: Sequence[str] | None = None,
        tags: Mapping[str, Sequence[str]] | None = None,
        *,
        coherence: str = "check",
        **options: Any,
    ) -> HierarchicalData:
        """Build from a table and a summation matrix; missing aggregates are summed from their bottom series.

        Args:
            values: All series (T, n), or the bottom series only, (T, m).
            S: Summation matrix (n, m), or a ``Hierarchy``.
            index: Consecutive periods, (T,).
            names: Names of the nodes, unless ``S`` is a ``Hierarchy``.
            tags: Node names of each level, unless ``S`` is a ``Hierarchy``.
            coherence: ``"check"`` the aggregates, or ``"aggregate"`` to replace them by the sums.
            **options: horizon, season, name and place, as for ``HierarchicalData``.

        Raises:
            ProbhardError: As for ``HierarchicalData``.
        """
        check_choice("coherence", coherence, ("check", "aggregate"))
        hierarchy = S if isinstance(S, Hierarchy) else Hierarchy(S, names=names, tags=tags)
        table = np.asarray(values, dtype=np.float64)
        if table.ndim == 2 and table.shape[1] in (hierarchy.bottoms, hierarchy.variables):
            sums = summed(hierarchy, table[:, -hierarchy.bottoms :])
            observed = table if table.shape[1] == hierarchy.variables else sums
            preferred, fallback = (sums, observed) if coherence == "aggregate" else (observed, sums)
            table = np.where(np.isnan(preferred), fallback, preferred)
        return cls(table, index, hierarchy, **options)
