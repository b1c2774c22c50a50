"""Training that goes on: killed, interrupted and longer runs, checkpoints, and processes that work as one."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

import probhard as ph

pytest.importorskip("lightning.pytorch")

from probhard.training import Schedule
from training_runs import (
    SCHEDULE,
    During,
    Network,
    assert_same,
    data,
    launched,
    model,
    script,
    total,
    trained,
    weights,
)


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
