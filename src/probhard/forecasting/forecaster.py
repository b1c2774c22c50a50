"""Forecasts of a whole hierarchy from a long frame, in the form that Nixtla's users know.

    paths:     y^(s)_1, ..., y^(s)_h,  s = 1, ..., S,     drawn by DeepVAR; of a projecting method all are feasible
    mean:      (1 / S) sum over s of y^(s),               which adds up as the paths do
    interval:  quantiles over s, series by series,        within the bounds, but quantiles of sums are not sums of
               quantiles: intervals need not add up.

Series that move little from step to step are learned as changes, which add up as they do,

    y_(T+k) = projection(y_T + d_1 + ... + d_k),          d: paths of changes, drawn by DeepVAR,

because a network that sees levels cannot tell changes of a thousandth of them. A first network, which has not seen the
last windows, says how wide draws should be (``spread``). What training needs beyond the data is chosen by ``defaults``
from their frequency and size.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import narwhals as nw
import numpy as np
import torch

from probhard.constraints import Box, Constraint, Hierarchy
from probhard.errors import ParameterError
from probhard.forecasting.data.frames import from_frame, to_long
from probhard.forecasting.data.seasons import default_lags
from probhard.forecasting.data.stamps import Place
from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.models import spread
from probhard.forecasting.models.baselines import last_value
from probhard.forecasting.models.estimator import DeepVAREstimator
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.storage import constraint_from_record, constraint_record, read_arrays, read_record
from probhard.forecasting.models.training import DeepVARModule, ProgressBar
from probhard.forecasting.reconciliation.nixtla import Columns, probabilities
from probhard.method import Method, as_method
from probhard.training import quiet_training

FORMAT, FORMAT_VERSION = "probhard-forecaster", 4
COLUMNS = {"id_col": "unique_id", "time_col": "ds", "target_col": "y"}
SMOOTH = 0.05  # typical change between steps, relative to the level, below which changes are learned
LONGEST_CONTEXT = 60  # steps, besides the horizon: an LSTM learns no more from longer ones, and takes longer


def default_horizon(data: HierarchicalData) -> int:
    """The usual horizon of the data: one season, but at most a quarter of the rows."""
    return data.horizon or max(1, min(data.season, len(data.index) // 4))


def smooth(data: HierarchicalData) -> bool:
    """Whether the series move so little from step to step that their changes are learned."""
    steps, level = np.abs(np.diff(data.values, axis=0)), np.abs(data.values[1:])
    known = ~np.isnan(steps)
    return bool(known.any() and steps[known].sum() < SMOOTH * level[known].sum())


def defaults(data: HierarchicalData, horizon: int, changes: bool) -> dict[str, Any]:
    """Settings of ``DeepVAREstimator`` for data of this frequency and size; ``max_epochs`` goes to its trainer."""
    rows, nodes = data.values.shape
    lags = {1, *default_lags(data.freq), data.season}
    small = nodes < 100  # few series bear larger steps, and a large network learns their noise by heart
    return {
        "context_length": min(2 * max(horizon, data.season, 12), LONGEST_CONTEXT + horizon),
        "lags_seq": sorted(lag for lag in lags if lag == 1 or lag <= rows // 2),
        "scaling": "centre",
        "hidden_size": 16 if small else 40,
        "lr": 1e-2 if small else 1e-3,
        "batch_size": 32 if nodes < 500 else 16,
        "num_batches_per_epoch": 50,
        "max_epochs": (3 if changes else 5) if small else 10,
    }


class HierarchicalForecaster:
    """Trains DeepVAR on all nodes of a hierarchy and draws coherent forecasts of them.

    Args:
        keys, S, tags: The hierarchy, as in ``from_frame``.
        freq, season: Frequency, and steps after which the seasons repeat; found from the stamps unless given.
        method: A name in ``METHODS`` or a ``Method``.
        nonnegative, upper: Bounds on every draw; ``upper`` is a number, or numbers by the names of nodes.
        horizon: Steps of a training window; forecasts may be longer or shorter.
        changes: Whether to learn changes between steps instead of levels; by default where series are ``smooth``.
        calibrate: Whether ``spread_factor`` is learned from past windows, with a training of its own; else it is 1.
        epochs, network: Instead of ``defaults``; ``network`` are options of ``DeepVAREstimator``.
        num_samples, seed: Draws behind a forecast; seed of weights, windows and draws.
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
            _check_count(name, value)
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
        """Name of the column of means, and beginning of those of intervals."""
        return self.method if isinstance(self.method, str) else "probhard"

    @property
    def data(self) -> HierarchicalData:
        """The history that was fitted."""
        return self._fitted()[0]

    @property
    def predictor(self) -> DeepVARPredictor:
        """The trained GluonTS predictor."""
        return self._fitted()[1]

    @property
    def constraint(self) -> Constraint:
        """What every draw of a projecting method obeys."""
        box = _bounds(self.data, self.nonnegative, self.upper)
        return self.data.hierarchy if box is None else self.data.hierarchy & box

    def fit(self, df: Any, *, progress: str = "", **reading: Any) -> Self:
        """Train on a long frame (pandas or polars), or on ``HierarchicalData``.

        ``reading`` are options of ``from_frame``: id_col, time_col, target_col, on_gap, coherence. With ``progress``,
        a label, a terminal shows a bar.
        """
        data = self._read(df, reading)
        box = _bounds(data, self.nonnegative, self.upper)
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
            self._trained = data, cast(DeepVARPredictor, estimator.train(self._seen(data).to_gluonts()))
        self.reading, self.like = reading, None
        if not isinstance(df, HierarchicalData):
            self.like = nw.from_native(df, eager_only=True).head(1).to_native()
        return self

    def update(self, df: Any) -> Self:
        """Start from another history of the same hierarchy, without training anew."""
        data, before = self._read(df, self.reading), self.data
        sums = data.names == before.names and not (data.hierarchy.summation != before.hierarchy.summation).nnz
        if not sums or data.freq != before.freq:
            other = sorted(set(data.names) ^ set(before.names))
            what = f"the frequency {data.freq}" if sums else f"other nodes ({other[0]!r})" if other else "other sums"
            raise ParameterError(
                f"The new history has {what}; the fitted one had {len(before.names)} nodes, {before.freq}.",
                "The network's outputs belong to the nodes and steps that it was fitted to.",
                "Pass the same series at the same frequency, or call fit.",
            )
        self._trained = data, self.predictor
        return self

    def predict(self, h: int | None = None, level: Sequence[float] | None = (80, 95)) -> Any:
        """Means and intervals of all nodes for the next h steps, a long frame of the library of the fitted one.

        Every draw adds up, and so do the means; the ends of intervals are quantiles, which need not.
        """
        probabilities(level or ())  # checked before anything is drawn
        draws, data = self.sample(h), self.data
        names = {**COLUMNS, **{name: self.reading[name] for name in COLUMNS if name in self.reading}}
        columns = summary(draws, self.model, level or ())
        return to_long(columns, data.names, data.future(draws.shape[1]), self.like, data.place, **names)

    def sample(self, h: int | None = None, num_samples: int | None = None) -> np.ndarray:
        """Sample paths of all nodes, (num_samples, h, n), in the order of ``data.names``."""
        _check_count("num_samples", num_samples)
        predictor = _extended(self.predictor, self.predictor.prediction_length if h is None else h)
        (forecast,) = predictor.predict(self._seen(self.data).to_gluonts(), num_samples or self.num_samples)
        draws = np.asarray(forecast.samples)
        if not self.learns_changes and self.spread_factor == 1:
            return draws
        if self.learns_changes:
            draws = last_value(self.data, 1) + draws.cumsum(1)
        return self._within(spread.widened(draws, self.spread_factor))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the forecaster and its history to a folder of plain files."""
        path = Path(folder)
        self.predictor.serialize(path / "predictor")
        data, (record, arrays) = self.data, constraint_record(self.data.hierarchy)
        bounds, training = ("nonnegative", "upper"), ("changes", "calibrate", "epochs", "num_samples", "seed")
        names = ("freq", "season", "horizon", *bounds, *training)
        network = {name: value for name, value in self.network.items() if name != "family"}  # the predictor has it
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "keys": self.keys,
            "method": self.method if isinstance(self.method, str) else None,
            "options": {**{name: getattr(self, name) for name in names}, **network},
            "spread_factor": self.spread_factor,
            "learns_changes": self.learns_changes,
            "reading": self.reading,
            "like": _like_record(self.like, self.reading),
            "hierarchy": record,
            "data": {
                "start": str(data.index[0]),
                "freq": data.freq,
                "season": data.season,
                "name": data.name,
                "place": vars(data.place),
            },
        }
        (path / "forecaster.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        np.savez(path / "history.npz", values=data.values, **arrays)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> HierarchicalForecaster:
        """Read a folder written by ``save``; never runs code from its files."""
        path = Path(folder)
        file = path / "forecaster.json"
        content = read_record(file, FORMAT, FORMAT_VERSION, "HierarchicalForecaster.save")
        pandas = require("pandas", "HierarchicalForecaster")
        predictor = DeepVARPredictor.deserialize(path / "predictor")
        arrays = read_arrays(path / "history.npz")
        hierarchy, values = cast(Hierarchy, constraint_from_record(content["hierarchy"], arrays)), arrays["values"]
        about = content["data"]
        index = pandas.period_range(about["start"], periods=len(values), freq=about["freq"])
        options = {"season": about["season"], "name": about["name"], "place": Place(**about["place"])}
        data = HierarchicalData(values, index, hierarchy, **options)
        S = None
        if content["keys"] is None:
            S = pandas.DataFrame(hierarchy.summation.toarray(), data.names, data.names[hierarchy.aggregates :])
        tags = None if content["keys"] or not hierarchy.tags else hierarchy.tags
        method = content["method"] or predictor.prediction_net.method
        family = predictor.prediction_net.network.family
        made = cls(content["keys"], S=S, tags=tags, method=method, **content["options"], family=family)
        made.reading, made.like = content["reading"], _like(content["like"], content["reading"])
        made._trained, made.spread_factor = (data, predictor), content["spread_factor"]
        made.learns_changes = content["learns_changes"]
        return made

    def _fitted(self) -> tuple[HierarchicalData, DeepVARPredictor]:
        if self._trained is None:
            raise ParameterError(
                "This forecaster has not been fitted.", "It has no network and no history.", "Call fit(df) first."
            )
        return self._trained

    def _seen(self, data: HierarchicalData) -> HierarchicalData:
        """What the network sees: the data, or their changes."""
        if not self.learns_changes:
            return data
        steps = np.diff(data.values, axis=0)
        return HierarchicalData.from_matrix(steps, data.hierarchy, data.index[1:], coherence="aggregate")

    def _learned_spread(self, data: HierarchicalData, horizon: int, progress: str) -> float:
        """The factor on deviations that would have been best on past windows, for a network that has not seen them."""
        windows = spread.past_windows(data, horizon)
        if not windows:
            return 1.0
        first = copy.copy(self)
        first.calibrate, first.spread_factor, first.changes = False, 1.0, self.learns_changes
        first.fit(windows[0][0], progress=f"{progress}, spread" if progress else "")
        return spread.spread_factor([first.update(known).sample(horizon) for known, _ in windows], windows)

    def _within(self, draws: np.ndarray) -> np.ndarray:
        """Coherent draws (S, H, n), projected on the bounds by projecting methods."""
        step = as_method(self.method).inference
        layer = step.layer()
        if layer is None or step.linear_only or self.constraint is self.data.hierarchy:
            return draws
        return layer.project_samples(torch.from_numpy(draws), self.constraint).value.numpy()

    def _read(self, df: Any, reading: Mapping[str, Any]) -> HierarchicalData:
        if isinstance(df, HierarchicalData):
            return df
        return from_frame(df, self.keys, S=self.S, tags=self.tags, freq=self.freq, season=self.season, **reading)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int | np.integer) or value < 1):
        raise ParameterError(
            f"Got {name}={value!r}.", "It is a whole number.", "Pass at least 1, or None for the default."
        )


def summary(draws: np.ndarray, model: str, level: Sequence[float]) -> dict[str, np.ndarray]:
    """Mean and interval ends of draws (S, H, n) by their column, each (H, n)."""
    columns = Columns(model)
    columns.add_levels(level)
    ends = np.quantile(draws, list(columns.quantiles.values()), axis=0) if columns.quantiles else ()
    return {model: draws.mean(0), **dict(zip(columns.quantiles, ends))}


def _bounds(data: HierarchicalData, nonnegative: bool, upper: float | Mapping[str, float] | None) -> Box | None:
    """The box of all nodes, or None; refused if the history lies outside."""
    if not nonnegative and upper is None:
        return None
    high = np.full(len(data.names), np.inf)
    if isinstance(upper, Mapping):
        for node, bound in upper.items():
            high[data.hierarchy.index(node)] = bound
    elif upper is not None:
        high[:] = upper
    low = 0.0 if nonnegative else -np.inf
    outside = (data.values < low) | (data.values > high)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise ParameterError(
            f"Series {data.names[column]!r} is {data.values[row, column]:.6g} at {data.index[row]}, outside its bounds "
            f"[{low:g}, {high[column]:g}].",
            "Forecasts within bounds cannot follow a history that is not.",
            "Correct the value, or leave out the bound.",
        )
    return Box(low, torch.from_numpy(high))


def _extended(predictor: DeepVARPredictor, h: int) -> DeepVARPredictor:
    """The same network drawing paths of h steps: a rollout can stop anywhere."""
    module = cast(DeepVARModule, predictor.prediction_net)
    _check_count("h", h)
    network = copy.copy(module.network)  # weights are shared
    network.layout = replace(network.layout, prediction_length=h)
    twin = DeepVARModule(network, module.constraint, module.method)
    return DeepVARPredictor(twin, predictor.num_parallel_samples, predictor.seed, predictor.device)


def _like_record(like: Any, reading: Mapping[str, Any]) -> list[str] | None:
    """A frame's library, and kind and value of its first stamp, from which ``_like`` makes another."""
    if like is None:
        return None
    table = nw.from_native(like, eager_only=True)
    column = table.get_column(reading.get("time_col", COLUMNS["time_col"]))
    kinds = {nw.Date: "date", nw.Datetime: "datetime", nw.String: "text"}
    kind = next((text for dtype, text in kinds.items() if column.dtype == dtype), "other")
    return [nw.get_native_namespace(table).__name__, kind, str(column.to_list()[0])]


def _like(record: Sequence[str] | None, reading: Mapping[str, Any]) -> Any:
    if record is None:
        return None
    library, kind, text = record
    stamp: Any = text
    if kind in ("date", "datetime"):
        stamp = require("pandas", "HierarchicalForecaster").Timestamp(text).tz_localize(None).to_pydatetime()
        stamp = stamp.date() if kind == "date" else stamp
    content = {} if kind == "other" else {reading.get("time_col", COLUMNS["time_col"]): [stamp]}
    return require(library, "HierarchicalForecaster").DataFrame(content)
