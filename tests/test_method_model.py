"""Named methods as DESIGN's table has them, and models: losses, batches, saving, learned metrics, training."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scoringrules
import torch
from torch import nn

from probhard import (
    DPPL,
    METHODS,
    NORMAL,
    ConstrainedModel,
    DenseMetric,
    Diagonal,
    DiagonalMetric,
    Hierarchy,
    LinearEquality,
    LocationScale,
    LowRankMetric,
    Method,
    ParameterError,
    Projected,
    Step,
    constraint_error,
    crps,
    nll,
)
from probhard.model import Batch

DOUBLE = torch.float64
SUMS = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=DOUBLE)
S = torch.cat([SUMS, torch.eye(4, dtype=DOUBLE)])
N, INPUTS, SIZE = 7, 3, 6
ROWS = torch.cat([torch.eye(3, dtype=DOUBLE), -SUMS], 1).numpy()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


class Backbone(nn.Module):
    """Means and standard deviations of n variables from three inputs."""

    def __init__(self, n: int = N, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, 2 * n)]
            self.layers = nn.Sequential(*layers).to(DOUBLE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, raw = self.layers(x).chunk(2, -1)
        return mean, nn.functional.softplus(raw) + 0.05


def data(size: int = SIZE, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, INPUTS, dtype=DOUBLE, generator=generator)
    bottom = torch.randn(size, 4, dtype=DOUBLE, generator=generator)
    return x, bottom @ S.T


def model(method: str | Method = "probhard-ob", **options) -> ConstrainedModel:
    return ConstrainedModel(Backbone(**options), Hierarchy(S), method)


def predicted(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The untouched means and standard deviations of the backbone."""
    with torch.no_grad():
        mean, stddev = Backbone()(x)
    return mean.numpy(), stddev.numpy()


