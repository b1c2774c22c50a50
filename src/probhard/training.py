"""Training on Lightning: one ``fit`` for every backbone, constraint and method.

The loss of a batch is a sum over its points. Distributed training averages gradients over processes, so each process
multiplies its sum by their number: the gradient is then that of one process with the whole batch. The order of the
data, the learning rate and all random numbers of an epoch depend on the seed and the epoch alone, so a run that was
killed goes on as if it had not been.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from probhard.errors import MissingExtraError, ParameterError, ShapeError
from probhard.method import METHODS
from probhard.model import Batch, ConstrainedModel

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Checkpoint, TQDMProgressBar
except ImportError as error:
    raise MissingExtraError("lightning", "train", "Training") from error

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    Args:
        epochs: Passes over the training data.
        batch_size: Of one step, over all processes.
        lr: Learning rate of Adam.
        weight_decay: Of Adam.
        halvings: In how many equal parts of the epochs each has half the learning rate of the one before.
        warm_up: Epochs trained without the constraint at first.
        patience: Epochs without a better validation score after which to stop; None trains to the end.
        clip: Largest norm of the gradient; None leaves it.
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
                "Pass positive numbers, whole ones of epochs, and warm_up <= epochs.",
            )

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch."""
        return self.lr * 0.5 ** (epoch * self.halvings // self.epochs)


DEFAULT = Schedule()


@dataclass(frozen=True)
class Fit:
    """What a training run did; the model itself holds the weights of the best epoch."""

    best_epoch: int
    best_score: float
    epochs: int  # trained in all, resumed ones included
    seconds: float  # of training in all, resumed epochs included
    history: list[dict[str, float]] = field(repr=False)  # per epoch: training loss and validation score per point


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
    **trainer: Any,
) -> Fit:
    """Train a model in place and leave it in ``eval`` mode with the weights of its best epoch.

    Args:
        model: Backbone, constraint and method.
        train: A batch of all data (tuple, mapping or ``Batch`` of tensors), or a torch ``Dataset`` of items.
        validation: The same, to choose the best epoch.
        schedule: Epochs, batch size, learning rate.
        seed: Of the order of the data and of what is drawn in training; weights come with the model.
        directory: Keeps checkpoints here and goes on from the last one found, which must be of the same method, seed,
            schedule (but for ``epochs`` and ``patience``) and number of samples; None keeps none.
        progress: Show a progress bar.
        devices: Processes (gloo on CPU, nccl on CUDA), each of which runs the calling script.
        **trainer: Options of ``lightning.Trainer``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        task = Task(model.train(), train, validation, schedule, seed)
        keeper = _Keeper(Path(scratch if directory is None else directory), schedule, task.settings())
        bar = [TQDMProgressBar(leave=False)] if progress else []
        options: dict[str, Any] = {
            "max_epochs": schedule.epochs,
            "accelerator": "cuda" if torch.cuda.is_available() else "cpu",
            "devices": devices,
            "strategy": _strategy(model, devices),
            "logger": False,
            "callbacks": [keeper, *bar, *trainer.pop("callbacks", ())],
            "enable_progress_bar": progress,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "gradient_clip_val": schedule.clip,
            "default_root_dir": keeper.folder,
        }
        last = keeper.folder / "last.ckpt"
        if last.exists():
            _check_checkpoints(keeper.folder, task)
        with quiet_training():
            runner = pl.Trainer(**{**options, **trainer})
            runner.fit(task, ckpt_path=str(last) if last.exists() else None, weights_only=True)
        if keeper.best is None:
            raise ParameterError(
                f"No epoch of {len(keeper.rows)} had a finite validation score.",
                "Training diverged, or the targets are not finite.",
                "Lower the learning rate, or look at the data.",
            )
        content = torch.load(keeper.folder / "best.ckpt", map_location="cpu", weights_only=True)
        task.load_state_dict(content["state_dict"])
        runner.strategy.barrier()  # the folder may go with the first process
        model.eval()
        score = keeper.rows[keeper.best][VALIDATION]
        return Fit(keeper.best, score, len(keeper.rows), keeper.seconds, keeper.rows)


def _check_checkpoints(folder: Path, task: Task) -> None:
    """Raise unless the checkpoints of a folder can be read and fit the network."""
    for name in ("last.ckpt", "best.ckpt"):
        try:
            state = torch.load(folder / name, map_location="cpu", weights_only=True)["state_dict"]
        except Exception as error:  # of many kinds: no file, a broken archive, pickled objects
            raise ParameterError(
                f"{folder / name} cannot be read ({type(error).__name__}).",
                "The run in this folder cannot go on without it.",
                "Pass another directory, or remove this one to begin anew.",
            ) from error
        own = task.state_dict()
        if {key: value.shape for key, value in state.items()} != {key: value.shape for key, value in own.items()}:
            raise ParameterError(
                f"{folder / name} holds the weights of another network.",
                "A run goes on only with the network that it began with.",
                "Pass another directory, or remove this one to begin anew.",
            )


def _strategy(model: ConstrainedModel, devices: int) -> str:
    """Parameters outside the backbone, of a learned metric, may go without a gradient in some or all epochs."""
    if devices == 1:
        return "auto"
    inside = {id(parameter) for parameter in model.backbone.parameters()}
    idle = any(id(parameter) not in inside for parameter in model.parameters())
    return "ddp_find_unused_parameters_true" if idle else "ddp"


class Task(pl.LightningModule):
    """A constrained model with its data and schedule, as Lightning wants them."""

    def __init__(self, model: ConstrainedModel, train: Any, validation: Any, schedule: Schedule, seed: int) -> None:
        super().__init__()
        self.model, self.schedule, self.seed = model, schedule, seed
        self.data = {TRAIN: _dataset(train), VALIDATION: _dataset(validation)}
        self.free = model
        if schedule.warm_up:  # of the same class, whose loss may be its own
            warm = METHODS["base"].replace(score="nll" if model.method.score == "nll" else "crps")
            self.free = type(model)(model.backbone, model.constraint_fn, warm)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The weights of the model alone, each of them once."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Read the weights of the model."""
        return self.model.load_state_dict(*args, **kwargs)

    def settings(self) -> dict[str, Any]:
        """What a run must share with the one that it goes on with, as plain values."""
        schedule = {name: value for name, value in vars(self.schedule).items() if name not in ("epochs", "patience")}
        samples = [len(data) for data in self.data.values()]  # type: ignore[arg-type]
        return {"method": self.model.method.record(), "seed": self.seed, **schedule, "number of samples": samples}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, fused where it can be: complex weights cannot."""
        weights, schedule = list(self.model.parameters()), self.schedule
        fused = all(weight.is_floating_point() for weight in weights)
        return torch.optim.Adam(weights, lr=schedule.lr, weight_decay=schedule.weight_decay, fused=fused)

    def train_dataloader(self) -> DataLoader:
        """Shuffled by seed and epoch."""
        return self._loader(TRAIN, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """In order."""
        return self._loader(VALIDATION, shuffle=False)

    def on_train_epoch_start(self) -> None:
        """Random numbers and learning rate of an epoch, the same whether or not the run was resumed before it."""
        torch.manual_seed(((self.seed * 100_003 + self.current_epoch) * 1_009 + self.global_rank) % 2**63)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.schedule.rate(self.current_epoch)

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss, scaled against the mean over processes."""
        warming = self.current_epoch < self.schedule.warm_up
        loss = (self.free if warming else self.model).loss(batch)
        self._log(TRAIN, loss, batch)
        return loss * self.trainer.world_size

    def validation_step(self, batch: Any, index: int) -> None:
        """The loss that chooses the best epoch."""
        self._log(VALIDATION, self.model.loss(batch), batch)

    def _log(self, name: str, loss: Tensor, batch: Any) -> None:
        target = Batch.of(batch).target
        assert target is not None
        per_point = loss.detach() / target.numel()
        self.log(name, per_point, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(target))

    def _loader(self, name: str, shuffle: bool) -> DataLoader:
        data, world = self.data[name], self.trainer.world_size
        if self.schedule.batch_size % world:
            raise ParameterError(
                f"The batch size {self.schedule.batch_size} is not a multiple of {world} processes.",
                "Every process takes an equal share of each batch.",
                "Choose another batch size or number of devices.",
            )
        sampler: DistributedSampler = DistributedSampler(data, world, self.global_rank, shuffle, self.seed)
        share, aside = self.schedule.batch_size // world, torch.Generator()  # else iterators take global random numbers
        return DataLoader(data, share, sampler=sampler, collate_fn=_collate(data), generator=aside)


