"""DeepVAR: windows, network, loss and rollout against plain re-computations; the GluonTS contract."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scoringrules
import torch
from gluonts.evaluation import MultivariateEvaluator, make_evaluation_predictions
from gluonts.model.predictor import Predictor
from lightning.pytorch.callbacks import Callback

import probhard as ph
from probhard.forecasting.data.seasons import cycle_features, default_lags, period_frequency
from probhard.forecasting.models.estimator import DeepVAREstimator
from probhard.forecasting.models.network import DeepVAR
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.storage import constraint_from_record, constraint_record
from probhard.forecasting.models.training import DeepVARModule
from probhard.forecasting.models.windows import Layout, RandomWindows, Series, Window, Windows, last_windows
from probhard.model import Batch

S = np.vstack([[[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], np.eye(4)])  # total, two halves, four bottoms
START = pd.Period("2010-01", freq="M")
LAYOUT = Layout("M", prediction_length=3, context_length=6, lags_seq=(1, 4), time_features=("month_of_year",))
PROJECTED = ("probhard-or", "probhard-ob", "probconserv", "probhard-inf", "hier-e2e")


@pytest.fixture(autouse=True)
def _quiet(caplog):
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def history(rows: int = 60, seed: int = 0) -> np.ndarray:
    """Coherent seasonal series of very different sizes, (7, rows)."""
    noise = np.random.default_rng(seed)
    season = 1 + 0.4 * np.sin(2 * np.pi * np.arange(rows) / 12 + np.arange(4)[:, None])
    bottom = np.array([[1000.0], [100.0], [10.0], [300.0]]) * season * noise.uniform(0.9, 1.1, (4, rows))
    return S @ bottom


def entry(target: np.ndarray, **more) -> dict:
    return {"target": target, "start": START, "item_id": "all", **more}


def estimator(**changes) -> DeepVAREstimator:
    trainer = {"max_epochs": 1, "enable_progress_bar": False, "accelerator": "cpu"}
    options = {
        "freq": "M",
        "prediction_length": 3,
        "hierarchy": S,
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


def module(method: str = "base", network: DeepVAR | None = None, windows: Windows | None = None) -> DeepVARModule:
    """An untrained module without dropout."""
    network = DeepVAR(LAYOUT, 7, hidden_size=5) if network is None else network
    if windows is not None:
        network.typical.copy_(windows.typical())
    return DeepVARModule(network, ph.Hierarchy(S), ph.METHODS[method]).eval()


def forecast(predictor, target: np.ndarray, samples: int = 20, **more) -> np.ndarray:
    return next(iter(predictor.predict([entry(target, **more)], num_samples=samples))).samples


# --- windows ---


def test_windows_are_slices_of_the_series():
    y = history(40)
    windows = Windows([entry(y)], LAYOUT)
    assert windows.origins.tolist() == list(range(10, 38))  # a whole past before, a whole horizon after
    window = windows.at(windows.origins)
    for k, first in enumerate(windows.origins.tolist()):  # forecast start `first`, window from first - 10 on
        np.testing.assert_allclose(window.target[k], y.T[first - 10 : first + 3], rtol=1e-6)
        months = pd.period_range(START + (first - 6), periods=9, freq="M").month
        expected = np.stack([np.cos(2 * np.pi * months / 12), np.sin(2 * np.pi * months / 12)], -1)
        np.testing.assert_allclose(window.features[k], expected, atol=1e-6)
    (last,) = last_windows(windows, 4)
    np.testing.assert_allclose(last.target[0], y.T[-13:], rtol=1e-6)


def test_short_series_are_padded_and_entries_are_not_mixed():
    first, second = history(9), -history(30)
    windows = Windows([entry(first), entry(second)], LAYOUT)
    window = windows.at(windows.origins)
    positive, negative = ((~(side * window.target < 0)).all((1, 2)) for side in (1, -1))
    assert positive.tolist() == [True] * 4 + [False] * 18  # starts 3 to 6 of 9 rows, 10 to 27 of 30
    assert torch.equal(negative, ~positive)
    assert bool(window.target[:, -3:].isfinite().all())  # whole horizons
    short = window.target[0]
    missing = int(short[:, 0].isnan().sum())
    assert missing == 10 - 3
    assert bool(short[:missing].isnan().all())
    np.testing.assert_allclose(short[missing:], first.T[: 13 - missing], rtol=1e-6)
    assert bool(window.features.isfinite().all())


def test_epochs_are_seeded():
    windows = Windows([entry(history())], LAYOUT)
    one, two = RandomWindows(windows, 4, 3, seed=1), RandomWindows(windows, 4, 3, seed=1)
    first, again = list(one), list(two)
    assert len(first) == len(one) == 3
    assert all(torch.equal(a.target, b.target) for a, b in zip(first, again))
    assert not torch.equal(first[0].target, next(iter(one)).target)  # the next epoch
    assert not torch.equal(first[0].target, next(iter(RandomWindows(windows, 4, 3, seed=2))).target)


@pytest.mark.parametrize(
    ("freq", "period", "lags"), [("MS", "M", (1, 12)), ("QE", "Q-DEC", (1, 12)), ("D", "D", (1, 7, 14))]
)
def test_frequencies(freq, period, lags):
    assert period_frequency(freq) == period
    assert default_lags(freq) == lags


def test_features_of_a_cycle():
    days = pd.period_range("2024-01-01", periods=8, freq="D")  # a Monday
    found = cycle_features(("day_of_week",), days)
    np.testing.assert_allclose(found[0], [1, 0], atol=1e-12)
    np.testing.assert_allclose(found[7], found[0], atol=1e-12)
    np.testing.assert_allclose(np.hypot(*found.T), 1)


# --- network and loss ---


def test_shapes_units_and_gradients():
    windows = Windows([entry(history())], LAYOUT)
    made = module("probhard-or", windows=windows)
    window = windows.at(windows.origins[:5])
    law = made.network(window)
    assert law.batch_shape == (5, 9)
    assert law.event_shape == (7,)
    assert law.loc.dtype == torch.float32
    context = window.target[:, 4:10].abs().mean(1)  # data units: the spread of an untrained network is a tenth of this
    np.testing.assert_allclose((law.variance.detach().sqrt() / context[:, None]).mean(), 0.1, rtol=0.2)
    made.train()
    made.loss(window).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in made.parameters())


def test_a_step_sees_only_the_past():
    windows = Windows([entry(history())], LAYOUT)
    network = module(windows=windows).network
    window = windows.at(windows.origins[:2])
    target = window.target.clone().requires_grad_()
    law = network(Window(target, window.features))
    for step in (6, 7, 8):  # of the horizon
        (gradient,) = torch.autograd.grad(law.loc[:, step].sum(), target, retain_graph=True)
        assert bool((gradient[:, 4 + step :] == 0).all())
        assert bool((gradient[:, 4 + step - 1] != 0).any())


@pytest.mark.parametrize("family", [ph.NORMAL, ph.student_t(5.0)], ids=["normal", "student-t"])
def test_loss_is_the_masked_pooled_score(family):
    y = history()
    y[2, 20:40:3] = np.nan
    windows = Windows([entry(y)], LAYOUT)
    made = module(network=DeepVAR(LAYOUT, 7, hidden_size=5, family=family), windows=windows)
    window = windows.at(windows.origins[5:25])
    law = made.network(window)
    loc, scale, target = (x.detach().double().numpy() for x in (law.loc, law.marginals.scale, window.target[:, 4:]))
    crps = scoringrules.crps_normal if family == ph.NORMAL else lambda y, m, s: scoringrules.crps_t(y, 5.0, m, s)
    observed = ~np.isnan(target)
    assert (~observed).sum() > 0
    expected = crps(target[observed], loc[observed], scale[observed]).sum()
    typical = np.nanmean(np.abs(y), 1).sum()
    np.testing.assert_allclose(made.loss(window).item(), expected / typical / (20 * 9), rtol=1e-5)


def test_what_is_not_observed_does_not_leak():
    y, hidden = history(), np.zeros((7, 60), dtype=bool)
    hidden[1, 30:50], hidden[4, -1] = True, True
    results = []
    for value in (0.0, 1e6, np.nan):
        changed = np.where(hidden, value, y)
        data = [entry(changed, observed_values=~hidden)]
        windows = Windows(data, LAYOUT)
        made = module("probhard-ob", windows=windows)
        torch.manual_seed(0)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        paths = made(Series.of(data[0], LAYOUT, 3).last(LAYOUT), 4, torch.Generator().manual_seed(0))
        results.append((made.loss(windows.at(windows.origins)).item(), paths))
    assert np.isfinite(results[0][0])
    for loss, paths in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(paths, results[0][1])


def test_series_without_a_scale_in_the_context():
    y = history()
    y[6, :30] = 0  # nothing until half time
    y[5] = 0
    windows = Windows([entry(y)], LAYOUT)
    made = module(windows=windows)
    _, (_, scale) = made.network.scaled(windows.at(windows.origins[:1]).target)
    np.testing.assert_allclose(scale[0, 0, 6], np.abs(y[6]).mean(), rtol=1e-6)
    assert bool((scale > 0).all())
    assert np.isfinite(made.loss(windows.at(windows.origins)).item())


@pytest.mark.parametrize(("scaling", "centre"), [("mean", 0.0), ("centre", 1.0)])
def test_units_of_an_untrained_network(scaling, centre):
    y = history()
    windows = Windows([entry(y)], LAYOUT)
    network = DeepVAR(LAYOUT, 7, hidden_size=5, scaling=scaling)
    torch.nn.init.zeros_(network.head.weight)
    law = network(windows.at(windows.origins[:1]))
    mean = torch.as_tensor(y.T[4:10].mean(0), dtype=torch.float32)
    torch.testing.assert_close(law.loc[0], centre * mean.expand(9, 7), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(law.marginals.scale[0], 0.101 * mean.expand(9, 7), rtol=1e-5, atol=0.0)


def test_low_rank_covariance_in_data_units():
    windows = Windows([entry(history())], LAYOUT)
    network = module(network=DeepVAR(LAYOUT, 7, hidden_size=5, rank=2), windows=windows).network.double()
    window = Window(*(x.double() for x in windows.at(windows.origins[:2])))
    values, units = network.scaled(window.target)
    hidden, _ = network.recur(network.inputs(values, window.features, units))
    raw = network.head(hidden)
    spread = torch.log1p(torch.exp(raw[..., 7:14]) * np.expm1(0.1)) + 1e-3
    factor = 0.1 * raw[..., 14:].reshape(2, 9, 7, 2)
    dense = factor @ factor.mT + torch.diag_embed(spread**2)
    expected = units.scale[..., None] * dense * units.scale[..., None, :]
    torch.testing.assert_close(network(window).cov.dense(), expected, rtol=1e-9, atol=0.0)


def test_penalty_is_homogeneous():
    """Score and penalty grow alike with the unit of measurement, so that the loss does not depend on it."""
    losses = []
    for unit in (1.0, 1024.0):
        windows = Windows([entry(unit * history())], LAYOUT)
        torch.manual_seed(3)
        made = module("softc", windows=windows)
        window = windows.at(windows.origins)
        losses.append(made.loss(window).item())
    plain = module("base", made.network).loss(window).item()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[1] > 1.01 * plain


# --- rollout ---


@pytest.mark.parametrize("scaling", ["mean", "centre", "none"])
def test_rollout_is_the_plain_loop(scaling):
    """Each step by running the whole window again with the draws so far, and one dense projection."""
    y = history(40)
    network = DeepVAR(LAYOUT, 7, hidden_size=5, scaling=scaling).double()
    made = module("probhard-or", network, Windows([entry(y)], LAYOUT))
    window = Window(*(x.double() for x in Series.of(entry(y), LAYOUT, 3).last(LAYOUT)))
    paths = made(window, 4, torch.Generator().manual_seed(5))
    rows = np.hstack([np.eye(3), -S[:3]])
    projector = torch.as_tensor(np.eye(7) - rows.T @ np.linalg.solve(rows @ rows.T, rows))
    filled, generator = window.target.repeat(4, 1, 1), torch.Generator().manual_seed(5)
    for step in range(3):
        law = network(Window(filled, window.features.expand(4, -1, -1)))
        noise = torch.randn(4, 7, generator=generator)
        draw = law.loc[:, 6 + step] + law.variance[:, 6 + step].sqrt() * noise
        filled[:, 10 + step] = draw @ projector
    torch.testing.assert_close(paths, filled[:, 10:], rtol=1e-10, atol=1e-8)


def test_rollout_in_chunks(monkeypatch):
    y = history(40)
    made = module("probhard-or", windows=Windows([entry(y)], LAYOUT))
    window = Series.of(entry(y), LAYOUT, 3).last(LAYOUT)
    monkeypatch.setattr("probhard.forecasting.models.training.ENTRIES", 7 * 8)
    paths = made(window, 20, torch.Generator().manual_seed(0))
    assert paths.shape == (20, 3, 7)
    assert paths.dtype == torch.float64
    assert len({float(x) for x in paths[:, 0, 0]}) == 20  # no chunk repeats another


# --- estimator and predictor ---


@pytest.mark.parametrize("name", sorted(ph.METHODS))
def test_every_method_trains_and_keeps_its_promise(name):
    y = history()
    forecasts = list(estimator(method=name).train([entry(y)]).predict([entry(y)]))
    samples = torch.as_tensor(forecasts[0].samples)
    assert samples.shape == (20, 3, 7)
    assert bool(samples.isfinite().all())
    assert forecasts[0].start_date == START + 60
    assert forecasts[0].item_id == "all"
    incoherence = float(ph.Hierarchy(S).relative_violation(samples).max())
    if name in PROJECTED:
        assert incoherence < 1e-9
    else:
        assert incoherence > 1e-6


@pytest.mark.parametrize("method", ["probhard-or", "probhard-ob"])
def test_no_path_is_negative(method, monkeypatch):
    monkeypatch.setattr("probhard.forecasting.models.network.FIRST_SPREAD", 1.0)  # as wide as the series are high
    y = history()
    plain = forecast(estimator(method=method).train([entry(y)]), y, 200)
    bounded = forecast(estimator(method=method, constraint=ph.NonNegative()).train([entry(y)]), y, 200)
    assert plain.min() < 0  # so that there was something to do
    assert bounded.min() >= 0
    assert float(ph.Hierarchy(S).relative_violation(torch.as_tensor(bounded)).max()) < 1e-9


@pytest.mark.parametrize("options", [{"rank": 2}, {"family": ph.student_t(4.0)}], ids=["low-rank", "student-t"])
def test_other_laws(options):
    y = history()
    predictor = estimator(method="probhard-ob", **options).train([entry(y)])
    samples = torch.as_tensor(forecast(predictor, y))
    assert float(ph.Hierarchy(S).relative_violation(samples).max()) < 1e-9
    law = predictor.network.network(Series.of(entry(y), LAYOUT, 3).last(LAYOUT))
    assert law.family == options.get("family", ph.NORMAL)
    assert isinstance(law.cov, ph.LowRank if "rank" in options else ph.Diagonal)


@pytest.mark.parametrize("method", ["probhard-or", "softc"])
def test_forecasts_scale_with_the_data(method):
    y = history()
    plain = forecast(estimator(method=method).train([entry(y)]), y)
    large = forecast(estimator(method=method).train([entry(1024 * y)]), 1024 * y)
    np.testing.assert_allclose(large, 1024 * plain, rtol=1e-4, atol=1e-4 * 1024 * np.abs(plain).max())


def test_dynamic_features():
    y, noise = history(), np.random.default_rng(0)
    known = noise.integers(0, 2, (1, 63)).astype(float)
    y = y * (1 + 0.5 * known[:, :60])
    train = [entry(y, feat_dynamic_real=known[:, :60])]
    predictor = estimator(
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
    trained = estimator(**settings).train([entry(y[:, :114])], validation_data=[entry(y[:, :117])])
    samples = torch.as_tensor(forecast(trained, y[:, :117], 200))
    truth = torch.as_tensor(y.T[117:])
    crps = float(ph.weighted_quantile_loss(samples, truth))
    naive = float((truth - torch.as_tensor(y.T[105:108])).abs().sum() / truth.abs().sum())
    assert crps < naive


def test_seeds():
    y = history()
    state = torch.random.get_rng_state()
    made = estimator(seed=3)
    first, again = (forecast(made.train([entry(y)]), y) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's numbers change
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - forecast(estimator(seed=4).train([entry(y)]), y)).max() > 0


def test_callbacks_stay_and_no_file_is_left(tmp_path, monkeypatch):
    class Count(Callback):
        epochs = 0

        def on_train_epoch_end(self, *_):
            self.epochs += 1

    monkeypatch.chdir(tmp_path)
    count = Count()
    trainer = {"max_epochs": 2, "callbacks": [count], "enable_progress_bar": False, "accelerator": "cpu"}
    made = estimator(trainer_kwargs=trainer)
    made.train([entry(history())])
    made.train([entry(history())])
    assert count.epochs == 4
    assert not list(tmp_path.iterdir())


def test_training_goes_on_from_a_predictor():
    y = history()
    made = estimator()
    first = made.train([entry(y)])
    second = made.train_from(first, [entry(y)])
    windows = Windows([entry(y)], LAYOUT)
    window = windows.at(windows.origins)
    assert second.network.loss(window) < first.network.loss(window)


def test_gluonts_evaluator_accepts_the_forecasts():
    y = history()
    predictor = estimator().train([entry(y[:, :-3])])
    forecasts, series = make_evaluation_predictions([entry(y)], predictor, num_samples=50)
    forecasts, series = list(forecasts), list(series)
    levels = np.arange(1, 20) / 20
    overall, _ = MultivariateEvaluator(quantiles=levels)(series, forecasts)
    expected = ph.weighted_quantile_loss(torch.as_tensor(forecasts[0].samples), torch.as_tensor(y.T[-3:]))
    assert overall["mean_wQuantileLoss"] == pytest.approx(float(expected), rel=1e-9)


def test_saved_predictors_are_the_same_and_plain(tmp_path):
    y = history()
    names = list("TABabcd")
    hierarchy = ph.Hierarchy(S, names=names, tags={"all": names}, immutable=["T"])
    made = estimator(
        hierarchy=hierarchy,
        constraint=ph.Box(0.0, 1e4),
        method="probhard-ob",
        family=ph.student_t(6.0),
        rank=1,
        seed=8,
        num_parallel_samples=7,
    )
    predictor = made.train([entry(y)])
    predictor.serialize(tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert files == {"gluonts-config.json", "deepvar.json", "constraint.npz", "weights.pt"}
    expected = next(iter(predictor.predict([entry(y)]))).samples
    for load in (DeepVARPredictor.deserialize, Predictor.deserialize):
        loaded = load(tmp_path / "saved")
        found = next(iter(loaded.predict([entry(y)]))).samples
        np.testing.assert_array_equal(found, expected)
    stored = loaded.network.constraint.linear_part()
    assert stored.names == tuple(names)
    assert stored.tags == hierarchy.tags


def test_what_cannot_be_saved_must_be_passed(tmp_path):
    y = history()
    curved = ph.Ball(1e5)
    predictor = estimator(constraint=curved).train([entry(y)])
    predictor.serialize(tmp_path)
    with pytest.raises(ph.ParameterError, match="constraint of this predictor was not saved"):
        DeepVARPredictor.deserialize(tmp_path)
    loaded = DeepVARPredictor.deserialize(tmp_path, constraint=ph.Hierarchy(S) & curved)
    np.testing.assert_array_equal(forecast(loaded, y), forecast(predictor, y))
    (Path(tmp_path) / "deepvar.json").write_text("{}")
    with pytest.raises(ph.ParameterError, match="does not hold probhard-deepvar"):
        DeepVARPredictor.deserialize(tmp_path)


def test_rows_are_stored():
    rows = ph.Hierarchy(S).fix([0], [12.0]) & ph.NonNegative()
    record, arrays = constraint_record(rows)
    again = constraint_from_record(record, arrays)
    z = torch.randn(3, 7)
    layer = ph.DPPL("orthogonal")
    torch.testing.assert_close(layer.project(z, again).value, layer.project(z, rows).value)
    with pytest.raises(ph.ParameterError, match="cannot be read"):
        constraint_from_record([{"kind": "box"}], {})


def test_base_needs_no_hierarchy():
    y = history()
    samples = forecast(estimator(hierarchy=None, method="base").train([entry(y)]), y)
    assert samples.shape == (20, 3, 7)


# --- errors ---


def _trained_on(target, **more):
    return lambda: estimator().train([entry(target, **more)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: estimator(hierarchy=None), "neither a hierarchy nor a constraint"),
        (lambda: estimator(prediction_length=0), "prediction_length=0"),
        (lambda: estimator(lags_seq=[0, 1]), r"lags_seq=\[0, 1\]"),
        (lambda: estimator(freq="fortnight"), "freq='fortnight'"),
        (lambda: estimator(time_features=["moon"]), "'moon'"),
        (lambda: estimator(method="magic"), "'magic'"),
        (lambda: estimator(scaling="log").train([entry(history())]), "'log'"),
        (_trained_on(history()[0]), "target has shape"),
        (_trained_on(history()[:5]), "data have 5 series, the constraint 7"),
        (_trained_on(history(3)), "longest entry has 3 rows"),
        (_trained_on(np.full((7, 60), np.nan)), "All targets are NaN"),
        (_trained_on(np.full((7, 60), np.inf)), "420 infinite"),
        (_trained_on(history(), start=pd.Period("2020-01-01", freq="D")), "frequency 'D'"),
        (lambda: estimator().train([]), "no entry"),
        (lambda: estimator().train([entry(history()), entry(history()[:5])]), r"\[5, 7\] series"),
    ],
)
def test_errors_have_three_parts(call, words):
    with pytest.raises(ph.ProbhardError, match=words) as caught:
        call()
    assert caught.value.why
    assert caught.value.fix


def test_another_hierarchy_at_prediction():
    predictor = DeepVARPredictor(module())
    with pytest.raises(ph.ShapeError, match="An entry has 5 series, the network 7"):
        forecast(predictor, history()[:5])


def test_batches_of_the_model_keep_their_mask():
    """The module hands ConstrainedModel the mask that NaN implies."""
    y = history()
    y[0, 30] = np.nan
    windows = Windows([entry(y)], LAYOUT)
    made = module("probhard-or", windows=windows)
    window = windows.at(windows.origins[20:30])
    target = window.target[:, 4:]
    by_hand = made.model.loss(Batch(window, target.nan_to_num(7.0), ~target.isnan()))
    torch.testing.assert_close(made.loss(window) * made.network.typical.sum() * 90, by_hand)
