"""CLOVER, DPMN and COPDeepVAR: coherent draws, saved folders, gradients, blocks of steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import probhard as ph
from forecasting.helpers import LAYOUT, TWO_GROUPS, entry, forecast, history, incoherence, small_estimator
from probhard.forecasting import SYSTEMS, HierarchicalData, TemporalBlocks
from probhard.forecasting.models.network import DeepVAR
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.training import DeepVARModule
from probhard.forecasting.models.windows import Windows

BOTTOM_UP = ("clover", "dpmn")


@pytest.mark.parametrize("name", BOTTOM_UP)
def test_draws_add_up_and_survive_a_folder(name, tmp_path):
    y = history()
    y[:, 20] = np.nan  # a missing row
    predictor = small_estimator(**SYSTEMS[name]).train([entry(y)])
    samples = forecast(predictor, y, 50)
    assert samples.shape == (50, 3, 7)
    assert incoherence(samples) < 1e-14
    assert samples.std(0).min() > 0
    if name == "dpmn":
        assert samples.min() >= 0
        np.testing.assert_array_equal(samples, np.round(samples))
    predictor.serialize(tmp_path)
    np.testing.assert_array_equal(forecast(DeepVARPredictor.deserialize(tmp_path), y, 50), samples)


@pytest.mark.parametrize("name", BOTTOM_UP)
def test_gradients_reach_every_output(name):
    windows = Windows([entry(history())], LAYOUT)
    options = dict(SYSTEMS[name])
    method = options.pop("method")
    torch.manual_seed(0)
    network = DeepVAR(LAYOUT, 7, hidden_size=5, outputs=4, **options)
    network.typical.copy_(windows.typical())
    DeepVARModule(network, ph.Hierarchy(TWO_GROUPS), method).eval().loss(windows.at(windows.origins)).backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert bool((network.head.weight.grad.abs().sum(1) > 0).all())


def test_the_unit_of_counts_scales_the_draws():
    y = history() / 100
    samples = forecast(small_estimator(**SYSTEMS["dpmn"], count_unit=0.25).train([entry(y)]), y, 50)
    np.testing.assert_allclose(samples * 4, np.round(samples * 4), atol=1e-9)
    assert (samples != np.round(samples)).any()


def test_training_learns_common_movements_of_counts():
    """Series that rise and fall together: the total of a mixture is wider than that of independent counts."""
    noise = np.random.default_rng(0)
    common = 100 * np.exp(0.3 * noise.standard_normal((1, 200)))
    y = TWO_GROUPS @ noise.poisson(common.repeat(4, 0)).astype(float)
    trainer = {"max_epochs": 6, "enable_progress_bar": False, "accelerator": "cpu"}
    estimator = small_estimator(**SYSTEMS["dpmn"], num_batches_per_epoch=30, batch_size=16, trainer_kwargs=trainer)
    samples = forecast(estimator.train([entry(y)]), y, 400)[:, 0]
    independent = samples[:, 3:].var(0).sum()
    assert samples[:, 0].var() > 2.5 * independent  # perfect dependence gives 4, independence 1
    assert samples[:, 0].std() == pytest.approx(y[0].std(), rel=0.5)


def test_a_bottom_up_system_needs_a_hierarchy():
    with pytest.raises(ph.ParameterError, match="bottom-up"):
        small_estimator(hierarchy=None, constraint=ph.NonNegative(), **SYSTEMS["dpmn"])
    with pytest.raises(ph.ParameterError, match="law"):
        small_estimator(law="gamma").train([entry(history())])


def monthly(rows: int = 62) -> HierarchicalData:
    import pandas as pd

    index = pd.period_range("2010-01", periods=rows, freq="M")
    return HierarchicalData.from_matrix(history(rows).T[:, 3:], TWO_GROUPS, index, season=12)


def test_blocks_hold_the_sums_of_their_steps():
    data = monthly()
    blocks = TemporalBlocks(data.hierarchy, (4, 2, 1))
    entries = blocks.entries(data)
    assert len(entries) == 4
    for phase, made in enumerate(entries):
        assert float(blocks.constraint.violation(torch.from_numpy(made["target"].T)).max()) < 1e-9
        steps = blocks.steps(made["target"].T[None], 100)[0]
        np.testing.assert_allclose(steps, data.values[phase : phase + len(steps)], rtol=1e-12)
    (last,) = blocks.last(data, 8)
    np.testing.assert_allclose(blocks.steps(last["target"].T[None], 100)[0][-4:], data.values[-4:], rtol=1e-12)
    assert last["feat_dynamic_real"].shape[1] == last["target"].shape[1] + 2


def test_forecasts_of_blocks_add_up_over_places_and_time():
    data = monthly()
    blocks = TemporalBlocks(data.hierarchy, (4, 2, 1))
    estimator = small_estimator(**{**blocks.options(data, 8, 12), **SYSTEMS["copdeepvar"]})
    (made,) = estimator.train(blocks.entries(data)).predict(blocks.last(data, 8), num_samples=30)
    assert made.samples.shape == (30, 2, 49)
    parts = blocks.constraint.split(torch.from_numpy(made.samples))
    size = float(parts[4].abs().max())
    assert float((parts[1].sum(-2, keepdim=True) - parts[4]).abs().max()) < 1e-12 * size
    pairs = parts[1].unflatten(-2, (2, 2)).sum(-2)
    assert float((pairs - parts[2]).abs().max()) < 1e-12 * size
    steps = blocks.steps(made.samples, 7).numpy()
    assert steps.shape == (30, 7, 7)
    assert incoherence(steps) < 1e-12


def test_bad_blocks():
    data = monthly()
    with pytest.raises(ph.ParameterError, match="blocks"):
        TemporalBlocks(data.hierarchy, (4, 3, 1))
    with pytest.raises(ph.ParameterError, match="rows"):
        TemporalBlocks(data.hierarchy, (12, 1)).entries(data.window(0, 8))
