"""Compiled parts of one step of ``laws.soft_threshold``: what variables share, their fields, moments and responses.

Symmetric 2 x 2 matrices are three numbers: of the row, of both, of the ball. A state has eight numbers for every
variable (its response, its noise and its two means) and two for the multipliers.
"""

from __future__ import annotations

import math

from probhard._util.jit import Array, compiled

RARE = 1e-9  # smallest probability of the ball's bound, relative stiffness of a row without free variables
TINY = 1e-300
FAR = 9.0  # distance in sds from which a bound counts as infinite


def _density(t: float) -> float:
    return 0.3989422804014327 * math.exp(-0.5 * t * t) if abs(t) < 38 else 0.0


density = compiled(_density)


def _mass(t: float) -> float:
    """Probability below t."""
    return 0.5 * math.erfc(-t * 0.7071067811865476)


mass = compiled(_mass)


def _clipped(loc: float, scale: float, lower: float, upper: float, out: Array) -> None:
    """Write mean and variance of a normal value clipped at bounds, the probability inside, and the sums of densities.

    ``out`` is mean, variance, ``P``, ``D = f(l) - f(h)``, ``K = l f(l) - h f(h)``, the masses below and above, and the
    densities at both bounds.
    """
    a, b = max((lower - loc) / scale, -1e100), min((upper - loc) / scale, 1e100)
    if lower >= upper:
        out[0], out[1], out[2], out[3], out[4] = lower, 0.0, 0.0, 0.0, 0.0
        out[5] = mass(a)
        out[6], out[7], out[8] = 1 - out[5], 0.0, 0.0
        return
    below, above, fa, fb = 0.0, 0.0, 0.0, 0.0
    if a > -FAR:
        below, fa = mass(a), density(a)
    if b < FAR:
        above, fb = mass(-b), density(b)
    out[3], out[4] = fa - fb, (a * fa if a > -FAR else 0.0) - (b * fb if b < FAR else 0.0)
    out[5], out[6], out[7], out[8] = below, above, fa, fb
    if a > 0:  # far outside nothing may cancel
        inside = mass(-a)
        first = max(fa - a * inside, 0.0)
        second = max((1 + a * a) * inside - a * fa, 0.0)
        last = max(fb - b * above, 0.0) if b < FAR else 0.0
        if b < FAR:
            second -= max((1 + b * b) * above - b * fb, 0.0) + 2 * (b - a) * last
        mean, inside = first - last, inside - above
        out[0] = lower + scale * mean
    elif b < 0:
        inside = mass(b)
        first = max(fb + b * inside, 0.0)
        second = max((1 + b * b) * inside + b * fb, 0.0)
        last = max(fa + a * below, 0.0) if a > -FAR else 0.0
        if a > -FAR:
            second -= max((1 + a * a) * below + a * fa, 0.0) + 2 * (b - a) * last
        mean, inside = last - first, inside - below
        out[0] = upper + scale * mean
    else:
        inside = 1 - below - above
        mean, second = 0.0, inside + out[4]
        if a > -FAR:
            mean += fa + a * below
            second += a * a * below
        if b < FAR:
            mean -= fb - b * above
            second += b * b * above
        out[0] = loc + scale * mean
    out[1] = scale * scale * max(second - mean * mean, 0.0)
    out[2] = max(inside, 0.0)


clipped = compiled(_clipped)


def _shared(state: Array, last: Array, rows: int, sides: int, stiff: Array, out: Array) -> None:
    """Write what all variables share.

    ``out``: response (3), noise (3), sums of the responses (3) and of the noise (3), the multiplier m of the ball, and
    k, t, p, the density at the bound and the noise before scaling of its field.
    """
    for j in range(3):
        total, noise = 0.0, 0.0
        for i in range(state.shape[1]):
            total += state[j, i]
            noise += state[3 + j, i]
        out[6 + j], out[9 + j] = total, noise
    if rows == 0:
        out[6] = 1.0
    out[6], out[8] = max(out[6], RARE * stiff[0]), max(out[8], RARE * stiff[1])
    for j in range(6):
        out[j] = out[6 + j]
    out[12] = 0.0
    if sides == 1:
        out[2] = 1.0
        return
    k = max(out[8] - out[7] * out[7] / out[6], RARE * out[8])
    h = -out[7] / out[6]
    t = math.sqrt(max(out[11] + 2 * h * out[10] + h * h * out[9], TINY)) / k
    z = last[1] / t
    p, d = min(max(mass(z), RARE), 1 - RARE), density(z)
    m = max(last[1] * p + t * d, 0.0) if z < 0 else last[1] + t * (d - z * (1 - p))
    if z < -FAR:
        m = 0.0
    spread = max((last[1] * last[1] + t * t) * p + last[1] * t * d - m * m, 0.0)
    if z > 5:
        spread = p * t * t
    rest = max(spread - p * p * t * t, 0.0)
    out[2] += k * (1 / p - 1)
    out[5] += rest * (k / p) ** 2
    out[12], out[13], out[14], out[15], out[16], out[17] = m, k, t, p, d, rest


