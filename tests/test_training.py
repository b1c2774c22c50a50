"""Training: what is kept, what is resumed, and that several processes do what one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import probhard as ph
from probhard.model import Batch

pl = pytest.importorskip("lightning.pytorch")

from probhard.pde.adapters import OperatorBackbone  # noqa: E402
from probhard.training import Schedule, Task, fit  # noqa: E402

N = 4


class Network(nn.Module):
    """A small backbone with dropout, whose randomness must be resumed too."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(rate), nn.Linear(16, 2 * N))

    def forward(self, x):
        mean, raw = self.body(x).chunk(2, -1)
        return mean, nn.functional.softplus(raw) + 0.01


def total() -> ph.LinearEquality:
    return ph.LinearEquality(torch.ones(1, N), torch.ones(1))


def data(count: int = 40, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    target = torch.sin(inputs @ torch.linspace(-1, 1, 3 * N, dtype=torch.float64).view(3, N))
    return inputs, target - target.mean(-1, keepdim=True) + 1 / N


def model(method="probhard-ob", rate: float = 0.1) -> ph.ConstrainedModel:
    torch.manual_seed(3)
    return ph.ConstrainedModel(Network(rate).double(), total(), method)


SCHEDULE = Schedule(6, batch_size=10, lr=1e-2, halvings=3)


def trained(trainee=None, schedule=SCHEDULE, **options):
    trainee = model() if trainee is None else trainee
    return trainee, fit(trainee, data(40), data(20, 2), schedule, progress=False, **options)


def weights(trainee) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainee.parameters()]


def assert_same(one, other):
    assert one[1].history == other[1].history
    assert one[1].best_epoch == other[1].best_epoch
    assert all(torch.equal(mine, its) for mine, its in zip(weights(one[0]), weights(other[0])))


class During(pl.Callback):
    """Does something after the second batch of an epoch."""

    def __init__(self, epoch: int, action) -> None:
        self.epoch, self.action = epoch, action

    def on_train_batch_end(self, trainer, task, outputs, batch, index):
        if (trainer.current_epoch, index) == (self.epoch, 1):
            self.action()


def script(folder: Path, text: str) -> Path:
    """A program that starts from this module."""
    head = f"""import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_training import *
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
folder = Path(sys.argv[1])
"""
    path = folder / "program.py"
    path.write_text(head + text)
    return path


