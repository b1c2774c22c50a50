"""Operators with several heads that are kept apart (DiverseNO; Mouli et al., 2024).

M linear heads w_1 .. w_M read the same last features. Training fits every head and pushes their weights apart:

    loss = sum over fields of 1/M sum_i |u_i - y| / |y|  -  strength * mean over pairs of |w_i - w_j|^2

Where data fix the fields, the heads agree. Elsewhere they differ, and their spread is the forecast's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probhard.ensembles import Mixture, MixtureBackbone
from probhard.errors import ParameterError
from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale
from probhard.model import Batch
from probhard.pde.heads import FLOOR
from probhard.pde.operators import HEAD, VarianceNO


class DiverseNO(MixtureBackbone, VarianceNO):
    """A Fourier neural operator with M linear heads; its forecast is the mixture of their fields.

    With one head it predicts points, as a law without spread: a member of a ``DeepEnsemble`` or of ``MCDropout``.

    Args:
        heads: Number M of heads.
        channels: As of ``VarianceNO``.
        modes: As of ``VarianceNO``.
        width: As of ``VarianceNO``.
        layers: As of ``VarianceNO``.
        padding: As of ``VarianceNO``.
        dropout: As of ``VarianceNO``.

    Raises:
        ParameterError: If a number is out of range.
    """

    steps: Tensor

    def __init__(
        self,
        heads: int = 10,
        channels: int = 3,
        modes: Sequence[int] = (12, 12),
        width: int = 32,
        layers: int = 4,
        padding: int = 9,
        dropout: float = 0.0,
    ) -> None:
        VarianceNO.__init__(self, channels, modes, width, layers, padding, dropout)
        if heads < 1:
            raise ParameterError(f"Got heads={heads}.", "The forecast is the mixture of its heads.", "Pass heads >= 1.")
        self.head = nn.Linear(HEAD, heads, bias=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))  # training steps of ``diverse_score`` so far

    def moments(self, inputs: Tensor) -> Tensor:
        """The field of every head, (batch, heads, *grid), for inputs of ``forward``."""
        features = self.features(inputs)
        return (self.head.weight @ features.flatten(2)).unflatten(-1, features.shape[2:])

    def mixture(self, inputs: Tensor) -> Mixture:
        """The fields of the heads as laws without spread, for inputs (batch, channels, *grid)."""
        self._check(inputs)
        fields = (self.network or self.moments)(inputs).flatten(2)
        none = Diagonal(torch.full_like(fields[:, 0], FLOOR))
        return Mixture(tuple(LocationScale(field, none, validate_args=False) for field in fields.unbind(1)))

    def diversity(self) -> Tensor:
        """The mean of ``|w_i - w_j|^2`` over pairs of heads; 0 for one head."""
        count = self.head.out_features
        centred = self.head.weight - self.head.weight.mean(0)
        return 2 * centred.square().sum() / max(count - 1, 1)

    def diverse_score(self, strength: float = 1.0, warm_up: int = 0) -> Callable[[Any, Batch], Tensor]:
        """The training loss of this operator as a score of ``ConstrainedModel``.

        Args:
            strength: Of the diversity. Validation, in ``eval`` mode, leaves it out.
            warm_up: Number of first training steps without it; they are counted in the buffer ``steps``.

        Returns:
            A function of the law before projection and the batch, for methods without a training step.

        Raises:
            ParameterError: If a number is negative.
        """
        if strength < 0 or warm_up < 0:
            raise ParameterError(
                f"Got strength={strength} and warm_up={warm_up}.",
                "The strength rewards distance between heads, from some training step on.",
                "Pass numbers from 0 on.",
            )

        def score(law: Any, batch: Batch) -> Tensor:
            assert batch.target is not None
            errors = torch.stack([relative_l2(field, batch.target) for field in self._fields(law)]).mean(0)
            if not self.training:
                return errors
            self.steps += 1
            if self.steps <= warm_up or not strength:
                return errors
            return errors - strength * self.diversity() / len(errors)

        return score

    def _fields(self, law: Any) -> list[Tensor]:
        """The fields of the heads, from the factor of their matched law."""
        count = self.head.out_features
        if not isinstance(law, LocationScale):
            raise ParameterError(
                f"The score of DiverseNO got a {type(law).__name__}.",
                "It scores every head before any projection.",
                "Train with a method whose training step projects nothing, such as 'probhard-inf'.",
            )
        if count == 1:
            return [law.mean]
        return [law.mean + count**0.5 * column for column in law.cov.factor.unbind(-1)]  # type: ignore[attr-defined]


def relative_l2(u: Tensor, y: Tensor) -> Tensor:
    """``|u - y| / |y|`` of every field.

    Args:
        u: Predicted fields, (*batch, n).
        y: Exact fields, (*batch, n), not 0.

    Returns:
        (*batch,).
    """
    return (u - y).norm(dim=-1) / y.norm(dim=-1)
