"""Forecasts of a whole hierarchy from a long frame, with an interface like Nixtla's.

    paths:     y^(s)_1, ..., y^(s)_h,  s = 1, ..., S,     drawn by DeepVAR; with a projecting method all are feasible
    mean:      (1 / S) sum over s of y^(s),               adds up as the paths do
    interval:  quantiles over s of each series,           within the bounds; quantiles need not add up

Smooth series are learned as changes d, which add up as the series do:

    y_(T+k) = projection(y_T + d_1 + ... + d_k),          d: paths of changes, drawn by DeepVAR.

A first network, trained without the last windows, calibrates the spread of the draws (``models.spread``). Other
settings are chosen from the frequency and size of the data (``models.defaults``).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import narwhals as nw
import numpy as np
import torch

from probhard.constraints import Constraint
from probhard.errors import ParameterError
from probhard.forecasting.data.bounds import history_box
from probhard.forecasting.data.frames import from_frame, to_long
from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.models import spread
from probhard.forecasting.models.baselines import last_value
from probhard.forecasting.models.defaults import default_horizon, defaults, smooth
from probhard.forecasting.models.estimator import DeepVAREstimator, check_count
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.training import ProgressBar
from probhard.forecasting.reconciliation.columns import probabilities, summary
from probhard.forecasting.saved import COLUMNS, SavedForecaster
from probhard.method import Method, as_method
from probhard.training import quiet_training

__all__ = ["HierarchicalForecaster", "default_horizon", "defaults", "smooth", "summary"]

SAVED = ("freq", "season", "horizon", "nonnegative", "upper", "changes", "calibrate", "epochs", "num_samples", "seed")


class HierarchicalForecaster:
    """Trains DeepVAR on all n nodes of a hierarchy and draws coherent forecasts.

    Args:
        keys, S, tags: The hierarchy, as in ``from_frame``.
        freq, season: Pandas alias and season length in steps; inferred from the stamps by default.
        method: A name in ``METHODS`` or a ``Method``.
        nonnegative, upper: Bounds on every draw; ``upper`` is a number, or numbers by node name.
        horizon: Steps of a training window; forecasts may be longer or shorter.
        changes: Whether to learn changes between steps; by default if the series are ``smooth``.
        calibrate: Whether to fit ``spread_factor`` on past windows, which takes a second training; otherwise it is 1.
        epochs, network: Override ``defaults``; ``network`` are options of ``DeepVAREstimator``.
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
        method: str | Method = "probhard-or",
        nonnegative: bool = False,
        upper: float | Mapping[str, float] | None = None,
        horizon: int | None = None,
        changes: bool | None = None,
        calibrate: bool = True,
        epochs: int | None = None,
        num_samples: int = 1000,
        seed: int = 0,
        **network: Any,
    ) -> None:
        for name, value in {"horizon": horizon, "epochs": epochs, "num_samples": num_samples, "season": season}.items():
            if value is not None:
                check_count(name, value)
        self.keys, self.S, self.tags, self.freq, self.season = keys, S, tags, freq, season
        self.method, self.nonnegative, self.upper = method, nonnegative, upper
        self.horizon, self.epochs, self.num_samples, self.seed = horizon, epochs, num_samples, seed
        self.changes, self.calibrate, self.network = changes, calibrate, network
        self.spread_factor, self.learns_changes = 1.0, bool(changes)
        self.reading: dict[str, Any] = {}
        self.like: Any = None
        self._trained: tuple[HierarchicalData, DeepVARPredictor] | None = None

    @property
    def model(self) -> str:
        """Name of the column of means, and prefix of the columns of intervals."""
        return self.method if isinstance(self.method, str) else "probhard"

    @property
    def data(self) -> HierarchicalData:
        """The fitted history; ParameterError before ``fit``."""
        return self._fitted()[0]

    @property
    def predictor(self) -> DeepVARPredictor:
        """The trained GluonTS predictor; ParameterError before ``fit``."""
        return self._fitted()[1]

    @property
    def constraint(self) -> Constraint:
        """The constraint that every draw of a projecting method obeys: the sums and the bounds."""
        box = history_box(self.data, self.nonnegative, self.upper)
        return self.data.hierarchy if box is None else self.data.hierarchy & box

    def fit(self, df: Any, *, progress: str = "", **reading: Any) -> Self:
        """Train on a history; return the forecaster itself.

        Args:
            df: A long frame (pandas or polars), or ``HierarchicalData``.
            progress: Label of a progress bar in a terminal; "" shows none.
            **reading: Options of ``from_frame``: id_col, time_col, target_col, on_gap, coherence.

        Raises:
            ProbhardError: If the frame cannot be read, or the history violates the bounds or is too short.
        """
        data = self._read(df, reading)
        box = history_box(data, self.nonnegative, self.upper)
        self.learns_changes = smooth(data) if self.changes is None else self.changes
        horizon = self.horizon or default_horizon(data)
        self.spread_factor = self._learned_spread(data, horizon, progress) if self.calibrate else 1.0
        options = {**defaults(data, horizon, self.learns_changes), **self.network}
        trainer = {"max_epochs": self.epochs or options["max_epochs"], "enable_progress_bar": False}
        trainer |= {"callbacks": [ProgressBar(progress)]} if progress else {}
        del options["max_epochs"]
        estimator = DeepVAREstimator(
            freq=data.freq,
            prediction_length=horizon,
            hierarchy=data.hierarchy,
            method=self.method,
            constraint=None if self.learns_changes else box,
            num_parallel_samples=self.num_samples,
            trainer_kwargs=trainer,
            seed=self.seed,
            **options,
        )
        with quiet_training():
            self._trained = data, cast(DeepVARPredictor, estimator.train(self._inputs(data).to_gluonts()))
        self.reading, self.like = reading, None
        if not isinstance(df, HierarchicalData):
            self.like = nw.from_native(df, eager_only=True).head(1).to_native()
        return self

    def update(self, df: Any) -> Self:
        """Replace the history by another one of the same hierarchy, without training; return the forecaster itself.

        Args:
            df: A long frame, or ``HierarchicalData``, read with the options of ``fit``.

        Raises:
            ProbhardError: If the frame cannot be read, or has other nodes, sums or another frequency.
        """
        data, before = self._read(df, self.reading), self.data
        same_sums = data.names == before.names and not (data.hierarchy.summation != before.hierarchy.summation).nnz
        if not same_sums or data.freq != before.freq:
            other = sorted(set(data.names) ^ set(before.names))
            nodes = f"other nodes ({other[0]!r})" if other else "other sums"
            difference = f"the frequency {data.freq}" if same_sums else nodes
            raise ParameterError(
                f"The new history has {difference}; the fitted one had {len(before.names)} nodes, {before.freq}.",
                "The network's outputs belong to the nodes and steps that it was fitted to.",
                "Pass the same series at the same frequency, or call fit.",
            )
        self._trained = data, self.predictor
        return self

    def predict(self, h: int | None = None, level: Sequence[float] | None = (80, 95)) -> Any:
        """Forecast the next steps of all nodes; means add up, the ends of intervals need not.

        Args:
            h: Number of steps; by default the horizon of training.
            level: Interval levels in percent.

        Returns:
            A long frame of the fitted frame's library: means and interval ends by node and stamp.

        Raises:
            ParameterError: Before ``fit``, or if h or a level is invalid.
        """
        probabilities(level or ())  # raises before anything is drawn
        draws, data = self.sample(h), self.data
        names = {**COLUMNS, **{name: self.reading[name] for name in COLUMNS if name in self.reading}}
        columns = summary(draws, self.model, level or ())
        return to_long(columns, data.names, data.future(draws.shape[1]), self.like, data.place, **names)

    def sample(self, h: int | None = None, num_samples: int | None = None) -> np.ndarray:
        """Draw sample paths of all nodes.

        Args:
            h: Number of steps; by default the horizon of training.
            num_samples: Number of paths S; by default that of the forecaster.

        Returns:
            Paths, (S, h, n), in the order of ``data.names``.

        Raises:
            ParameterError: Before ``fit``, or if a count is invalid.
        """
        if num_samples is not None:
            check_count("num_samples", num_samples)
        predictor = self.predictor
        if h is not None:
            check_count("h", h)
            predictor = predictor.extended(h)
        (forecast,) = predictor.predict(self._inputs(self.data).to_gluonts(), num_samples or self.num_samples)
        draws = np.asarray(forecast.samples)
        if not self.learns_changes and self.spread_factor == 1:
            return draws
        if self.learns_changes:
            draws = last_value(self.data, 1) + draws.cumsum(1)
        return self._within(spread.widened(draws, self.spread_factor))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the forecaster and its history to a folder of plain files.

        Raises:
            ParameterError: Before ``fit``.
        """
        network = {name: value for name, value in self.network.items() if name != "family"}  # the predictor has it
        SavedForecaster(
            self.data,
            self.predictor,
            self.keys,
            self.method if isinstance(self.method, str) else None,
            {**{name: getattr(self, name) for name in SAVED}, **network},
            self.spread_factor,
            self.learns_changes,
            self.reading,
            self.like,
        ).write(Path(folder))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> HierarchicalForecaster:
        """Read a folder written by ``save``; never runs code from its files.

        Raises:
            ParameterError: If a file is missing or damaged, or was written by another version.
        """
        saved = SavedForecaster.read(Path(folder))
        data, hierarchy, network = saved.data, saved.data.hierarchy, saved.predictor.prediction_net
        S = None
        if saved.keys is None:
            frame = require("pandas", "HierarchicalForecaster").DataFrame
            S = frame(hierarchy.summation.toarray(), data.names, data.names[hierarchy.aggregates :])
        tags = None if saved.keys or not hierarchy.tags else hierarchy.tags
        method = saved.method or network.method
        forecaster = cls(saved.keys, S=S, tags=tags, method=method, **saved.options, family=network.network.family)
        forecaster.reading, forecaster.like = dict(saved.reading), saved.like
        forecaster._trained, forecaster.spread_factor = (data, saved.predictor), saved.spread_factor
        forecaster.learns_changes = saved.learns_changes
        return forecaster

    def _fitted(self) -> tuple[HierarchicalData, DeepVARPredictor]:
        if self._trained is None:
            raise ParameterError(
                "This forecaster has not been fitted.", "It has no network and no history.", "Call fit(df) first."
            )
        return self._trained

    def _inputs(self, data: HierarchicalData) -> HierarchicalData:
        """Return the series that the network learns: the data, or their changes."""
        if not self.learns_changes:
            return data
        steps = np.diff(data.values, axis=0)
        return HierarchicalData.from_matrix(steps, data.hierarchy, data.index[1:], coherence="aggregate")

    def _learned_spread(self, data: HierarchicalData, horizon: int, progress: str) -> float:
        """Fit the spread factor on past windows, with a network that was trained without them."""
        windows = spread.past_windows(data, horizon)
        if not windows:
            return 1.0
        first = copy.copy(self)
        first.calibrate, first.spread_factor, first.changes = False, 1.0, self.learns_changes
        first.fit(windows[0][0], progress=f"{progress}, spread" if progress else "")
        return spread.spread_factor([first.update(known).sample(horizon) for known, _ in windows], windows)

    def _within(self, draws: np.ndarray) -> np.ndarray:
        """Project coherent draws (S, H, n) onto the bounds, if there are any and the method projects."""
        step = as_method(self.method).inference
        layer, bounded = step.layer(), self.nonnegative or self.upper is not None
        if layer is None or step.linear_only or not bounded:
            return draws
        return layer.project_samples(torch.from_numpy(draws), self.constraint).value.numpy()

    def _read(self, df: Any, reading: Mapping[str, Any]) -> HierarchicalData:
        if isinstance(df, HierarchicalData):
            return df
        return from_frame(df, self.keys, S=self.S, tags=self.tags, freq=self.freq, season=self.season, **reading)
