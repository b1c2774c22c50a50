"""Tangents: ``P = du*/dz`` at a solution, from which gradients, variances and linear draws follow."""

from probhard.laws.covariance import Identity
from probhard.tangent.base import Differential
from probhard.tangent.coupled import DenseTangent, LowRankTangent
from probhard.tangent.covariance import ProjectedCovariance
from probhard.tangent.linear import DiagonalTangent, PinnedTangent, Tangent, tangent_of

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
