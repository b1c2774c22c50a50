"""Laws stored as arrays on a grid.

The arrays of a file say which law the fields have:

    mean with stddev or variance     normal in every cell
    lower, upper, level              normal band: stddev = (upper - lower) / (2 Phi^-1((1 + level) / 2))
    draws (S, *batch, *grid)         empirical
    mean alone                       points

A trained run adds two things that no file has: factors that correlate the cells of a field, and a calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from probhard.errors import ParameterError, ShapeError
from probhard.io.cells import Cells
from probhard.laws.calibration import Calibration
from probhard.laws.covariance import Diagonal, LowRank
from probhard.laws.distribution import LocationScale
from probhard.laws.family import NORMAL

LEVEL = 0.9  # probability of the bands, unless the input has one


@dataclass(frozen=True, eq=False)
class StoredLaw:
    """The law of fields, as their file gives it.

    Args:
        mean: Means, (*batch, *grid).
        stddev: Standard deviations that broadcast with the means, or None.
        draws: Draws, (S, *batch, *grid), or None.
        level: Probability of the bands.
        factor: What the cells of a field share, (rank, *batch, *grid): its squares are part of the variance; or None.
        calibration: Corrects the law before it is projected; or None.
    """

    mean: np.ndarray
    stddev: np.ndarray | None = None
    draws: np.ndarray | None = None
    level: float = LEVEL
    factor: np.ndarray | None = None
    calibration: Calibration | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> StoredLaw:
        """Read the law from arrays by name: draws take precedence, then stddev or variance, then bands.

        Raises:
            ShapeError: The draws are empty or have no dimension of their own, or the ends of bands do not fit.
            ParameterError: There is neither mean, band nor draws, the level is not a probability, a band is crossed, or
                standard deviations and variances contradict each other.
        """
        level, band = _level(arrays), "lower" in arrays and "upper" in arrays
        if "draws" in arrays:
            draws = arrays["draws"]
            if draws.ndim < 2 or not draws.size:
                raise ShapeError(
                    f"The draws have shape {draws.shape}.",
                    "Draws lead, at least one: (S, *batch, *grid).",
                    "Add a first dimension, or leave out the empty array.",
                )
            return cls(draws.mean(0), draws.std(0, ddof=1) if len(draws) > 1 else None, draws, level)
        if "mean" not in arrays and not band:
            raise ParameterError(
                f"The file has the arrays {', '.join(sorted(arrays)) or '(none)'}.",
                "Nothing among them says what to project.",
                "Save 'mean' (with 'stddev' or 'variance'), 'lower', 'upper' and 'level', or 'draws' with draws first.",
            )
        if band:
            _check_band(arrays["lower"], arrays["upper"])
        mean = arrays["mean"] if "mean" in arrays else (arrays["lower"] + arrays["upper"]) / 2
        if "stddev" in arrays:
            if "variance" in arrays:
                _check_same(arrays["stddev"], arrays["variance"])
            return cls(mean, arrays["stddev"], None, level)
        if "variance" in arrays:
            with np.errstate(invalid="ignore"):  # negative ones become NaN, which check() rejects
                return cls(mean, np.sqrt(arrays["variance"]), None, level)
        spread = (arrays["upper"] - arrays["lower"]) / (2 * _quantile(level)) if band else None
        return cls(mean, spread, None, level)

    @property
    def spread(self) -> np.ndarray:
        """Standard deviations, (*batch, *grid); 0 for a single draw."""
        return np.zeros_like(self.mean) if self.stddev is None else np.broadcast_to(self.stddev, self.mean.shape)

    def base(self, cells: Cells, fields: np.ndarray) -> LocationScale | None:
        """The law of some fields before calibration, batch (fields,) of n cells; None for points."""
        if self.stddev is None:
            return None
        loc = torch.from_numpy(cells.gather(self.mean, fields))
        variance = torch.from_numpy(cells.everywhere("The standard deviation", self.stddev, fields)).square()
        if self.factor is None:
            return LocationScale(loc, Diagonal(variance))
        factor = torch.from_numpy(cells.gather(self.factor, fields)).movedim(0, -1)  # (fields, n, rank)
        return LocationScale(loc, LowRank(factor, (variance - factor.square().sum(-1)).clamp(min=0)))

    def calibrated(self, base: LocationScale | None) -> LocationScale | None:
        """The law that draws are taken from, of the law before calibration."""
        return base if base is None or self.calibration is None else self.calibration.apply(base)

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the normal band, each (*batch, *grid)."""
        half = _quantile(self.level) * self.spread
        return self.mean - half, self.mean + half

    def check(self, cells: Cells) -> None:
        """Check that all cells of the domain have finite means and standard deviations of at least 0.

        Raises:
            ParameterError: Some do not.
        """
        all_fields = np.arange(cells.fields)
        for name, array, low in (("mean", self.mean, -np.inf), ("standard deviation", self.stddev, 0.0)):
            if array is None:
                continue
            inside = cells.everywhere(f"The {name}", array, all_fields)
            bad = int((~np.isfinite(inside) | (inside < low)).sum())
            if bad:
                what = "NaN, infinite or negative" if low == 0 else "NaN or infinite"
                source = "the draws" if self.draws is not None else "the band or the variances"
                raise ParameterError(
                    f"The {name}{' of the draws' if self.draws is not None else ''} is {what} in {bad} of "
                    f"{inside.size} cells.",
                    "Nothing can be projected from there.",
                    f"Save an array 'mask' that is True for the cells of the domain, or mend {source}.",
                )


def _check_band(lower: np.ndarray, upper: np.ndarray) -> None:
    """Check that two ends of a band fit together, and that none is crossed."""
    if lower.shape != upper.shape:
        raise ShapeError(
            f"'lower' has shape {lower.shape}, 'upper' {upper.shape}.",
            "Together they are the bands of the same cells.",
            "Give both the shape (*batch, *grid).",
        )
    crossed = int((lower > upper).sum())
    if crossed:
        raise ParameterError(
            f"'lower' is above 'upper' in {crossed} of {lower.size} cells.",
            "A band has its lower end below.",
            "Swap the two arrays, or mend these cells.",
        )


def _check_same(stddev: np.ndarray, variance: np.ndarray) -> None:
    """Check that standard deviations and variances of one file agree, to the precision of 32 bits."""
    try:
        same = np.allclose(np.square(stddev), variance, rtol=1e-4, atol=0.0, equal_nan=True)
    except ValueError:
        same = False
    if not same:
        raise ParameterError(
            f"'stddev' has shape {stddev.shape}, 'variance' {variance.shape}, and its squares are not the variances.",
            "It is not clear which of them is the spread.",
            "Leave out one of the two arrays.",
        )


def _level(arrays: Mapping[str, np.ndarray]) -> float:
    """The probability of the bands."""
    if "level" not in arrays and not ("lower" in arrays and "upper" in arrays):
        return LEVEL
    level = arrays.get("level", np.empty(0))
    if level.size != 1 or not 0 < level.item() < 1:
        raise ParameterError(
            f"The level of the band is {level.tolist()}.",
            "The spread of a normal law follows from the probability of its band, one number between 0 and 1.",
            "Save it beside 'lower' and 'upper', such as level=0.9.",
        )
    return float(level.item())


def _quantile(level: float) -> float:
    """Half the width of a standard normal band of this probability."""
    return float(NORMAL.icdf(torch.tensor((1 + level) / 2, dtype=torch.float64)))
