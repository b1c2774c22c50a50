"""Gradients through the parts of one step of ``laws.soft_threshold``: moments, responses, shared numbers.

A symmetric matrix has three numbers. Its gradient is that of a full matrix: the number off the diagonal counts twice.
"""

from __future__ import annotations

from probhard._util.jit import Array, compiled
from probhard.laws._threshold_kernels import RARE


def _through(ayy: float, ayd: float, add: float, b: Array) -> tuple[float, float, float]:
    """``A B A`` of symmetric matrices."""
    l00, l01 = ayy * b[0] + ayd * b[1], ayy * b[1] + ayd * b[2]
    l10, l11 = ayd * b[0] + add * b[1], ayd * b[1] + add * b[2]
    return l00 * ayy + l01 * ayd, l00 * ayd + l01 * add, l10 * ayd + l11 * add


through = compiled(_through)


def _pull_side(loc: float, scale: float, lower: float, upper: float, part: Array, grad: Array, out: Array) -> None:
    """Add to ``out`` (loc, scale, lower, upper) the gradient of mean, variance and probability, ``grad`` (3,)."""
    if lower >= upper:
        out[2] += grad[0]
        return
    mean, inside, d, k, below, above = part[0], part[2], part[3], part[4], part[5], part[6]
    off, one, two, three = loc - mean, grad[0], 2 * grad[1], grad[2] / scale
    out[0] += inside * one + (off * inside + scale * d) * two + d * three
    out[1] += d * one + (off * d + scale * (inside + k)) * two + k * three
    if below > 0:
        out[2] += below * (one + (lower - mean) * two) - part[7] * three
    if above > 0:
        out[3] += above * (one + (upper - mean) * two) + part[8] * three


pull_side = compiled(_pull_side)


def _pull_response(
    a: float, w: float, sides: int, field: Array, part: Array, fresh: Array, g: Array, out: Array
) -> None:
    """Gradients through ``response``.

    Args:
        a: Coefficient of the row.
        w: Weight.
        sides: 2 with a ball, 1 without.
        field: Fields of the variable.
        part: Moments of both sides.
        fresh: What ``response`` wrote.
        g: Gradient of response (3), noise (3) and the two means before Newton's step.
        out: Written: gradient of G (3), C (3), w, and of mean, variance, probability and s of both sides (8).
    """
    up, down = part[0, 2] * w / field[9], 0.0
    first, second = part[0, 0], 0.0
    if sides == 2:
        down, second = part[1, 2] * w / field[13], part[1, 0]
    myy, myd, mdd = a * a * (up + down), a * (up - down), up + down
    if sides == 1:
        myd, mdd = 0.0, 0.0
    gyy, gyd, gdd = field[0], field[1], field[2]
    q00, q01, q10, q11 = fresh[8], fresh[9], fresh[10], fresh[11]
    v1, v2 = part[0, 1], part[1, 1] if sides == 2 else 0.0
    fyy, fyd, fdd = a * a * (v1 + v2 - 2 * first * second), a * (v1 - v2), v1 + v2 + 2 * first * second
    if sides == 1:
        fyd, fdd = 0.0, 0.0
    inner = through(myy, myd, mdd, field[3:6])
    zyy, zyd, zdd = fyy - inner[0], fyd - inner[1], fdd - inner[2]
    # noise Q Z Q^T and response Q M
    n0, n1, n2 = g[3], g[4], g[5]
    a00, a01, a10, a11 = q00 * zyy + q01 * zyd, q00 * zyd + q01 * zdd, q10 * zyy + q11 * zyd, q10 * zyd + q11 * zdd
    t00, t01 = 2 * (n0 * a00 + n1 * a10), 2 * (n0 * a01 + n1 * a11)
    t10, t11 = 2 * (n1 * a00 + n2 * a10), 2 * (n1 * a01 + n2 * a11)
    t00 += g[0] * myy + g[1] * myd
    t01 += g[0] * myd + g[1] * mdd
    t10 += g[1] * myy + g[2] * myd
    t11 += g[1] * myd + g[2] * mdd
    l00, l01, l10, l11 = n0 * q00 + n1 * q10, n0 * q01 + n1 * q11, n1 * q00 + n2 * q10, n1 * q01 + n2 * q11
    z0, z1 = q00 * l00 + q10 * l10, 0.5 * (q00 * l01 + q10 * l11 + q01 * l00 + q11 * l10)
    z2 = q01 * l01 + q11 * l11
    m00, m01, m10, m11 = (
        q00 * g[0] + q10 * g[1],
        q00 * g[1] + q10 * g[2],
        q01 * g[0] + q11 * g[1],
        q01 * g[1] + q11 * g[2],
    )
    # Q = (I - M G)^-1: K = Q^T T Q^T
    u00, u01, u10, u11 = q00 * t00 + q10 * t10, q00 * t01 + q10 * t11, q01 * t00 + q11 * t10, q01 * t01 + q11 * t11
    k00, k01 = u00 * q00 + u01 * q01, u00 * q10 + u01 * q11
    k10, k11 = u10 * q00 + u11 * q01, u10 * q10 + u11 * q11
    m00 += k00 * gyy + k01 * gyd
    m01 += k00 * gyd + k01 * gdd
    m10 += k10 * gyy + k11 * gyd
    m11 += k10 * gyd + k11 * gdd
    out[0] = myy * k00 + myd * k10
    out[1] = 0.5 * (myy * k01 + myd * k11 + myd * k00 + mdd * k10)
    out[2] = myd * k01 + mdd * k11
    # Z = F - M C M
    work = out[3:6]
    work[0], work[1], work[2] = z0, z1, z2
    pushed = through(myy, myd, mdd, work)
    c0, c1, c2 = field[3], field[4], field[5]
    x00, x01, x10, x11 = myy * c0 + myd * c1, myy * c1 + myd * c2, myd * c0 + mdd * c1, myd * c1 + mdd * c2
    m00 -= 2 * (z0 * x00 + z1 * x10)
    m01 -= z0 * x01 + z1 * x11 + z1 * x00 + z2 * x10
    m10 -= z1 * x00 + z2 * x10 + z0 * x01 + z1 * x11
    m11 -= 2 * (z1 * x01 + z2 * x11)
    out[3], out[4], out[5] = -pushed[0], -pushed[1], -pushed[2]
    out[6] = 0.0
    both = m01 + m10
    for side in range(sides):
        e = 0.0 if sides == 1 else 1.0 - 2.0 * side
        other = second if side == 0 else first
        s, start = field[9 + 4 * side], 7 + 4 * side
        own = a * a * m00 + a * e * both + e * e * m11
        out[6] += own * part[side, 2] / s
        out[start] = a * g[6] + e * g[7] + (-2 * a * a * z0 + 2 * e * e * z2) * other
        out[start + 1] = a * a * z0 + 2 * a * e * z1 + e * e * z2
        out[start + 2] = own * w / s
        out[start + 3] = -own * part[side, 2] * w / (s * s)