shared = compiled(_shared)


def _fields(
    i: int, x: Array, a: float, state: Array, last: Array, whole: Array, sides: int, wide: float, out: Array
) -> None:
    """Write the cavity fields of variable i: G (3), C (3), both means, then q, s, loc and variance of both sides."""
    ryy, ryd, rdd = whole[0] - state[0, i], whole[1] - state[1, i], whole[2] - state[2, i]
    nyy, nyd, ndd = whole[3] - state[3, i], whole[4] - state[4, i], whole[5] - state[5, i]
    det = max(ryy * rdd - ryd * ryd, RARE * RARE * abs(ryy * rdd) + TINY)
    gyy, gyd, gdd = rdd / det, -ryd / det, ryy / det
    b00, b01 = gyy * nyy + gyd * nyd, gyy * nyd + gyd * ndd
    b10, b11 = gyd * nyy + gdd * nyd, gyd * nyd + gdd * ndd
    cyy, cyd, cdd = b00 * gyy + b01 * gyd, b00 * gyd + b01 * gdd, b10 * gyd + b11 * gdd
    f, g = state[6, i], state[7, i]
    y, m = last[0] - gyy * f - gyd * g, whole[12] - gyd * f - gdd * g
    out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7] = gyy, gyd, gdd, cyy, cyd, cdd, y, m
    w = x[2]
    for side in range(sides):
        e = 0.0 if sides == 1 else 1.0 - 2.0 * side
        q = a * a * gyy + 2 * a * e * gyd + e * e * gdd
        c = a * a * cyy + 2 * a * e * cyd + e * e * cdd
        start = 8 + 4 * side
        out[start], out[start + 1] = q, 1 + w * q
        out[start + 2] = x[0] - w * (a * y + e * m)
        out[start + 3] = max(x[1] + wide + w * w * c, TINY)


fields = compiled(_fields)


def _response(a: float, w: float, sides: int, field: Array, part: Array, out: Array) -> None:
    """Write the next state of a variable: response (3), noise (3), means (2), and ``(I - M G)^-1`` (4).

    ``part`` (2, 9) are the moments of both sides.
    """
    up, down = part[0, 2] * w / field[9], 0.0
    first, second, v1, v2 = part[0, 0], 0.0, part[0, 1], 0.0
    if sides == 2:
        down, second, v2 = part[1, 2] * w / field[13], part[1, 0], part[1, 1]
    myy, myd, mdd = a * a * (up + down), a * (up - down), up + down
    fyy, fyd, fdd = a * a * (v1 + v2 - 2 * first * second), a * (v1 - v2), v1 + v2 + 2 * first * second
    g, h = a * (first + second), first - second
    if sides == 1:
        myd, mdd, fyd, fdd, h = 0.0, 0.0, 0.0, 0.0, 0.0
    gyy, gyd, gdd, cyy, cyd, cdd = field[0], field[1], field[2], field[3], field[4], field[5]
    l00, l01, l10, l11 = myy * cyy + myd * cyd, myy * cyd + myd * cdd, myd * cyy + mdd * cyd, myd * cyd + mdd * cdd
    zyy, zyd, zdd = fyy - l00 * myy - l01 * myd, fyd - l00 * myd - l01 * mdd, fdd - l10 * myd - l11 * mdd
    k00, k01 = 1 - myy * gyy - myd * gyd, -(myy * gyd + myd * gdd)
    k10, k11 = -(myd * gyy + mdd * gyd), 1 - myd * gyd - mdd * gdd
    det = k00 * k11 - k01 * k10
    q00, q01, q10, q11 = k11 / det, -k01 / det, -k10 / det, k00 / det
    out[0], out[1], out[2] = q00 * myy + q01 * myd, q00 * myd + q01 * mdd, q10 * myd + q11 * mdd
    s00, s01 = q00 * zyy + q01 * zyd, q00 * zyd + q01 * zdd
    s10, s11 = q10 * zyy + q11 * zyd, q10 * zyd + q11 * zdd
    out[3], out[4], out[5] = s00 * q00 + s01 * q01, s00 * q10 + s01 * q11, s10 * q10 + s11 * q11
    out[6], out[7], out[8], out[9], out[10], out[11] = g, h, q00, q01, q10, q11


response = compiled(_response)
