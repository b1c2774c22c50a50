"""Kernels for equal blocks on a CPU, compiled by numba if it is installed: the formulas of ``moments``.

Blocks are the rows of matrices (blocks, width) with shared coefficients a (width,). Each block is read twice, the
second time from the cache, and written once. Sums are in float64, whatever the dtype of the points.
"""

from __future__ import annotations

from probhard._util.jit import Array, compiled, quick
from probhard.rows._kernels.lanes import TINY, Numbers


@quick
def _sums(x: Numbers, y: Numbers, a: Numbers) -> tuple[float, float]:
    """``sum a x`` and ``sum a^2 y``."""
    first, second = 0.0, 0.0
    for i in range(len(a)):
        first += a[i] * x[i]
        second += a[i] * a[i] * y[i]
    return first, second


@compiled
def oblique(
    z: Numbers, w: Numbers, b: Numbers, a: Numbers, mean: Numbers, scale: Numbers, multiplier: Array, mass: Array
) -> None:
    """Write points, roots of the variances, and multipliers and masses (blocks,) for the adjoint."""
    for r in range(z.shape[0]):
        point, total = _sums(z[r], w[r], a)
        regular = total > 0.0  # otherwise no variable of the row can move
        mass[r] = total if regular else 1.0
        multiplier[r] = (point - b[r]) / total if regular else 0.0
        for i in range(z.shape[1]):
            gain = a[i] * w[r, i]
            mean[r, i] = z[r, i] - multiplier[r] * gain
            scale[r, i] = (max(mass[r] - gain * a[i], 0.0) / mass[r] * w[r, i]) ** 0.5


@quick
def _pulls(of_mean: Numbers, of_scale: Numbers, scale: Numbers, w: Numbers, a: Numbers) -> tuple[float, float]:
    """``sum g u'`` and ``sum g^2 v'`` with the gain ``g = a w``."""
    first, second = 0.0, 0.0
    for i in range(len(a)):
        gain = a[i] * w[i]
        first += gain * of_mean[i]
        second += gain * gain * (0.5 * of_scale[i] * scale[i] / (scale[i] * scale[i] + TINY))
    return first, second


@compiled
def oblique_adjoint(
    w: Numbers,
    a: Numbers,
    multiplier: Array,
    mass: Array,
    scale: Numbers,
    of_mean: Numbers,
    of_scale: Numbers,
    of_z: Numbers,
    of_w: Numbers,
    of_b: Numbers,
) -> None:
    """Write the gradients of z, w and b of ``oblique``."""
    for r in range(w.shape[0]):
        first, second = _pulls(of_mean[r], of_scale[r], scale[r], w[r], a)
        right, shift, inverse = -first / mass[r], multiplier[r], 1.0 / mass[r]
        curved = second * inverse * inverse - shift * right
        of_b[r] = -right
        for i in range(w.shape[1]):
            of_variance = 0.5 * of_scale[r, i] * scale[r, i] / (scale[r, i] * scale[r, i] + TINY)
            of_z[r, i] = of_mean[r, i] + a[i] * right
            own = of_variance * (1.0 - 2.0 * a[i] * a[i] * w[r, i] * inverse)
            of_w[r, i] = own - of_mean[r, i] * a[i] * shift + a[i] * a[i] * curved


@compiled
def fixed(z: Numbers, s: Numbers, b: Numbers, a: Numbers, gain: Numbers, mean: Numbers, scale: Numbers) -> None:
    """Write points and roots of the variances; block r uses row ``r % q`` of the gains (q, width)."""
    for r in range(z.shape[0]):
        point, total = _sums(z[r], s[r], a)
        right, k = point - b[r], gain[r % gain.shape[0]]
        for i in range(z.shape[1]):
            stay = max(1.0 - k[i] * a[i], 0.0)
            mean[r, i] = z[r, i] - right * k[i]
            others = max(total - a[i] * a[i] * s[r, i], 0.0)
            scale[r, i] = (others * k[i] * k[i] + s[r, i] * stay * stay) ** 0.5


@quick
def _pushes(of_mean: Numbers, of_scale: Numbers, scale: Numbers, k: Numbers) -> tuple[float, float]:
    """``sum k u'`` and ``sum k^2 v'``."""
    first, second = 0.0, 0.0
    for i in range(len(k)):
        first += k[i] * of_mean[i]
        second += k[i] * k[i] * (0.5 * of_scale[i] * scale[i] / (scale[i] * scale[i] + TINY))
    return first, second


@compiled
def fixed_adjoint(
    a: Numbers,
    gain: Numbers,
    scale: Numbers,
    of_mean: Numbers,
    of_scale: Numbers,
    of_z: Numbers,
    of_s: Numbers,
    of_b: Numbers,
) -> None:
    """Write the gradients of z, s and b of ``fixed``."""
    for r in range(scale.shape[0]):
        k = gain[r % gain.shape[0]]
        right, total = _pushes(of_mean[r], of_scale[r], scale[r], k)
        of_b[r] = right
        for i in range(scale.shape[1]):
            of_variance = 0.5 * of_scale[r, i] * scale[r, i] / (scale[r, i] * scale[r, i] + TINY)
            stay = max(1.0 - k[i] * a[i], 0.0)
            of_z[r, i] = of_mean[r, i] - a[i] * right
            of_s[r, i] = (total - of_variance * k[i] * k[i]) * a[i] * a[i] + of_variance * stay * stay
