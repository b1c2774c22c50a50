"""``on_failure``: what each choice does with means and draws whose projection fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import probhard as ph
from probhard.projection.policy import RESTARTS, Failures
from projection.curves import SPHERE, close
from registry import rand, randn


def half(u: Tensor) -> Tensor:
    """``|u| = 1`` where the first variable is below 50; no root is ever found above."""
    far = u[..., :1] - 50
    return torch.where(far < 0, u.square().sum(-1, keepdim=True) - 1, 1 + torch.exp(-far.clamp(min=0)))


HALF = ph.NonlinearEquality(half)
AWAY = torch.tensor([70.0, 1.0, 1.0])  # a point that fails from few starts


@pytest.fixture(autouse=True)
def few_starts(request, monkeypatch):
    if "more" not in request.node.name:
        monkeypatch.setitem(RESTARTS, "retry", 2)


def test_more_starts_solve_what_few_do_not():
    assert ph.DPPL("orthogonal").project(AWAY, HALF).stats.converged
    assert not ph.DPPL("orthogonal", on_failure="flag").project(AWAY, HALF).stats.converged


def points(count: int, failures: int) -> Tensor:
    z = randn(count, 3)
    z[:failures] = AWAY
    return z


def test_one_failure_is_masked_and_counted():
    layer = ph.DPPL("orthogonal")
    assert layer.on_failure == "retry"
    solution = layer.project(points(64, 1), HALF)
    assert solution.value[0].isnan().all()
    assert HALF.violation(solution.value[1:]).max() <= 1e-10
    assert solution.stats.converged.tolist() == [False] + 63 * [True]
    assert solution.stats.masked == layer.failures.masked == 1
    assert solution.stats.failure_share == layer.failures.share == 1 / 64


def test_too_many_failures_raise_and_name_their_elements():
    layer = ph.DPPL("orthogonal")
    layer.project(points(200, 2), HALF)  # 1 %
    with pytest.raises(ph.ConvergenceError, match=r"1 of 64 points .* Failed: 0\. .* 264 points 1.14 % failed"):
        layer.project(points(64, 1), HALF)
    with pytest.raises(ph.ConvergenceError, match=r"2 of 2 points .* Failed: 0, 1\."):
        ph.DPPL("orthogonal").project(points(2, 2), HALF)
    with pytest.raises(ph.ConvergenceError, match="1 of 1 points"):
        ph.DPPL("orthogonal").project(AWAY, HALF)


def test_only_the_last_thousand_count():
    failures = Failures()
    assert not failures.add(500, 5)
    assert not failures.add(500, 5)
    assert failures.share == 0.01
    assert failures.add(10, 1)
    assert not failures.add(5000, 50)
    assert failures.count == 5000
    assert failures.add(1, 1)  # a whole call


def test_a_set_that_is_proven_empty_raises_at_once():
    box = ph.LinearEquality(torch.ones(1, 3), torch.tensor([[1.0]] * 63 + [[5.0]])) & ph.LinearInequality(
        torch.cat([torch.eye(3), -torch.eye(3)]), torch.ones(6)
    )
    with pytest.raises(ph.InfeasibleError):
        ph.DPPL("orthogonal").project(randn(64, 3), box)


def test_failed_draws_are_redrawn_and_counted():
    mean, stddev = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([22.0, 1.0, 1.0])  # 1.2 % of draws beyond 50
    layer = ph.DPPL("orthogonal")
    law = layer((mean, stddev), HALF)
    source = torch.Generator().manual_seed(3)
    layer.failures.add(100_000, 0)
    before = (law.base.sample((300,), torch.Generator().manual_seed(3))[:, 0] > 50).sum()
    draws = law.sample((300,), source)
    assert before > 0
    assert draws.isfinite().all()
    assert HALF.violation(draws).max() <= 1e-10
    assert law.stats.redrawn == layer.failures.redrawn >= before
    assert 0 < law.stats.failure_share < 0.01


def test_a_share_of_failed_draws_above_one_per_cent_raises():
    law = ph.DPPL("orthogonal")((torch.tensor([45.0, 0.5, 0.5]), torch.tensor([22.0, 1.0, 1.0])), HALF)
    with pytest.raises(ph.ConvergenceError, match=r"of 1000 (draws|points)"):
        law.sample((1000,))


@pytest.mark.parametrize("covariance", ["delta", "second-order", "monte-carlo"])
def test_a_failed_mean_is_nan_and_has_no_gradient(covariance):
    mean, stddev = points(64, 1).requires_grad_(), rand(64, 3).requires_grad_()
    law = ph.DPPL("orthogonal", covariance, draws=4)((mean, stddev), HALF)
    assert law.mean[0].isnan().all()
    assert law.mean[1:].isfinite().all()
    assert law.variance[1:].isfinite().all()
    score = ph.crps(law, torch.zeros(64, 3))
    assert score[0].isnan().all()
    gradients = torch.autograd.grad(score[1:].sum(), (mean, stddev))
    for gradient in gradients:
        assert gradient[0].abs().max() == 0
        assert gradient.isfinite().all()


class Backbone(torch.nn.Module):
    """Predicts its inputs, times a weight of 1, with the same spread; or points."""

    def __init__(self, law: bool = True) -> None:
        super().__init__()
        self.weight, self.law = torch.nn.Parameter(torch.ones(())), law

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        return (self.weight * x, 0.1 + 0 * x + 0 * self.weight) if self.law else self.weight * x


def losses(model: ph.ConstrainedModel, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and its gradient in the weight."""
    loss = model.loss((x, y))
    return loss, torch.autograd.grad(loss, model.backbone.weight)[0]