def dense_projection(mean: np.ndarray, variance: np.ndarray, oblique: bool) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances of the projected law, point by point."""
    means, variances = [], []
    for mu, spread in zip(mean, variance):
        W = np.diag(spread) if oblique else np.eye(N)
        P = np.eye(N) - W @ ROWS.T @ np.linalg.solve(ROWS @ W @ ROWS.T, ROWS)
        means.append(P @ mu)
        variances.append(np.diag(P @ np.diag(spread) @ P.T))
    return np.stack(means), np.stack(variances)


def normal_crps(y: torch.Tensor, mean: np.ndarray, stddev: np.ndarray) -> float:
    return float(scoringrules.crps_normal(y.numpy(), mean, stddev).sum())


# ----------------------------------------------------------------------------------------------- the table


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
    }
    assert {name for name, method in METHODS.items() if method.training.draws} == {"hier-e2e"}
    assert METHODS["hier-e2e"].training.draws == 100
    assert {name for name, method in METHODS.items() if method.penalty} == {"softc"}
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


@pytest.mark.parametrize("name", METHODS)
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
        assert violation.max() < 1e-12
    of_mean = constraint_error(Hierarchy(S), one.forecast(x)).largest
    assert (of_mean > 1e-3) if name in ("base", "softc") else (of_mean < 1e-12)


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
    found = one.loss((x, y)).item()
    torch.manual_seed(5)
    mean, stddev = predicted(x)
    raw = mean + stddev * torch.randn(100, SIZE, N, dtype=DOUBLE).numpy()
    P = np.eye(N) - np.linalg.pinv(ROWS) @ ROWS
    draws = np.sort(raw @ P.T, axis=0)
    expected = 0.0
    for level in np.arange(1, 20) / 20:
        quantile = draws[round(99 * level)]
        expected += (2 * np.abs((quantile - y.numpy()) * ((y.numpy() <= quantile) - level))).sum() / 19
    assert found == pytest.approx(expected, rel=1e-10)


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
    found = model(method).loss((x, y)).item()
    torch.manual_seed(7)
    forecast = model("probhard-ob").forecast(x)
    draws = forecast.rsample((40,)).detach().numpy()
    expected = scoringrules.crps_ensemble(y.numpy(), draws, m_axis=0, estimator="fair").sum()
    assert found == pytest.approx(float(expected), rel=1e-10)


# ------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("name", [name for name in METHODS if name != "hier-e2e"])
@pytest.mark.parametrize("score", ["crps", "nll"])
def test_the_loss_is_a_sum(name, score):
    x, y = data()
    one = model(METHODS[name].replace(score=score))
    twice = one.loss((torch.cat([x, x]), torch.cat([y, y]))).item()
    assert twice == pytest.approx(2 * one.loss((x, y)).item(), rel=1e-12)
    apart = sum(one.loss((x[i : i + 1], y[i : i + 1])).item() for i in range(SIZE))
    assert one.loss((x, y)).item() == pytest.approx(apart, rel=1e-11)


@pytest.mark.parametrize("name", ["base", "probhard-ob", "probhard-or"])
def test_nll_is_that_of_the_marginals(name):
    x, y = data()
    one = model(METHODS[name].replace(score="nll"))
    forecast = model(name).forecast(x)
    law = torch.distributions.Normal(forecast.mean, forecast.stddev)
    assert one.loss((x, y)).item() == pytest.approx(-law.log_prob(y).sum().item(), rel=1e-11)


@pytest.mark.parametrize("name", METHODS)
def test_missing_targets_are_masked(name):
    x, y = data()
    mask = torch.rand(SIZE, N, generator=torch.Generator().manual_seed(8)) > 0.3
    one = model(name)
    holes = torch.where(mask, y, torch.nan)
    torch.manual_seed(9)
    loss = one.loss((x, holes, mask))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in one.parameters())
    torch.manual_seed(9)
    assert loss.item() == one.loss({"inputs": x, "target": torch.where(mask, y, 1e6), "mask": mask}).item()
    if name not in ("hier-e2e", "softc"):
        training = model(Method(inference=METHODS[name].training)).forecast(x)
        assert loss.item() == pytest.approx(crps(training, y)[mask].sum().item(), rel=1e-12)
    torch.manual_seed(9)
    assert loss.item() != one.loss((x, y)).item()


def test_a_masked_batch_still_pays_the_penalty():
    x, y = data()
    nothing = torch.zeros(SIZE, N, dtype=torch.bool)
    mean, _ = predicted(x)
    found = model("softc").loss((x, y * torch.nan, nothing)).item()
    assert found == pytest.approx(float(((mean @ ROWS.T) ** 2).sum()), rel=1e-11)


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_gets_a_gradient(name):
    x, y = data()
    one = model(name)
    one.loss((x, y)).backward()
    for parameter_name, parameter in one.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


def test_the_loss_gradient_is_right():
    x, y = data(2)
    one = model("probhard-ob", width=2)
    names = [name for name, _ in one.named_parameters()]

    def loss(*values):
        return torch.func.functional_call(Loss(one), {f"model.{k}": v for k, v in zip(names, values)}, ((x, y),))

    assert torch.autograd.gradcheck(loss, tuple(p.detach().clone().requires_grad_() for p in one.parameters()))


class Loss(nn.Module):
    def __init__(self, model: ConstrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model.loss(batch)


def test_phases_are_calls_and_not_modes():
    x, y = data()
    one = model()
    one.train()
    first = one.forecast(x).mean, one.loss((x, y))
    one.eval()
    second = one.forecast(x).mean, one.loss((x, y))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


# ------------------------------------------------------------------------------------------------- batches


def test_batches_of_every_kind_say_the_same():
    x, y = data()
    mask = y > -0.5
    one = model()
    plain = one.loss((x, y)).item()
    assert one.loss([x, y]).item() == plain
    assert one.loss({"inputs": x, "target": y}).item() == plain
    assert one.loss({"inputs": x, "target": y, "context": {"unused": 1}}).item() == plain
    assert one.loss(Batch(x, y)).item() == plain
    assert one.loss((x, y, mask)).item() == one.loss({"inputs": x, "target": y, "mask": mask}).item() < plain
    mean = one.forecast(x).mean
    for batch in ((x,), (x, y), {"inputs": x}, {"inputs": x, "target": None}):
        assert torch.equal(one.forecast(batch).mean, mean)


def test_context_reaches_the_constraint_and_inputs_the_backbone():
    x, y = data()
    totals = torch.arange(SIZE, dtype=DOUBLE).unsqueeze(-1)
    seen = []

    def budget(context):
        seen.append(context)
        return Hierarchy(S).fix([0], context)

    one = ConstrainedModel(Backbone(), budget)
    forecast = one.forecast({"inputs": x, "context": totals})
    assert seen[-1] is totals
    assert torch.equal(forecast.mean[:, 0], totals[:, 0])
    assert not forecast.variance[:, 0].any()
    draws = one.sample({"inputs": x, "context": totals}, 5)
    assert torch.equal(draws[..., 0], totals[:, 0].expand(5, -1))
    one.loss({"inputs": x, "target": y, "context": totals}).backward()
    assert seen[-1] is totals
    assert all(p.grad is not None for p in one.parameters())


def test_the_inputs_are_the_context_unless_one_is_given():
    x, y = data()
    seen = []

    def constraint(context):
        seen.append(context)
        return Hierarchy(S)

    one = ConstrainedModel(Backbone(), constraint)
    for batch in (x, (x, y), {"inputs": x}, Batch(x, y)):
        one.forecast(batch)
        assert seen[-1] is x


def test_inputs_may_be_anything_the_backbone_takes():
    class Two(Backbone):
        def forward(self, pair):
            return super().forward(pair["left"] + pair["right"])

    x, y = data()
    halves = {"left": 0.25 * x, "right": 0.75 * x}
    one = ConstrainedModel(Two(), Hierarchy(S))
    assert one.loss({"inputs": halves, "target": y}).item() == pytest.approx(model().loss((x, y)).item(), rel=1e-12)


@pytest.mark.parametrize("form", ["pair", "normal", "student", "location-scale"])
def test_backbones_may_return_any_law(form):
    class Other(Backbone):
        def forward(self, x):
            mean, stddev = super().forward(x)
            return {
                "pair": (mean, stddev),
                "normal": torch.distributions.Normal(mean, stddev),
                "student": torch.distributions.StudentT(5.0, mean, stddev),
                "location-scale": LocationScale(mean, Diagonal.from_stddev(stddev), NORMAL),
            }[form]

    x, y = data()
    one = ConstrainedModel(Other(), Hierarchy(S))
    one.loss((x, y)).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in one.parameters())
    assert Hierarchy(S).violation(one.sample(x, 7)).max() < 1e-12
    if form != "student":
        assert one.loss((x, y)).item() == pytest.approx(model().loss((x, y)).item(), rel=1e-12)


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


# ----------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("name", METHODS)
def test_saved_models_come_back(tmp_path, name):
    x, _ = data()
    one = ConstrainedModel(Backbone(seed=3), Hierarchy(S), METHODS[name].replace(penalty=2.5))
    one.save(tmp_path / "model.pt")
    other = ConstrainedModel.load(tmp_path / "model.pt", Backbone(seed=4), Hierarchy(S))
    assert other.method == one.method
    assert torch.equal(other.forecast(x).mean, one.forecast(x).mean)
    assert torch.equal(other.forecast(x).variance, one.forecast(x).variance)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in content["state"].values())


def test_saving_replaces_the_old_file(tmp_path):
    x, _ = data()
    path = str(tmp_path / "model.pt")
    model().save(path)
    newer = ConstrainedModel(Backbone(seed=5), Hierarchy(S))
    newer.save(path)
    assert torch.equal(ConstrainedModel.load(path, Backbone(), Hierarchy(S)).forecast(x).mean, newer.forecast(x).mean)


def test_a_given_method_overrides_the_saved_one(tmp_path):
    model("base").save(tmp_path / "model.pt")
    other = ConstrainedModel.load(tmp_path / "model.pt", Backbone(), Hierarchy(S), "probconserv")
    assert other.method == METHODS["probconserv"]
    assert isinstance(other.forecast(data()[0]), Projected)


# ------------------------------------------------------------------------------------------- learned metrics


def learned(kind: str, learn: bool = True):
    generator = torch.Generator().manual_seed(10)
    ones = torch.ones(N, dtype=DOUBLE)
    if kind == "diagonal":
        return DiagonalMetric(ones, learn)
    if kind == "low rank":
        return LowRankMetric(0.3 * torch.randn(N, 2, dtype=DOUBLE, generator=generator), ones, learn)
    return DenseMetric(torch.diag(ones) + 0.2 * torch.randn(N, N, dtype=DOUBLE, generator=generator).tril(-1), learn)


def with_metric(metric, draws: int = 0) -> Method:
    return Method(Step(metric, draws=draws), Step(metric))


each_metric = pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])


@each_metric
def test_a_learned_metric_is_trained(kind):
    x, y = data(64)
    metric = learned(kind)
    one = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(metric))
    before = {name: value.detach().clone() for name, value in metric.named_parameters()}
    assert before
    assert {id(p) for p in metric.parameters()} <= {id(p) for p in one.parameters()}
    weight = metric.weight(y, None).dense().detach()
    optimizer = torch.optim.Adam(one.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = one.loss((x, y))
        loss.backward()
        for name, parameter in one.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all()
        optimizer.step()
        losses.append(loss.item())
    for name, value in metric.named_parameters():
        assert (value - before[name]).abs().max() > 1e-3, name
    after = metric.weight(y, None).dense().detach()
    assert (after - weight).abs().max() > 1e-2
    assert torch.linalg.eigvalsh(after).min() > 0
    assert losses[-1] < losses[0]
    assert Hierarchy(S).violation(one.sample(x, 5)).max() < 1e-11


@each_metric
def test_the_gradient_of_a_learned_metric_is_right(kind):
    x, y = data(2)
    metric = learned(kind)
    names = [name for name, _ in metric.named_parameters()]
    with torch.no_grad():
        base = LocationScale(Backbone()(x)[0], Diagonal.from_stddev(Backbone()(x)[1]))

    def loss(*values):
        layer = DPPL(metric)
        parameters = {f"layer.metric.{name}": value for name, value in zip(names, values)}
        return torch.func.functional_call(Score(layer), parameters, (base, y))

    assert torch.autograd.gradcheck(loss, tuple(p.detach().clone().requires_grad_() for p in metric.parameters()))


class Score(nn.Module):
    def __init__(self, layer: DPPL) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, base, y):
        return crps(self.layer(base, Hierarchy(S)), y).sum()


@each_metric
def test_a_fixed_metric_has_no_parameters_and_matches_its_learned_twin(kind):
    x, _ = data()
    fixed, trained = learned(kind, learn=False), learned(kind)
    assert not list(fixed.parameters())
    assert list(fixed.buffers())
    first = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(fixed)).forecast(x)
    second = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(trained)).forecast(x)
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.variance, second.variance, rtol=1e-12, atol=1e-12)


@each_metric
def test_a_learned_metric_is_saved_with_the_model(kind, tmp_path):
    x, y = data()
    metric = learned(kind)
    one = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(metric))
    optimizer = torch.optim.Adam(one.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        one.loss((x, y)).backward()
        optimizer.step()
    one.save(tmp_path / "model.pt")
    fresh = learned(kind)
    other = ConstrainedModel.load(tmp_path / "model.pt", Backbone(), Hierarchy(S), with_metric(fresh))
    for first, second in zip(metric.parameters(), fresh.parameters()):
        assert torch.equal(first, second)
    assert torch.equal(other.forecast(x).mean, one.forecast(x).mean)
    assert torch.equal(other.forecast(x).variance, one.forecast(x).variance)


def test_a_learned_metric_can_be_trained_by_draws():
    x, y = data()
    metric = learned("diagonal")
    one = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(metric, draws=30).replace(score="quantile"))
    one.loss((x, y)).backward()
    assert metric.values.grad.isfinite().all()
    assert metric.values.grad.any()


# ------------------------------------------------------------------------------------- universal approximation


def smooth_target(size: int, seed: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Coherent series that bend with the inputs."""
    x = torch.rand(size, INPUTS, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    bottom = torch.stack([torch.sin(2 * x[:, 0]), x[:, 1] ** 2, x[:, 0] * x[:, 2], torch.exp(-x[:, 1])], -1)
    return x, bottom @ S.T


@pytest.mark.parametrize("name", ["probhard-ob", "probhard-or"])
def test_a_small_network_and_a_projection_fit_a_constrained_target(name):
    x, y = smooth_target(128)
    one = ConstrainedModel(Backbone(width=32, seed=12), Hierarchy(S), name)
    optimizer = torch.optim.Adam(one.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=400)
    first = one.loss((x, y)).item() / y.numel()
    for _ in range(400):
        optimizer.zero_grad()
        loss = one.loss((x, y)) / y.numel()
        loss.backward()
        optimizer.step()
        schedule.step()
    unseen_x, unseen_y = smooth_target(200, seed=13)
    error = (one.forecast(unseen_x).mean - unseen_y).detach()
    assert first > 0.3
    assert loss.item() < 0.03
    assert error.square().mean().sqrt() < 0.1 * unseen_y.std()
    assert Hierarchy(S).violation(one.sample(unseen_x, 10)).max() < 1e-11


def test_nll_training_learns_the_spread():
    generator = torch.Generator().manual_seed(14)
    x = torch.rand(512, INPUTS, dtype=DOUBLE, generator=generator)
    truth = torch.tensor([0.1, 0.4, 0.2, 0.8], dtype=DOUBLE)
    y = (x.sum(-1, keepdim=True) + truth * torch.randn(512, 4, dtype=DOUBLE, generator=generator)) @ S.T
    one = ConstrainedModel(Backbone(seed=15), Hierarchy(S), METHODS["probhard-ob"].replace(score="nll"))
    optimizer = torch.optim.Adam(one.parameters(), lr=0.03)
    for _ in range(250):
        optimizer.zero_grad()
        (one.loss((x, y)) / y.numel()).backward()
        optimizer.step()
    forecast = one.forecast(x)
    spread = (S.square() @ truth.square()).sqrt()
    assert nll(forecast, y).mean() < float((spread.log() + 0.5 + 0.5 * np.log(2 * np.pi)).mean()) + 0.05
    torch.testing.assert_close(forecast.stddev.mean(0).detach(), spread, rtol=0.2, atol=0)
