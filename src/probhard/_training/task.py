"""The Lightning module of a constrained model.

The loss of a batch is a sum over its points. Lightning averages gradients over processes, so each process multiplies
its sum by their number. The gradient is then that of one process with the whole batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from probhard._training.data import TRAIN, VALIDATION, as_dataset, collate_for
from probhard.errors import ParameterError
from probhard.method import METHODS, Method
from probhard.model import Batch, ConstrainedModel

if TYPE_CHECKING:
    from probhard.training import Schedule


class Task(pl.LightningModule):
    """A constrained model with its data and schedule, as a Lightning module.

    Args:
        model: The model to train.
        train: Training data, as in ``fit``.
        validation: Validation data, as in ``fit``.
        schedule: Epochs, batch size, learning rate.
        seed: Seed of the data order and of all random numbers of training.
        judge: Method whose loss on validation data selects the best epoch; None for the model's own.

    Raises:
        ParameterError: If data have no targets, or their targets are not a tensor.
        ShapeError: If inputs, targets and context have different numbers of samples.
    """

    def __init__(
        self,
        model: ConstrainedModel,
        train: Any,
        validation: Any,
        schedule: Schedule,
        seed: int,
        judge: Method | None = None,
    ) -> None:
        super().__init__()
        self.model, self.schedule, self.seed = model, schedule, seed
        own = callable(model.method.score)
        self.data = {TRAIN: as_dataset(train, not own), VALIDATION: as_dataset(validation, not own)}
        self.free = model
        self.judge = model if judge is None else type(model)(model.backbone, model.constraint_fn, judge)
        self.warm_up = max(schedule.warm_up, model.method.warm_up)
        if self.warm_up:  # of the same class, which may override the loss
            score = model.method.score if own or model.method.score == "nll" else "crps"
            scored = {name: getattr(model.method, name) for name in ("functionals", "functional_weight")}
            warm = METHODS["base"].replace(score=score, penalty=model.method.warm_penalty, **scored)
            self.free = type(model)(model.backbone, model.constraint_fn, warm)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The weights of the model, each of them once; arguments as of ``nn.Module.state_dict``."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the weights of the model; arguments as of ``nn.Module.load_state_dict``."""
        return self.model.load_state_dict(*args, **kwargs)

    def settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share with the run before, as plain values."""
        schedule = {name: value for name, value in vars(self.schedule).items() if name not in ("epochs", "patience")}
        samples = [len(data) for data in self.data.values()]  # type: ignore[arg-type]
        judge = {} if self.judge is self.model else {"judge": self.judge.method.record()}
        method = {"method": self.model.method.record(), **judge}
        return {**method, "seed": self.seed, **schedule, "number of samples": samples}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam; fused unless there are complex weights, which the fused one does not support."""
        weights, schedule = list(self.model.parameters()), self.schedule
        fused = all(weight.is_floating_point() for weight in weights)
        return torch.optim.Adam(weights, lr=schedule.lr, weight_decay=schedule.weight_decay, fused=fused)

    def train_dataloader(self) -> DataLoader:
        """Training batches, shuffled by seed and epoch."""
        return self._loader(TRAIN, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Validation batches, in order."""
        return self._loader(VALIDATION, shuffle=False)

    def on_train_epoch_start(self) -> None:
        """Set the seed and the learning rate from the epoch alone, so that resumed runs repeat them."""
        torch.manual_seed(((self.seed * 100_003 + self.current_epoch) * 1_009 + self.global_rank) % 2**63)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.schedule.rate(self.current_epoch)

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss of a batch, times the number of processes, over which gradients are averaged."""
        warming = self.current_epoch < self.warm_up
        loss = (self.free if warming else self.model).loss(batch)
        self._log(TRAIN, loss, batch)
        return loss * self.trainer.world_size

    def validation_step(self, batch: Any, index: int) -> None:
        """Log the validation score, which selects the best epoch."""
        self._log(VALIDATION, self.judge.loss(batch), batch)

    def _log(self, name: str, loss: Tensor, batch: Any) -> None:
        """Log the loss per point, or per sample if there are no targets."""
        parts = Batch.of(batch)
        count = parts.size if parts.target is None else parts.target.numel()
        figure = loss.detach() / count
        self.log(name, figure, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=parts.size)

    def _loader(self, name: str, shuffle: bool) -> DataLoader:
        data, world = self.data[name], self.trainer.world_size
        if self.schedule.batch_size % world:
            raise ParameterError(
                f"The batch size {self.schedule.batch_size} is not a multiple of {world} processes.",
                "Every process takes an equal share of each batch.",
                "Choose another batch size or number of devices.",
            )
        sampler: DistributedSampler = DistributedSampler(data, world, self.global_rank, shuffle, self.seed)
        share = self.schedule.batch_size // world
        own = torch.Generator()  # without one, iterators draw from the global generator
        return DataLoader(data, share, sampler=sampler, collate_fn=collate_for(data), generator=own)
