"""A small model, its data and runs of its training, in this process or in programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import probhard as ph

pl = pytest.importorskip("lightning.pytorch")

from probhard.training import Schedule, fit  # noqa: E402

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
    """A program that has the names of this module, and its folder as an argument."""
    head = f"""import json
import os
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from training_runs import *
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
