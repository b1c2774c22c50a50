"""Newton steps with dense Hessians, for few variables and dense rows under a diagonal weight.

In the coordinates ``x = W^-1/2 u`` let ``B = L^-1 J W^1/2`` with ``L L^T = M``, so that ``P = I - B^T B`` projects on
the tangent space, and ``H = I + W^1/2 C W^1/2`` with the multipliers times the Hessians of h, C. The step is

    d = n + t,     n = -B^T L^-1 h,     t = -|P H P + B^T B|^-1 P (g + H n),     g = W^-1/2 (u - z),

where ``|.|`` replaces eigenvalues by their size: steps leave saddles and never climb. Where the diagonal of C is
positive, W is ``(Q + diag C)^-1`` instead, and the identity in H the share of Q: the rounding of a variable whose
weight is far larger than its curvature allows would hide all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.tensors import divide, matvec
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.laws.covariance import Covariance, Diagonal
from probhard.rows.dense import DenseRows, DenseRowsFactor
from probhard.solvers.linearised import Linearised
from probhard.tangent.linear import DiagonalTangent

DENSE = 128  # largest number of variables whose Hessian is formed
FLOOR = 0.02  # smallest curvature of a step; that of the distance alone is 1


def small(constraint: NonlinearEquality, weight: Covariance) -> bool:
    """Whether Hessians are dense and small enough to be formed, as far as is known before the rows are."""
    dense = constraint.pattern is None and constraint.linearise is None
    return dense and isinstance(weight, Diagonal) and weight.shape[-1] <= DENSE


def newton_step(near: Linearised, curvature: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The step and its image under Q, (L, n).

    Args:
        near: The constraint linearised at points u.
        curvature: C there, (L, n, n), see ``hessian``.
        y: ``Q (u - z)``, (L, n).
    """
    assert isinstance(near.weight, Diagonal)
    assert isinstance(near.tangent, DiagonalTangent)
    assert isinstance(near.tangent.core, DenseRows)
    factor, root = near.tangent.factor, near.weight.variance.expand(y.shape).sqrt()
    assert isinstance(factor, DenseRowsFactor)
    matrix = near.tangent.core.map.matrix * root.unsqueeze(-2)
    basis = torch.linalg.solve_triangular(factor.lower, matrix.expand(*y.shape[:-1], -1, -1), upper=False)
    move, normal = (-image for image in near.images(near.h))  # n in units of u, Q n
    n, share = divide(move, root), near.distance(torch.ones_like(y))
    identity = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    bent = curvature * root.unsqueeze(-1) * root.unsqueeze(-2) + torch.diag_embed(share) - identity  # H - I
    inside = identity - basis.mT @ basis  # P
    slope = -matvec(inside, root * y + n + matvec(bent, n))
    reduced = identity + inside @ bent @ inside  # P H P + B^T B
    t = matvec(inside, _descent(reduced.nan_to_num(0.0, 0.0, 0.0), slope.nan_to_num(0.0, 0.0, 0.0)))
    return move + root * t, normal + near.distance(divide(t, root))


def hessian(constraint: NonlinearEquality, u: Tensor, multiplier: Tensor) -> Tensor:
    """``sum_i l_i hess(h_i)``, (L, n, n), at u (L, n) for multipliers (L, q)."""

    def slope(point: Tensor) -> Tensor:
        return torch.func.grad(lambda p: (multiplier * constraint.residual(p)).sum())(point)

    pullback = torch.func.vjp(slope, u.contiguous())[1]
    n = u.shape[-1]
    seeds = torch.eye(n, dtype=u.dtype, device=u.device).unsqueeze(1).expand(n, *u.shape)
    return torch.func.vmap(lambda seed: pullback(seed)[0])(seeds).movedim(0, -2)


def _descent(matrix: Tensor, slope: Tensor) -> Tensor:
    """``|A|^-1 s`` (L, n) for symmetric matrices A (L, n, n), with eigenvalues of at least ``FLOOR``."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    info = torch.linalg.cholesky_ex(matrix - FLOOR * identity).info
    lower = torch.linalg.cholesky_ex(torch.where((info == 0)[:, None, None], matrix, identity)).L
    step = torch.cholesky_solve(slope.unsqueeze(-1), lower).squeeze(-1)
    bad = torch.nonzero(info != 0).squeeze(-1)
    if len(bad):
        values, vectors = torch.linalg.eigh(matrix.index_select(0, bad))
        along = matvec(vectors.mT, slope.index_select(0, bad)) / values.abs().clamp(min=FLOOR)
        step = step.index_copy(0, bad, matvec(vectors, along))
    return step
