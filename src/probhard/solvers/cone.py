"""Cone programs solved to rounding: Clarabel first, then Newton's method on the optimality conditions.

With ``minimise 1/2 x^T P x + c^T x``, ``A x + s = b``, s in a cone K, and ``w = y - s``, y the multipliers, these are

    P x + A^T proj(w) + c = 0,     A x + proj(w) - w = b,     proj on the dual cone of K.

Their residual proves optimality, whatever the solver said, and their Jacobian gives the derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse as sp

from probhard.constraints.convex_program import cvx
from probhard.errors import ParameterError

NEWTON = 30  # steps of refinement
PATIENCE = 4  # ... and of them without progress
NOISE = 1e-6  # of large terms, below which small ones are not asked for more
TIGHT = 1e-13  # asked of the cone solver, which stops where it makes no more progress
STATIONARY = 1e-9  # of the optimality conditions, relative


@dataclass(frozen=True)
class Report:
    """How one cone program went."""

    status: str = "not tried"
    steps: int = 0
    left: float = np.inf  # of the optimality conditions, relative

    @property
    def solved(self) -> bool:
        """Whether the conditions prove the point nearest."""
        return self.left <= STATIONARY


class ConeSolver:
    """Clarabel and Newton's method on one cone program at a time, as cvxpylayers calls them."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def attach(self, context: Any) -> None:
        """Take over the sparsity of P and ``(-A, b)`` and the cones, as cvxpy orders them for Clarabel."""
        dims = context.cone_dims
        if dims.p3d or dims.pnd:
            raise ParameterError(
                "The description of a ConvexProgram needs power cones.",
                "Their projections have no derivatives here.",
                "Write it with squares, norms, exponentials and logarithms.",
            )
        self.entries, self.pointers, self.shape = context.reduced_A.problem_data_index
        self.columns = np.repeat(np.arange(self.shape[1]), np.diff(self.pointers))
        self.quadratic = context.reduced_P.problem_data_index
        self.names = cvx("cvxpy.reductions.solvers.conic_solvers.clarabel_conif").dims_to_solver_cones(dims)
        self.cones, self.own = _cones(dims), context.var_recover[0].primal

    def solve(self, P: Any, q: Any, A: Any, dims: Any, options: Any, needs: bool) -> tuple[Any, Any, Any]:
        """The answer x and multipliers y of one problem, and the conditions at it."""
        clarabel = cvx("clarabel")
        whole = sp.csc_matrix((A, self.entries, self.pointers), shape=self.shape)
        rows, b, c = -whole[:, :-1], whole[:, -1].toarray().ravel(), np.asarray(q[:-1], dtype=float)
        entries, pointers, shape = self.quadratic
        square = sp.csc_matrix((P, entries, pointers), shape=shape)
        rows.eliminate_zeros()
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = TIGHT
        found = clarabel.DefaultSolver(sp.triu(square, format="csc"), c, rows, b, self.names, settings).solve()
        x, y, s = (np.array(values) for values in (found.x, found.z, found.s))
        slack, pull = (float(np.abs(values[dims.zero :]).max(initial=0.0)) for values in (s, y))
        balance = float(np.clip(slack / pull, 1e-6, 1e6)) if min(slack, pull) > 0 else 1.0  # multipliers like slacks
        conditions = Conditions(
            balance * square.toarray(), rows.toarray(), b, balance * c, self.cones, balance, self.own
        )
        state = conditions.refined(x, balance * y - s)
        self.reports.append(Report(str(found.status), found.iterations + state.steps, state.left))
        return state.x, state.y / balance, state

    def derivative(self, gradient: Any, _: Any, state: State) -> tuple[None, Any, Any]:
        """Pull a gradient in x back to q and the entries of ``(-A, b)``; 0 for a problem that was not solved."""
        n = self.shape[1] - 1
        if not state.left <= STATIONARY:
            return None, np.zeros(n + 1), np.zeros(len(self.entries))
        full = np.concatenate([gradient, np.zeros_like(state.y)])
        adjoint = state.factor.solve(full, transposed=True)
        first, second = np.append(adjoint[:n], 0.0), adjoint[n:]
        x = np.append(state.x, 1.0)
        entries = state.y[self.entries] * first[self.columns] + second[self.entries] * x[self.columns]
        return None, -state.conditions.balance * first, entries


@dataclass
class State:
    """A point of the optimality conditions."""

    conditions: Conditions
    x: np.ndarray
    y: np.ndarray
    slope: np.ndarray  # of the projection on the dual cone
    left: float
    steps: int

    @property
    def factor(self) -> Factor:
        """The conditions' Jacobian, factored once."""
        if "_factor" not in vars(self):
            vars(self)["_factor"] = Factor(self.conditions.jacobian(self.slope))
        return vars(self)["_factor"]


