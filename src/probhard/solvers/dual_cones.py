"""Projections on the dual cones of a cone program, with their derivatives.

Each projection maps a block w of a vector to the nearest point of the dual cone, ``argmin |y - w|``. It returns the
point and its Jacobian ("slope"). The cones are zero (whose dual is free), orthant, second-order, semidefinite and
exponential.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize

from probhard._util.numerics import TINY

EQUAL = 1e-12  # distance of eigenvalues that counts as none, relative to the largest
AXIS = 300.0  # exponent beyond which the ray of an exponential cone is an axis, to rounding
OVERFLOW = 600.0  # largest exponent that is evaluated

Projected = tuple[np.ndarray, np.ndarray]  # value (k,) and slope (k, k)
Cone = tuple[int, Callable[[np.ndarray], Projected]]  # size of the block and the projection on its dual cone


def dual_cones(dims: Any) -> list[Cone]:
    """The dual cones in the order of cvxpy's dimensions for Clarabel.

    Args:
        dims: cvxpy's ``ConeDims``: zero and nonneg rows, and the sizes of soc, psd and exp cones.

    Returns:
        The size of each block and the projection on its dual cone.
    """
    cones: list[Any] = [(dims.zero, lambda w: (w, np.eye(len(w))))]
    cones.append((dims.nonneg, lambda w: (np.maximum(w, 0.0), np.diag((w > 0).astype(float)))))
    cones += [(size, _second_order) for size in dims.soc]
    for size in dims.psd:
        i, j = np.tril_indices(size)  # the upper triangle by columns, off-diagonal entries times sqrt(2)
        basis = np.zeros((len(i), size, size))
        basis[np.arange(len(i)), i, j] = basis[np.arange(len(i)), j, i] = np.where(i == j, 1.0, 0.5**0.5)
        cones.append((len(i), lambda w, basis=basis: _semidefinite(w, basis)))
    return cones + [(3, _exponential)] * dims.exp


def project(w: np.ndarray, cones: list[Cone]) -> Projected:
    """The projection of w (m,) on a product of dual cones, and its slope (m, m)."""
    value, slope, start = np.empty_like(w), np.zeros((len(w), len(w))), 0
    for size, projection in cones:
        part = slice(start, start + size)
        value[part], slope[part, part] = projection(w[part])
        start += size
    return value, slope


def _second_order(w: np.ndarray) -> Projected:
    """On ``|w_1..| <= w_0``, which is its own dual."""
    height, size, eye = w[0], np.linalg.norm(w[1:]), np.eye(len(w))
    if size <= abs(height):
        return (w, eye) if height > 0 else (0 * w, 0 * eye)
    along, share = w[1:] / size, height / size
    slope = (1 + share) * eye
    slope[1:, 1:] -= share * np.outer(along, along)
    slope[0, 0], slope[0, 1:], slope[1:, 0] = 1.0, along, along
    return 0.5 * (height + size) * np.append(1.0, along), 0.5 * slope


def _semidefinite(w: np.ndarray, basis: np.ndarray) -> Projected:
    """On positive semidefinite matrices, given in a basis (k, size, size), by their positive eigenvalues."""
    values, vectors = np.linalg.eigh(np.tensordot(w, basis, 1))
    positive = np.maximum(values, 0.0)
    gap = values[:, None] - values
    near = np.abs(gap) <= EQUAL * np.abs(values).max(initial=TINY)
    shares = np.where(near, values > 0, (positive[:, None] - positive) / np.where(near, 1.0, gap))
    turned = vectors.T @ basis @ vectors
    whole = (vectors * positive) @ vectors.T
    return np.einsum("kij,ij->k", basis, whole), np.einsum("kij,ij,lij->kl", turned, shares, turned)


def _exponential(w: np.ndarray) -> Projected:
    """On the dual exponential cone, by Moreau's decomposition from the projection p of -w on ``y exp(x / y) <= z``.

    Then ``-w = p + pull``, with p on a ray of the boundary given by the ratio ``x / y``.
    """
    x, y, z = point = -w
    eye = np.eye(3)
    if (y > 0 and y * np.exp(min(x / y, OVERFLOW)) <= z) or (y == 0 and x <= 0 <= z):
        return 0 * w, 0 * eye
    if (x > 0 and x * np.exp(min(y / x, OVERFLOW)) <= -math.e * z) or (x == 0 and y <= 0 and z <= 0):
        return w, eye
    if x <= 0 and y <= 0:
        return w + np.array([x, 0.0, max(z, 0.0)]), np.diag([0.0, 1.0, float(z <= 0)])
    low, high = 1 - y / x if x > 0 else -np.inf, x / y if y > 0 else np.inf
    if low > AXIS:
        return w + np.array([0.0, 0.0, z]), np.diag([1.0, 1.0, 0.0])
    if high < -AXIS:
        return w + np.array([x, y, 0.0]), np.diag([0.0, 0.0, 1.0])
    ray = ExponentialRay(*point)
    near, slope = ray.projected(ray.ratio(low, high))
    return w + near, eye - slope


@dataclass(frozen=True)
class ExponentialRay:
    """The projection of (x, y, z) on the boundary of the exponential cone, as a function of its ratio."""

    x: float
    y: float
    z: float

    def lengths(self, ratio: float) -> tuple[float, float]:
        """How far the projection lies along the ray, and how far it is pulled along the normal."""
        share = ratio * (ratio - 1) + 1
        return ((ratio - 1) * self.x + self.y) / share, (self.x - ratio * self.y) / share

    def gap(self, ratio: float) -> float:
        """Zero at the ratio of the projection; increasing."""
        along, pull = self.lengths(ratio)
        rate = np.exp(np.clip(ratio, -OVERFLOW, OVERFLOW))
        return along * rate - pull / rate - self.z

    def ratio(self, low: float, high: float) -> float:
        """The root of the gap between the ratios at which the projection or the pull vanishes, by Brent's method."""
        if np.isinf(high):
            high = low + 1
            while self.gap(high) < 0 and high < OVERFLOW:
                high = 2 * high - low
        if np.isinf(low):
            low = high - 1
            while self.gap(low) > 0 and low > -OVERFLOW:
                low = 2 * low - high
        if self.gap(low) < 0 < self.gap(high):
            return scipy.optimize.brentq(self.gap, low, high, xtol=1e-15, rtol=1e-15, disp=False)
        return float(low if self.gap(low) >= 0 else high)  # where rounding hides the change of sign

    def projected(self, ratio: float) -> Projected:
        """The projection on the cone and its slope."""
        along, pull = self.lengths(ratio)
        # each of the two without cancellation
        height = self.z + pull * np.exp(-ratio) if ratio > 0 else along * np.exp(ratio)
        along = height * np.exp(-ratio) if ratio > 0 else along
        ray = np.array([ratio, 1.0, np.exp(ratio)])
        normal = np.array([1.0, 1 - ratio, -np.exp(-ratio)])
        ray, normal = ray / np.linalg.norm(ray), normal / np.linalg.norm(normal)
        side = np.cross(ray, normal)
        bend = pull * (side[0] - ratio * side[1]) ** 2  # of the boundary across the ray
        slope = np.outer(ray, ray) + along / (along + bend) * np.outer(side, side)
        return np.array([ratio * along, along, height]), slope
