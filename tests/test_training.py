"""Training: losses and figures, schedules, warm-ups, methods, data of any form, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import probhard as ph
from probhard.model import Batch

pytest.importorskip("lightning.pytorch")

from probhard.pde.adapters import OperatorBackbone
from probhard.training import Schedule, Task, fit
from training_runs import SCHEDULE, N, Network, assert_same, data, model, total, trained, weights


def test_loss_goes_down_and_draws_are_feasible():
    trainee, done = trained(schedule=Schedule(25, batch_size=10, lr=2e-2, halvings=3))
    assert done.history[-1]["train"] < 0.5 * done.history[0]["train"]
    assert done.history[-1]["validation"] < 0.5 * done.history[0]["validation"]
    assert done.epochs == len(done.history) == 25
    assert float(total().violation(trainee.sample(data(5)[0], 20)).max()) < 1e-12


def test_the_figures_are_scores_per_point_and_the_best_epoch_is_kept():
    inputs, target = data(40)
    opposite = 0.5 - target  # the better the fit, the worse this score
    trainee = model(rate=0.0)
    done = fit(trainee, (inputs, target), (inputs, opposite), SCHEDULE, progress=False)
    column = [row["validation"] for row in done.history]
    assert column.index(min(column)) == done.best_epoch < len(column) - 1
    with torch.no_grad():
        score = ph.crps(trainee.forecast(inputs), opposite).mean()
    assert done.best_score == min(column) == pytest.approx(float(score), rel=1e-12)
    assert not trainee.training


def test_the_step_is_adam_on_the_summed_loss():
    schedule = Schedule(2, batch_size=40, lr=1e-2, weight_decay=0.1, halvings=2)
    trainee, done = trained(model(rate=0.0), schedule)
    plain = model(rate=0.0)
    optimiser = torch.optim.Adam(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for epoch in range(done.best_epoch + 1):
        optimiser.param_groups[0]["lr"] = 1e-2 * 0.5**epoch
        optimiser.zero_grad()
        loss = plain.loss(data(40))
        assert done.history[epoch]["train"] == pytest.approx(loss.item() / (40 * N), rel=1e-10)
        loss.backward()
        optimiser.step()
    for mine, expected in zip(weights(trainee), weights(plain)):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def test_seeds_decide():
    first = trained(seed=0)
    assert_same(first, trained(seed=0))
    assert trained(seed=1)[1].history != first[1].history


def test_the_constraint_waits_for_the_warm_up():
    schedule = Schedule(4, batch_size=10, lr=1e-2, halvings=0, warm_up=2)
    warmed, free, bound = trained(schedule=schedule), trained(model("base")), trained()
    columns = [[row["train"] for row in done.history] for _, done in (warmed, free, bound)]
    assert columns[0][:2] == columns[1][:2] != columns[2][:2]
    assert columns[0][2:] != columns[1][2:4]


def test_functionals_are_scored_during_the_warm_up():
    schedule, family = Schedule(2, batch_size=10, lr=1e-2, halvings=0, warm_up=2), ph.BlockMeans((N,), (2,))
    scored = {name: ph.METHODS[name].replace(functionals=family, functional_weight=2.0) for name in ph.METHODS}
    runs = [trained(model(m), schedule) for m in (scored["probhard-ob"], scored["base"], "base")]
    warmed, free, plain = ([row["train"] for row in done.history] for _, done in runs)
    assert warmed == free != plain


def test_a_method_may_warm_up_by_a_soft_loss():
    schedule = Schedule(3, batch_size=10, lr=1e-2, halvings=0)
    soft = ph.METHODS["softc"].replace(penalty=3.0)
    warmed = ph.METHODS["hardnet-aff"].replace(warm_up=2, warm_penalty=3.0)
    first, second = ([row["train"] for row in trained(model(m), schedule)[1].history] for m in (soft, warmed))
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_the_penalty_pulls_the_mean_to_the_constraint():
    violations = {}
    for penalty in (0.0, 1.0):
        method = ph.METHODS["softc"].replace(penalty=penalty)
        trainee, _ = trained(model(method, rate=0.0), Schedule(25, batch_size=10, lr=1e-2))
        violations[penalty] = total().violation(trainee.forecast(data(20, 2)[0]).mean).mean().item()
    assert violations[1.0] < 0.5 * violations[0.0]


@pytest.mark.parametrize("method", sorted(ph.METHODS))
def test_every_method_trains_by_both_scores(method):
    for score in ("crps", "nll"):
        chosen = ph.METHODS[method]
        if chosen.score == "quantile" and score == "nll":
            continue
        chosen = chosen if chosen.score == "quantile" else chosen.replace(score=score)
        _, done = trained(model(chosen), Schedule(3, batch_size=20, lr=2e-2))
        assert done.history[-1]["train"] < done.history[0]["train"]


def test_data_of_any_form_train_alike():
    inputs, target = data(40)
    validation = data(20, 2)

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return {"inputs": inputs[index], "target": target[index]}

    forms = [
        (inputs, target),
        {"inputs": inputs, "target": target},
        Batch(inputs, target, torch.ones_like(target, dtype=torch.bool), (inputs, {"more": inputs})),
        torch.utils.data.TensorDataset(inputs, target),
        Items(),
    ]
    runs_of_forms = []
    for form in forms:
        trainee = model()
        runs_of_forms.append((trainee, fit(trainee, form, validation, SCHEDULE, progress=False)))
    for other in runs_of_forms[1:]:
        assert_same(other, runs_of_forms[0])


def test_context_is_cut_into_batches_with_the_data():
    inputs, target = data(40)
    sums = target.sum(-1, keepdim=True) + torch.arange(40.0)[:, None]
    seen = []

    def rule(context):
        seen.append(len(context))
        return ph.LinearEquality(torch.ones(1, N), context)

    torch.manual_seed(3)
    trainee = ph.ConstrainedModel(Network(), rule, "probhard-ob")
    batch = {"inputs": inputs, "target": target + torch.arange(40.0)[:, None] / N, "context": sums}
    done = fit(trainee, batch, batch, Schedule(1, batch_size=16), progress=False)
    assert seen == [16, 16, 8] * 2
    assert done.history[0]["validation"] > 0


def test_the_progress_bar_is_shown_on_demand(capfd):
    fit(model(), data(40), data(20, 2), Schedule(2, batch_size=10), progress=True)
    assert "Epoch" in "".join(capfd.readouterr())
    trained(schedule=Schedule(2, batch_size=10))
    assert "".join(capfd.readouterr()) == ""


def test_dropout_is_on_in_training_whatever_mode_the_model_came_in():
    evaluated = model(rate=0.9)
    evaluated.eval()
    assert_same(trained(evaluated), trained(model(rate=0.9)))


def test_complex_weights_train():
    operator = nn.Sequential(Spectral(), nn.Conv1d(3, 2, 1))
    trainee = ph.ConstrainedModel(OperatorBackbone(operator, variance=True).double(), total(), "probhard-ob")
    inputs = torch.randn(20, 3, N)
    target = torch.fft.irfft(torch.fft.rfft(inputs[:, 0]) * 1j, n=N)
    target = target - target.mean(-1, keepdim=True) + 1 / N
    before = trainee.backbone.operator[0].weight.detach().clone()
    done = fit(
        trainee, (inputs, target), (inputs, target), Schedule(60, lr=5e-2, halvings=0, clip=100.0), progress=False
    )
    assert done.history[-1]["train"] < 0.7 * done.history[0]["train"]
    assert not torch.equal(trainee.backbone.operator[0].weight, before)


class Spectral(nn.Module):
    """Complex weights on the modes of a periodic field."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, N // 2 + 1, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=N)


