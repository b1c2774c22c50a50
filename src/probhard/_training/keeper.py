"""Checkpoints: one callback that records metrics, saves the last and the best epoch, and stops early."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Checkpoint

from probhard._training.data import TRAIN, VALIDATION
from probhard._training.task import Task
from probhard.errors import ParameterError

if TYPE_CHECKING:
    from probhard.training import Schedule


class Keeper(Checkpoint):
    """Records the metrics of every epoch, saves the last and the best epoch, and stops the run.

    Args:
        folder: Where the checkpoints ``last.ckpt`` and ``best.ckpt`` are written.
        schedule: Its ``epochs`` and ``patience`` end the run.
        settings: Plain values that a resumed run must share.
    """

    def __init__(self, folder: Path, schedule: Schedule, settings: dict[str, Any]) -> None:
        self.folder, self.schedule, self.settings = folder, schedule, settings
        self.rows: list[dict[str, float]] = []
        self.earlier, self.start = 0.0, time.perf_counter()

    @property
    def state_key(self) -> str:
        """Name of the callback's state in checkpoints; fixed, so that old checkpoints can be resumed."""
        return "_Keeper"

    @property
    def seconds(self) -> float:
        """Training time so far, including earlier runs that this one resumes."""
        return self.earlier + time.perf_counter() - self.start

    @property
    def best(self) -> int | None:
        """The first epoch with the lowest finite validation score."""
        finite = [(row[VALIDATION], epoch) for epoch, row in enumerate(self.rows) if math.isfinite(row[VALIDATION])]
        return min(finite)[1] if finite else None

    @property
    def stopping(self) -> bool:
        """Whether patience is exhausted, or the training loss is not finite."""
        stale = len(self.rows) - 1 - (-1 if self.best is None else self.best)
        patience = self.schedule.patience
        return (patience is not None and stale >= patience) or not math.isfinite(self.rows[-1][TRAIN])

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.folder = trainer.strategy.broadcast(self.folder)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = bool(self.rows) and self.stopping

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        if self.best == len(self.rows) - 1:
            trainer.save_checkpoint(self.folder / "best.ckpt", weights_only=True)
        trainer.save_checkpoint(self.folder / "last.ckpt")
        trainer.should_stop = self.stopping

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "seconds": self.seconds, "settings": self.settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows, self.earlier = list(state_dict["rows"]), state_dict.get("seconds", 0.0)
        before = state_dict.get("settings", self.settings)
        changed = [name for name, value in self.settings.items() if before.get(name) != value]
        if changed or len(self.rows) > self.schedule.epochs:
            difference = f"another {' and '.join(changed)}" if changed else f"{len(self.rows)} epochs"
            raise ParameterError(
                f"{self.folder} holds a run with {difference}.",
                "A resumed run must keep the settings it began with, and cannot be shortened.",
                "Pass another directory, or remove this one.",
            )


def check_checkpoints(folder: Path, task: Task) -> None:
    """Check that the checkpoints of a folder can be read and fit the network.

    Args:
        folder: Holds ``last.ckpt`` and ``best.ckpt``.
        task: The network to resume.

    Raises:
        ParameterError: If a file cannot be read, or holds other weights.
    """
    for name in ("last.ckpt", "best.ckpt"):
        try:
            state = torch.load(folder / name, map_location="cpu", weights_only=True)["state_dict"]
        except Exception as error:  # no file, a broken archive or pickled objects raise different errors
            raise ParameterError(
                f"{folder / name} cannot be read ({type(error).__name__}).",
                "The run in this folder cannot be resumed without it.",
                "Pass another directory, or remove this one to start again.",
            ) from error
        own = task.state_dict()
        if {key: value.shape for key, value in state.items()} != {key: value.shape for key, value in own.items()}:
            raise ParameterError(
                f"{folder / name} holds the weights of another network.",
                "A run can be resumed only with the network that it began with.",
                "Pass another directory, or remove this one to start again.",
            )
