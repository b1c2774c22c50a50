"""Base forecasts of any model, not coherent: means, and normal laws, quantiles or draws.

Quantiles ``q_p`` define the law of

    X = q(Z),      Z ~ N(0, 1),      q linear between the points (Phi^-1(p), q_p), extrapolated at both ends,

which is normal if the quantiles are. Series are independent unless there are draws. Without a median, the mean is used
as the median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import ndtr, ndtri

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError
from probhard.forecasting.data.table import summed

STRAIGHT = 1e-3  # deviation from normal quantiles, relative to the spread, up to which a law counts as normal


@dataclass(frozen=True, eq=False)
class Forecasts:
    """Forecasts of n series over H steps, not coherent.

    Args:
        mean: Means, (H, n); None takes the mean of the reconciled draws.
        stddev: Standard deviations of independent normal laws, (H, n).
        draws: Joint draws, (S, H, n); with another law, they are draws of it.
        quantiles: Normal scores of the probabilities, ascending, (Q,), and the quantiles, (Q, H, n).
        summing: Whether the draws add up; the normal laws are then those of sums, not independent.

    Raises:
        ProbhardError: If shapes differ, a number is NaN or infinite, or a standard deviation is negative.
    """

    mean: np.ndarray | None = None
    stddev: np.ndarray | None = None
    draws: np.ndarray | None = None
    quantiles: tuple[np.ndarray, np.ndarray] | None = None
    summing: bool = False

    def __post_init__(self) -> None:
        for name in ("mean", "stddev", "draws"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, np.asarray(values, dtype=np.float64))
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
        noise = torch.randn(samples, *self.shape, dtype=torch.float64, generator=generator).numpy()
        if self.quantiles is None:
            assert self.mean is not None
            return self.mean + self.stddev * noise
        scores, values = self.quantiles
        segment = np.clip(np.searchsorted(scores, noise) - 1, 0, len(scores) - 2)  # (S, H, n)
        left, right = (np.take_along_axis(values, segment + i, 0) for i in (0, 1))
        return left + (noise - scores[segment]) / (scores[segment + 1] - scores[segment]) * (right - left)

    def summed(self, hierarchy: Hierarchy, samples: int = 1000, seed: int = 0) -> Forecasts:
        """Sum forecasts of the m bottom series to forecasts of all n series.

        Args:
            hierarchy: The sums.
            samples: Draws of the sums, unless there are draws or only means.
            seed: Seed of the draws.
        """
        mean, stddev = None if self.mean is None else summed(hierarchy, self.mean), None
        if self.certain:
            return Forecasts(mean)
        draws = summed(hierarchy, self.drawn(samples, torch.Generator().manual_seed(seed)))
        if self.stddev is not None and self.draws is None:
            squares = hierarchy.summation.power(2)
            stddev = np.sqrt((squares @ np.square(self.stddev).T).T)
        return Forecasts(mean, stddev, draws, summing=True)


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