class _Tensors(Dataset):
    """A batch of all data as a dataset; a list of items is fetched by one indexing."""

    def __init__(self, content: Batch) -> None:
        self.content = content

    def __len__(self) -> int:
        assert self.content.target is not None
        return len(self.content.target)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        return {name: tree_map(lambda part: _taken(part, indices), part) for name, part in vars(self.content).items()}


def _taken(part: Any, indices: list[int]) -> Any:
    return part[indices] if isinstance(part, Tensor) else part


def _dataset(data: Any) -> Dataset:
    if isinstance(data, Dataset):
        return data
    content = Batch.of(data)
    if content.target is None:
        raise ParameterError(
            "fit() got data without targets.", "There is nothing to learn from.", "Pass (inputs, targets)."
        )
    if not isinstance(content.target, Tensor):
        raise ParameterError(
            f"fit() got targets of the type {type(content.target).__name__}.",
            "Networks are trained on tensors.",
            "Pass torch.as_tensor(...) of inputs and targets.",
        )
    parts = tree_leaves((content.inputs, content.target, content.context, content.mask))
    counts = {len(part) if part.dim() else 1 for part in parts if isinstance(part, Tensor)}
    if len(counts) > 1 or 0 in counts:
        raise ShapeError(
            f"Inputs, targets and context have {' and '.join(map(str, sorted(counts)))} samples.",
            "Each input belongs to one target, and there is at least one.",
            "Pass tensors with the same first dimension.",
        )
    return _Tensors(content)


