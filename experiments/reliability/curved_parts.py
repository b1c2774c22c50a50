"""Random curved constraints that a given point obeys: balls, spheres, cones, shapes of profiles; see ``parts``."""

from __future__ import annotations

from collections.abc import Callable

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor

import probhard as ph
from experiments.reliability.parts import Maker, Part

TINY = 1e-300


def ball(maker: Maker) -> Part:
    """A ball that reaches the point, about a centre of the whole batch."""
    count = max(1, maker.point.size // maker.n)
    center = maker.point.reshape(-1, maker.n).sum(0) / count - maker.scale * maker.random.normal(size=maker.n)
    radius = np.linalg.norm(maker.point - center, axis=-1) + maker.slack(*maker.point.shape[:-1])

    def violation(u: np.ndarray) -> np.ndarray:
        size = radius + np.abs(u).max(-1) + np.abs(center).max()
        return np.maximum(np.linalg.norm(u - center, axis=-1) - radius, 0) / size

    return Part("ball", ph.Ball(radius, center), violation, lambda u: [cp.norm(u - center) <= radius])


def sphere(maker: Maker) -> Part:
    """A curved equality: the squared distance from a centre is that of the feasible point."""
    center = maker.point - maker.scale * maker.random.normal(size=maker.point.shape)
    square = np.square((maker.point - center) / maker.scale).sum(-1)
    args, scale = (torch.from_numpy(center), torch.from_numpy(np.asarray(square)[..., None])), maker.scale

    def fn(u: Tensor, middle: Tensor, target: Tensor) -> Tensor:
        return ((u - middle) / scale).square().sum(-1, keepdim=True) - target

    def violation(u: np.ndarray) -> np.ndarray:
        found = np.square((u - center) / scale).sum(-1)
        size = square + np.square((np.abs(u) + np.abs(center)) / scale).sum(-1)
        return np.abs(found - square) / size

    return Part("sphere", ph.NonlinearEquality(fn, args=args), violation)


def exponential(maker: Maker) -> Part:
    """A convex function, ``log sum exp(a u / scale) <= total``, as a NonlinearInequality."""
    slopes, scale = maker.random.uniform(-1, 1, maker.n), maker.scale
    total = _log_sum(maker.point / scale * slopes) + maker.slack(*maker.point.shape[:-1]) / scale
    args = (torch.from_numpy(slopes), torch.from_numpy(np.asarray(total)[..., None]))

    def fn(u: Tensor, slopes: Tensor, total: Tensor) -> Tensor:
        return (u / scale * slopes).logsumexp(-1, keepdim=True) - total

    def violation(u: np.ndarray) -> np.ndarray:
        size = 1 + np.abs(total) + np.abs(u / scale).max(-1)
        return np.maximum(_log_sum(u / scale * slopes) - total, 0) / size

    return Part("exponential", ph.NonlinearInequality(fn, args=args), violation,
                lambda u: [cp.log_sum_exp(cp.multiply(slopes / scale, u)) <= total])  # fmt: skip


def _log_sum(x: np.ndarray) -> np.ndarray:
    most = x.max(-1)
    return most + np.log(np.exp(x - most[..., None]).sum(-1))


def cone(maker: Maker) -> Part:
    """A second-order cone ``|B u + c| <= a . u + d``."""
    count = int(maker.random.integers(1, 4))
    B, c = maker.random.normal(size=(count, maker.n)), maker.scale * maker.random.normal(size=count)
    a = maker.random.normal(size=maker.n) * maker.random.choice([0.0, 1.0])
    d = np.linalg.norm(maker.point @ B.T + c, axis=-1) - maker.point @ a + maker.slack(*maker.point.shape[:-1])

    def violation(u: np.ndarray) -> np.ndarray:
        excess = np.linalg.norm(u @ B.T + c, axis=-1) - u @ a - d
        size = np.linalg.norm(np.abs(u) @ np.abs(B).T, axis=-1) + np.linalg.norm(c) + np.abs(u) @ np.abs(a) + np.abs(d)
        return np.maximum(excess, 0) / (size + TINY)

    return Part("second-order cone", ph.SecondOrderCone(B, c, a, d), violation,
                lambda u: [cp.norm(B @ u + c) <= a @ u + d])  # fmt: skip


def standard_cone(maker: Maker) -> Part:
    """The cone ``|u[1:]| <= u[0]``."""

    def violation(u: np.ndarray) -> np.ndarray:
        return np.maximum(np.linalg.norm(u[..., 1:], axis=-1) - u[..., 0], 0) / (np.linalg.norm(u, axis=-1) + TINY)

    return Part("standard cone", ph.SecondOrderCone(), violation, lambda u: [cp.norm(u[1:]) <= u[0]])


def semidefinite(maker: Maker) -> Part:
    """Positive semidefinite matrices."""
    return _matrices(maker, unit=False)


def correlation(maker: Maker) -> Part:
    """Correlation matrices."""
    return _matrices(maker, unit=True)


def _matrices(maker: Maker, unit: bool) -> Part:
    size = round((np.sqrt(8 * maker.n + 1) - 1) / 2)
    row, column = np.tril_indices(size)
    whole = np.zeros((size, size, maker.n))
    for k, (i, j) in enumerate(zip(row, column)):
        whole[i, j, k] = whole[j, i, k] = 1.0 if i == j else 0.5**0.5
    diagonal = np.flatnonzero(row == column)

    def violation(u: np.ndarray) -> np.ndarray:
        low = np.linalg.eigvalsh(np.tensordot(u, whole, (-1, -1)))[..., 0]
        found = np.maximum(-low, 0) / (np.linalg.norm(u, axis=-1) + TINY)
        return np.maximum(found, np.abs(u[..., diagonal] - 1).max(-1)) if unit else found

    def terms(u: cp.Variable) -> list[cp.Constraint]:
        matrix = cp.reshape(whole.reshape(size * size, -1) @ u, (size, size), order="C")
        return [matrix >> 0, *([u[diagonal] == 1] if unit else [])]

    name = "correlation" if unit else "semidefinite"
    return Part(name, ph.Correlation(size) if unit else ph.PositiveSemidefinite(size), violation, terms)


def convex(maker: Maker) -> Part:
    """Profiles that curve upwards."""

    def violation(u: np.ndarray) -> np.ndarray:
        return np.maximum(-np.diff(u, 2, axis=-1), 0).max(-1, initial=0.0) / (np.abs(u).max(-1) + TINY)

    return Part("convex", ph.Convex(), violation, lambda u: [cp.diff(u, 2) >= 0] if maker.n > 2 else [])


def lots(maker: Maker) -> Part:
    """Semicontinuous values: 0 or at least the scale."""
    least = maker.scale

    def violation(u: np.ndarray) -> np.ndarray:
        return np.maximum(np.minimum(np.abs(u), least - u), 0).max(-1, initial=0.0) / least

    return Part("semicontinuous", ph.Semicontinuous(least), violation)


def fading(maker: Maker) -> Part:
    """Fields of three times whose variation never grows."""
    shape = (3, maker.n // 3)

    def violation(u: np.ndarray) -> np.ndarray:
        field = u.reshape(*u.shape[:-1], *shape)
        growth = np.diff(np.abs(np.diff(field, axis=-1)).sum(-1), axis=-1)
        return np.maximum(growth, 0).max(-1, initial=0.0) / (np.abs(u).sum(-1) + TINY)

    return Part("variation diminishing", ph.TotalVariationDiminishing(shape), violation)


def program(maker: Maker) -> Part:
    """A norm bounded by a parameter, as a ConvexProgram."""
    scale = maker.scale
    radius = np.linalg.norm(maker.point / scale, 3, axis=-1) + maker.slack(*maker.point.shape[:-1]) / scale

    def describe(u: cp.Variable, bound: cp.Parameter) -> list[cp.Constraint]:
        return [cp.pnorm(u / scale, 3) <= bound]

    def violation(u: np.ndarray) -> np.ndarray:
        found = np.linalg.norm(u / scale, 3, axis=-1)
        return np.maximum(found - radius, 0) / (found + radius + TINY)

    constraint = ph.ConvexProgram(describe, maker.n, args=(radius,), parameters=((),))
    return Part("convex program", constraint, violation, lambda u: [cp.pnorm(u / scale, 3) <= radius])


CURVED: dict[str, Callable[[Maker], Part]] = {
    make.__name__: make
    for make in (ball, sphere, exponential, cone, standard_cone, semidefinite, correlation, convex, lots, fading)
}
CURVED["program"] = program
