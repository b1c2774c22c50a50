"""Hierarchical time series: one table of all series over time, and the sums that they obey.

    y_t = S b_t,      t = 1, ..., T,

with the aggregates first and the bottom series ``b_t`` last. NaN marks missing values. A history that does not add up
is rejected, because no coherent forecast can match it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError, check_choice, optional
from probhard.forecasting.data.stamps import START, Place, season_of

if TYPE_CHECKING:
    import pandas as pd

COHERENT = 1e-6  # relative difference between an aggregate and its sum up to which it counts as rounding


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
        values: All series, (T, n), aggregates first; NaN where not observed.
        index: Consecutive periods as a ``pandas.PeriodIndex``, (T,).
        hierarchy: The sums; its tags name the levels, top first.
        horizon, season: Usual number of steps to forecast, and season length in steps.
        name: Label of the data set.
        place: Position of the stamps in their periods; forecasts are stamped alike.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", np.asarray(self.values, dtype=np.float64))
        _check_index(self.index)
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
        _check_names(self.names, self.hierarchy.tags)
        if np.isinf(self.values).any():
            row, column = np.argwhere(np.isinf(self.values))[0]
            raise ParameterError(
                f"Series {self.names[column]!r} is infinite at {self.index[row]}.",
                "It cannot be summed or scored.",
                "Replace it by a number, or by NaN if it was not observed.",
            )
        self._check_coherence()

    def _check_coherence(self) -> None:
        aggregates = self.hierarchy.aggregates
        rows, observed = self.hierarchy.summation[:aggregates], self.values[:, :aggregates]
        gap = np.abs(observed - (rows @ self.bottom.T).T)
        scale = np.abs(observed) + (abs(rows) @ np.abs(self.bottom).T).T
        relative = np.nan_to_num(gap / np.maximum(scale, np.finfo(np.float64).tiny))  # missing terms: no check
        if relative.size and relative.max() > COHERENT:
            row, column = np.unravel_index(np.argmax(relative), relative.shape)
            wrong = int((relative > COHERENT).any(0).sum())
            raise ParameterError(
                f"Series {self.names[column]!r} differs from the sum of its bottom series by {gap[row, column]:.4g} at "
                f"{self.index[row]}, {relative[row, column]:.1e} of its size; {wrong} of {aggregates} sums are off.",
                "Coherent forecasts cannot match a history that does not add up.",
                "Correct the history or the hierarchy, or pass coherence='aggregate' to rebuild the aggregates.",
            )

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
        return replace(self, values=self.values[start:stop], index=self.index[start:stop])

    def train_test(
        self, horizon: int | None = None, origin: int = 0, step: int | None = None
    ) -> tuple[HierarchicalData, HierarchicalData]:
        """Split into a training history and the next ``horizon`` rows.

        Args:
            horizon: Rows of the test window; by default ``self.horizon``.
            origin: 0 tests on the last rows; origin k ends ``k * step`` rows earlier. Later rows are dropped.
            step: Rows between origins; by default the horizon, so that test windows do not overlap.

        Returns:
            The training rows and the test rows.

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
        return self.window(0, stop - steps), self.window(stop - steps, stop)

    def to_gluonts(self) -> list[dict[str, Any]]:
        """Convert to a GluonTS dataset: one multivariate entry with a target of shape (n, T)."""
        return [{"start": self.index[0], "target": self.values.T.copy(), "item_id": self.name}]

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


def _check_index(index: Any) -> None:
    pandas = require("pandas", "HierarchicalData")
    if not isinstance(index, pandas.PeriodIndex):
        raise ParameterError(
            f"The index is a {type(index).__name__}.",
            "Series need periods with a frequency.",
            "Pass a pandas.PeriodIndex, for instance stamps.to_period('M').",
        )
    if len(index) == 0 or not index.equals(pandas.period_range(index[0], periods=len(index))):
        raise ParameterError(
            "The index is empty." if len(index) == 0 else "The index is not a run of consecutive periods.",
            "Lags and seasons are counted in rows.",
            "Sort the rows and fill gaps with NaN; from_frame does both.",
        )


def _check_names(names: tuple[str, ...], tags: Mapping[str, Sequence[str]]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ParameterError(
            f"The series name {repeated[0]!r} occurs more than once.",
            "Names identify the series.",
            "Rename one of them, for instance by adding its level.",
        )
    known = set(names)
    for level, nodes in tags.items():
        unknown = [node for node in nodes if node not in known]
        if unknown:
            raise ParameterError(
                f"The level {level!r} lists {unknown[0]!r}, which is not a series.",
                "Scores are reported by level.",
                "Use the names of the rows of S in the tags.",
            )
