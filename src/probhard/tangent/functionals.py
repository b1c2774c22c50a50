"""Variances of functionals where the structure of the rows has a formula for independent noise.

Under a diagonal weight, noise of its own and shared noise are projected by the same P. With ``C = diag(d) + G G^T``

    diag(F P C P^T F^T) = diag(F P diag(d) P^T F^T) + sum over the columns of (F P G)^2.

The first term is the structure's. If d > 0, a functional that the rows fix is one whose first term is 0.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.laws.base import LinearMap
from probhard.laws.covariance import Covariance, Diagonal, LowRank
from probhard.rows.base import Factor
from probhard.rows.maps import SparseMap

if TYPE_CHECKING:
    from probhard.tangent.linear import DiagonalTangent


def structured_variance(tangent: DiagonalTangent, rows: LinearMap, cov: Covariance) -> Tensor | None:
    """``diag(F P C P^T F^T)``, (*batch, k), of a tangent under a diagonal weight; None if there is no formula.

    Args:
        tangent: P.
        rows: F, (k, n).
        cov: C.
    """
    if isinstance(cov, Diagonal):
        own = own_variance(tangent.factor, rows, tangent.system.free(cov.variance.to(tangent.dtype)))
        return None if own is None else own.to(cov.dtype)
    if not isinstance(cov, LowRank) or not checking() or not bool((cov.diagonal_part > 0).all()):
        return None
    own = own_variance(tangent.factor, rows, tangent.system.free(cov.diagonal_part.to(tangent.dtype)))
    if own is None:
        return None
    shared = rows.at(own).apply(tangent.apply(tangent._columns(cov.factor))).square().sum(0)
    return torch.where(own > 0, own + shared, 0.0).to(cov.dtype)


def own_variance(factor: Factor, rows: LinearMap, s: Tensor) -> Tensor | None:
    """``diag(F P diag(s) P^T F^T)``, (*batch, k), by the structure's own formula; None if it has none."""
    return factor.functional_variance(rows, s) if isinstance(rows, SparseMap) else None


def same_values(first: Covariance, second: Covariance) -> bool:
    """Whether two covariances have the same structure and entries."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    pairs = [(getattr(first, field.name), getattr(second, field.name)) for field in fields(first)]
    return all(_same(a, b) for a, b in pairs)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    return bool(a == b)
