"""Real engines of other libraries as members; a test skips where its package is not installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forecasting.helpers import KEYS, frame, incoherence
from probhard.forecasting import HierarchicalForecaster, from_frame
from probhard.forecasting.members.external import member_of

HORIZON, ORIGINS = 4, (52, 56)
WHY = "the extra 'engines' is not installed: pip install 'probhard[engines]'"


@pytest.fixture(autouse=True)
def _as_for_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # Lightning writes checkpoints to the current folder
    for name in ("lightning", "pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # other libraries mix it with float32 data
    yield
    torch.set_default_dtype(before)


def lightgbm(freq: Any = "MS") -> Any:
    forecast = pytest.importorskip("mlforecast", reason=WHY).MLForecast
    model = pytest.importorskip("lightgbm", reason=WHY).LGBMRegressor(
        n_estimators=40, min_child_samples=5, verbosity=-1, n_jobs=1
    )
    return forecast(models=[model], freq=freq, lags=[1, 12])


def nhits(**options: Any) -> Any:
    engine = pytest.importorskip("neuralforecast", reason=WHY).NeuralForecast
    settings = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False, "accelerator": "cpu"}
    model = pytest.importorskip("neuralforecast.models", reason=WHY).NHITS
    return engine([model(h=HORIZON, input_size=24, max_steps=15, **settings, **options)], freq="MS")


def feed_forward() -> Any:
    trainer = {"max_epochs": 2, "enable_progress_bar": False, "logger": False, "accelerator": "cpu"}
    return pytest.importorskip("gluonts.torch", reason=WHY).SimpleFeedForwardEstimator(
        prediction_length=HORIZON,
        context_length=12,
        hidden_dimensions=[8],
        num_batches_per_epoch=5,
        trainer_kwargs=trainer,
    )


def median_of_nhits() -> Any:
    losses = pytest.importorskip("neuralforecast.losses.pytorch", reason=WHY)
    return nhits(loss=losses.MQLoss(level=[80]))


@pytest.mark.parametrize("make", [lightgbm, nhits, median_of_nhits, feed_forward])
def test_real_engines_are_members(make: Any) -> None:
    data = from_frame(frame(60), KEYS)
    made = member_of(make(), data).forecast(data, HORIZON, ORIGINS)
    size = np.abs(data.values).max(0)
    for base in made.bases:
        assert base.mean.shape == base.stddev.shape == (HORIZON, 7)
        assert np.isfinite(base.mean).all()
        assert (base.stddev > 0).all()
        assert (np.abs(base.mean) < 5 * size).all()  # every series has its own forecasts


def test_lightgbm_learns_the_season_of_every_series_and_sees_no_later_rows() -> None:
    data = from_frame(frame(60), KEYS)
    made = member_of(lightgbm(), data).forecast(data, HORIZON, ORIGINS)
    for end, base in zip(ORIGINS, made.bases):
        error = np.abs(base.mean - data.values[end : end + HORIZON]).mean(0)
        assert (error < 0.5 * data.values.std(0)).all()
    later = data.values.copy()
    later[ORIGINS[0] :] *= 3.0
    changed = member_of(lightgbm(), data).forecast(
        type(data)(later, data.index, data.hierarchy, season=12), HORIZON, ORIGINS
    )
    np.testing.assert_allclose(changed.bases[0].mean, made.bases[0].mean)


def test_a_forecaster_pools_engines_and_named_members() -> None:
    models = [lightgbm(), feed_forward(), "naive"]
    forecaster = HierarchicalForecaster(KEYS, models=models, horizon=HORIZON, windows=2, num_samples=100)
    draws = forecaster.fit(frame(60)).sample()
    assert set(forecaster.weights_) == {"MLForecast", "SimpleFeedForwardEstimator", "naive"}
    assert incoherence(draws) < 1e-12


def test_an_engine_that_fails_is_left_out_with_a_note() -> None:
    class Broken:
        freq = 1

        def cross_validation(self, **options: Any) -> Any:
            raise RuntimeError("no memory on the device")

        def fit(self, df: Any) -> Any:
            raise RuntimeError("no memory on the device")

    forecaster = HierarchicalForecaster(KEYS, models=[Broken(), "naive"], horizon=HORIZON, num_samples=50)
    forecaster.fit(frame(60))
    assert list(forecaster.weights_) == ["naive"]
    assert any("Broken was left out" in note and "no memory on the device" in note for note in forecaster.pool.notes)


def test_networks_of_gluonts_leave_no_checkpoints(tmp_path: Path) -> None:
    estimator = feed_forward()
    member_of(estimator, from_frame(frame(60), KEYS)).forecast(from_frame(frame(60), KEYS), HORIZON, (56,))
    assert not list(tmp_path.iterdir())
    assert "default_root_dir" not in estimator.trainer_kwargs
