"""DeepVAR as a forecaster of its own, and as a member.

    paths:     y^(s)_1, ..., y^(s)_h,  s = 1, ..., S,     drawn by DeepVAR; with a projecting method all are feasible

Smooth series are learned as changes d, which add up as the series do:

    y_(T+k) = y_T + d_1 + ... + d_k,          d: paths of changes, drawn by DeepVAR.

A first network, trained without the last windows, calibrates the spread of the draws (``models.spread``). Other
settings are chosen from the frequency and size of the data (``models.defaults``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch

from probhard.errors import ParameterError
from probhard.forecasting.data.bounds import history_box
from probhard.forecasting.data.regressors import Regressors
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import LONG, MemberForecast
from probhard.forecasting.members.bootstrap import summary_of
from probhard.forecasting.models import spread
from probhard.forecasting.models.baselines import last_value
from probhard.forecasting.models.defaults import default_horizon, defaults, smooth
from probhard.forecasting.models.estimator import DeepVAREstimator
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.training import ProgressBar
from probhard.method import Method
from probhard.training import quiet_training

SAMPLES = 400  # paths of the member
LEARNED = ("horizon", "num_samples", "seed", "spread_factor", "learns_changes", "regressors")  # of a trained network


@dataclass
class NetworkForecast:
    """DeepVAR with its settings, trained by ``fit``.

    Args:
        method: A name in ``METHODS`` or a ``Method``.
        nonnegative, upper: Bounds on every draw.
        horizon: Steps of a training window; forecasts may be longer or shorter.
        changes: Whether to learn changes between steps; by default if the series are ``smooth``.
        calibrate: Whether to fit ``spread_factor`` on past windows.
        epochs, options: Override ``defaults``; ``options`` are those of ``DeepVAREstimator``.
        num_samples, seed: Draws behind a forecast, and the seed of weights, windows and draws.
        predictor, spread_factor, learns_changes, regressors: Results of the fit.
    """

    method: str | Method = "probhard-or"
    nonnegative: bool = False
    upper: float | Mapping[str, float] | None = None
    horizon: int | None = None
    changes: bool | None = None
    calibrate: bool = True
    epochs: int | None = None
    num_samples: int = 1000
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    predictor: DeepVARPredictor | None = None
    spread_factor: float = 1.0
    learns_changes: bool = False
    regressors: Sequence[str] = ()

    def fit(self, data: HierarchicalData, progress: str = "") -> Self:
        """Train on a history; return the forecast itself.

        Args:
            data: The history.
            progress: Label of a progress bar in a terminal; "" shows none.

        Raises:
            ProbhardError: If the history violates the bounds or is too short.
        """
        box = history_box(data, self.nonnegative, self.upper)
        self.learns_changes = smooth(data) if self.changes is None else self.changes
        horizon = self.horizon or default_horizon(data)
        self.spread_factor = self._learned_spread(data, horizon, progress) if self.calibrate else 1.0
        data = data.known_ahead(horizon)
        options = {**defaults(data, horizon, self.learns_changes), **self.options}
        self.regressors = data.feature_names
        options |= {"num_feat_dynamic_real": len(self.regressors)} if self.regressors else {}
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
            self.predictor = cast(DeepVARPredictor, estimator.train(self._inputs(data).to_gluonts()))
        return self

    def sample(self, data: HierarchicalData, h: int | None = None, num_samples: int | None = None) -> np.ndarray:
        """Draw paths from the end of a history, (S, h, n), before the bounds unless ``within_bounds``."""
        assert self.predictor is not None  # fitted
        predictor = self.predictor if h is None else self.predictor.extended(h)
        known = replace(data, regressors=None)
        if self.regressors:
            given, rows = data.regressors or Regressors((), np.empty((0, 0))), len(data.index)
            known = replace(data, regressors=given.only(self.regressors, rows, predictor.prediction_length))
        (forecast,) = predictor.predict(self._inputs(known).to_gluonts(), num_samples or self.num_samples)
        draws = np.asarray(forecast.samples)
        if self.within_bounds:
            return draws
        if self.learns_changes:
            draws = last_value(data, 1) + draws.cumsum(1)
        return spread.widened(draws, self.spread_factor)

    @property
    def learned(self) -> dict[str, Any]:
        """What a trained network is besides its weights, as plain values."""
        return {name: getattr(self, name) for name in LEARNED}

    @property
    def within_bounds(self) -> bool:
        """Whether the network itself has projected its paths."""
        return not self.learns_changes and self.spread_factor == 1

    def _inputs(self, data: HierarchicalData) -> HierarchicalData:
        """Return the series that the network learns: the data, or their changes."""
        if not self.learns_changes:
            return data
        steps = np.diff(data.values, axis=0)
        known = None if data.regressors is None else data.regressors.after(1)
        index = data.index[1:]
        return HierarchicalData.from_matrix(steps, data.hierarchy, index, coherence="aggregate", regressors=known)

    def _learned_spread(self, data: HierarchicalData, horizon: int, progress: str) -> float:
        """Fit the spread factor on past windows, with a network that was trained without them."""
        windows = spread.past_windows(data, horizon)
        if not windows:
            return 1.0
        first = replace(self, calibrate=False, changes=self.learns_changes, spread_factor=1.0, predictor=None)
        first.fit(windows[0][0], progress=f"{progress}, spread" if progress else "")
        drawn = [first.sample(known, horizon) for known, _ in windows]
        return spread.spread_factor(drawn, windows)


@dataclass(frozen=True, eq=False)
class NetworkMember:
    """DeepVAR as a member, trained on the rows before the first past origin.

    What past windows tell of a network holds for that network. So it is trained again, on all rows, only where the rows
    before the first origin are few.

    Args:
        model: The settings.
        trial: Whether it joins a pool only where past windows show that it helps.
    """

    model: NetworkForecast
    trial: bool = False
    name: str = "deepvar"

    @property
    def settings(self) -> dict[str, Any]:
        """What the forecasts depend on besides the data. See ``Member``."""
        model = self.model
        chosen = {name: getattr(model, name) for name in ("method", "changes", "epochs", "seed", "options")}
        return {**chosen, "torch": torch.__version__}

    @property
    def kept(self) -> bool:
        """Whether the settings are plain values, so that a kept network is known by them. See ``Member``."""
        values = (self.model.method, *self.model.options.values())
        return all(value is None or isinstance(value, (str, int, float, list)) for value in values)

    def forecast(self, data: HierarchicalData, horizon: int, origins: Sequence[int], jobs: int = 1) -> MemberForecast:
        """Train and draw at every origin. See ``Member``."""
        del jobs
        started, draws = time.process_time(), []
        known = [data.window(0, end) for end in (*origins, len(data.index))]
        plain = replace(
            self.model, calibrate=False, nonnegative=False, upper=None, num_samples=SAMPLES, horizon=horizon
        )
        final = None
        if origins:
            past = replace(plain).fit(known[0])
            draws = [past.sample(rows, horizon) for rows in known[:-1]]
            final = past if origins[0] >= LONG else None
        final = final or plain.fit(data)
        draws.append(final.sample(data, horizon))
        bases = [summary_of(rows, paths) for rows, paths in zip(known, draws)]
        return MemberForecast(self.name, bases, draws, [], final, time.process_time() - started)

    def resume(self, data: HierarchicalData, horizon: int, state: Any) -> MemberForecast:
        """Draw from a new history by the trained network. See ``Member``."""
        if not isinstance(state, NetworkForecast):
            raise ParameterError("The network was not kept.", "Its weights are needed.", "Fit again.")
        draws = state.sample(data, horizon)
        return MemberForecast(self.name, [summary_of(data, draws)], [draws], [], state)

    def write_state(self, folder: Path, state: NetworkForecast) -> None:
        """Write a trained network to a folder of plain files."""
        assert state.predictor is not None  # fitted
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "network.json").write_text(json.dumps(state.learned), encoding="utf-8")
        state.predictor.serialize(folder)

    def read_state(self, folder: Path) -> NetworkForecast:
        """Read what ``write_state`` wrote."""
        learned = json.loads((folder / "network.json").read_text(encoding="utf-8"))
        return NetworkForecast(predictor=DeepVARPredictor.deserialize(folder), **learned)
