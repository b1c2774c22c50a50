"""Shrunk correlation of residuals, as low rank plus diagonal with a unit diagonal (Schaefer and Strimmer, 2005).

With residuals standardised to ``z`` of T times and n variables, ``R = z^T z / T`` and ``w_tij = z_ti z_tj``::

    C = (1 - lambda) R + lambda I,    lambda = sum_{i != j} var(r_ij) / sum_{i != j} r_ij^2,  clipped to [0, 1],
    var(r_ij) = sum_t (w_tij - r_ij)^2 / (T (T - 1)).

No n x n matrix is formed: ``sum_ij r_ij^2 = |z z^T|_F^2 / T^2``, and the squares of ``w`` are squares of row norms.
``Sigma = C.scaled(stddev)`` is then a covariance between given scales.

Missing values (NaN): a variable is standardised by its own observed times, and a missing entry adds 0 to the sum of its
products. Two variables with few common times are thus little correlated, and C stays positive semi-definite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import LowRank

FEWEST = 3  # observed times below which a correlation says nothing: of two times it is always +-1
CONSTANT = 1e-9  # standard deviation, relative to the largest entry, that is rounding of a constant


def shrunk_correlation(residuals: Tensor, rank: int | None = None, shrinkage: float | None = None) -> LowRank:
    """Estimate a correlation matrix from residuals, as low rank plus diagonal.

    Args:
        residuals: (T, n), NaN where missing. Constant variables get correlation 0.
        rank: Columns to keep, those of largest variance; the rest of the variance goes on the diagonal. None: all.
        shrinkage: Weight lambda of the identity, in [0, 1]. None: estimated.

    Returns:
        C with unit diagonal, of factor (n, at most min(T, n, rank)).

    Raises:
        ShapeError: If the residuals are not a matrix.
        ParameterError: If they are infinite, too few, or if ``rank`` or ``shrinkage`` is out of range.
    """
    _check(residuals, rank, shrinkage)
    z = _standardised(residuals)
    share = shrinkage_intensity(residuals) if shrinkage is None else shrinkage
    factor = (1 - share) ** 0.5 * z.mT  # (n, T)
    size = min(factor.shape)
    if (rank is not None and rank < size) or size < factor.shape[-1]:
        factor = _largest(factor, size if rank is None else min(rank, size))
    diagonal = (1 - factor.square().sum(-1)).clamp(min=0)
    return LowRank(factor, diagonal).to(residuals.dtype)


def shrinkage_intensity(residuals: Tensor) -> float:
    """Weight lambda of the identity that is estimated to be best.

    Args:
        residuals: (T, n), NaN where missing.

    Returns:
        The weight, in [0, 1]; 1 if all correlations are 0.
    """
    _check(residuals, None, None)
    z = _standardised(residuals)  # (T, n), columns of norm 1 or 0
    times, square = z.shape[0], z.square()
    gram = z @ z.mT if times < z.shape[1] else z.mT @ z  # the smaller one: both have the same norm
    off_diagonal = gram.square().sum() - square.sum(0).square().sum()
    products = square.sum(1).square().sum() - square.square().sum()  # of w_tij / T, squared, over i != j
    variance = (products - off_diagonal / times) * times / (times - 1)
    if off_diagonal <= torch.finfo(z.dtype).eps * z.shape[1]:  # one variable, or correlations that are rounding
        return 1.0
    return float((variance / off_diagonal).clamp(0, 1))


def _standardised(residuals: Tensor) -> Tensor:
    """Centred columns of norm 1, or 0 where nothing varies; missing entries are 0. (T, n), in float64."""
    observed = ~residuals.isnan()
    x = torch.where(observed, residuals, 0.0).double()
    count = observed.sum(0)
    centred = torch.where(observed, x - x.sum(0) / count.clamp(min=1), 0.0)
    norm = centred.square().sum(0).sqrt()
    varies = (norm > CONSTANT * x.abs().amax(0) * count.sqrt()) & (count >= FEWEST)
    return torch.where(varies, centred / torch.where(varies, norm, 1.0), 0.0)


def _largest(factor: Tensor, rank: int) -> Tensor:
    """The columns ``F V`` of largest norm, V eigenvectors of ``F^T F``; from the smaller side of F (n, T)."""
    if factor.shape[0] < factor.shape[1]:
        values, vectors = torch.linalg.eigh(factor @ factor.mT)  # (n,), (n, n)
        return vectors[:, -rank:] * values[-rank:].clamp(min=0).sqrt()
    _, vectors = torch.linalg.eigh(factor.mT @ factor)
    return factor @ vectors[:, -rank:]


def _check(residuals: Tensor, rank: int | None, shrinkage: float | None) -> None:
    if residuals.dim() != 2:
        raise ShapeError(
            f"The residuals have shape {tuple(residuals.shape)}.",
            "A correlation is estimated from T times of n variables.",
            "Pass (T, n); use one call per group of residuals.",
        )
    if residuals.shape[0] < FEWEST:
        raise ParameterError(
            f"There are residuals at {residuals.shape[0]} times.",
            f"Below {FEWEST} times every correlation is +-1 and says nothing.",
            "Pass more residuals, or use Diagonal.",
        )
    if bool(residuals.isinf().any()):
        raise ParameterError(
            f"{int(residuals.isinf().sum())} of {residuals.numel()} residuals are infinite.",
            "They would make every correlation NaN.",
            "Remove them, or mark them as missing (NaN).",
        )
    if rank is not None and rank < 1:
        raise ParameterError(
            f"rank is {rank}.",
            "A low-rank correlation has at least one column.",
            "Use Diagonal for independent variables, or a rank of 1 or more.",
        )
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise ParameterError(
            f"shrinkage is {shrinkage}.",
            "It is the weight of the identity: 0 keeps the sample correlation, 1 gives independent variables.",
            "Pass a number from 0 to 1, or None to estimate it.",
        )
