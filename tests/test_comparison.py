"""``compare``: rows recomputed by hand, methods that do not apply, points, seeds, masks, pictures and bad data."""

from __future__ import annotations

import math

import matplotlib.image
import numpy as np
import pytest
import scoringrules
import torch
from torch import nn

import probhard as ph
from bad_input import rejected
from probhard.comparison import measured
from probhard.model import Batch
from probhard.training import Schedule
from small_model import DOUBLE, Backbone, S, data

SHORT = Schedule(epochs=2, batch_size=12)
X, Y = data(40)


def quick(methods, constraint=None, factory=Backbone, **options) -> ph.Comparison:
    constraint = ph.Hierarchy(S) if constraint is None else constraint
    options = {"schedule": SHORT, "progress": False, **options}
    return ph.compare(factory, constraint, options.pop("data", (X, Y)), methods, **options)


def test_figures_are_those_of_the_model():
    one = ph.ConstrainedModel(Backbone(), ph.Hierarchy(S), "probhard-ob").eval()
    row = measured(one, Batch(X, Y), 50, seed=3)
    draws = one.sample(X, 50, torch.Generator().manual_seed(3)).numpy()
    y = Y.numpy()
    mean = one.forecast(X).mean.detach().numpy()
    assert row.mse == pytest.approx(np.square(mean - y).mean(), rel=1e-10)
    crps = scoringrules.crps_ensemble(y, draws, m_axis=0, estimator="fair").mean()
    assert row.crps == pytest.approx(float(crps), rel=1e-9)
    energy = scoringrules.es_ensemble(y, np.moveaxis(draws, 0, 1), estimator="nrg").mean()
    fair = scoringrules.es_ensemble(y, np.moveaxis(draws, 0, 1), estimator="fair").mean()
    assert min(abs(row.energy_score - float(value)) for value in (energy, fair)) < 1e-9
    assert row.violation_draws == pytest.approx(float(ph.Hierarchy(S).violation(torch.from_numpy(draws)).max()))
    assert row.feasible
    assert row.violating == 0


def test_every_method_is_a_row_and_each_tells_the_truth(tmp_path):
    result = quick(None, plot=tmp_path / "picture.png")
    assert [row.method for row in result.rows] == list(ph.METHODS)
    assert not result.skipped
    assert {row.method for row in result.rows if not row.feasible} == {"base", "softc", "hardc", "hardnet++"}
    for row in result.rows:
        assert row.epochs == 2
        assert row.train_seconds > 0
        assert (row.violation_draws < 1e-10) is (row.feasible)
        assert all(math.isfinite(getattr(row, name)) for name in ("mse", "crps", "energy_score"))
    frame = result.frame
    assert list(frame.method) == list(ph.METHODS)
    assert matplotlib.image.imread(tmp_path / "picture.png").std() > 0
    assert all(name in str(result) for name in ph.METHODS)
    text = result.to_csv(tmp_path / "rows.csv").read_text().splitlines()
    assert len(text) == 1 + len(ph.METHODS)


def test_methods_that_do_not_apply_are_rows_with_a_reason():
    result = quick(["probhard-or", "hardnet-aff", "probconserv"], ph.Ball(9.0))
    assert set(result.skipped) == {"hardnet-aff", "probconserv"}
    assert all(reason.startswith("does not apply: ") for reason in result.skipped.values())
    assert [row.method for row in result.measured] == ["probhard-or"]
    assert "linear rows and bounds" in str(result)


def test_probconserv_is_not_called_feasible_where_it_only_knows_the_linear_part():
    rows = {row.method: row for row in quick(["probconserv", "probhard-ob"], ph.Hierarchy(S) & ph.NonNegative()).rows}
    assert rows["probhard-ob"].feasible
    assert not rows["probconserv"].feasible
    assert rows["probconserv"].violating > 0


def test_rows_of_one_seed_start_alike_and_repeat():
    first, second = (quick(["base", "softc"], seeds=(1, 2)) for _ in range(2))
    assert [row.seed for row in first.rows] == [1, 2, 1, 2]
    assert [row.crps for row in first.rows] == [row.crps for row in second.rows]
    assert len(first.means()) == 2
    both = [row.crps for row in first.rows if row.method == "base"]
    assert first.means()[0].crps == pytest.approx(sum(both) / 2)
    made = []

    def factory() -> nn.Module:
        made.append(nn.Linear(3, 7).to(DOUBLE))
        return made[-1]

    quick(["base", "probhard-or"], factory=factory, schedule=Schedule(epochs=1, lr=1e-12, weight_decay=0))
    torch.testing.assert_close(made[0].weight, made[1].weight)


def test_points_have_no_draws_and_oblique_methods_do_not_apply():
    def factory() -> nn.Module:
        return nn.Linear(3, 7).to(DOUBLE)

    result = quick(["probhard-or", "probhard-ob", "dc3"], factory=factory)
    assert set(result.skipped) == {"probhard-ob"}
    for row in result.measured:
        assert math.isnan(row.violation_draws)
        assert row.violation_mean < 1e-10
        assert not row.feasible


def test_own_methods_named_parts_and_masks():
    mask = torch.rand(Y.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    holes = torch.where(mask, Y, torch.nan)
    parts = {"train": (X[:20], Y[:20]), "validation": (X[20:30], Y[20:30]), "test": (X[30:], holes[30:], mask[30:])}
    own = {"mine": ph.METHODS["probhard-ob"].replace(score="nll"), "theirs": "base"}
    result = quick(own, data=parts)
    assert [row.method for row in result.rows] == ["mine", "theirs"]
    assert all(math.isfinite(row.mse) for row in result.rows)


def test_bad_requests_are_refused():
    rejected(lambda: quick(["probhard"]), ph.ParameterError, ["probhard"])
    rejected(lambda: quick(["base"], data={"train": (X, Y)}), ph.ParameterError, ["train"])
    rejected(lambda: quick(["base"], data=X), ph.ParameterError, ["targets"])
    rejected(lambda: quick(["base"], data=(X[:2], Y[:2])), ph.ShapeError, ["2 samples"])
