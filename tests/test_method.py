"""Methods: what each does in training and at inference, and records of methods."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scoringrules
import torch

from probhard import (
    DPPL,
    METHODS,
    ConstrainedModel,
    DiagonalMetric,
    Hierarchy,
    LinearEquality,
    LocationScale,
    Method,
    ParameterError,
    Projected,
    Step,
    constraint_error,
)
from small_model import (
    DOUBLE,
    ROWS,
    SIZE,
    Backbone,
    N,
    S,
    data,
    dense_projection,
    model,
    normal_crps,
    predicted,
)

# ----------------------------------------------------------------------------------------------- the table

CORRECTED = ("hardnet-aff", "hardnet++", "dc3", "completion")


def test_the_table_holds_the_methods_of_the_paper():
    assert set(METHODS) == {
        "base",
        "probhard-ob",
        "probhard-or",
        "hardc",
        "probconserv",
        "probhard-inf",
        "softc",
        "hier-e2e",
        *CORRECTED,
    }
    assert {name for name, method in METHODS.items() if method.training.draws} == {"hier-e2e"}
    assert METHODS["hier-e2e"].training.draws == 100
    assert {name for name, method in METHODS.items() if method.penalty} == {"softc", "dc3"}
    assert {name for name, method in METHODS.items() if method.training.correction} == set(CORRECTED)
    assert {name for name, method in METHODS.items() if method.inference.linear_only} == {"probconserv"}


@pytest.mark.parametrize("name", ["base", "probconserv", "probhard-inf"])
def test_methods_that_train_without_the_constraint(name):
    x, y = data()
    mean, stddev = predicted(x)
    assert model(name).loss((x, y)).item() == pytest.approx(normal_crps(y, mean, stddev), rel=1e-10)


@pytest.mark.parametrize(("name", "oblique"), [("probhard-ob", True), ("probhard-or", False)])
def test_methods_that_train_through_the_projection(name, oblique):
    x, y = data()
    mean, stddev = predicted(x)
    mean, variance = dense_projection(mean, stddev**2, oblique)
    assert model(name).loss((x, y)).item() == pytest.approx(normal_crps(y, mean, variance**0.5), rel=1e-10)


def test_hardc_trains_on_the_projected_mean_and_the_raw_variance():
    x, y = data()
    mean, stddev = predicted(x)
    projected, _ = dense_projection(mean, stddev**2, oblique=False)
    assert model("hardc").loss((x, y)).item() == pytest.approx(normal_crps(y, projected, stddev), rel=1e-10)


@pytest.mark.parametrize("penalty", [0.1, 1.0, 10.0])
def test_softc_adds_the_squared_residuals_of_the_mean(penalty):
    x, y = data()
    mean, stddev = predicted(x)
    residual = mean @ ROWS.T
    expected = normal_crps(y, mean, stddev) + penalty * float((residual**2).sum())
    method = METHODS["softc"].replace(penalty=penalty)
    assert model(method).loss((x, y)).item() == pytest.approx(expected, rel=1e-10)
    assert METHODS["softc"].penalty == 1.0


@pytest.mark.parametrize("name", [name for name in METHODS if name not in CORRECTED])
def test_forecasts_are_what_the_table_says(name):
    x, _ = data()
    mean, stddev = predicted(x)
    forecast = model(name).forecast(x)
    if name in ("base", "softc", "hardc"):
        assert isinstance(forecast, LocationScale)
        assert not isinstance(forecast, Projected)
        assert forecast.feasible is False
    else:
        assert isinstance(forecast, Projected)
        assert forecast.feasible is True
    if name in ("probhard-ob", "probconserv", "probhard-inf"):
        mean, variance = dense_projection(mean, stddev**2, oblique=True)
    elif name in ("probhard-or", "hier-e2e"):
        mean, variance = dense_projection(mean, stddev**2, oblique=False)
    elif name == "hardc":
        (mean, _), variance = dense_projection(mean, stddev**2, oblique=False), stddev**2
    else:
        variance = stddev**2
    np.testing.assert_allclose(forecast.mean.detach(), mean, rtol=0, atol=1e-11)
    np.testing.assert_allclose(forecast.variance.detach(), variance, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_forecasts_are_what_the_table_says(name):
    x, _ = data()
    mean, stddev = predicted(x)
    forecast = model(name).forecast(x)
    assert isinstance(forecast, Projected)
    assert forecast.feasible is (name != "hardnet++")
    if name in ("hardnet-aff", "hardnet++"):  # on equalities alone, the orthogonal projection, exact or nearly so
        mean, variance = dense_projection(mean, stddev**2, oblique=False)
    else:  # the bottom series are the free variables of no choice but a pivoted one: read it from the forecast
        moved = np.abs(forecast.mean.detach().numpy() - mean).max(0)
        free, solved = np.flatnonzero(moved == 0), np.flatnonzero(moved > 0)
        assert len(solved) == 3
        T = np.eye(N)[:, free] @ np.eye(N)[free]
        T[np.ix_(solved, free)] = -np.linalg.solve(ROWS[:, solved], ROWS[:, free])
        mean, variance = mean @ T.T, stddev**2 @ np.square(T).T
    if name == "hardnet++":  # its moments are those of fixed draws
        np.testing.assert_allclose(forecast.mean.detach(), mean, rtol=0, atol=0.1)
        np.testing.assert_allclose(forecast.variance.detach(), variance, rtol=0.7)
        return
    np.testing.assert_allclose(forecast.mean.detach(), mean, rtol=0, atol=1e-11)
    np.testing.assert_allclose(forecast.variance.detach(), variance, rtol=0, atol=1e-11)


@pytest.mark.parametrize("penalty_form", ["squares", "norms"])
def test_the_penalty_has_two_forms(penalty_form):
    x, y = data()
    mean, stddev = predicted(x)
    residual = mean @ ROWS.T
    total = np.square(residual).sum() if penalty_form == "squares" else np.linalg.norm(residual, axis=1).sum()
    method = METHODS["base"].replace(penalty=5.0, penalty_form=penalty_form)
    expected = normal_crps(y, mean, stddev) + 5 * total
    assert model(method).loss((x, y)).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", METHODS)
def test_draws_are_feasible_exactly_when_promised(name):
    x, _ = data()
    one = model(name)
    draws = one.sample(x, 50, torch.Generator().manual_seed(2))
    assert draws.shape == (50, SIZE, N)
    assert not draws.requires_grad
    assert torch.equal(draws, one.sample(x, 50, torch.Generator().manual_seed(2)))
    violation = Hierarchy(S).violation(draws)
    if name in ("base", "softc", "hardc"):
        assert violation.min() > 1e-6
    else:
        assert violation.max() < (1e-7 if name == "hardnet++" else 1e-12)
    of_mean = constraint_error(Hierarchy(S), one.forecast(x)).largest
    assert (of_mean > 1e-3) if name in ("base", "softc") else (of_mean < (1e-7 if name == "hardnet++" else 1e-12))


def test_probconserv_uses_the_weights_of_base():
    """Training alike and inference oblique: the same weights, projected afterwards."""
    x, y = data()
    base, conserved = model("base"), model("probconserv")
    for one in (base, conserved):
        optimizer = torch.optim.SGD(one.parameters(), lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            one.loss((x, y)).backward()
            optimizer.step()
    for first, second in zip(base.parameters(), conserved.parameters()):
        assert torch.equal(first, second)
    expected = DPPL("oblique")(base.forecast(x), Hierarchy(S))
    assert torch.equal(conserved.forecast(x).mean, expected.mean)
    assert torch.equal(conserved.forecast(x).variance, expected.variance)


def test_linear_only_asks_the_constraint_for_its_linear_part():
    class Curved(Hierarchy):
        def linear_part(self):
            asked.append(True)
            return LinearEquality(torch.from_numpy(ROWS)[:1])

    asked: list[bool] = []
    x, _ = data()
    forecast = ConstrainedModel(Backbone(), Curved(S), "probconserv").forecast(x)
    assert asked == [True]
    assert forecast.constraint.row_count == 1
    asked.clear()
    assert ConstrainedModel(Backbone(), Curved(S), "probhard-inf").forecast(x).constraint.row_count == 3
    assert asked == []


def test_hier_e2e_scores_quantiles_of_projected_draws():
    x, y = data()
    one = model("hier-e2e")
    torch.manual_seed(5)
    loss = one.loss((x, y)).item()
    torch.manual_seed(5)
    mean, stddev = predicted(x)
    raw = mean + stddev * torch.randn(100, SIZE, N, dtype=DOUBLE).numpy()
    P = np.eye(N) - np.linalg.pinv(ROWS) @ ROWS
    draws = np.sort(raw @ P.T, axis=0)
    expected = 0.0
    for level in np.arange(1, 20) / 20:
        quantile = draws[round(99 * level)]
        expected += (2 * np.abs((quantile - y.numpy()) * ((y.numpy() <= quantile) - level))).sum() / 19
    assert loss == pytest.approx(expected, rel=1e-10)


def test_hier_e2e_trains():
    x, y = data()
    one = model("hier-e2e")
    torch.manual_seed(6)
    optimizer = torch.optim.Adam(one.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = one.loss((x, y))
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in one.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_draws_may_be_scored_by_the_ensemble_crps():
    x, y = data()
    method = Method(Step("oblique", draws=40), Step("oblique"), score="crps")
    torch.manual_seed(7)
    loss = model(method).loss((x, y)).item()
    torch.manual_seed(7)
    forecast = model("probhard-ob").forecast(x)
    draws = forecast.rsample((40,)).detach().numpy()
    expected = scoringrules.crps_ensemble(y.numpy(), draws, m_axis=0, estimator="fair").sum()
    assert loss == pytest.approx(float(expected), rel=1e-10)


# ------------------------------------------------------------------------------------------ methods as records


def test_replace_changes_a_copy():
    base = METHODS["base"]
    other = base.replace(score="nll", inference=Step("orthogonal"))
    assert (other.score, other.inference.metric, other.training) == ("nll", "orthogonal", base.training)
    assert (base.score, base.inference.metric) == ("crps", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.score = "nll"
    with pytest.raises(ParameterError):
        base.replace(score="quantile")


@pytest.mark.parametrize("name", METHODS)
def test_a_record_holds_plain_values_and_gives_the_method_back(name):
    record = METHODS[name].record()
    assert Method.from_record(record) == METHODS[name]

    def plain(value):
        if isinstance(value, dict):
            return all(plain(v) for v in value.values())
        return value is None or type(value) in (str, int, float, bool)

    assert plain(record)


def test_a_method_with_a_metric_module_has_no_record():
    metric = DiagonalMetric(torch.ones(N, dtype=DOUBLE))
    assert Method(Step(metric)).record() is None
    assert Method(inference=Step(metric)).record() is None