def point(u: ph.Projected | Tensor) -> Tensor:
    return u if isinstance(u, Tensor) else u.mean


OWN = {"crps": "crps", "own": lambda u, batch: ((point(u) - batch.target) ** 2).sum(-1)}


@pytest.mark.parametrize("score", OWN)
@pytest.mark.parametrize("law", [True, False])
def test_the_loss_leaves_failed_elements_out(law, score):
    x, y = points(64, 1), randn(64, 3)
    with_failure = ph.ConstrainedModel(Backbone(law), HALF, "probhard-or", OWN[score])
    without = ph.ConstrainedModel(Backbone(law), HALF, "probhard-or", OWN[score])
    for one, two in zip(losses(with_failure, x, y), losses(without, x[1:], y[1:])):
        close(one, two)
    assert with_failure.training_layer.failures.masked == 1
    if not law:
        assert with_failure(x)[0].isnan().all()
    total = ph.ConstrainedModel(Backbone(law), HALF, "probhard-or", lambda u, batch: point(u).sum())
    with pytest.raises(ph.ParameterError, match="one value for each sample"):
        total.loss((x, y))


def test_methods_that_keep_the_covariance_leave_failed_elements_out():
    x, y = points(64, 1), randn(64, 3)
    for one, two in zip(*(losses(ph.ConstrainedModel(Backbone(), HALF, "hardc"), x[k:], y[k:]) for k in (0, 1))):
        close(one, two)


@pytest.mark.parametrize("covariance", ["delta", "monte-carlo"])
def test_functionals_and_penalties_leave_failed_elements_out(covariance):
    step, family = ph.Step("orthogonal", covariance), ph.Directions(torch.ones(1, 3))
    model = ph.ConstrainedModel(Backbone(), HALF, ph.Method(step, step, functionals=family, penalty=1.0))
    x, y = points(64, 1), randn(64, 3)
    loss, gradient = losses(model, x, y)
    law = model.forecast(x)
    own = ph.crps(law, y)[1:].sum() + 0.9 * (ph.crps(law, y, functionals=family) * family.weight)[1:].sum()
    close(loss, own + HALF.penalty(law.mean[1:]).sum())
    assert gradient.isfinite()


def test_other_choices_keep_their_meaning():
    z = points(64, 1)
    with pytest.raises(ph.ConvergenceError, match="1 of 64 points"):
        ph.DPPL("orthogonal", on_failure="raise").project(z, HALF)
    with pytest.raises(ph.ConvergenceError, match="1 of 64 points"):
        ph.DPPL("orthogonal", on_failure="resample").project(z, HALF)
    flagged = ph.DPPL("orthogonal", on_failure="flag").project(z, HALF)
    assert not flagged.stats.converged[0]
    model = ph.ConstrainedModel(
        Backbone(law=False), HALF, ph.Method(inference=ph.Step("orthogonal", on_failure="flag"))
    )
    assert model(z)[0].isnan().all()  # a plain tensor has no status


def test_convex_sets_never_fail_and_count_nothing():
    layer = ph.DPPL("orthogonal")
    assert layer.project(randn(30, 4), ph.Simplex()).stats.masked == 0
    assert layer.project(randn(30, 4), SPHERE).stats.masked == 0
    assert layer.failures.share == 0


def test_a_law_with_a_flagged_mean_is_not_called_feasible():
    layer = ph.DPPL("orthogonal", on_failure="flag")
    law = layer((points(4, 1), torch.ones(4, 3)), HALF)
    assert law.stats.converged.tolist() == [False, True, True, True]
    assert not law.feasible
    assert layer((points(4, 0), torch.ones(4, 3)), HALF).feasible