def test_divergence_is_an_error_not_a_model():
    inputs, target = data(40)
    trainee = model()
    bad = target.clone()
    bad[:, 0] = torch.inf
    with pytest.raises(ph.ParameterError, match="No epoch of 1 had a finite validation score"):
        fit(trainee, (inputs, bad), (inputs, bad), SCHEDULE, progress=False)


def test_schedules():
    schedule = Schedule(500, halvings=10, lr=1e-3)
    assert [schedule.rate(epoch) for epoch in (0, 49, 50, 499)] == [1e-3, 1e-3, 5e-4, 1e-3 * 0.5**9]
    assert Schedule(7, halvings=0, lr=1.0).rate(6) == 1.0
    for options in ({"epochs": 0}, {"batch_size": 0}, {"lr": -1.0}, {"warm_up": 501}, {"patience": -1}, {"clip": -1.0}):
        with pytest.raises(ph.ParameterError, match="something to train"):
            Schedule(**options)
    with pytest.raises(ph.ParameterError, match="without targets"):
        fit(model(), data(4)[0], data(4), progress=False)


def test_a_batch_must_split_over_the_processes():
    task = Task(model(), data(40), data(20, 2), Schedule(1, batch_size=5), 0)
    task.trainer = type("Two", (), {"world_size": 2, "global_rank": 0, "strategy": None})()
    with pytest.raises(ph.ParameterError, match="not a multiple of 2 processes"):
        task.train_dataloader()


def test_another_method_may_judge_the_epochs(tmp_path):
    drawn = ph.METHODS["probhard-ob"].replace(training=ph.Step("oblique", draws=4))
    judge = ph.METHODS["probhard-ob"]
    trainee, done = trained(model(drawn, rate=0.0), judge=judge, directory=tmp_path)
    inputs, target = data(20, 2)
    closed = ph.ConstrainedModel(trainee.backbone, total(), judge)
    with torch.no_grad():
        assert done.best_score == pytest.approx(float(closed.loss((inputs, target))) / target.numel(), rel=1e-9)
    _, own = trained(model(drawn, rate=0.0))
    assert [row["train"] for row in own.history] == [row["train"] for row in done.history]  # only the choice differs
    assert own.best_score != done.best_score
    with pytest.raises(ph.ParameterError, match="another judge"):
        trained(model(drawn, rate=0.0), directory=tmp_path, judge=judge.replace(score="nll"))
