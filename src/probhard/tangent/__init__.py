"""The tangent of a projection, ``P = du*/dz``, on which everything else rests.

At a solution with active rows A and metric weight ``W = Q^-1`` (paper, proposition "linearsolution_main")

    P = I - W A^T (A W A^T)^-1 A,     u* = z - W A^T (A W A^T)^-1 (A z - b),     cov(u*) = P S P^T.

Only W is represented, so the oblique metric W = S inverts nothing. Marginal variances never form an n x n matrix where
the structure allows it. One class per kind of W: diagonal, low rank plus diagonal, anything else.
"""

from __future__ import annotations

from probhard._util.tensors import checking
from probhard.laws.covariance import Covariance, Diagonal, LowRank
from probhard.rows.system import LinearSystem
from probhard.tangent.base import Differential, Tangent
from probhard.tangent.coupled import DenseTangent, LowRankTangent
from probhard.tangent.covariance import ProjectedCovariance
from probhard.tangent.diagonal import DiagonalTangent, Identity, PinnedTangent

__all__ = [
    "DenseTangent",
    "DiagonalTangent",
    "Differential",
    "Identity",
    "LowRankTangent",
    "PinnedTangent",
    "ProjectedCovariance",
    "Tangent",
    "tangent_of",
]


def tangent_of(system: LinearSystem, weight: Covariance) -> Tangent:
    """The tangent of rows under a metric weight."""
    if isinstance(weight, Diagonal):
        return PinnedTangent(system, weight) if system.core is None else DiagonalTangent(system, weight)
    if isinstance(weight, LowRank) and (not checking() or bool((weight.diagonal_part > 0).all())):
        return LowRankTangent(system, weight)
    return DenseTangent(system, weight)