pull_response = compiled(_pull_response)


def _pull_shared(last: Array, whole: Array, sides: int, g: Array, out: Array) -> None:
    """Gradients through ``shared``.

    Args:
        last: Multipliers.
        whole: What ``shared`` wrote.
        sides: 2 with a ball, 1 without.
        g: Gradient of H (3), noise (3), the multiplier of the ball, and k.
        out: Written: gradient of every response (3), of every noise (3), and of the ball's field.
    """
    for j in range(6):
        out[j] = g[j]
    out[6] = 0.0
    if sides == 1:
        return
    k, t, p, d, rest, m = whole[13], whole[14], whole[15], whole[16], whole[17], whole[12]
    syy, syd = whole[6], whole[7]
    z, ratio = last[1] / t, (k / p) ** 2
    to_k = g[7] + g[2] * (1 / p - 1)
    to_p, to_spread, to_square = -g[2] * k / (p * p), 0.0, 0.0
    if rest > 0:
        to_k += 2 * g[5] * rest * ratio / k
        to_p -= g[5] * (2 * p * t * t * ratio + 2 * rest * ratio / p)
        to_spread, to_square = g[5] * ratio, -g[5] * k * k
    if p <= RARE or p >= 1 - RARE:
        to_p = 0.0
    to_t = g[6] * d + to_spread * (2 * t * p - 2 * m * d) - to_p * z * d / t + 2 * t * to_square
    out[6] = g[6] * p + to_spread * 2 * m * (1 - p) + to_p * d / t
    h = -syd / syy
    to_k -= to_t * t / k
    to_variance = to_t / (2 * t * k * k)
    out[3] += h * h * to_variance
    out[4] += h * to_variance
    out[5] += to_variance
    to_h = 2 * (whole[10] + h * whole[9]) * to_variance
    out[2] += to_k
    out[1] += -0.5 * to_h / syy - syd / syy * to_k
    out[0] += to_h * syd / (syy * syy) + (syd / syy) ** 2 * to_k


pull_shared = compiled(_pull_shared)
