"""Operators whose last layer solves the equation: PDE-CL (Negiar et al., 2023), with experts (Chalapathi et al., 2024).

A network gives K basis functions b_k on the grid. Their weights are not learned: they solve the equation in least
squares at some of its rows, for every field anew, and training lowers the residual at the other rows:

    u = sum_k w_k b_k,  w = argmin sum over fitted rows of residual(u)^2,  loss = sum over other rows of residual(u)^2.

With experts, every region of the grid has weights of its own, fitted to the rows that lie in it. Rows are those of a
constraint, so the equation is written once. Nothing makes the residual exactly 0: that is a matter of the basis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from probhard.constraints.base import Constraint
from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale
from probhard.model import Batch
from probhard.pde.heads import FLOOR, OWN
from probhard.pde.operators import HEAD, VarianceNO, pointwise
from probhard.solvers.least_squares import implicit, least_squares

RIDGE = 1e-8  # keeps weights of nearly equal basis functions small


class BasisNO(VarianceNO):
    """A Fourier neural operator that combines basis functions by the equation; returns points, or a law.

    Args:
        equations: Maps inputs (batch, channels, *grid) to the equalities of their flattened fields, q rows.
        basis: Number K of basis functions.
        linear: Whether the rows are affine in the field: closed form then, else Levenberg-Marquardt.
        fitted: Rows that the weights are fitted to, (q,) bool; None for all.
        regions: Expert of every grid point, (n,) integers from 0 on; None for one expert.
        places: Grid point of every row, (q,) integers; needed with regions.
        spread: Return a law with a learned variance at every point; else points.
        ridge: Weight of ``|w|^2 / 2`` in the least squares.
        options: ``channels``, ``modes``, ``width``, ``layers``, ``padding`` and ``dropout`` of ``VarianceNO``.

    Raises:
        ParameterError: If a number is out of range, or there are regions without places.
    """

    experts: Tensor

    def __init__(
        self,
        equations: Callable[[Tensor], Constraint],
        basis: int = 32,
        linear: bool = True,
        fitted: Tensor | None = None,
        regions: Tensor | None = None,
        places: Tensor | None = None,
        spread: bool = False,
        ridge: float = RIDGE,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if basis < 1 or ridge < 0 or (regions is not None and places is None):
            raise ParameterError(
                f"Got basis={basis}, ridge={ridge} and regions {'without' if places is None else 'with'} places.",
                "The weights of at least one function are fitted, per region to the rows that lie in it.",
                "Pass basis >= 1, ridge >= 0, and the grid point of every row.",
            )
        self.equations, self.linear, self.ridge = equations, linear, ridge
        self.head = nn.Linear(HEAD, basis)
        self.spread = nn.Linear(HEAD, 1) if spread else None
        self.fitted = None if fitted is None else fitted.clone()
        self.regions = None if regions is None else regions.clone()
        self.places = None if places is None else places.clone()

    def forward(self, inputs: Tensor) -> Tensor | LocationScale:  # type: ignore[override]
        """Fields (batch, n), or their law, for inputs (batch, channels, *grid)."""
        self._check(inputs)
        features = self.features(inputs)
        field, _ = self.combined(inputs, pointwise(self.head, features).flatten(2).mT)
        if self.spread is None:
            return field
        # As in VarianceNO with a joint law, the spread reads the features that the mean learns.
        raw = pointwise(self.spread, features.detach()).flatten(1)
        return LocationScale(field, Diagonal(softplus(raw + OWN) + FLOOR), validate_args=False)

    def combined(self, inputs: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Combine basis functions.

        Args:
            inputs: (batch, channels, *grid).
            basis: Values of the functions, (batch, n, K).

        Returns:
            Fields (batch, n) and weights (experts, batch, K), in the dtype of the basis and in float64.

        Raises:
            ShapeError: If rows, places or regions do not fit.
        """
        exact = basis.double()
        rows = self.equations(inputs.double())
        mask = self._rows(rows.residual(exact.detach()[..., 0]).shape[-1], exact.shape[1])

        def residual(w: Tensor) -> Tensor:
            return rows.residual((exact @ w.unsqueeze(-1)).squeeze(-1)) * mask

        start = torch.zeros(len(mask), len(basis), basis.shape[-1], dtype=torch.float64, device=basis.device)
        found = least_squares(residual, start, self.ridge, self.linear)
        weights = implicit(residual, found.value, self.ridge, self.linear)
        fields = (exact @ weights.unsqueeze(-1)).squeeze(-1)  # (experts, batch, n)
        if self.regions is None:
            return fields[0].to(basis.dtype), weights
        chosen = self.regions.to(fields.device).expand(1, *fields.shape[1:])
        return fields.gather(0, chosen)[0].to(basis.dtype), weights

    def residual_score(self) -> Callable[[Any, Batch], Tensor]:
        """The training loss as a score of ``ConstrainedModel``: squared residuals of the rows that are not fitted.

        Returns:
            A function of points or a law and the batch, which needs no target; of all rows if all are fitted.
        """

        def score(prediction: Any, batch: Batch) -> Tensor:
            field = prediction if isinstance(prediction, Tensor) else prediction.mean
            rows = self.equations(batch.inputs.double()).residual(field.double())
            other = rows if self.fitted is None else rows[..., ~self.fitted]
            return other.square().sum(-1)

        return score

    def _rows(self, count: int, points: int) -> Tensor:
        """Which rows an expert is fitted to, (experts, 1, q)."""
        given = {"fitted": (self.fitted, count), "places": (self.places, count), "regions": (self.regions, points)}
        wrong = [name for name, (value, size) in given.items() if value is not None and value.shape != (size,)]
        if wrong:
            raise ShapeError(
                f"{' and '.join(wrong)} do not fit {count} rows and {points} grid points.",
                "There is one entry per row, and one region per grid point.",
                "Pass tensors of these lengths.",
            )
        fitted = torch.ones(count, dtype=torch.bool) if self.fitted is None else self.fitted
        if self.regions is None or self.places is None:
            return fitted.double()[None, None]
        owner = self.regions[self.places]
        return torch.stack([fitted & (owner == e) for e in range(int(self.regions.max()) + 1)]).double().unsqueeze(1)


def blocks(shape: Sequence[int], parts: Sequence[int]) -> Tensor:
    """Split a grid into equal boxes, the regions of experts.

    Args:
        shape: Points per axis.
        parts: Boxes per axis.

    Returns:
        The number of the box of every point, (n,), first axis slowest.
    """
    axes = [torch.arange(n) * p // n for n, p in zip(shape, parts)]
    label = torch.zeros((), dtype=torch.long)
    for axis, count in zip(axes, parts):
        label = label.unsqueeze(-1) * count + axis
    return label.flatten()
