"""DeepVAR's network, loss and rollout against plain recomputations."""

from __future__ import annotations

import numpy as np
import pytest
import scoringrules
import torch

import probhard as ph
from forecasting.helpers import LAYOUT, TWO_GROUPS, entry, history, untrained
from probhard.forecasting.models.network import DeepVAR
from probhard.forecasting.models.windows import Series, Window, Windows
from probhard.model import Batch


def test_shapes_units_and_gradients():
    windows = Windows([entry(history())], LAYOUT)
    module = untrained("probhard-or", windows=windows)
    window = windows.at(windows.origins[:5])
    law = module.network(window)
    assert law.batch_shape == (5, 9)
    assert law.event_shape == (7,)
    assert law.loc.dtype == torch.float32
    context = window.target[:, 4:10].abs().mean(1)  # data units: the spread of an untrained network is a tenth of this
    np.testing.assert_allclose((law.variance.detach().sqrt() / context[:, None]).mean(), 0.1, rtol=0.2)
    module.train()
    module.loss(window).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())


def test_a_step_sees_only_the_past():
    windows = Windows([entry(history())], LAYOUT)
    network = untrained(windows=windows).network
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
    module = untrained(network=DeepVAR(LAYOUT, 7, hidden_size=5, family=family), windows=windows)
    window = windows.at(windows.origins[5:25])
    law = module.network(window)
    loc, scale, target = (x.detach().double().numpy() for x in (law.loc, law.marginals.scale, window.target[:, 4:]))
    crps = scoringrules.crps_normal if family == ph.NORMAL else lambda y, m, s: scoringrules.crps_t(y, 5.0, m, s)
    observed = ~np.isnan(target)
    assert (~observed).sum() > 0
    expected = crps(target[observed], loc[observed], scale[observed]).sum()
    typical = np.nanmean(np.abs(y), 1).sum()
    np.testing.assert_allclose(module.loss(window).item(), expected / typical / (20 * 9), rtol=1e-5)


def test_what_is_not_observed_does_not_leak():
    y, hidden = history(), np.zeros((7, 60), dtype=bool)
    hidden[1, 30:50], hidden[4, -1] = True, True
    results = []
    for value in (0.0, 1e6, np.nan):
        changed = np.where(hidden, value, y)
        data = [entry(changed, observed_values=~hidden)]
        windows = Windows(data, LAYOUT)
        module = untrained("probhard-ob", windows=windows)
        torch.manual_seed(0)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        paths = module(Series.of(data[0], LAYOUT, 3).last(LAYOUT), 4, torch.Generator().manual_seed(0))
        results.append((module.loss(windows.at(windows.origins)).item(), paths))
    assert np.isfinite(results[0][0])
    for loss, paths in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(paths, results[0][1])


def test_series_without_a_scale_in_the_context():
    y = history()
    y[6, :30] = 0  # zero in the first half
    y[5] = 0
    windows = Windows([entry(y)], LAYOUT)
    module = untrained(windows=windows)
    _, (_, scale) = module.network.scaled(windows.at(windows.origins[:1]).target)
    np.testing.assert_allclose(scale[0, 0, 6], np.abs(y[6]).mean(), rtol=1e-6)
    assert bool((scale > 0).all())
    assert np.isfinite(module.loss(windows.at(windows.origins)).item())


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
    network = untrained(network=DeepVAR(LAYOUT, 7, hidden_size=5, rank=2), windows=windows).network.double()
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
    """Score and penalty scale alike with the unit, so that the loss does not depend on it."""
    losses = []
    for unit in (1.0, 1024.0):
        windows = Windows([entry(unit * history())], LAYOUT)
        torch.manual_seed(3)
        module = untrained("softc", windows=windows)
        window = windows.at(windows.origins)
        losses.append(module.loss(window).item())
    plain = untrained("base", module.network).loss(window).item()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[1] > 1.01 * plain


def test_batches_of_the_model_keep_their_mask():
    """The module passes the mask of missing values to ConstrainedModel."""
    y = history()
    y[0, 30] = np.nan
    windows = Windows([entry(y)], LAYOUT)
    module = untrained("probhard-or", windows=windows)
    window = windows.at(windows.origins[20:30])
    target = window.target[:, 4:]
    by_hand = module.model.loss(Batch(window, target.nan_to_num(7.0), ~target.isnan()))
    torch.testing.assert_close(module.loss(window) * module.network.typical.sum() * 90, by_hand)


@pytest.mark.parametrize("scaling", ["mean", "centre", "none"])
def test_rollout_is_the_plain_loop(scaling):
    """Oracle: every step runs the whole window with the draws so far, and a dense projection."""
    y = history(40)
    network = DeepVAR(LAYOUT, 7, hidden_size=5, scaling=scaling).double()
    module = untrained("probhard-or", network, Windows([entry(y)], LAYOUT))
    window = Window(*(x.double() for x in Series.of(entry(y), LAYOUT, 3).last(LAYOUT)))
    paths = module(window, 4, torch.Generator().manual_seed(5))
    rows = np.hstack([np.eye(3), -TWO_GROUPS[:3]])
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
    module = untrained("probhard-or", windows=Windows([entry(y)], LAYOUT))
    window = Series.of(entry(y), LAYOUT, 3).last(LAYOUT)
    monkeypatch.setattr("probhard.forecasting.models.training.ENTRIES", 7 * 8)
    paths = module(window, 20, torch.Generator().manual_seed(0))
    assert paths.shape == (20, 3, 7)
    assert paths.dtype == torch.float64
    assert len({float(x) for x in paths[:, 0, 0]}) == 20  # no chunk repeats another
