"""DeepVAR with a low-rank covariance and functionals in its loss: every method, bounds, saved folders, gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import probhard as ph
from forecasting.helpers import LAYOUT, TWO_GROUPS, entry, forecast, history, incoherence, small_estimator, untrained
from probhard.forecasting.models.network import DeepVAR
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.windows import Windows

PROJECTED = ("probhard-or", "probhard-ob", "probconserv", "probhard-inf", "hier-e2e")
FEASIBLE = ("probhard-or", "probhard-ob", "probhard-inf", "hier-e2e")  # with bounds, too


@pytest.mark.parametrize("name", sorted(ph.METHODS))
def test_every_method_with_a_rank(name, tmp_path):
    y = history()
    predictor = small_estimator(method=name, rank=2, functionals="levels").train([entry(y)])
    samples = forecast(predictor, y, 50)
    assert np.isfinite(samples).all()
    if name in PROJECTED:
        assert incoherence(samples) < 1e-9
    predictor.serialize(tmp_path)
    loaded = DeepVARPredictor.deserialize(tmp_path)
    np.testing.assert_array_equal(forecast(loaded, y, 50), samples)
    assert loaded.network.method == predictor.network.method
    assert loaded.network.method.functionals == ph.Levels(TWO_GROUPS)


@pytest.mark.parametrize("name", FEASIBLE)
def test_bounds_with_a_rank(name, monkeypatch):
    monkeypatch.setattr("probhard.forecasting.models.heads.FIRST_SPREAD", 1.0)  # spreads as large as the values
    y = history()
    predictor = small_estimator(method=name, rank=2, constraint=ph.NonNegative()).train([entry(y)])
    samples = forecast(predictor, y, 200)
    assert samples.min() >= 0
    assert (samples == 0).any()  # the bound matters
    assert incoherence(samples) < 1e-9


@pytest.mark.parametrize("method", ["probhard-or", "probhard-ob"])
def test_gradients_reach_the_factor_from_the_start(method):
    windows = Windows([entry(history())], LAYOUT)
    torch.manual_seed(0)
    module = untrained(method, DeepVAR(LAYOUT, 7, hidden_size=5, rank=3), windows)
    module.loss(windows.at(windows.origins)).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    of_factor = module.network.head.weight.grad[14:]  # (21, hidden)
    assert bool((of_factor.abs().sum(1) > 0).all())


def test_training_finds_common_noise():
    """Bottoms that move together: the learned law of the total is wide, that of independent nodes cannot be."""
    noise = np.random.default_rng(1)
    y = TWO_GROUPS @ (100 * (1 + 0.2 * noise.standard_normal((1, 200)).repeat(4, 0)))
    options = {
        "method": "probhard-or",
        "num_batches_per_epoch": 60,
        "batch_size": 16,
        "trainer_kwargs": {"max_epochs": 4, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    predictor = small_estimator(rank=2, functionals="levels", **options).train([entry(y)])
    samples = forecast(predictor, y, 400)[:, 0]  # (S, n)
    assert np.corrcoef(samples[:, 3:].T)[0, 1] > 0.5
    assert samples[:, 0].std() == pytest.approx(80, rel=0.35)


def test_levels_in_the_loss():
    estimator = small_estimator(functionals="levels")
    assert estimator.method.functionals == ph.Levels(TWO_GROUPS)
    given = ph.Directions(np.ones((1, 7)))
    assert small_estimator(functionals=given).method.functionals == given
    with pytest.raises(ph.ParameterError, match="without a hierarchy"):
        small_estimator(hierarchy=ph.Box(0.0, None), functionals="levels")
    with pytest.raises(ph.ParameterError, match="functionals"):
        small_estimator(functionals="leaves")
