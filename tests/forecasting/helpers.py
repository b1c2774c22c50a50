"""Data, models and checks that several forecasting tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

import probhard as ph
from probhard.errors import ProbhardError
from probhard.forecasting import DeepVAREstimator, HierarchicalForecaster
from probhard.forecasting.models.network import DeepVAR
from probhard.forecasting.models.training import DeepVARModule
from probhard.forecasting.models.windows import Layout, Windows

FIVE_NODES = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=float)  # total, a pair, bottoms
TWO_GROUPS = np.vstack([[[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], np.eye(4)])  # total, two halves, four bottoms
KEYS = ["state", "region"]
NODES = ["Total", "Total/A", "Total/B", "Total/A/x", "Total/A/y", "Total/B/x", "Total/B/z"]
TINY = {
    "epochs": 1, "num_batches_per_epoch": 2, "batch_size": 4, "hidden_size": 4, "context_length": 6, "calibrate": False,
}  # fmt: skip
START = pd.Period("2010-01", freq="M")
LAYOUT = Layout("M", prediction_length=3, context_length=6, lags_seq=(1, 4), time_features=("month_of_year",))


def assert_three_parts(error: ProbhardError) -> None:
    """An error says what was wrong, why it matters and what to do."""
    assert error.what
    assert error.why
    assert error.fix


def frame(rows: int = 40, low: float = 20.0, ends: bool = False) -> pd.DataFrame:
    """Bottom rows of two states with two regions each, monthly, of different sizes."""
    random = np.random.default_rng(3)
    stamps = pd.date_range("2018-01-01", periods=rows, freq="ME" if ends else "MS")
    series = []
    for i, (state, region) in enumerate([("A", "x"), ("A", "y"), ("B", "x"), ("B", "z")]):
        season = np.sin(2 * np.pi * np.arange(rows) / 12 + i)
        y = (low + 30.0 * i) * (1.2 + season) + random.uniform(0, 5, rows)
        series.append(pd.DataFrame({"state": state, "region": region, "ds": stamps, "y": y}))
    return pd.concat(series, ignore_index=True)


def fitted(df: Any = None, **options: Any) -> HierarchicalForecaster:
    """A forecaster trained for two steps."""
    forecaster = HierarchicalForecaster(KEYS, **{"num_samples": 60, "horizon": 4, **TINY, **options})
    return forecaster.fit(frame() if df is None else df)


def incoherence(draws: np.ndarray) -> float:
    """Largest difference between a node of ``TWO_GROUPS`` and its sum, relative to the largest value."""
    return float(np.abs(draws - draws[..., 3:] @ TWO_GROUPS.T).max() / np.abs(draws).max())


def history(rows: int = 60, seed: int = 0) -> np.ndarray:
    """Coherent seasonal series of very different sizes, (7, rows)."""
    noise = np.random.default_rng(seed)
    season = 1 + 0.4 * np.sin(2 * np.pi * np.arange(rows) / 12 + np.arange(4)[:, None])
    bottom = np.array([[1000.0], [100.0], [10.0], [300.0]]) * season * noise.uniform(0.9, 1.1, (4, rows))
    return TWO_GROUPS @ bottom


def entry(target: np.ndarray, **more) -> dict:
    return {"target": target, "start": START, "item_id": "all", **more}


def small_estimator(**changes) -> DeepVAREstimator:
    trainer = {"max_epochs": 1, "enable_progress_bar": False, "accelerator": "cpu"}
    options = {
        "freq": "M",
        "prediction_length": 3,
        "hierarchy": TWO_GROUPS,
        "context_length": 6,
        "lags_seq": (1, 4),
        "hidden_size": 6,
        "batch_size": 4,
        "num_batches_per_epoch": 3,
        "num_parallel_samples": 20,
        "lr": 0.01,
        "trainer_kwargs": trainer,
    }
    return DeepVAREstimator(**{**options, **changes})


def untrained(method: str = "base", network: DeepVAR | None = None, windows: Windows | None = None) -> DeepVARModule:
    """An untrained module without dropout."""
    network = DeepVAR(LAYOUT, 7, hidden_size=5) if network is None else network
    if windows is not None:
        network.typical.copy_(windows.typical())
    return DeepVARModule(network, ph.Hierarchy(TWO_GROUPS), ph.METHODS[method]).eval()


def forecast(predictor, target: np.ndarray, samples: int = 20, **more) -> np.ndarray:
    return next(iter(predictor.predict([entry(target, **more)], num_samples=samples))).samples
