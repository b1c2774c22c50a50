"""The training loss of a window and the rollout of its horizon, as a Lightning module.

    loss:     sum of the score over steps and series, divided by batch x steps x the typical sum over series;
              with the CRPS, an estimate of the pooled CRPS;
    rollout:  y_{t+1} ~ projection(law(state, y_t, ...)); the next step sees the PROJECTED draw.

Laws are projected in data units: in float32 in training, in float64 before a draw.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from tqdm import tqdm

from probhard.constraints.base import Constraint
from probhard.forecasting.models.heads import Law, Units
from probhard.forecasting.models.network import DeepVAR, State
from probhard.forecasting.models.windows import Window
from probhard.laws.distribution import LocationScale
from probhard.laws.poisson_mixture import PoissonMixture
from probhard.method import Method
from probhard.model import Batch, ConstrainedModel

ENTRIES = 2**20  # numbers per step of a rollout, to bound the memory


class Start(NamedTuple):
    """State of a rollout at the end of the context."""

    values: Tensor  # (1, lags + horizon, n), scaled
    features: Tensor  # (1, horizon, F)
    units: Units
    state: State


class DeepVARModule(pl.LightningModule):
    """A DeepVAR network under a constraint.

    Args:
        network: The network of n series.
        constraint: Constraint on the n series of one time step, in data units.
        method: How the constraint is applied in training and in rollouts.
        lr: Learning rate of Adam.
        weight_decay: Weight decay of Adam.
    """

    def __init__(
        self, network: DeepVAR, constraint: Constraint, method: Method, lr: float = 1e-3, weight_decay: float = 1e-8
    ) -> None:
        super().__init__()
        self.constraint, self.method, self.lr, self.weight_decay = constraint, method, lr, weight_decay
        # squared residuals have the squared unit of the data; divided by the typical value they match the score's
        weighted = method.replace(penalty=method.penalty / float(network.typical.mean()))
        self.model = ConstrainedModel(network, constraint, weighted)
        self.projection = ConstrainedModel(nn.Identity(), constraint, method)  # maps laws, not windows

    @property
    def network(self) -> DeepVAR:
        """The DeepVAR network."""
        return cast(DeepVAR, self.model.backbone)

    def loss(self, window: Window) -> Tensor:
        """Return the scaled score of a batch of windows, a scalar."""
        target = window.target[:, self.network.layout.longest_lag :]  # (B, steps, n)
        total = self.model.loss(Batch(window, target, ~torch.isnan(target)))
        return total / (self.network.typical.sum() * target.shape[0] * target.shape[1])

    def training_step(self, window: Window, index: int) -> Tensor:
        """Return the loss of a batch, logged as ``train_loss``."""
        return self._logged("train_loss", window)

    def validation_step(self, window: Window, index: int) -> Tensor:
        """Return the loss of a batch, logged as ``val_loss``."""
        return self._logged("val_loss", window)

    def _logged(self, name: str, window: Window) -> Tensor:
        loss = self.loss(window)
        self.log(name, loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(window.target))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    @torch.no_grad()
    def forward(self, window: Window, paths: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw sample paths of the horizon of one window.

        Args:
            window: A batch of one window.
            paths: Number of paths S.
            generator: Source of the noise.

        Returns:
            Paths, (S, horizon, n), in float64.
        """
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
        """Roll out paths into ``draws``, (paths, horizon, n)."""
        network, longest, paths = self.network, self.network.layout.longest_lag, len(draws)
        values = start.values.repeat(paths, 1, 1)  # (paths, lags + horizon, n)
        features, *units = (tensor.expand(paths, -1, -1) for tensor in (start.features, *start.units))
        state = [(h.repeat(1, paths, 1), c.repeat(1, paths, 1)) for h, c in start.state]
        now = Units(*(unit[:, 0] for unit in units))
        for step in range(features.shape[1]):
            seen = values[:, step : step + longest + 1]  # the last row, the step itself, is not used
            hidden, state = network.recur(network.inputs(seen, features[:, step : step + 1], Units(*units)), state)
            law = double(network.law(hidden[:, 0], now))
            draws[:, step] = self.projection.forecast(law).sample((), generator)
            values[:, longest + step] = ((draws[:, step] - now.centre) / now.scale).to(values)


def double(law: Law) -> Law:
    """Convert a law to float64, so that its projected draws add up to float64 rounding."""
    if isinstance(law, PoissonMixture):
        return law.to(torch.float64)
    return LocationScale(law.loc.double(), law.cov.to(torch.float64), law.family, validate_args=False)


class ProgressBar(Callback):
    """A progress bar of training, shown in a terminal only.

    Args:
        label: Text before the bar.
    """

    def __init__(self, label: str) -> None:
        self.label = label

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the bar."""
        steps = trainer.max_epochs * trainer.num_training_batches
        self.bar = tqdm(total=steps, desc=self.label, unit="step", disable=None)

    def on_train_batch_end(self, *args: Any) -> None:
        """Advance the bar by one step."""
        self.bar.update()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Show the loss of the epoch."""
        self.bar.set_postfix(loss=f"{float(trainer.callback_metrics['train_loss']):.4g}")

    def on_train_end(self, *args: Any) -> None:
        """Close the bar."""
        self.bar.close()

    def on_exception(self, *args: Any) -> None:
        """Close the bar if it is open."""
        if hasattr(self, "bar"):  # otherwise training had not begun
            self.bar.close()
