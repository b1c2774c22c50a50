"""Which tangent serves linear rows under a metric weight.

| weight W                                      | rows                              | tangent            |
|-----------------------------------------------|-----------------------------------|--------------------|
| diagonal                                      | each pins one variable            | ``PinnedTangent``  |
| diagonal                                      | others                            | ``DiagonalTangent``|
| noise shared along a hierarchy                | the hierarchy's own sums          | ``CoherentTangent``|
| low rank, with a positive diagonal            | any                               | ``LowRankTangent`` |
| factored                                      | ``W A^T`` too large to be formed  | ``IterativeTangent`` |
| others                                        | any                               | ``DenseTangent``   |
"""

from __future__ import annotations

from probhard._util.tensors import checking
from probhard.laws.covariance import Covariance, Diagonal, Factored, LowRank
from probhard.laws.hierarchy_factors import HierarchyFactors
from probhard.rows.system import LinearSystem
from probhard.tangent.coupled import CoherentTangent, DenseTangent, LowRankTangent
from probhard.tangent.iterative import IterativeTangent
from probhard.tangent.linear import DiagonalTangent, PinnedTangent, Tangent, coherent

DENSE_NUMBERS = 50_000_000  # up to this many numbers in W A^T, correlated weights are solved by a dense factor


def tangent_of(system: LinearSystem, weight: Covariance) -> Tangent:
    """The tangent of rows under a metric weight.

    Args:
        system: The rows.
        weight: W, (*batch, n).
    """
    if isinstance(weight, Diagonal):
        return PinnedTangent(system, weight) if system.core is None else DiagonalTangent(system, weight)
    if isinstance(weight, HierarchyFactors) and coherent(system, weight):
        return CoherentTangent(system, weight)
    if isinstance(weight, LowRank) and (not checking() or bool((weight.diagonal_part > 0).all())):
        return LowRankTangent(system, weight)
    if isinstance(weight, Factored) and system.row_count * weight.diagonal().numel() > DENSE_NUMBERS:
        return IterativeTangent(system, weight)
    return DenseTangent(system, weight)
