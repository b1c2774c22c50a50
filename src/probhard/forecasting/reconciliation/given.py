"""Base forecasts of any model, not coherent: means, and normal laws, quantiles or draws.

Quantiles ``q_p`` define the law of

    X = q(Z),      Z ~ N(0, 1),      q linear between the points (Phi^-1(p), q_p), extrapolated at both ends,

which is normal if the quantiles are. Without a median, the mean is used as the median. Z is correlated across series
and steps as ``dependence`` describes; joint draws have their own dependence.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy.special import ndtr, ndtri

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.forecasting.data.table import summed
from probhard.forecasting.reconciliation.dependence import COVARIANCES, along_hierarchy
from probhard.forecasting.reconciliation.joint_law import error_correlation, floored, implied_rho, path_noise
from probhard.laws import Diagonal, LowRank
from probhard.laws.correlation import FEWEST
from probhard.laws.factored import Factored
from probhard.rows.maps import SparseMap

UNKNOWN_DEPENDENCE = (
    "Forecasts of bottom series alone do not say how series depend on each other; intervals of their sums take them "
    "as independent and are too narrow if they move together. Add forecasts of aggregates or a history, or choose "
    "covariance='independent'."
)
STRAIGHT = 1e-3  # deviation from normal quantiles, relative to the spread, up to which a law counts as normal


@dataclass(frozen=True, eq=False)
class Forecasts:
    """Forecasts of n series over H steps, not coherent.

    Args:
        mean: Means, (H, n); None takes the mean of the reconciled draws.
        stddev: Standard deviations of normal laws, (H, n).
        draws: Joint draws, (S, H, n); with another law, they are draws of it.
        quantiles: Normal scores of the probabilities, ascending, (Q,), and the quantiles, (Q, H, n).
        summing: Whether the draws add up; the normal laws are then those of sums.
        errors: Past one-step errors of the series, (T, n); NaN where missing.
        correlation: Correlation C of the normal scores, (n,); None for independent series.
        rho: Correlation of two successive steps.
        covariance: How C was found, once ``dependent`` has set it.

    Raises:
        ProbhardError: If shapes differ, a number is NaN or infinite, or a standard deviation is negative.
    """

    mean: np.ndarray | None = None
    stddev: np.ndarray | None = None
    draws: np.ndarray | None = None
    quantiles: tuple[np.ndarray, np.ndarray] | None = None
    summing: bool = False
    errors: np.ndarray | None = None
    correlation: Factored | None = None
    rho: float = 0.0
    covariance: str | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "stddev", "draws"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, np.require(values, np.float64, "W"))  # torch shares it
        arrays = {"mean": self.mean, "stddev": self.stddev, "draws": self.draws}
        shapes = {name: np.shape(array)[-2:] for name, array in arrays.items() if array is not None}
        if self.quantiles is not None:
            shapes["quantiles"] = self.quantiles[1].shape[-2:]
        if len(set(shapes.values())) > 1 or any(len(shape) < 2 for shape in shapes.values()):
            raise ShapeError(
                f"The forecasts have the shapes {', '.join(f'{name} {shape}' for name, shape in shapes.items())}.",
                "Each has H steps and n series.",
                "Pass (H, n), and draws (S, H, n).",
            )
        for name, array in {**arrays, "quantiles": self.quantiles and self.quantiles[1]}.items():
            if array is None:
                continue
            bad = ~np.isfinite(array) | ((array < 0) if name == "stddev" else False)
            if bad.any():
                step, series = np.argwhere(bad)[0][-2:]
                raise ParameterError(
                    f"{bad.sum()} numbers of the forecasts' {name} are NaN, infinite or, of spreads, negative; the "
                    f"first is at step {step} of series {series}.",
                    "Such points have no projection.",
                    "Fill in the missing forecasts.",
                )
        if self.errors is not None:
            object.__setattr__(self, "errors", self._checked_errors(np.require(self.errors, np.float64, "W")))

    def _checked_errors(self, errors: np.ndarray) -> np.ndarray:
        """Raise unless errors (T, n) are those of the series."""
        if errors.ndim != 2 or errors.shape[1] != self.shape[1]:
            raise ShapeError(
                f"The errors have shape {errors.shape}, there are forecasts of {self.shape[1]} series.",
                "They are past errors of the same series.",
                f"Pass (T, {self.shape[1]}), NaN where missing.",
            )
        return errors

    @classmethod
    def of_quantiles(
        cls,
        probabilities: Sequence[float],  # (Q,), each between 0 and 1
        values: np.ndarray,  # (Q, H, n)
        mean: np.ndarray | None = None,  # (H, n)
    ) -> Forecasts:
        """Build from quantiles; crossing quantiles are sorted.

        Args:
            probabilities: Distinct numbers between 0 and 1, (Q,).
            values: Quantiles, (Q, H, n).
            mean: Means, (H, n).

        Raises:
            ProbhardError: If probabilities repeat or do not fit the values, or as for ``Forecasts``.
        """
        known, values = np.asarray(probabilities, dtype=np.float64), np.asarray(values, dtype=np.float64)
        if len(known) != len(values) or len(set(known)) != len(known) or not ((known > 0) & (known < 1)).all():
            raise ParameterError(
                f"There are {len(values)} quantiles of the probabilities {known.tolist()}.",
                "Each quantile has one probability between 0 and 1.",
                "Pass every probability once, such as 0.1, 0.5 and 0.9.",
            )
        if mean is not None and not np.isclose(known, 0.5).any():
            known, values = np.append(known, 0.5), np.concatenate([values, mean[None]])
        if len(known) < 2:
            return cls(mean=values[0] if mean is None else mean)
        order = np.argsort(known)
        scores, values = ndtri(known[order]), np.sort(values[order], axis=0)
        line = np.linalg.pinv(np.stack([np.ones_like(scores), scores], -1)) @ values.reshape(len(scores), -1)
        centre, spread = line.reshape(2, *values.shape[1:])
        fitted = centre + spread * scores[:, None, None]
        middle = centre if mean is None else mean
        near = STRAIGHT * spread + 1e-12 * np.abs(values)
        if (np.abs(fitted - values) <= near).all() and (np.abs(middle - centre) <= near).all():
            return cls(middle, np.maximum(spread, 0.0))
        return cls(mean, quantiles=(scores, values))

    @property
    def shape(self) -> tuple[int, int]:
        """Steps and series, (H, n); ParameterError if there are no forecasts."""
        arrays = [x for x in (self.mean, self.draws, self.quantiles and self.quantiles[1]) if x is not None]
        if not arrays:
            raise ParameterError("There are no forecasts.", "Nothing can be reconciled.", "Pass means or draws.")
        return arrays[0].shape[-2], arrays[0].shape[-1]

    @property
    def certain(self) -> bool:
        """Whether there are only means."""
        return self.stddev is None and self.draws is None and self.quantiles is None

    def at(self, steps: np.ndarray) -> Forecasts:
        """Return the forecasts of some steps, (k,)."""
        mean, stddev = (None if x is None else x[steps] for x in (self.mean, self.stddev))
        quantiles = None if self.quantiles is None else (self.quantiles[0], self.quantiles[1][:, steps])
        draws = None if self.draws is None else self.draws[:, steps]
        return replace(self, mean=mean, stddev=stddev, draws=draws, quantiles=quantiles)

    @property
    def spread(self) -> np.ndarray | None:
        """Standard deviations, (H, n): of the normal laws, the quantiles or the draws; None if unknown."""
        if self.stddev is not None:
            return self.stddev
        if self.quantiles is not None:
            return _spread_of(*self.quantiles)
        return None if self.draws is None or len(self.draws) < 2 else self.draws.std(0, ddof=1)

    def drawn(self, samples: int, generator: torch.Generator) -> np.ndarray:
        """Return the draws, or new ones if there are none.

        Args:
            samples: Number of new draws S.
            generator: Source of their noise.

        Returns:
            Draws, (S, H, n).
        """
        if self.draws is not None:
            return self.draws
        noise = path_noise((samples, *self.shape), self.correlation, self.rho, generator).numpy()
        if self.quantiles is None:
            assert self.mean is not None
            return self.mean + self.stddev * noise
        scores, values = self.quantiles
        segment = np.clip(np.searchsorted(scores, noise) - 1, 0, len(scores) - 2)  # (S, H, n)
        left, right = (np.take_along_axis(values, segment + i, 0) for i in (0, 1))
        return left + (noise - scores[segment]) / (scores[segment + 1] - scores[segment]) * (right - left)

    def scaled(self, factor: float) -> Forecasts:
        """Multiply all deviations from the mean (of quantiles: from the median) by a factor."""
        stddev = None if self.stddev is None else factor * self.stddev
        draws = None if self.draws is None else self.draws.mean(0) + factor * (self.draws - self.draws.mean(0))
        quantiles = self.quantiles
        if quantiles is not None:
            scores, values = quantiles
            at = int(np.clip(np.searchsorted(scores, 0.0) - 1, 0, len(scores) - 2))
            share = -scores[at] / (scores[at + 1] - scores[at])
            median = (1 - share) * values[at] + share * values[at + 1]
            quantiles = scores, median + factor * (values - median)
        return replace(self, stddev=stddev, draws=draws, quantiles=quantiles)

    @cached_property
    def error_correlation(self) -> LowRank | None:
        """The shrunk correlation of the errors, (n,); None if there are too few."""
        if self.errors is None or len(self.errors) < FEWEST:
            return None
        return error_correlation(torch.from_numpy(self.errors))

    def dependent(self, covariance: str, hierarchy: Hierarchy) -> Forecasts:
        """Set the dependence of series and steps.

        Args:
            covariance: One of ``dependence.COVARIANCES``.
            hierarchy: The sums.

        Raises:
            ParameterError: If the covariance is unknown, or there are no errors to take it from.
        """
        check_choice("covariance", covariance, COVARIANCES)
        if self.certain or self.draws is not None or self.covariance is not None:
            return self
        mean = np.zeros(self.shape) if self.mean is None else self.mean
        spread = floored(torch.from_numpy(mean), torch.from_numpy(self.spread))
        correlation: Factored | None = None
        if covariance == "errors":
            if (correlation := self.error_correlation) is None:
                raise ParameterError(
                    "The covariance of errors was asked for, and there are no past errors.",
                    f"Correlations are estimated from at least {FEWEST} of them.",
                    "Pass a history with fitted values, or another covariance.",
                )
        elif covariance == "hierarchy":
            correlation = along_hierarchy(spread.numpy(), hierarchy)
        known = None if self.errors is None else torch.from_numpy(self.errors)
        rho = 0.0 if covariance == "independent" else implied_rho(spread, known)
        return replace(self, correlation=correlation, rho=rho, covariance=covariance)

    def summed(
        self, hierarchy: Hierarchy, samples: int = 1000, seed: int = 0, covariance: str | None = None
    ) -> Forecasts:
        """Sum forecasts of the m bottom series to forecasts of all n series.

        Args:
            hierarchy: The sums.
            samples: Draws of the sums, unless there are draws or only means.
            seed: Seed of the draws.
            covariance: ``"errors"`` or ``"independent"``; by default that of errors, and independent, with a warning,
                where there are none.
        """
        mean, stddev = None if self.mean is None else summed(hierarchy, self.mean), None
        if self.certain:
            return Forecasts(mean)
        base = self._joint_bottoms(hierarchy, covariance)
        draws = summed(hierarchy, base.drawn(samples, torch.Generator().manual_seed(seed)))
        if base.stddev is not None and base.draws is None:
            scale = torch.from_numpy(base.stddev)
            law = Diagonal.from_stddev(scale) if base.correlation is None else base.correlation.scaled(scale)
            stddev = law.functional_variance(SparseMap(hierarchy.summation)).sqrt().numpy()
        return Forecasts(mean, stddev, draws, summing=True, covariance=base.covariance)

    def _joint_bottoms(self, hierarchy: Hierarchy, covariance: str | None) -> Forecasts:
        """Forecasts of bottom series with a dependence; warns where it is taken to be none."""
        if self.draws is not None:
            return self
        if covariance is None:
            covariance = "independent" if self.error_correlation is None else "errors"
            if covariance == "independent":
                warnings.warn(UNKNOWN_DEPENDENCE, UserWarning, stacklevel=4)
        if covariance == "hierarchy":
            raise ParameterError(
                "The covariance along the hierarchy was asked for, and there are forecasts of bottom series alone.",
                "It is fitted to the spreads of aggregates.",
                "Add forecasts of aggregates, or past errors, or choose covariance='independent'.",
            )
        return self.dependent(covariance, hierarchy)


def _spread_of(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Compute the standard deviation of q(Z), (H, n), from the moments of Z on each linear segment of q."""
    edges = np.array([-np.inf, *scores[1:-1], np.inf])
    slopes = np.diff(values, axis=0) / np.diff(scores)[:, None, None]  # (Q - 1, H, n)
    levels = values[:-1] - slopes * scores[:-1, None, None]
    density = np.exp(-np.square(edges) / 2) / np.sqrt(2 * np.pi)
    weighted = np.where(np.isfinite(edges), edges, 0.0) * density
    mass, first = np.diff(ndtr(edges)), -np.diff(density)
    second = mass - np.diff(weighted)
    shift = values.mean(0)  # avoids cancellation where values are far from 0
    m, f, s = (moment[:, None, None] for moment in (mass, first, second))
    a, b = levels - shift, slopes
    mean = (a * m + b * f).sum(0)
    square = (a**2 * m + 2 * a * b * f + b**2 * s).sum(0)
    return np.sqrt(np.maximum(square - mean**2, 0.0))
