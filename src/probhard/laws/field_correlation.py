"""The correlation of errors of fields on a grid, by their average power spectrum.

    p_k = 1/T sum_t (T z_t)_k^2,        C = T^T diag(p) T, scaled to a unit diagonal

for standardised errors z_t (n,) and the transform T of ``_transforms``. It takes correlations to depend on distances
only, so a few dozen fields are enough. Next to walls, where basis functions vanish or peak, it is approximate.
``C.scaled(stddev)`` is then a covariance between given scales. Other variables are for ``shrunk_correlation``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.laws import _transforms
from probhard.laws.spectral import Spectral

WHITE = 0.01  # share of independent noise: no wave length is without power


def spectral_correlation(residuals: Tensor, shape: Sequence[int], boundary: str = "reflecting") -> Spectral:
    """Estimate the correlation of fields from their standardised errors.

    Args:
        residuals: Errors divided by their predicted standard deviations, (T, n), flattened with the first axis slowest.
        shape: Points along each axis; their product is n.
        boundary: ``"periodic"``, ``"reflecting"`` or ``"zero"``.

    Returns:
        C with unit diagonal.

    Raises:
        ShapeError: If the errors are not fields of this shape.
        ParameterError: If an error is NaN or infinite, all are 0, or the boundary is not known.
    """
    check_choice("boundary", boundary, _transforms.BOUNDARIES)
    grid = tuple(int(m) for m in shape)
    if residuals.dim() != 2 or residuals.shape[-1] != math.prod(grid) or not len(residuals):
        raise ShapeError(
            f"The errors have shape {tuple(residuals.shape)}, the grid {grid}.",
            "There is one row for each field and one column for each point.",
            "Flatten the fields to (T, n), with the first axis slowest.",
        )
    if not bool(torch.isfinite(residuals).all()) or not bool((residuals != 0).any()):
        raise ParameterError(
            "The errors of fields are NaN or infinite, or all of them are 0.",
            "The power of every wave length is an average over all points.",
            "Leave out fields with missing points, and standardise by positive standard deviations.",
        )
    power = _transforms.forward(residuals.detach(), grid, boundary).square().mean(0)
    return Spectral.normalised(grid, power, torch.ones_like(power), 1 - WHITE, boundary)


def resized(correlation: Spectral, shape: Sequence[int]) -> Spectral:
    """The correlation of the same waves on another grid of the same domain; waves that it adds have no power.

    Args:
        correlation: A correlation with unit diagonal.
        shape: Points along each axis of the other grid.

    Returns:
        The correlation, with unit diagonal and the same share of independent noise.
    """
    power, grid = correlation.power.unflatten(-1, correlation.shape_of_field), tuple(int(m) for m in shape)
    for axis, (old, new) in enumerate(zip(correlation.shape_of_field, grid)):
        k = torch.arange(new, device=power.device)
        if correlation.boundary == "periodic":
            k = torch.where(k > new // 2, k - new, k)
            kept, k = k.abs() <= (min(old, new) - 1) // 2, k % old
        else:
            kept, k = k < old, k.clamp(max=old - 1)
        size = [-1 if i == axis else 1 for i in range(len(grid))]
        power = power.index_select(axis, k) * kept.reshape(size)
    share = 1 - float(correlation.diagonal_part.mean())
    flat = power.flatten()
    return Spectral.normalised(grid, flat, torch.ones_like(flat), share, correlation.boundary)
