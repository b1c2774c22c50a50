"""The Lightning trainer of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from probhard._training.keeper import Keeper
from probhard.model import ConstrainedModel

if TYPE_CHECKING:
    from probhard.training import Schedule


def build_trainer(
    model: ConstrainedModel,
    schedule: Schedule,
    keeper: Keeper,
    devices: int,
    progress: bool,
    options: dict[str, Any],
) -> pl.Trainer:
    """Build the trainer.

    Args:
        model: The model to train.
        schedule: Epochs and gradient clipping.
        keeper: The callback that writes checkpoints.
        devices: Number of processes.
        progress: Show a progress bar.
        options: The caller's options of ``lightning.Trainer``, which replace the defaults here; callbacks are added.
    """
    options = dict(options)
    bar = [TQDMProgressBar(leave=False)] if progress else []
    defaults: dict[str, Any] = {
        "max_epochs": schedule.epochs,
        "accelerator": "cuda" if torch.cuda.is_available() else "cpu",
        "devices": devices,
        "strategy": _strategy(model, devices),
        "logger": False,
        "callbacks": [keeper, *bar, *options.pop("callbacks", ())],
        "enable_progress_bar": progress,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "gradient_clip_val": schedule.clip,
        "default_root_dir": keeper.folder,
    }
    return pl.Trainer(**{**defaults, **options})


def _strategy(model: ConstrainedModel, devices: int) -> str:
    """The strategy of Lightning; a learned metric has parameters that get no gradient in some epochs."""
    if devices == 1:
        return "auto"
    inside = {id(parameter) for parameter in model.backbone.parameters()}
    idle = any(id(parameter) not in inside for parameter in model.parameters())
    return "ddp_find_unused_parameters_true" if idle else "ddp"
