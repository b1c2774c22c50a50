"""Constrained models: losses, batches, saving, and the fit of constrained targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from probhard import (
    METHODS,
    NORMAL,
    ConstrainedModel,
    Diagonal,
    Hierarchy,
    LocationScale,
    Method,
    Projected,
    crps,
    nll,
)
from probhard.model import Batch
from small_model import (
    DOUBLE,
    INPUTS,
    ROWS,
    SIZE,
    Backbone,
    N,
    S,
    data,
    model,
    predicted,
)

# ------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("hier-e2e", "hardnet++")])  # not by draws
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
    loss = model("softc").loss((x, y * torch.nan, nothing)).item()
    assert loss == pytest.approx(float(((mean @ ROWS.T) ** 2).sum()), rel=1e-11)


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
