"""Training on Lightning: one ``fit`` for every backbone, constraint and method.

Data order, learning rate and random numbers of an epoch depend on the seed and the epoch alone. A run that was killed
therefore resumes as if it had not been. ``batch_size`` is global: the gradient is the same for any number of processes.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from probhard._training.data import TRAIN, VALIDATION
from probhard._training.keeper import Keeper, check_checkpoints
from probhard._training.runner import build_trainer
from probhard._training.task import Task
from probhard.errors import ParameterError
from probhard.method import Method
from probhard.model import ConstrainedModel

__all__ = ["DEFAULT", "TRAIN", "VALIDATION", "Fit", "Schedule", "Task", "fit", "quiet_training"]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    Args:
        epochs: Passes over the training data.
        batch_size: Samples per step, over all processes.
        lr: Initial learning rate of Adam.
        weight_decay: Weight decay of Adam.
        halvings: Number of equal parts of the epochs; each part has half the learning rate of the part before.
        warm_up: Number of first epochs, trained without the constraint.
        patience: Stop after this many epochs without a better validation score; None never stops early.
        clip: Largest norm of the gradient; None does not clip.

    Raises:
        ParameterError: If a number is out of range.
    """

    epochs: int = 500
    batch_size: int = 20
    lr: float = 1e-3
    weight_decay: float = 1e-4
    halvings: int = 10
    warm_up: int = 0
    patience: int | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        counts = [x for x in (self.epochs, self.batch_size, self.patience) if x is not None]
        whole = all(isinstance(x, int) for x in (*counts, self.halvings, self.warm_up))
        rates = [self.lr, *([] if self.clip is None else [self.clip])]
        fits = whole and min(counts) > 0 and all(0 < x < math.inf for x in rates) and 0 <= self.weight_decay < math.inf
        if not fits or self.halvings < 0 or not 0 <= self.warm_up <= self.epochs:
            raise ParameterError(
                f"Got {self}.",
                "There must be something to train, and the warm-up is part of the epochs.",
                "Pass positive numbers, integers where epochs or samples are counted, and warm_up <= epochs.",
            )

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0."""
        return self.lr * 0.5 ** (epoch * self.halvings // self.epochs)


DEFAULT = Schedule()


@dataclass(frozen=True)
class Fit:
    """Record of a training run; the model itself holds the weights of the best epoch.

    Args:
        best_epoch: Epoch with the lowest validation score, counted from 0.
        best_score: Its validation score per point, or per sample if there are no targets.
        epochs: Number of epochs trained, including those of the runs it resumed.
        seconds: Training time, including that of the runs it resumed.
        history: Training loss and validation score per point, of every epoch.
    """

    best_epoch: int
    best_score: float
    epochs: int
    seconds: float
    history: list[dict[str, float]] = field(repr=False)


def fit(
    model: ConstrainedModel,
    train: Any,
    validation: Any,
    schedule: Schedule = DEFAULT,
    *,
    seed: int = 0,
    directory: str | os.PathLike[str] | None = None,
    progress: bool = True,
    devices: int = 1,
    judge: Method | None = None,
    **trainer: Any,
) -> Fit:
    """Train a model in place and leave it in ``eval`` mode with the weights of its best epoch.

    Args:
        model: Backbone, constraint and method.
        train: All data as one batch (tuple, mapping or ``Batch`` of tensors), or a torch ``Dataset``. Targets are not
            needed if the model's score is a function.
        validation: The same, to select the best epoch.
        schedule: Epochs, batch size, learning rate.
        seed: Seed of data order and random numbers; initial weights come with the model.
        directory: Holds checkpoints, from which a run with the same method, seed, data size and schedule (but for
            ``epochs`` and ``patience``) resumes; None keeps none.
        progress: Show a progress bar.
        devices: Number of processes (gloo on CPU, nccl on CUDA), each of which runs the calling script.
        judge: Method whose loss on validation data selects the best epoch; None for that of the model. Models that
            train on draws are judged faster, and without noise, by a method without draws.
        **trainer: Options of ``lightning.Trainer``.

    Returns:
        The record of the run.

    Raises:
        ParameterError: If needed targets are missing, checkpoints do not fit, or no epoch has a finite score.
        ShapeError: If inputs, targets and context have different numbers of samples.
    """
    with tempfile.TemporaryDirectory() as scratch:
        task = Task(model.train(), train, validation, schedule, seed, judge)
        keeper = Keeper(Path(scratch if directory is None else directory), schedule, task.settings())
        last = keeper.folder / "last.ckpt"
        if last.exists():
            check_checkpoints(keeper.folder, task)
        with quiet_training():
            runner = build_trainer(model, schedule, keeper, devices, progress, trainer)
            runner.fit(task, ckpt_path=str(last) if last.exists() else None, weights_only=True)
        if keeper.best is None:
            raise ParameterError(
                f"No epoch of {len(keeper.rows)} had a finite validation score.",
                "Training diverged, or the targets are not finite.",
                "Lower the learning rate, or check the data.",
            )
        content = torch.load(keeper.folder / "best.ckpt", map_location="cpu", weights_only=True)
        task.load_state_dict(content["state_dict"])
        runner.strategy.barrier()  # else the first process may delete the folder too early
        model.eval()
        score = keeper.rows[keeper.best][VALIDATION]
        return Fit(keeper.best, score, len(keeper.rows), keeper.seconds, keeper.rows)


@contextmanager
def quiet_training() -> Iterator[None]:
    """Silence Lightning's advice on hardware and workers, and keep its handling of Ctrl-C local.

    Raises:
        KeyboardInterrupt: On Ctrl-C, where Lightning would end the program.
    """
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels, handler = [logger.level for logger in loggers], signal.getsignal(signal.SIGINT)
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning.*")
            yield
    except SystemExit as ending:
        if not isinstance(ending.__context__, KeyboardInterrupt):
            raise
        raise KeyboardInterrupt from None
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
        if signal.getsignal(signal.SIGINT) is not handler:  # Lightning ignores further interrupts
            signal.signal(signal.SIGINT, handler)
