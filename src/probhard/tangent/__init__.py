"""Tangents ``P = du*/dz`` at a solution, for gradients, variances and linear draws."""

from probhard.laws.covariance import Identity
from probhard.tangent.base import Differential
from probhard.tangent.chosen import ChosenTangent, MatrixTangent
from probhard.tangent.coupled import DenseTangent, LowRankTangent
from probhard.tangent.covariance import ProjectedCovariance
from probhard.tangent.dispatch import tangent_of
from probhard.tangent.linear import DiagonalTangent, PinnedTangent, Tangent

__all__ = [
    "ChosenTangent",
    "DenseTangent",
    "DiagonalTangent",
    "Differential",
    "Identity",
    "LowRankTangent",
    "MatrixTangent",
    "PinnedTangent",
    "ProjectedCovariance",
    "Tangent",
    "tangent_of",
]
