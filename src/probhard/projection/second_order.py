"""Moments to second order after nonlinear equalities: means and variances corrected by the curvature of the set.

At the nearest point u* of the mean let ``P`` be the tangent, ``K = W J^T M^-1`` and ``M = J W J^T``. A point
``mu + d`` is projected to ``u* + t + b`` with the tangential part ``t = P d`` and, since ``h(u* + t + b) = 0``,

    b = -K h''(t, t) / 2,         E u = u* - K tr(h'' P Sigma P^T) / 2     for the oblique metric, W = Sigma.

Other metrics also turn the mean, by ``-E P W hess(M^-1 J d) t``. The expansion grows without bound in the spread. The
curve through t is therefore replaced by its osculating circle. With the angle ``w = 2 |b| / |t|`` and the normal noise
``a = 1 + (J d)^T M^-1 h''(t, t) / |t|^2`` it gives

    u = u* + t / s + 2 (1 - a / s) b / w^2,     s^2 = a^2 + w^2,

which agrees with the expansion for small w and is exact for spheres. Directions d are the columns of fixed rotations;
at least as many as variables give the trace exactly. ``h''(t, t)`` is the difference ``h(u* + t) + h(u* - t)``: kinks
of h that are narrower than the law do not count. No further point is projected. Off the set, P must be exact:
``curvature="exact"`` also divides ``a - 1`` by the curvature there, and drops third derivatives.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from probhard._util.tensors import divide, safe_sqrt
from probhard.constraints.base import Constraint
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.errors import ParameterError
from probhard.laws.covariance import Covariance
from probhard.laws.distribution import LocationScale
from probhard.projection.base import Projector
from probhard.projection.linear import LinearProjector
from probhard.projection.nonlinear import NonlinearProjector, NonlinearTangent
from probhard.projection.policy import Policy
from probhard.projection.projected import Projected

DIRECTIONS = 16  # directions along which the curvature is measured, each with both signs
CENTRE = 0.1  # nearest that noise comes to the centre of the circle, in radii


def second_order(base: LocationScale, constraint: Constraint, policy: Policy, projector: Projector) -> Projected:
    """The projected law with moments to second order.

    Args:
        base: The law, over (*batch, n).
        constraint: Equalities; for linear ones the first order is exact.
        policy: Treatment of failures.
        projector: Their projector.

    Raises:
        ParameterError: The constraint has inequalities.
        ProbhardError: The mean has no projection and ``policy`` does not flag it.
    """
    if not isinstance(projector, NonlinearProjector | LinearProjector):
        raise ParameterError(
            f"covariance='second-order' got the constraint {constraint!r}.",
            "A projection on inequalities has kinks, where second derivatives do not exist.",
            "Use covariance='auto', which clips marginals at bounds and takes fixed draws for other inequalities.",
        )
    solution, mean, scale, tangent = projector.moments(base.loc, base.cov)
    failed = None if solution is None else policy.check(solution.stats, projector, base.loc)
    if not isinstance(tangent, NonlinearTangent):
        return Projected(base, constraint, policy, projector, mean, tangent, scale, solution, failed=failed)
    assert isinstance(projector, NonlinearProjector)
    unit = base.family.unit_variance
    center, variance = _moments(base, projector, tangent, scale.to(torch.float64).square() * unit)
    scale = safe_sqrt(variance / unit).to(mean.dtype)
    parts = (policy, projector, mean, tangent, scale, solution)
    return Projected(base, constraint, *parts, center=center.to(mean.dtype), failed=failed)


def _moments(
    base: LocationScale, projector: NonlinearProjector, tangent: NonlinearTangent, first: Tensor
) -> tuple[Tensor, Tensor]:
    """Means and variances (*batch, n) in float64; ``first`` holds the variances of first order."""
    rows, u, size = tangent.linearised, tangent.value, base.cov.root_size
    noise = _directions(size).to(u).reshape(-1, *[1] * (u.dim() - 1), size) * base.family.unit_variance**0.5
    d = base.cov.to(torch.float64).root(noise).expand(-1, *u.shape)
    d = d if projector.first is None else projector.first.apply(d)
    t = tangent.moved(d)  # (m, *batch, n)
    bent = _bend(projector.curved, u, t)  # (m, *batch, q)
    multiplier, pull = rows.multiplier(rows.core.apply(d)), rows.multiplier(bent)
    b = -0.5 * rows.weight.apply(rows.core.transpose(pull))
    length = _norm(t, rows.weight)
    angle = divide(4 * _norm(b, rows.weight), length)  # w^2
    tilt = divide((multiplier * bent).sum(-1, keepdim=True), length)  # a - 1
    if projector.exact:
        distance = rows.multiplier(rows.core.apply(tangent.z - u))  # of the mean from the set, in multipliers
        tilt = tilt / (1 + divide((distance * bent).sum(-1, keepdim=True), length))
    (t_plus, b_plus), (t_minus, b_minus) = _circle(1 + tilt, angle), _circle(1 - tilt, angle)
    across = (b_plus + b_minus) / 2 * b
    shift = across
    if not projector.own:  # else normal and tangential noise are independent
        turned = projector.curved.curvature(u.expand(t.shape), multiplier, t)
        shift = across - t_plus * t_minus * rows.apply(rows.weight.apply(turned))
    shares = divide(((t_plus.square() + t_minus.square()) / 2 * t.square()).mean(0), t.square().mean(0))
    # All directions have the norm sqrt(size); that of normal noise varies.
    squares = (1 + 2 / size) * ((b_plus.square() + b_minus.square()) / 2 * b.square()).mean(0)
    spread = (squares - across.mean(0).square()).clamp(min=0)
    return u + shift.mean(0), shares * first + spread


def _norm(x: Tensor, weight: Covariance) -> Tensor:
    """``|x|^2`` (*lead, 1) in the metric, of which coupled weights give their diagonal."""
    return divide(x.square(), weight.diagonal().expand(x.shape)).sum(-1, keepdim=True)


def _bend(curved: NonlinearEquality, u: Tensor, t: Tensor) -> Tensor:
    """``h(u + t) - 2 h(u) + h(u - t)`` (m, *batch, q) for u (*batch, n): ``h''(t, t)`` at the scale of the law."""
    return curved.residual(u + t) + curved.residual(u - t) - 2 * curved.residual(u)


def _circle(a: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of t and of b on the osculating circle, for ``angle`` w^2."""
    a = a.clamp(min=CENTRE)
    s = (a.square() + angle).sqrt()
    # 2 (1 - a / s) / w^2 = 2 / (s (s + a)) loses no digits for small w.
    return 1 / s, 2 / (s * (s + a))


@lru_cache(maxsize=16)
def _directions(size: int) -> Tensor:
    """Vectors (m, size) of norm sqrt(size) along the columns of fixed random rotations."""
    generator, width = torch.Generator().manual_seed(0), min(size, DIRECTIONS)
    blocks = max(1, round(DIRECTIONS / size))
    rotations = torch.linalg.qr(torch.randn(blocks, size, width, dtype=torch.float64, generator=generator))[0]
    return size**0.5 * rotations.mT.flatten(0, 1)
