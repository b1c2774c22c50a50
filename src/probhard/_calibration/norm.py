"""The norm of a deviation in the pseudo-inverse of a projected covariance ``P C P^T``, without forming either.

A deviation v of two feasible points lies in the range of ``P = I - W A^T (A W A^T)^-1 A``, whose null space is spanned
by the columns of ``B = W A^T``. The pseudo-inverse norm is the least norm among all x that are projected on v:

    |v|^2 = min {x^T C^-1 x : P x = v} = x^T C^-1 x,      x = v - B H^-1 B^T C^-1 v,      H = B^T C^-1 B.

Under the oblique metric ``W = C`` the correction is 0, since ``A v = 0``. If W and C are diagonal,
``H = A (W^2 / C) A^T`` has the structure of the rows, which is factored in O(n) for trees and conservation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from probhard._util.conjugate_gradients import conjugate_gradients
from probhard._util.tensors import safe_sqrt
from probhard.laws.covariance import Covariance, Dense, Diagonal, Factored
from probhard.rows.dense import cholesky_solve
from probhard.rows.system import LinearSystem
from probhard.tangent import Tangent, tangent_of

FORMED = 500  # up to this many rows H is formed, else it is applied by conjugate gradients
CHUNK = 8_000_000  # numbers in columns of B at a time


def deviation_norm(
    v: Tensor,  # (*samples, *batch, n)
    cov: Covariance,
    tangent: Tangent | None = None,
    oblique: bool = False,
) -> Tensor:
    """The norm of deviations.

    Args:
        v: Deviations, (*samples, *batch, n); only their part in the range of P counts.
        cov: C, over (*batch, n). Variables of variance 0 do not count.
        tangent: P; None for the identity.
        oblique: Whether the weight of P is a multiple of C, so that the correction is 0.

    Returns:
        The norms, (*samples, *batch).
    """
    cov, v = without_constants(cov, v if tangent is None else tangent.apply(v))
    if tangent is not None and not oblique:
        v = v - _correction(v, cov, tangent)
    return safe_sqrt((v * cov.solve(v)).sum(-1))


def without_constants(cov: Covariance, v: Tensor) -> tuple[Covariance, Tensor]:
    """A covariance in which variables of variance 0 have variance 1, and deviations that are 0 there."""
    constant = cov.diagonal() == 0
    if not bool(constant.any()):
        return cov, v
    v = torch.where(constant, 0.0, v)
    if isinstance(cov, Diagonal):
        return Diagonal(torch.where(constant, 1.0, cov.variance)), v
    if isinstance(cov, Factored):
        return replace(cov, diagonal_part=torch.where(constant, 1.0, cov.diagonal_part)), v  # type: ignore[call-arg]
    if isinstance(cov, Dense):
        return Dense(cov.scale_tril + torch.diag_embed(constant.to(v))), v
    return cov, v


def _correction(v: Tensor, cov: Covariance, tangent: Tangent) -> Tensor:
    """``B H^-1 B^T C^-1 v``."""
    weight, system = tangent.given.to(v.dtype), tangent.system.at(v)
    if isinstance(weight, Diagonal) and isinstance(cov, Diagonal):
        return _diagonal_correction(v, cov.variance, weight.variance.expand_as(cov.variance), system)
    system = system.coupled
    core = system.core
    assert core is not None
    if system.held is not None:
        free = torch.ones(system.variables, dtype=v.dtype, device=v.device)
        weight = weight.scaled(free.index_fill(0, system.held, 0.0))
    image = core.apply(weight.apply(cov.solve(v)))  # B^T C^-1 v, (*samples, *batch, q)
    if core.row_count > FORMED:
        close = tangent_of(system, Diagonal(weight.diagonal().square() / cov.diagonal()))

        def product(t: Tensor) -> Tensor:
            return core.apply(weight.apply(cov.solve(weight.apply(core.transpose(t)))))

        return weight.apply(core.transpose(conjugate_gradients(product, image, close.multiplier)))
    rows = core.dense().movedim(-2, 0).to(v)  # (q, *batch, n)
    dims = max(len(cov.shape), len(weight.shape)) - 1
    rows = rows.reshape(rows.shape[0], *[1] * (dims - rows.dim() + 2), *rows.shape[1:])
    numbers = max(1, cov.shape.numel(), weight.shape.numel())
    columns = [  # H, a few columns at a time
        core.apply(weight.apply(cov.solve(weight.apply(part)))) for part in rows.split(max(1, CHUNK // numbers))
    ]
    lower = torch.linalg.cholesky(torch.cat(columns).movedim(0, -1))  # (*batch, q, q)
    return weight.apply(core.transpose(cholesky_solve(lower, image)))


def _diagonal_correction(v: Tensor, variance: Tensor, weight: Tensor, system: LinearSystem) -> Tensor:
    if system.core is None:
        return torch.zeros_like(v)  # every row fixes one variable, where v is 0
    weight = system.movable(weight)
    inner = tangent_of(system, Diagonal(weight.square() / variance))
    solved = inner.multiplier(system.core.apply(weight * v / variance))
    return weight * system.core.transpose(solved)
