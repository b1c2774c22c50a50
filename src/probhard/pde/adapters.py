"""Neural operators of other libraries as backbones: (batch, channels, *grid) to a law of the flattened field.

| output channels | law                                                                            |
|-----------------|--------------------------------------------------------------------------------|
| two             | mean and r, with variance softplus(r), as in ``VarianceNO``                    |
| 3 + rank        | the same, shared spread and weights of a factor, as in ``VarianceNO(rank)``    |
| one             | mean, with one standard deviation for all points, learned or fixed             |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn

from probhard.errors import MissingExtraError, ParameterError, ShapeError
from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale
from probhard.pde.heads import Head


class OperatorBackbone(nn.Module):
    """A module that maps (batch, channels, *grid) to (batch, 1, 2 or 3 + rank, *grid), as those of neuraloperator.

    ``.double()`` also casts complex weights, unlike torch. The spectral layers of neuraloperator still compute in
    single precision. Saved weights hold tensors only, so they load strictly and safely.

    Args:
        operator: The module: ``FNO``, ``TFNO``, ``UNO``, ...
        stddev: Standard deviation of every point in target units, for operators with one output channel.
        learned: Train ``stddev``; else it is fixed.
        rank: Number of columns of the factor that correlates the points; it takes rank + 1 further output channels.
        variance: The second of two output channels is the variance of the first, not another variable.

    Raises:
        ParameterError: If ``stddev`` is not positive and finite, there are both ``stddev`` and a rank, or nothing says
            what the output channels are.
    """

    def __init__(
        self,
        operator: nn.Module,
        stddev: float | None = None,
        learned: bool = True,
        rank: int = 0,
        variance: bool = False,
    ) -> None:
        super().__init__()
        if not (variance or rank or stddev is not None):
            raise ParameterError(
                "OperatorBackbone got neither variance=True, a stddev nor a rank.",
                "Two output channels could be mean and variance, or two variables.",
                "Pass variance=True if the second channel is a variance. For several variables, use one backbone each.",
            )
        if variance and stddev is not None:
            raise ParameterError(
                f"Got variance=True and stddev={stddev}.", "Only one can be the spread.", "Leave out one of them."
            )
        if rank < 0 or (rank and stddev is not None):
            raise ParameterError(
                f"Got rank={rank} and stddev={stddev}.",
                "A factor needs channels of the operator beside the mean.",
                "Pass a rank from 0 on, and no stddev with a positive one.",
            )
        if stddev is not None and not 0 < stddev < math.inf:
            raise ParameterError(
                f"Got stddev={stddev}.", "A point needs a positive spread.", "Pass the typical size of the errors."
            )
        self.operator, self.stddev, self.rank, self.law = operator, stddev, rank, Head(rank)
        if stddev is not None:
            self.log_stddev = nn.Parameter(torch.tensor(math.log(stddev)), requires_grad=learned)
        self.register_state_dict_post_hook(_tensors_only)

    @classmethod
    def fourier(
        cls,
        channels: int = 3,
        modes: Sequence[int] = (12, 12),
        width: int = 32,
        layers: int = 4,
        rank: int = 0,
        **options: Any,
    ) -> Self:
        """The FNO of neuraloperator with the modes +-K of ``VarianceNO``, which that library counts as 2 K.

        Args:
            channels: Number of input channels.
            modes: K per axis of the grid.
            width: Number of channels inside.
            layers: Number of Fourier layers.
            rank: As for the class.
            **options: Options of ``neuralop.models.FNO``, such as ``domain_padding``.

        Raises:
            MissingExtraError: If neuraloperator is not installed.
        """
        try:
            library = import_module("neuralop.models")
        except ImportError as error:
            raise MissingExtraError("neuraloperator", "operators", "OperatorBackbone.fourier") from error
        sizes = tuple(2 * k for k in modes)
        defaults = {
            "in_channels": channels,
            "out_channels": Head(rank).channels,
            "hidden_channels": width,
            "n_layers": layers,
        }
        return cls(library.FNO(n_modes=sizes, **{**defaults, **options}), rank=rank, variance=True)

    def forward(self, inputs: Tensor) -> LocationScale:
        """Predict the law of flattened fields.

        Args:
            inputs: (batch, channels, *grid).

        Returns:
            The law, batch (batch,), over all grid points.

        Raises:
            ShapeError: If the operator returns another number of channels, or another grid.
        """
        outputs = self.operator(inputs)
        expected = (len(inputs), self.law.channels if self.stddev is None else 1, *inputs.shape[2:])
        if outputs.shape != expected:
            raise ShapeError(
                f"The operator maps {tuple(inputs.shape)} to {tuple(outputs.shape)}.",
                f"With stddev={self.stddev} and rank={self.rank} its output must be {expected}: "
                + ("mean, variance and factor." if self.stddev is None else "the mean."),
                "Build it with out_channels=2 (3 + rank with a rank), or with out_channels=1 and pass stddev.",
            )
        if self.stddev is None:
            return self.law(self.law.moments(outputs))
        mean = outputs[:, 0].flatten(1)
        variance = (2 * self.log_stddev).exp().expand_as(mean)
        return LocationScale(mean, Diagonal(variance), validate_args=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast or move the weights; complex weights are passed as pairs of real numbers."""

        def paired(x: Tensor) -> Tensor:
            return torch.view_as_complex(fn(torch.view_as_real(x))) if x.is_complex() else fn(x)

        return super()._apply(paired, recurse)


def _tensors_only(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Drop entries that are not tensors: neuraloperator adds its constructor's arguments as ``_metadata``."""
    for name in [name for name, value in state_dict.items() if not isinstance(value, Tensor)]:
        del state_dict[name]
