"""Effects of regressors: recovered from data, nothing from noise, and used by series members and DeepVAR."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from forecasting.helpers import TINY
from probhard.errors import ParameterError
from probhard.forecasting import HierarchicalForecaster, from_frame
from probhard.forecasting.data.effects import effects

ROWS, STEPS = 96, 12


def sales(strength: float) -> tuple[pd.DataFrame, pd.DataFrame, np.ndarray]:
    """Two shops with promotions of a known effect: the history, the promotions ahead, and what was sold then."""
    random = np.random.default_rng(4)
    stamps = pd.date_range("2015-01-01", periods=ROWS + STEPS, freq="MS")
    promo = (random.random(ROWS + STEPS) < 0.3).astype(float)
    frames, truth = [], []
    for i, shop in enumerate("ab"):
        season = 10 * np.sin(2 * np.pi * np.arange(ROWS + STEPS) / 12)
        y = 100 + 20 * i + season + strength * (i + 1) * promo + random.normal(size=ROWS + STEPS)
        frames.append(pd.DataFrame({"shop": shop, "ds": stamps, "y": y, "promo": promo})[:ROWS])
        truth.append(y[ROWS:])
    ahead = pd.DataFrame({"ds": stamps[ROWS:], "promo": promo[ROWS:]})
    return pd.concat(frames), ahead, np.stack([truth[0] + truth[1], *truth], 1)


def test_effects_are_found_and_noise_is_not():
    history, ahead, _ = sales(30.0)
    data = from_frame(history, ["shop"], regressors=["promo"], future=ahead)
    found = effects(data, STEPS)
    assert found.shape == (ROWS + STEPS, 3)
    promo = np.concatenate([history["promo"][:ROWS], ahead["promo"]])
    for node, size in enumerate((90.0, 30.0, 60.0)):
        jump = found[promo == 1, node].mean() - found[promo == 0, node].mean()
        assert jump == pytest.approx(size, rel=0.05)
    nothing = effects(from_frame(sales(0.0)[0], ["shop"], regressors=["promo"], future=ahead), STEPS)
    assert np.abs(nothing).max() < 2
    assert effects(from_frame(history, ["shop"]), STEPS) is None
    assert effects(from_frame(history, ["shop"], regressors=["promo"]), STEPS) is None  # no future
    short = from_frame(history.groupby("shop").head(6), ["shop"], regressors=["promo"], future=ahead)
    assert effects(short, STEPS) is None or not effects(short, STEPS).any()


@pytest.mark.parametrize("models", [["naive"], ["ets"]])
def test_series_members_follow_known_promotions(models: list[str]):
    history, ahead, truth = sales(30.0)
    errors = {}
    for known in ({}, {"regressors": ["promo"], "future": ahead}):
        forecaster = HierarchicalForecaster(["shop"], models=models, windows=0, horizon=STEPS, num_samples=100)
        mean = forecaster.fit(from_frame(history, ["shop"], **known)).sample().mean(0)
        errors[bool(known)] = np.abs(mean - truth).mean()
    assert errors[True] < 0.4 * errors[False]


@pytest.mark.parametrize("changes", [False, True])
def test_deepvar_reads_regressors_and_needs_their_future(changes: bool):
    history, ahead, _ = sales(30.0)
    data = from_frame(history, ["shop"], regressors=["promo"], future=ahead)
    assert data.to_gluonts()[0]["feat_dynamic_real"].shape == (1, ROWS + STEPS)
    options = {**TINY, "horizon": 6, "num_samples": 10, "method": "probhard-or", "changes": changes}
    forecaster = HierarchicalForecaster(["shop"], **options).fit(data)
    assert forecaster.predictor.prediction_net.network.layout.num_feat_dynamic_real == 1
    assert forecaster.sample(STEPS).shape == (10, STEPS, 3)
    with pytest.raises(ParameterError, match="promo are not known for 13 steps"):
        forecaster.sample(STEPS + 1)