def _collate(data: Dataset) -> Any:
    return (lambda batch: batch) if isinstance(data, _Tensors) else None


class _Keeper(Checkpoint):
    """The figures of every epoch, the state after the last and the weights of the best one, and when to stop."""

    def __init__(self, folder: Path, schedule: Schedule, settings: dict[str, Any]) -> None:
        self.folder, self.schedule, self.settings = folder, schedule, settings
        self.rows: list[dict[str, float]] = []
        self.earlier, self.begun = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time spent until now, that of the runs before included."""
        return self.earlier + time.perf_counter() - self.begun

    @property
    def best(self) -> int | None:
        """The first epoch with the lowest finite validation score."""
        finite = [(row[VALIDATION], epoch) for epoch, row in enumerate(self.rows) if math.isfinite(row[VALIDATION])]
        return min(finite)[1] if finite else None

    @property
    def stopping(self) -> bool:
        """Whether there was no better epoch for long, or the weights are lost to a loss that is not finite."""
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
            other = f"another {' and '.join(changed)}" if changed else f"{len(self.rows)} epochs"
            raise ParameterError(
                f"{self.folder} holds a run with {other}.",
                "A run goes on only with what it began with, and cannot be shortened.",
                "Pass another directory, or remove this one.",
            )


@contextmanager
def quiet_training() -> Iterator[None]:
    """Lightning without its advice on hardware and workers; Ctrl-C stays one, instead of the end of the program."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels, handler = [logger.level for logger in loggers], signal.getsignal(signal.SIGINT)
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning.*")
            yield
    except SystemExit as end:
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise
        raise KeyboardInterrupt from None
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
        if signal.getsignal(signal.SIGINT) is not handler:  # Lightning ignores further ones
            signal.signal(signal.SIGINT, handler)