def launched(path: Path, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


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


def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
    whole = trained()
    lines = "import time\nlong, last = During(1, lambda: time.sleep(3)), During(3, lambda: os.kill(os.getpid(), 9))"
    path = script(tmp_path, f"{lines}\ntrained(directory=folder, callbacks=[long, last])\n")
    killed = launched(path, tmp_path / "run")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    content = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert content["epoch"] == 2
    moved = tmp_path / "elsewhere"
    (tmp_path / "run").rename(moved)
    resumed = trained(directory=moved)
    assert_same(resumed, whole)
    assert resumed[1].seconds > 3  # those before the kill are counted
    again = trained(directory=moved)  # nothing is left to train
    assert_same(again, whole)


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where the shell that started the tests has it ignored, as for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_interrupted_run_keeps_its_checkpoint(tmp_path, epoch, interruptible):
    handler = signal.getsignal(signal.SIGINT)
    interrupt = During(epoch, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trained(directory=tmp_path, callbacks=[interrupt])
    assert signal.getsignal(signal.SIGINT) is handler
    assert (tmp_path / "last.ckpt").exists() == (epoch > 0)
    assert_same(trained(directory=tmp_path), trained())


def test_a_terminated_run_does_not_pass_for_a_finished_one(tmp_path):
    with pytest.raises(SystemExit):
        trained(directory=tmp_path, callbacks=[During(2, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert_same(trained(directory=tmp_path), trained())


def test_longer_schedules_go_on_from_shorter_ones(tmp_path):
    constant = {"batch_size": 10, "lr": 1e-2, "halvings": 0}
    trained(schedule=Schedule(3, **constant), directory=tmp_path)
    longer = Schedule(6, **constant)
    assert_same(trained(schedule=longer, directory=tmp_path), trained(schedule=longer))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "another seed"),
        ({"trainee": model("probconserv")}, "another method"),
        ({"schedule": replace(SCHEDULE, lr=2e-2, halvings=2)}, "another lr and halvings"),
        ({"schedule": replace(SCHEDULE, epochs=2)}, "6 epochs"),
    ],
)
def test_a_folder_with_another_run_is_refused(tmp_path, change, named):
    trained(directory=tmp_path)
    with pytest.raises(ph.ParameterError, match=named):
        trained(directory=tmp_path, **change)


def test_training_stops_early_and_stays_stopped(tmp_path):
    schedule = Schedule(200, batch_size=10, lr=0.5, halvings=0, patience=3)
    stopped = trained(schedule=schedule, directory=tmp_path)
    assert stopped[1].epochs == stopped[1].best_epoch + 4 < 200
    assert_same(trained(schedule=schedule, directory=tmp_path), stopped)


def test_checkpoints_are_plain_and_their_weights_load_strictly(tmp_path):
    trainee, done = trained(directory=tmp_path)
    content = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert content["epoch"] == done.best_epoch
    fresh = model()
    fresh.load_state_dict(content["state_dict"], strict=True)
    assert all(torch.equal(mine, its) for mine, its in zip(weights(fresh), weights(trainee)))
    trainee.save(tmp_path / "model.pt")
    loaded = ph.ConstrainedModel.load(tmp_path / "model.pt", Network().double(), total())
    assert torch.equal(loaded.eval().forecast(data(5)[0]).mean, trainee.forecast(data(5)[0]).mean)


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


DISTRIBUTED = """
if __name__ == "__main__":
    folder.mkdir(exist_ok=True)
    options = {"devices": 2, "directory": folder / "kept"}
    kept, done = trained(model(rate=0.0), **options)
    metric = ph.Step(ph.DiagonalMetric(torch.ones(N), learn=True))
    torch.manual_seed(3)
    learned = ph.ConstrainedModel(Network(0.0), total(), ph.Method(metric, metric))
    _, warmed = trained(learned, Schedule(3, batch_size=10, warm_up=1), devices=2)
    rank = os.environ.get("LOCAL_RANK", "0")
    record = {"history": done.history, "weights": [w.tolist() for w in weights(kept)], "metric": warmed.epochs}
    (folder / f"{rank}.json").write_text(json.dumps(record))
"""


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    ran = launched(script(tmp_path, DISTRIBUTED), tmp_path / "two")
    assert ran.returncode == 0, ran.stderr[-3000:]
    one, done = trained(model(rate=0.0))
    for rank in "01":
        record = json.loads((tmp_path / "two" / f"{rank}.json").read_text())
        for mine, its in zip(record["history"], done.history, strict=True):
            assert mine == pytest.approx(its, rel=1e-9)
        for mine, its in zip(record["weights"], weights(one)):
            torch.testing.assert_close(torch.tensor(mine), its, rtol=1e-7, atol=1e-10)
        assert record["metric"] == 3


RESUMED = """
class Count(pl.Callback):
    epochs = 0

    def on_train_epoch_start(self, trainer, task):
        self.epochs += 1


if __name__ == "__main__":
    devices, epochs = int(folder.name[0]), int(folder.name[2])  # such as 2-3
    constant = Schedule(epochs, batch_size=10, lr=1e-2, halvings=0)
    options = {"devices": devices, "directory": folder.parent / "kept", "callbacks": [count := Count()]}
    kept, done = trained(model(rate=0.0), constant, **options)
    rank = os.environ.get("LOCAL_RANK", "0")
    record = {"history": done.history, "weights": [w.tolist() for w in weights(kept)], "trained": count.epochs}
    (folder / f"{rank}.json").write_text(json.dumps(record))
"""


@pytest.mark.slow
@pytest.mark.parametrize("runs", [("2-3", "1-6"), ("1-3", "2-6"), ("2-2", "1-4", "2-6")])
def test_a_checkpoint_resumes_under_another_number_of_processes(runs, tmp_path):
    path = script(tmp_path, RESUMED)
    for run in runs:
        (tmp_path / run).mkdir()
        ran = launched(path, tmp_path / run)
        assert ran.returncode == 0, ran.stderr[-3000:]
    one, done = trained(model(rate=0.0), Schedule(6, batch_size=10, lr=1e-2, halvings=0))
    for rank in range(int(runs[-1][0])):
        record = json.loads((tmp_path / runs[-1] / f"{rank}.json").read_text())
        assert record["trained"] == 6 - int(runs[-2][2])
        for mine, its in zip(record["history"], done.history, strict=True):
            assert mine == pytest.approx(its, rel=1e-9)
        for mine, its in zip(record["weights"], weights(one)):
            torch.testing.assert_close(torch.tensor(mine), its, rtol=1e-7, atol=1e-10)


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