@dataclass(frozen=True)
class Conditions:
    """``P x + A^T proj(w) + c = 0`` and ``A x + proj(w) - w = b``, the multipliers scaled by ``balance``."""

    P: np.ndarray
    A: np.ndarray
    b: np.ndarray
    c: np.ndarray
    cones: list[Any]
    balance: float
    own: slice  # the columns of u

    def at(self, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Residuals, multipliers and the slope of the projection."""
        y, slope = projected(w, self.cones)
        return np.concatenate([self.P @ x + self.A.T @ y + self.c, self.A @ x + y - w - self.b]), y, slope

    def jacobian(self, slope: np.ndarray) -> np.ndarray:
        n = len(self.c)
        matrix = np.empty((n + len(self.b),) * 2)
        matrix[:n, :n], matrix[:n, n:], matrix[n:, :n], matrix[n:, n:] = self.P, self.A.T @ slope, self.A, slope
        matrix[range(n, len(matrix)), range(n, len(matrix))] -= 1
        return matrix

    def refined(self, x: np.ndarray, w: np.ndarray) -> State:
        """Newton's method from the solver's answer; the best point of its steps."""
        if not (np.isfinite(x).all() and np.isfinite(w).all()):
            return State(self, x, w, np.zeros((len(w), len(w))), np.inf, 0)
        f, y, slope = self.at(x, w)
        n, best = len(x), State(self, x, y, slope, self.relative(f, x, y, w), 0)
        for step in range(1, NEWTON + 1):
            if best.left <= 1e-15 or step > best.steps + PATIENCE:
                break
            move = Factor(self.jacobian(slope)).solve(-f)
            x, w = x + move[:n], w + move[n:]
            if not np.abs(move).max() < 1e100:
                break
            f, y, slope = self.at(x, w)
            if not (np.isfinite(f).all() and np.isfinite(slope).all()):
                break
            left = self.relative(f, x, y, w)
            if best.left <= 1e-12 and left > 0.1 * best.left:  # rounding is all that is left
                break
            if left < best.left:
                best = State(self, x, y, slope, left, step)
        return best

    def relative(self, f: np.ndarray, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
        """The largest residual, relative: in ``v = R u - R z`` and what moves u to the terms that cancel there.

        Measured by the largest terms of all, an error of variables with large weights would pass for rounding.
        """
        size, moved = np.abs(self.A), self.P.diagonal() > 0  # the columns of v
        first, second = np.abs(self.P) @ np.abs(x) + size.T @ np.abs(y) + np.abs(self.c), size @ np.abs(x)
        second += np.abs(y - w) + np.abs(self.b)
        rows = size[:, moved].any(1)
        reach = second[rows] + NOISE * size[rows][:, self.own] @ np.full(
            self.own.stop - self.own.start, np.abs(x[self.own]).max()
        )
        unit = (
            np.full(len(x), max(float(first.max()), self.balance)),
            np.full(len(y), float(second.max(initial=1e-300))),
        )
        natural = self.balance * size[rows].T @ reach
        for columns in (moved, self.own):
            unit[0][columns] = np.maximum(natural, NOISE * first)[columns]
        unit[1][rows] = reach
        return float(np.abs(f / np.maximum(np.concatenate(unit), 1e-300)).max())


class Factor:
    """An equilibrated matrix, factored; by its pseudo-inverse where it is singular."""

    def __init__(self, matrix: np.ndarray) -> None:
        self.row_scale = _inverse(np.abs(matrix).max(1))
        matrix = matrix * self.row_scale[:, None]
        self.columns = _inverse(np.abs(matrix).max(0))
        matrix = matrix * self.columns
        self.inverse = None
        with np.errstate(all="ignore"):
            *self.triangles, flag = scipy.linalg.lapack.dgetrf(matrix)
            share = scipy.linalg.lapack.dgecon(self.triangles[0], np.abs(matrix).sum(0).max())[0]
        if flag or not share > 1e-14:
            self.inverse = np.linalg.pinv(matrix, rcond=1e-10)

    def solve(self, right: np.ndarray, transposed: bool = False) -> np.ndarray:
        left, after = (self.columns, self.row_scale) if transposed else (self.row_scale, self.columns)
        if self.inverse is not None:
            return after * ((self.inverse.T if transposed else self.inverse) @ (left * right))
        return after * scipy.linalg.lapack.dgetrs(*self.triangles, left * right, trans=int(transposed))[0]


def _inverse(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, 1 / np.where(x > 0, x, 1.0), 1.0)


def _cones(dims: Any) -> list[tuple[int, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]]]:
    """Sizes and projections, with their slopes, on the dual cones."""
    cones: list[Any] = [(dims.zero, lambda w: (w, np.eye(len(w))))]
    cones.append((dims.nonneg, lambda w: (np.maximum(w, 0.0), np.diag((w > 0).astype(float)))))
    cones += [(size, _second_order) for size in dims.soc]
    for size in dims.psd:
        i, j = np.tril_indices(size)  # the upper triangle by columns, off-diagonal entries times sqrt(2)
        basis = np.zeros((len(i), size, size))
        basis[np.arange(len(i)), i, j] = basis[np.arange(len(i)), j, i] = np.where(i == j, 1.0, 0.5**0.5)
        cones.append((len(i), lambda w, basis=basis: _semidefinite(w, basis)))
    return cones + [(3, _exponential)] * dims.exp


def projected(w: np.ndarray, cones: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The projection of w on a product of dual cones, and its slope."""
    value, slope, start = np.empty_like(w), np.zeros((len(w), len(w))), 0
    for size, project in cones:
        part = slice(start, start + size)
        value[part], slope[part, part] = project(w[part])
        start += size
    return value, slope


def _second_order(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    height, size, eye = w[0], np.linalg.norm(w[1:]), np.eye(len(w))
    if size <= abs(height):
        return (w, eye) if height > 0 else (0 * w, 0 * eye)
    along, share = w[1:] / size, height / size
    slope = (1 + share) * eye
    slope[1:, 1:] -= share * np.outer(along, along)
    slope[0, 0], slope[0, 1:], slope[1:, 0] = 1.0, along, along
    return 0.5 * (height + size) * np.append(1.0, along), 0.5 * slope


def _semidefinite(w: np.ndarray, basis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = np.linalg.eigh(np.tensordot(w, basis, 1))
    positive = np.maximum(values, 0.0)
    gap = values[:, None] - values
    near = np.abs(gap) <= 1e-12 * np.abs(values).max(initial=1e-300)
    shares = np.where(near, values > 0, (positive[:, None] - positive) / np.where(near, 1.0, gap))
    turned = vectors.T @ basis @ vectors
    whole = (vectors * positive) @ vectors.T
    return np.einsum("kij,ij->k", basis, whole), np.einsum("kij,ij,lij->kl", turned, shares, turned)


def _exponential(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By Moreau from the projection of -w on ``y exp(x / y) <= z``: ``-w = p + pull``, p on a ray of ratio x / y.

    One equation in the ratio is left, increasing between the ratios at which p or the pull vanishes.
    """
    point, eye = -w, np.eye(3)
    x, y, z = point
    if (y > 0 and y * np.exp(min(x / y, 600.0)) <= z) or (y == 0 and x <= 0 <= z):
        return 0 * w, 0 * eye
    if (x > 0 and x * np.exp(min(y / x, 600.0)) <= -math.e * z) or (x == 0 and y <= 0 and z <= 0):
        return w, eye
    if x <= 0 and y <= 0:
        return w + np.array([x, 0.0, max(z, 0.0)]), np.diag([0.0, 1.0, float(z <= 0)])
    low, high = 1 - y / x if x > 0 else -np.inf, x / y if y > 0 else np.inf
    if low > 300:  # the ray is an axis, to rounding
        return w + np.array([0.0, 0.0, z]), np.diag([1.0, 1.0, 0.0])
    if high < -300:
        return w + np.array([x, y, 0.0]), np.diag([0.0, 0.0, 1.0])

    def lengths(ratio: float) -> tuple[float, float]:
        share = ratio * (ratio - 1) + 1
        return ((ratio - 1) * x + y) / share, (x - ratio * y) / share

    def gap(ratio: float) -> float:
        along, pull = lengths(ratio)
        rate = np.exp(np.clip(ratio, -600.0, 600.0))
        return along * rate - pull / rate - z

    if np.isinf(high):
        high = low + 1
        while gap(high) < 0 and high < 600:
            high = 2 * high - low
    if np.isinf(low):
        low = high - 1
        while gap(low) > 0 and low > -600:
            low = 2 * low - high
    ratio = float(low if gap(low) >= 0 else high)  # where rounding hides the change of sign
    if gap(low) < 0 < gap(high):
        ratio = scipy.optimize.brentq(gap, low, high, xtol=1e-15, rtol=1e-15, disp=False)
    along, pull = lengths(ratio)
    height = z + pull * np.exp(-ratio) if ratio > 0 else along * np.exp(ratio)  # each without cancellation
    along = height * np.exp(-ratio) if ratio > 0 else along
    near = np.array([ratio * along, along, height])
    ray = np.array([ratio, 1.0, np.exp(ratio)])
    normal = np.array([1.0, 1 - ratio, -np.exp(-ratio)])
    ray, normal = ray / np.linalg.norm(ray), normal / np.linalg.norm(normal)
    side = np.cross(ray, normal)
    bend = pull * (side[0] - ratio * side[1]) ** 2  # of the boundary across the ray
    slope = np.outer(ray, ray) + along / (along + bend) * np.outer(side, side)
    return w + near, eye - slope
