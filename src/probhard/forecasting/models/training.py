"""The training loss of a window and the rollout of its horizon, as a Lightning module.

    loss = sum over steps and series of the score, in data units, over batch x steps x the typical sum over series:
           with the CRPS, an estimate of the pooled CRPS;
    rollout: y_{t+1} ~ projection(law(state, y_t, ...)), and the PROJECTED draw is what the next step sees.

Laws are projected in data units: in the network's own float32 in training, in float64 before a draw.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from tqdm import tqdm

from probhard.constraints.base import Constraint
from probhard.forecasting.models.network import DeepVAR, State, Units
from probhard.forecasting.models.windows import Window
from probhard.laws.distribution import LocationScale
from probhard.method import Method
from probhard.model import Batch, ConstrainedModel

ENTRIES = 2**20  # numbers per step of a rollout that are held at once


class Start(NamedTuple):
    """Where a rollout starts: at the end of the context."""

    values: Tensor  # (1, lags + horizon, n), scaled
    features: Tensor  # (1, horizon, F)
    units: Units
    state: State


class DeepVARModule(pl.LightningModule):
    """A DeepVAR network under a constraint.

    Args:
        network: The network.
        constraint: On the n series of one time step, in data units.
        method: What is done about it in training and in rollouts.
        lr: Learning rate of Adam.
        weight_decay: Of Adam.
    """

    def __init__(
        self, network: DeepVAR, constraint: Constraint, method: Method, lr: float = 1e-3, weight_decay: float = 1e-8
    ) -> None:
        super().__init__()
        self.constraint, self.method, self.lr, self.weight_decay = constraint, method, lr, weight_decay
        # squared residuals have the square of the data's unit: over the typical value they are comparable to the score
        weighted = method.replace(penalty=method.penalty / float(network.typical.mean()))
        self.model = ConstrainedModel(network, constraint, weighted)
        self.projection = ConstrainedModel(nn.Identity(), constraint, method)  # takes laws instead of windows

    @property
    def network(self) -> DeepVAR:
        """The network."""
        return cast(DeepVAR, self.model.backbone)

    def loss(self, window: Window) -> Tensor:
        """The scaled score of a batch of windows, a scalar."""
        target = window.target[:, self.network.layout.longest_lag :]  # (B, steps, n)
        total = self.model.loss(Batch(window, target, ~torch.isnan(target)))
        return total / (self.network.typical.sum() * target.shape[0] * target.shape[1])

    def training_step(self, window: Window, index: int) -> Tensor:
        """Loss of a batch; logged as ``train_loss``."""
        return self._logged("train_loss", window)

    def validation_step(self, window: Window, index: int) -> Tensor:
        """Loss of a batch; logged as ``val_loss``."""
        return self._logged("val_loss", window)

    def _logged(self, name: str, window: Window) -> Tensor:
        loss = self.loss(window)
        self.log(name, loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(window.target))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    @torch.no_grad()
    def forward(self, window: Window, paths: int, generator: torch.Generator | None = None) -> Tensor:
        """Sample paths of the horizon of one window, (paths, horizon, n) in float64."""
        network, layout = self.network, self.network.layout
        values, units = network.scaled(window.target)  # (1, rows, n)
        known = values[:, : layout.past], window.features[:, : layout.context_length]
        _, state = network.recur(network.inputs(*known, units))
        start = Start(values[:, layout.context_length :], window.features[:, layout.context_length :], units, state)
        draws = torch.empty(
            paths, layout.prediction_length, network.variables, dtype=torch.float64, device=values.device
        )
        for chunk in draws.split(max(1, ENTRIES // network.variables)):
            self._fill(chunk, start, generator)
        return draws

    def _fill(self, draws: Tensor, start: Start, generator: torch.Generator | None) -> None:
        """Write paths from the state at the end of the context into ``draws`` (paths, horizon, n)."""
        network, longest, paths = self.network, self.network.layout.longest_lag, len(draws)
        values = start.values.repeat(paths, 1, 1)  # (paths, lags + horizon, n)
        features, *units = (part.expand(paths, -1, -1) for part in (start.features, *start.units))
        state = [(h.repeat(1, paths, 1), c.repeat(1, paths, 1)) for h, c in start.state]
        now = Units(*(part[:, 0] for part in units))
        for step in range(features.shape[1]):
            seen = values[:, step : step + longest + 1]  # its last row, the step itself, is not looked at
            hidden, state = network.recur(network.inputs(seen, features[:, step : step + 1], Units(*units)), state)
            law = double(network.law(hidden[:, 0], now))
            draws[:, step] = self.projection.forecast(law).sample((), generator)
            values[:, longest + step] = ((draws[:, step] - now.centre) / now.scale).to(values)


def double(law: LocationScale) -> LocationScale:
    """The same law in float64, so that its draws add up to rounding of float64."""
    return LocationScale(law.loc.double(), law.cov.to(torch.float64), law.family, validate_args=False)


class ProgressBar(Callback):
    """A progress bar of training, only in a terminal."""

    def __init__(self, label: str) -> None:
        self.label = label

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        steps = trainer.max_epochs * trainer.num_training_batches
        self.bar = tqdm(total=steps, desc=self.label, unit="step", disable=None)

    def on_train_batch_end(self, *args: Any) -> None:
        self.bar.update()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.bar.set_postfix(loss=f"{float(trainer.callback_metrics['train_loss']):.4g}")

    def on_train_end(self, *args: Any) -> None:
        self.bar.close()

    def on_exception(self, *args: Any) -> None:
        if hasattr(self, "bar"):  # else training had not begun
            self.bar.close()
