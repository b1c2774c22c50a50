"""Forecasts of a whole hierarchy from a long frame, with an interface like Nixtla's.

    members:   models of all nodes (``members``), each made coherent by a projection learned on past windows
    paths:     y^(s)_1, ..., y^(s)_h,  s = 1, ..., S,     drawn from the pool of the members; all are feasible
    mean:      (1 / S) sum over s of y^(s),               adds up as the paths do
    interval:  quantiles over s of each series,           within the bounds; quantiles need not add up

Bounds come last: every path is projected onto them. With options of DeepVAR, that network alone is the forecaster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import narwhals as nw
import numpy as np

from probhard.constraints import Constraint
from probhard.errors import ParameterError
from probhard.forecasting.data.bounds import history_box
from probhard.forecasting.data.frames import from_frame, to_long
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.limits import Limits, by_method
from probhard.forecasting.members.base import Member
from probhard.forecasting.members.catalogue import default_members
from probhard.forecasting.members.external import member_of
from probhard.forecasting.members.network import NetworkForecast
from probhard.forecasting.members.pooled import PooledForecast
from probhard.forecasting.members.stored import network_of
from probhard.forecasting.members.streamed import check_memory
from probhard.forecasting.models.classical import BaseForecast
from probhard.forecasting.models.defaults import default_horizon, defaults, smooth
from probhard.forecasting.models.estimator import check_count
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.reconciliation.columns import probabilities, summary
from probhard.forecasting.saved import COLUMNS, SavedForecaster, check_same_series
from probhard.method import Method, as_method

__all__ = ["HierarchicalForecaster", "default_horizon", "defaults", "smooth", "summary"]

POOL, METHOD = "probhard", "probhard-or"  # names of the columns of a pool, and default method of a network


class HierarchicalForecaster:
    """Fits members to all n nodes of a hierarchy and draws coherent forecasts from their pool.

    Args:
        keys, S, tags: The hierarchy, as in ``from_frame``.
        freq, season: Pandas alias and season length in steps; inferred from the stamps by default.
        models: Names in ``members.catalogue``, models or engines of Nixtla, GluonTS estimators. By default a few cheap
            members; DeepVAR alone if ``method``, ``epochs``, ``changes`` or options of the network are given.
        fast: One member only.
        windows: Past windows that weights, scales and metrics are learned on; by default from the horizon, 0 for none.
        jobs: Number of processes that fit series.
        cache: Folder where fits are kept; by default nowhere.
        nonnegative, upper: Bounds on every draw; ``upper`` is a number, or numbers by node name.
        horizon: Steps of the past windows; forecasts may be longer or shorter.
        method, changes, calibrate, epochs, network: Of DeepVAR, as in ``members.network``.
        num_samples, seed: Draws behind a forecast, and the seed of weights, windows and draws.
    Counts that are not whole numbers of at least 1 raise ParameterError.
    """

    def __init__(
        self,
        keys: Sequence[str] | Sequence[Sequence[str]] | None = None,
        *,
        S: Any = None,
        tags: Mapping[str, Sequence[str]] | None = None,
        freq: str | None = None,
        season: int | None = None,
        models: Sequence[Any] | None = None,
        fast: bool = False,
        windows: int | None = None,
        jobs: int = 1,
        cache: str | os.PathLike[str] | None = None,
        nonnegative: bool = False,
        upper: float | Mapping[str, float] | None = None,
        horizon: int | None = None,
        method: str | Method | None = None,
        changes: bool | None = None,
        calibrate: bool = True,
        epochs: int | None = None,
        num_samples: int = 1000,
        seed: int = 0,
        **network: Any,
    ) -> None:
        counts = {"horizon": horizon, "epochs": epochs, "num_samples": num_samples, "season": season, "jobs": jobs}
        for name, value in counts.items():
            if value is not None:
                check_count(name, value)
        self.keys, self.S, self.tags, self.freq, self.season = keys, S, tags, freq, season
        about_network = method is not None or epochs is not None or changes is not None or bool(network)
        self.network_only = models is None and not fast and about_network
        self.models, self.fast, self.windows, self.jobs, self.cache = models, fast, windows, jobs, cache
        self.method: str | Method = METHOD if method is None else method
        self.nonnegative, self.upper = nonnegative, upper
        self.horizon, self.epochs, self.num_samples, self.seed = horizon, epochs, num_samples, seed
        self.changes, self.calibrate, self.network = changes, calibrate, network
        self.reading: dict[str, Any] = {}
        self.like: Any = None
        self._data: HierarchicalData | None = None
        self._fit: PooledForecast | NetworkForecast | None = None

    @property
    def model(self) -> str:
        """Name of the column of means, and prefix of the columns of intervals."""
        if not self.network_only:
            return POOL
        return self.method if isinstance(self.method, str) else "probhard"

    @property
    def data(self) -> HierarchicalData:
        """The fitted history; ParameterError before ``fit``."""
        return self._fitted()[0]

    @property
    def pool(self) -> PooledForecast:
        """The fitted members and what was learned of them; ParameterError before ``fit`` and for DeepVAR alone."""
        fit = self._fitted()[1]
        if not isinstance(fit, PooledForecast):
            raise ParameterError(
                "This forecaster has no pool.", "DeepVAR alone is fitted.", "Name members: models=['ets', 'deepvar']."
            )
        return fit

    @property
    def weights_(self) -> dict[str, float]:
        """Weights of the pool by member."""
        return self.pool.tuned.weights

    @property
    def explanation_(self) -> list[str]:
        """What was learned on past windows, in sentences: weights, scales, metrics; empty for DeepVAR alone."""
        return [] if self.network_only else self.pool.tuned.sentences()

    def base(self, member: str) -> BaseForecast | None:
        """Base forecasts of a member by name, before its projection; None without such a member."""
        made = self._fit.made if isinstance(self._fit, PooledForecast) else []
        return next((one.bases[-1] for one in made if one.name == member), None)

    @property
    def predictor(self) -> DeepVARPredictor:
        """The trained GluonTS predictor; ParameterError before ``fit``, and without DeepVAR."""
        network = network_of(self._fitted()[1])
        if network is not None and network.predictor is not None:
            return network.predictor
        raise ParameterError("No member is a network.", "Only DeepVAR has a predictor.", "Pass models=['deepvar'].")

    @property
    def spread_factor(self) -> float:
        """The factor on the deviations of all paths, fitted on past windows; 1 before ``fit``."""
        if isinstance(self._fit, PooledForecast):
            return self._fit.tuned.factor
        return 1.0 if self._fit is None else self._fit.spread_factor

    @property
    def learns_changes(self) -> bool:
        """Whether DeepVAR, alone, learns changes."""
        return self._fit.learns_changes if isinstance(self._fit, NetworkForecast) else bool(self.changes)

    @property
    def constraint(self) -> Constraint:
        """The constraint that every draw of a projecting method obeys: the sums and the bounds."""
        box = history_box(self.data, self.nonnegative, self.upper)
        return self.data.hierarchy if box is None else self.data.hierarchy & box

    def fit(self, df: Any, *, progress: str = "", **reading: Any) -> Self:
        """Fit a history; return the forecaster itself.

        Args:
            df: A long frame (pandas or polars), or ``HierarchicalData``.
            progress: Label of progress lines, and of a network's bar in a terminal; "" shows none.
            **reading: Options of ``from_frame``: id_col, time_col, target_col, on_gap, coherence.

        Raises:
            ProbhardError: If the frame cannot be read, or the history violates the bounds or is too short.
        """
        data = self._read(df, reading)
        history_box(data, self.nonnegative, self.upper)
        network = NetworkForecast(
            **{name: getattr(self, name) for name in NETWORK},
            options=self.network,  # its own copy of the settings
        )
        if self.network_only:
            self._fit = network.fit(data, progress)
        else:
            horizon = self.horizon or default_horizon(data)
            usual = self.models is None
            self._fit = PooledForecast.fit(
                default_members(data, horizon, self.fast, network) if usual else self._chosen(data, network),
                data,
                horizon,
                windows=self.windows,
                folder=None if self.cache is None else Path(self.cache),
                keep_tuning=True,
                jobs=self.jobs,
                progress=progress,
            )
        self._data, self.reading, self.like = data, reading, None
        if not isinstance(df, HierarchicalData):
            self.like = nw.from_native(df, eager_only=True).head(1).to_native()
        return self

    def update(self, df: Any) -> Self:
        """Replace the history by another one of the same hierarchy, without training; return the forecaster itself.

        Args:
            df: A long frame, or ``HierarchicalData``, read with the options of ``fit``.
        """
        data = self._read(df, self.reading)
        check_same_series(data, self.data)
        if isinstance(self._fit, PooledForecast):
            self._fit = self._fit.moved(data)
        self._data = data
        return self

    def predict(self, h: int | None = None, level: Sequence[float] | None = (80, 95), explain: bool = False) -> Any:
        """Forecast the next steps of all nodes; means add up, the ends of intervals need not.

        Args:
            h: Number of steps; by default the horizon of the fit.
            level: Interval levels in percent.
            explain: Whether columns say why nodes moved, see ``report.moves.step_moves``: ``base``, the mean before the
                projection, ``pulled_by``, the node that moved it most, and ``pull``, by how much; bounds come later.

        Returns:
            A long frame of the fitted frame's library: means and interval ends by node and stamp.

        Raises:
            ParameterError: Before ``fit``, for invalid numbers, and for explanations of DeepVAR alone.
        """
        probabilities(level or ())  # raises before anything is drawn
        if h is not None:
            check_count("h", h)
        data = self.data
        names = {**COLUMNS, **{name: self.reading[name] for name in COLUMNS if name in self.reading}}
        parts = [summary(draws, self.model, level or ()) for _, draws in self.steps(h)]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        steps, pulled_by = len(columns[self.model]), None
        if explain:
            moves = self._moves(steps)
            pulled_by = moves.pop("pulled_by").T.ravel().tolist()
            columns |= moves
        frame = to_long(columns, data.names, data.future(steps), self.like, data.place, **names)
        if pulled_by is None:
            return frame
        table = nw.from_native(frame, eager_only=True)
        texts = nw.new_series("pulled_by", pulled_by, nw.String, backend=nw.get_native_namespace(table))
        return table.with_columns(texts).to_native()

    def sample(self, h: int | None = None, num_samples: int | None = None) -> np.ndarray:
        """Draw sample paths of all nodes.

        Args:
            h: Number of steps; by default the horizon of the fit.
            num_samples: Number of paths S; by default that of the forecaster.

        Returns:
            Paths, (S, h, n), in the order of ``data.names``.
        """
        for name, value in {"h": h, "num_samples": num_samples}.items():
            if value is not None:
                check_count(name, value)
        data, fit = self._fitted()
        count = num_samples or self.num_samples
        if isinstance(fit, PooledForecast):
            return self._within(fit.sample(data, count, self.seed, h))
        draws = fit.sample(data, h, count)
        return draws if fit.within_bounds else self._within(draws)

    def steps(self, h: int | None = None, num_samples: int | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield some steps and their draws (S, k, n): all at once up to 1 GB, otherwise one step after the other.

        Raises:
            ParameterError: If the draws of a single step do not fit into memory; the text says how many do.
        """
        data, fit = self._fitted()
        count = num_samples or self.num_samples
        if not isinstance(fit, PooledForecast):
            draws = self.sample(h, count)
            yield slice(0, draws.shape[1]), draws
            return
        check_memory(count, len(data.names))
        for steps, draws in fit.steps(data, count, self.seed, h):
            yield steps, self._within(draws)

    def plot(self, node: str, h: int | None = None, level: float = 80, ax: Any = None) -> Any:
        """Draw a node's last seasons and its forecast with matplotlib; see ``views.plot``."""
        from probhard.forecasting.views import plot

        return plot(self, node, h, level, ax)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the forecaster and its history to a folder of plain files; members that are objects are refused."""
        SavedForecaster.of(self).write(Path(folder))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> HierarchicalForecaster:
        """Read a folder written by ``save``; never runs code from its files."""
        saved = SavedForecaster.read(Path(folder))
        forecaster = cls(**saved.arguments())
        forecaster.network_only = isinstance(saved.fit, NetworkForecast)
        forecaster.reading, forecaster.like = dict(saved.reading), saved.like
        forecaster._data, forecaster._fit = saved.data, saved.fit
        return forecaster

    def _fitted(self) -> tuple[HierarchicalData, PooledForecast | NetworkForecast]:
        if self._data is None or self._fit is None:
            raise ParameterError(
                "This forecaster has not been fitted.", "It has no model and no history.", "Call fit(df) first."
            )
        return self._data, self._fit

    def _moves(self, steps: int) -> dict[str, np.ndarray]:
        from probhard.forecasting.report.moves import step_moves

        pool = self.pool
        return step_moves(pool if steps <= pool.horizon else pool.moved(self.data, steps), self.data, steps)

    def _chosen(self, data: HierarchicalData, network: NetworkForecast) -> list[Member]:
        return [member_of(model, data, network) for model in self.models or ()]

    def _within(self, draws: np.ndarray) -> np.ndarray:
        """Project coherent draws (S, H, n) onto the bounds, if there are any and the method projects."""
        limits = Limits(self.nonnegative, self.upper)
        if not limits.active(self.data):
            return draws
        if not self.network_only:  # series that have ended stay at 0
            return np.asarray(limits.apply(draws, self.data).draws)
        return by_method(as_method(self.method), draws, None if limits.unbounded else self.constraint)

    def _read(self, df: Any, reading: Mapping[str, Any]) -> HierarchicalData:
        if isinstance(df, HierarchicalData):
            return df
        return from_frame(df, self.keys, S=self.S, tags=self.tags, freq=self.freq, season=self.season, **reading)


NETWORK = ("method", "nonnegative", "upper", "horizon", "changes", "calibrate", "epochs", "num_samples", "seed")
