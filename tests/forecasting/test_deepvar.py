"""DeepVAR as a GluonTS estimator and predictor: training, forecasts, saved folders, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from gluonts.evaluation import MultivariateEvaluator, make_evaluation_predictions
from gluonts.model.predictor import Predictor
from lightning.pytorch.callbacks import Callback

import probhard as ph
from forecasting.helpers import (
    LAYOUT,
    START,
    TWO_GROUPS,
    assert_three_parts,
    entry,
    forecast,
    history,
    small_estimator,
    untrained,
)
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.storage import constraint_from_record, constraint_record
from probhard.forecasting.models.windows import Series, Windows

PROJECTED = ("probhard-or", "probhard-ob", "probconserv", "probhard-inf", "hier-e2e")
COMPLETED = ("hardnet-aff", "dc3", "completion")  # exact on a hierarchy


@pytest.mark.parametrize("name", sorted(ph.METHODS))
def test_every_method_trains_and_keeps_its_promise(name):
    y = history()
    forecasts = list(small_estimator(method=name).train([entry(y)]).predict([entry(y)]))
    samples = torch.as_tensor(forecasts[0].samples)
    assert samples.shape == (20, 3, 7)
    assert bool(samples.isfinite().all())
    assert forecasts[0].start_date == START + 60
    assert forecasts[0].item_id == "all"
    incoherence = float(ph.Hierarchy(TWO_GROUPS).relative_violation(samples).max())
    if name in (*PROJECTED, *COMPLETED):
        assert incoherence < 1e-9
    elif name == "hardnet++":
        assert incoherence < 1e-6
    else:
        assert incoherence > 1e-6


@pytest.mark.parametrize("method", ["probhard-or", "probhard-ob"])
def test_no_path_is_negative(method, monkeypatch):
    monkeypatch.setattr("probhard.forecasting.models.heads.FIRST_SPREAD", 1.0)  # spreads as large as the values
    y = history()
    plain = forecast(small_estimator(method=method).train([entry(y)]), y, 200)
    bounded = forecast(small_estimator(method=method, constraint=ph.NonNegative()).train([entry(y)]), y, 200)
    assert plain.min() < 0  # the bound matters
    assert bounded.min() >= 0
    assert float(ph.Hierarchy(TWO_GROUPS).relative_violation(torch.as_tensor(bounded)).max()) < 1e-9


@pytest.mark.parametrize("options", [{"rank": 2}, {"family": ph.student_t(4.0)}], ids=["low-rank", "student-t"])
def test_other_laws(options):
    y = history()
    predictor = small_estimator(method="probhard-ob", **options).train([entry(y)])
    samples = torch.as_tensor(forecast(predictor, y))
    assert float(ph.Hierarchy(TWO_GROUPS).relative_violation(samples).max()) < 1e-9
    law = predictor.network.network(Series.of(entry(y), LAYOUT, 3).last(LAYOUT))
    assert law.family == options.get("family", ph.NORMAL)
    assert isinstance(law.cov, ph.LowRank if "rank" in options else ph.Diagonal)


@pytest.mark.parametrize("method", ["probhard-or", "softc"])
def test_forecasts_scale_with_the_data(method):
    y = history()
    plain = forecast(small_estimator(method=method).train([entry(y)]), y)
    large = forecast(small_estimator(method=method).train([entry(1024 * y)]), 1024 * y)
    np.testing.assert_allclose(large, 1024 * plain, rtol=1e-4, atol=1e-4 * 1024 * np.abs(plain).max())


def test_dynamic_features():
    y, noise = history(), np.random.default_rng(0)
    known = noise.integers(0, 2, (1, 63)).astype(float)
    y = y * (1 + 0.5 * known[:, :60])
    train = [entry(y, feat_dynamic_real=known[:, :60])]
    predictor = small_estimator(
        num_feat_dynamic_real=1,
        hidden_size=20,
        num_batches_per_epoch=40,
        trainer_kwargs={"max_epochs": 3, "enable_progress_bar": False, "accelerator": "cpu"},
    ).train(train)
    high, low = (
        forecast(predictor, y, feat_dynamic_real=np.hstack([known[:, :60], np.full((1, 3), value)]))[:, :, 0].mean()
        for value in (1.0, 0.0)
    )
    assert 1.1 < high / low < 1.7  # 1.5 in the data
    with pytest.raises(ph.ShapeError, match="feat_dynamic_real has shape"):
        forecast(predictor, y, feat_dynamic_real=known[:, :60])


def test_training_learns_and_validation_is_used():
    y = history(120)
    settings = {
        "lags_seq": (1, 12),
        "hidden_size": 20,
        "num_batches_per_epoch": 40,
        "trainer_kwargs": {"max_epochs": 3, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    trained = small_estimator(**settings).train([entry(y[:, :114])], validation_data=[entry(y[:, :117])])
    samples = torch.as_tensor(forecast(trained, y[:, :117], 200))
    truth = torch.as_tensor(y.T[117:])
    crps = float(ph.weighted_quantile_loss(samples, truth))
    naive = float((truth - torch.as_tensor(y.T[105:108])).abs().sum() / truth.abs().sum())
    assert crps < naive


def test_seeds():
    y = history()
    state = torch.random.get_rng_state()
    estimator = small_estimator(seed=3)
    first, again = (forecast(estimator.train([entry(y)]), y) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is untouched
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - forecast(small_estimator(seed=4).train([entry(y)]), y)).max() > 0


def test_callbacks_stay_and_no_file_is_left(tmp_path, monkeypatch):
    class Count(Callback):
        epochs = 0

        def on_train_epoch_end(self, *_):
            self.epochs += 1

    monkeypatch.chdir(tmp_path)
    count = Count()
    trainer = {"max_epochs": 2, "callbacks": [count], "enable_progress_bar": False, "accelerator": "cpu"}
    estimator = small_estimator(trainer_kwargs=trainer)
    estimator.train([entry(history())])
    estimator.train([entry(history())])
    assert count.epochs == 4
    assert not list(tmp_path.iterdir())


def test_training_goes_on_from_a_predictor():
    y = history()
    estimator = small_estimator()
    first = estimator.train([entry(y)])
    second = estimator.train_from(first, [entry(y)])
    windows = Windows([entry(y)], LAYOUT)
    window = windows.at(windows.origins)
    assert second.network.loss(window) < first.network.loss(window)


def test_gluonts_evaluator_accepts_the_forecasts():
    y = history()
    predictor = small_estimator().train([entry(y[:, :-3])])
    forecasts, series = make_evaluation_predictions([entry(y)], predictor, num_samples=50)
    forecasts, series = list(forecasts), list(series)
    levels = np.arange(1, 20) / 20
    overall, _ = MultivariateEvaluator(quantiles=levels)(series, forecasts)
    expected = ph.weighted_quantile_loss(torch.as_tensor(forecasts[0].samples), torch.as_tensor(y.T[-3:]))
    assert overall["mean_wQuantileLoss"] == pytest.approx(float(expected), rel=1e-9)


def test_saved_predictors_are_the_same_and_plain(tmp_path):
    y = history()
    names = list("TABabcd")
    hierarchy = ph.Hierarchy(TWO_GROUPS, names=names, tags={"all": names}, immutable=["T"])
    estimator = small_estimator(
        hierarchy=hierarchy,
        constraint=ph.Box(0.0, 1e4),
        method="probhard-ob",
        family=ph.student_t(6.0),
        rank=1,
        seed=8,
        num_parallel_samples=7,
    )
    predictor = estimator.train([entry(y)])
    predictor.serialize(tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert files == {"gluonts-config.json", "deepvar.json", "constraint.npz", "weights.pt"}
    expected = next(iter(predictor.predict([entry(y)]))).samples
    for load in (DeepVARPredictor.deserialize, Predictor.deserialize):
        loaded = load(tmp_path / "saved")
        samples = next(iter(loaded.predict([entry(y)]))).samples
        np.testing.assert_array_equal(samples, expected)
    stored = loaded.network.constraint.linear_part()
    assert stored.names == tuple(names)
    assert stored.tags == hierarchy.tags


def test_what_cannot_be_saved_must_be_passed(tmp_path):
    y = history()
    curved = ph.Ball(1e5)
    predictor = small_estimator(constraint=curved).train([entry(y)])
    predictor.serialize(tmp_path)
    with pytest.raises(ph.ParameterError, match="constraint of this predictor was not saved"):
        DeepVARPredictor.deserialize(tmp_path)
    loaded = DeepVARPredictor.deserialize(tmp_path, constraint=ph.Hierarchy(TWO_GROUPS) & curved)
    np.testing.assert_array_equal(forecast(loaded, y), forecast(predictor, y))
    (Path(tmp_path) / "deepvar.json").write_text("{}")
    with pytest.raises(ph.ParameterError, match="does not hold probhard-deepvar"):
        DeepVARPredictor.deserialize(tmp_path)


def test_rows_are_stored():
    rows = ph.Hierarchy(TWO_GROUPS).fix([0], [12.0]) & ph.NonNegative()
    record, arrays = constraint_record(rows)
    again = constraint_from_record(record, arrays)
    z = torch.randn(3, 7)
    layer = ph.DPPL("orthogonal")
    torch.testing.assert_close(layer.project(z, again).value, layer.project(z, rows).value)
    with pytest.raises(ph.ParameterError, match="cannot be read"):
        constraint_from_record([{"kind": "box"}], {})


def test_base_needs_no_hierarchy():
    y = history()
    samples = forecast(small_estimator(hierarchy=None, method="base").train([entry(y)]), y)
    assert samples.shape == (20, 3, 7)


def _trained_on(target, **more):
    return lambda: small_estimator().train([entry(target, **more)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: small_estimator(hierarchy=None), "neither a hierarchy nor a constraint"),
        (lambda: small_estimator(prediction_length=0), "prediction_length=0"),
        (lambda: small_estimator(lags_seq=[0, 1]), r"lags_seq=\[0, 1\]"),
        (lambda: small_estimator(freq="fortnight"), "freq='fortnight'"),
        (lambda: small_estimator(time_features=["moon"]), "'moon'"),
        (lambda: small_estimator(method="magic"), "'magic'"),
        (lambda: small_estimator(scaling="log").train([entry(history())]), "'log'"),
        (_trained_on(history()[0]), "target has shape"),
        (_trained_on(history()[:5]), "data have 5 series, the constraint 7"),
        (_trained_on(history(3)), "the longest history 3 rows"),
        (_trained_on(np.full((7, 60), np.nan)), "All targets are NaN"),
        (_trained_on(np.full((7, 60), np.inf)), "420 infinite"),
        (_trained_on(history(), start=pd.Period("2020-01-01", freq="D")), "frequency 'D'"),
        (lambda: small_estimator().train([]), "no entry"),
        (lambda: small_estimator().train([entry(history()), entry(history()[:5])]), r"\[5, 7\] series"),
    ],
)
def test_errors_have_three_parts(call, words):
    with pytest.raises(ph.ProbhardError, match=words) as caught:
        call()
    assert_three_parts(caught.value)


def test_another_hierarchy_at_prediction():
    predictor = DeepVARPredictor(untrained())
    with pytest.raises(ph.ShapeError, match="An entry has 5 series, the network 7"):
        forecast(predictor, history()[:5])
