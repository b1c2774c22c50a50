"""The result of a reconciliation: means, draws and quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtri

from probhard.constraints import Constraint
from probhard.errors import ParameterError


@dataclass(frozen=True, eq=False)
class Reconciled:
    """Reconciled forecasts of n series over H steps; points that could not be made feasible are NaN.

    Args:
        mean: Means, (H, n).
        draws: Draws, (S, H, n); None if there were only means.
        spread: Standard deviations, (H, n), if the marginals are exactly normal.
        before: Draws before the projection, (S, H, n).
        constraints: Groups of steps, (k,), each with the constraint that they obey.
        reasons: Why a step has infeasible points, by step.
    """

    mean: np.ndarray
    draws: np.ndarray | None = None
    spread: np.ndarray | None = None
    before: np.ndarray | None = None
    constraints: list[tuple[np.ndarray, Constraint]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, shape: tuple[int, int], before: np.ndarray | None, exact: bool) -> Reconciled:
        """Allocate a result filled with NaN.

        Args:
            shape: Steps and series, (H, n).
            before: Draws before the projection, (S, H, n).
            exact: Whether standard deviations will be known.
        """
        draws = None if before is None else np.full_like(before, np.nan)
        return cls(np.full(shape, np.nan), draws, np.full(shape, np.nan) if exact else None, before)

    def explain(self) -> None:
        """Add a reason for every step with infeasible points that has none yet."""
        mean_lost = np.isnan(self.mean).any(1)
        lost = np.zeros_like(mean_lost, dtype=np.int64) if self.draws is None else np.isnan(self.draws[..., 0]).sum(0)
        for step in np.flatnonzero(mean_lost | (lost > 0)):
            also = " and the mean" if mean_lost[step] else ""
            self.reasons.setdefault(int(step), f"{lost[step]} draws{also} could not be made feasible.")

    def quantiles(self, probabilities: Sequence[float]) -> np.ndarray:
        """Compute quantiles of each series, in closed form if exact, otherwise from the feasible draws.

        Args:
            probabilities: Q numbers between 0 and 1.

        Returns:
            Quantiles, (Q, H, n).

        Raises:
            ParameterError: If the forecasts are means only.
        """
        if self.draws is None:
            raise ParameterError(
                "Quantiles were requested of forecasts that are means alone.",
                "Means carry no uncertainty.",
                "Add intervals, quantiles or draws to the forecasts, or leave out the levels.",
            )
        if self.spread is not None:
            return self.mean + self.spread * ndtri(np.asarray(probabilities))[:, None, None]
        lost = np.isnan(self.draws[..., 0])  # (S, H)
        if not lost.any():
            return np.quantile(self.draws, probabilities, axis=0)
        quantiles = np.full((len(probabilities), *self.mean.shape), np.nan)
        for step in np.flatnonzero(~lost.all(0)):
            quantiles[:, step] = np.quantile(self.draws[~lost[:, step], step], probabilities, axis=0)
        return quantiles


def mean_of_feasible(draws: np.ndarray) -> np.ndarray:
    """Average the feasible draws of (S, k, n); NaN in (k, n) where no draw is feasible."""
    count = (~np.isnan(draws)).sum(0)
    return np.where(count > 0, np.nansum(draws, 0) / np.maximum(count, 1), np.nan)
