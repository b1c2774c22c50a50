"""Projections on two-sided rows in terms of their multipliers, by block principal pivoting.

A point u0 that obeys all equalities is moved to ``u = u0 - S C^T y`` by multipliers y of the rows ``l <= C u <= h``.
With ``K = C S C^T`` and ``c = C u0`` the optimality conditions are

    l <= c - K y <= h,     y >= 0 where the upper side is attained, y <= 0 at the lower side, y = 0 between them.

Rows at their sides a solve ``K_aa y_a = c_a - side_a``; only these are factored. All rows that ask for another side get
it at once. Where that does not lower the number of such rows any more, only the last of them does (Murty's rule, which
cannot cycle), until it falls.

Far from the set more rows may be violated than can be attained. Elements that do not settle within few steps therefore
get new sides from the alternating direction method of multipliers, whose iteration is one product with the same matrix
for the whole batch. What is left is solved by ``active_set`` and its interior point method. Rows have unit size,
``C W C^T = 1`` on the diagonal; a tiny ridge keeps dependent rows regular.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probhard._util.numerics import equal_bounds
from probhard.constraints.shapes import SLACK
from probhard.rows.dense import DenseRows
from probhard.solvers import active_set
from probhard.solvers.batched import Batched
from probhard.solvers.quadratic import NEAR, QuadraticProblem

QUICK, SLOW = 8, 40  # steps of pivoting at first, and after the last relaxation
STAGES = ((10.0, 50), (100.0, 150), (1000.0, 300))  # penalties and iterations of the relaxations
OVERSHOOT = 1.6  # over-relaxation of their steps
PATIENCE = 6  # steps of whole blocks without progress before rows change their sides one by one
RIDGE = 1e-13  # added to the diagonal of K_aa
STUCK = 1e-13  # rows with a smaller diagonal of K are fixed by the equalities
CHUNK = 4_000_000  # numbers in the rows of K_aa at a time


@dataclass(frozen=True)
class DualProblem:
    """One problem per element of the leading dimension L; float64, no gradients."""

    gram: Tensor  # K, (E, m, m): one for all elements if E = 1
    owner: Tensor  # which K an element has, (L,)
    value: Tensor  # c, (L, m)
    lower: Tensor  # l, (L, m)
    upper: Tensor  # h, (L, m)
    size: Tensor  # size of the terms that c is a sum of, (L, m)
    rank: int  # largest number of independent rows

    def select(self, index: Tensor) -> DualProblem:
        """The problems with these indices (k,)."""
        names = ("owner", "value", "lower", "upper", "size")
        return replace(self, **{name: getattr(self, name).index_select(0, index) for name in names})


@dataclass(frozen=True)
class ActiveRows:
    """The rows at their sides, at most k in an element, in front."""

    index: Tensor  # (*lead, k); 0 where there are fewer
    used: Tensor  # (*lead, k) bool

    @classmethod
    def of(cls, side: Tensor) -> ActiveRows:
        """The rows of sides (*lead, m) that are not 0."""
        flat = side.reshape(-1, side.shape[-1]) != 0
        place = flat.cumsum(-1)
        count = flat.sum(-1, keepdim=True)
        width = int(count.max()) if flat.numel() else 0
        row, column = flat.nonzero(as_tuple=True)
        index = place.new_zeros(len(flat), width)
        index[row, place[row, column] - 1] = column
        used = torch.arange(width, device=side.device) < count
        return cls(*(x.reshape(*side.shape[:-1], width) for x in (index, used)))

    def rows(self, matrix: Tensor, owner: Tensor) -> Tensor:
        """Rows (*lead, k, j) of matrices (E, m, j); element i has the matrix ``owner[i]``."""
        number = owner.reshape(*self.index.shape[:-1], 1) * matrix.shape[-2] + self.index
        flat = matrix.reshape(-1, matrix.shape[-1]).index_select(0, number.flatten())
        return flat.reshape(*self.index.shape, matrix.shape[-1])

    def factor(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cholesky factors of K_aa (*lead, k, k) from the rows of K (*lead, k, m), and where they failed (*lead,)."""
        return self.factored(rows.gather(-1, self.index.unsqueeze(-2).expand(*rows.shape[:-1], self.index.shape[-1])))

    def factored(self, square: Tensor) -> tuple[Tensor, Tensor]:
        """Cholesky factors of K_aa (*lead, k, k), given with any entries at unused rows, and where they failed."""
        both = self.used.unsqueeze(-1) & self.used.unsqueeze(-2)
        ridge = torch.where(self.used, RIDGE, 1.0).to(square.dtype)
        lower, info = torch.linalg.cholesky_ex(torch.where(both, square, 0.0) + torch.diag_embed(ridge))
        return lower, info != 0

    def gather(self, x: Tensor) -> Tensor:
        """Entries (..., *lead, k) of x (..., *lead, m); 0 where unused."""
        found = x.gather(-1, self.index.expand(*x.shape[:-1], self.index.shape[-1]))
        return torch.where(self.used, found, 0.0)

    def spread(self, y: Tensor, rows: int) -> Tensor:
        """Entries y (..., *lead, k), 0 where unused, among m rows: (..., *lead, m)."""
        return y.new_zeros(*y.shape[:-1], rows).scatter_add(-1, self.index.expand(y.shape), y)


@dataclass(frozen=True)
class Sides(Batched):
    """The sides of the solutions and how the solver ended."""

    side: Tensor  # (L, m) int8: -1 at the lower side, 1 at the upper one, 0 between them
    multiplier: Tensor  # y, (L, m)
    steps: Tensor  # (L,)
    done: Tensor  # (L,) bool

    @property
    def unfinished(self) -> Tensor:
        """Indices of the elements that are not done, (k,)."""
        return torch.nonzero(~self.done).squeeze(-1)


@torch.no_grad()
def solve(problem: DualProblem) -> Sides:
    """Find the sides of the optimal points and their multipliers.

    Args:
        problem: The problems, one per element of the leading dimension L.

    Returns:
        The sides of the solutions; ``done`` is False where the method failed.
    """
    count, rows = problem.value.shape
    width = max(1, CHUNK // max(1, rows * rows))
    if count > width:
        parts = torch.arange(count, device=problem.value.device).split(width)
        solved = [solve(problem.select(part)) for part in parts]
        names = ("side", "multiplier", "steps", "done")
        return Sides(*(torch.cat([getattr(part, name) for part in solved]) for name in names))
    start = torch.zeros_like(problem.value, dtype=torch.int8)
    side = _sides(problem, start, problem.value, torch.zeros_like(problem.value))
    sides, splits = _pivoted(problem, side, QUICK), Splits.of(problem)
    for stage, (penalty, steps) in enumerate(STAGES):
        left = sides.unfinished
        if len(left) == 0:
            return sides
        part, splits = problem.select(left), _relaxed(problem.select(left), splits.take(left), penalty, steps)
        found = _pivoted(part, splits.sides(part), QUICK if stage + 1 < len(STAGES) else SLOW)
        before = sides.steps.index_select(0, left) + steps
        sides = sides.placed(left, replace(found, steps=before + found.steps))
        splits = Splits.of(problem).placed(left, splits)
    left = sides.unfinished
    return sides.placed(left, _from_inside(problem.select(left))) if len(left) else sides


def settled(problem: DualProblem, sides: Sides, reached: Tensor) -> Tensor:
    """Whether all rows of an element are on the sides they belong on, (L,) bool, for ``c - K y`` (L, m)."""
    return sides.done & (_sides(problem, sides.side, reached, sides.multiplier) == sides.side).all(-1)


def _pivoted(problem: DualProblem, side: Tensor, most: int) -> Sides:
    """Block principal pivoting from sides (L, m), in at most so many steps; finished elements are dropped."""
    movable = problem.gram.diagonal(dim1=-2, dim2=-1) > STUCK  # (E, m)
    side = torch.where(movable.index_select(0, problem.owner), side, 0)
    steps = torch.zeros(len(side), dtype=torch.int64, device=side.device)
    whole = Sides(side, torch.zeros_like(problem.value), steps, steps > 0)
    index = torch.arange(len(side), device=side.device)
    least, patience = torch.full_like(steps, side.shape[-1] + 1), torch.full_like(steps, PATIENCE)
    number = torch.arange(1, side.shape[-1] + 1, device=side.device)
    for step in range(1, most + 1):
        fits = (side != 0).sum(-1) <= problem.rank  # others have too many rows at their sides
        if not bool(fits.all()):
            index, problem = index[fits], problem.select(fits.nonzero().squeeze(-1))
            side, least, patience = side[fits], least[fits], patience[fits]
        if len(index) == 0:
            break
        multiplier, reached, broken = _face(problem, side)
        fresh = _sides(problem, side, reached, multiplier)
        asks = (fresh != side) & movable.index_select(0, problem.owner)
        count = asks.sum(-1)
        left = ((count > 0) & ~broken).nonzero().squeeze(-1)
        if len(left) < len(index) or step == most:
            done = (count == 0) & ~broken
            whole = whole.placed(index, Sides(side, multiplier, torch.full_like(count, step), done))
            index, problem = index.index_select(0, left), problem.select(left)
            chosen = (side, fresh, asks, count, least, patience)
            side, fresh, asks, count, least, patience = (x.index_select(0, left) for x in chosen)
        better = count < least
        least, patience = torch.where(better, count, least), torch.where(better, PATIENCE, patience - 1)
        last = torch.where(asks, number, 0).amax(-1, keepdim=True)
        asks &= (patience >= 0).unsqueeze(-1) | (number == last)
        side = torch.where(asks, fresh, side)
    return whole


@dataclass(frozen=True)
class Splits(Batched):
    """Iterates of the alternating direction method: copies v of ``C u`` within the sides, and multipliers y."""

    value: Tensor  # v, (L, m)
    multiplier: Tensor  # y, (L, m)

    @classmethod
    def of(cls, problem: DualProblem) -> Splits:
        """The start: c moved to its sides."""
        return cls(problem.value.clamp(problem.lower, problem.upper), torch.zeros_like(problem.value))

    def sides(self, problem: DualProblem) -> Tensor:
        """Sides of the rows with multipliers, (L, m) int8."""
        side = self.multiplier.sign().to(torch.int8)
        return torch.where(equal_bounds(problem.lower, problem.upper), torch.ones_like(side), side)


def _relaxed(problem: DualProblem, splits: Splits, penalty: float, steps: int) -> Splits:
    """Iterations ``C u = c + K (K + I / penalty)^-1 (v - c - y / penalty)``, ``v = clip(C u + y / penalty)``."""
    m, gram, c = problem.value.shape[-1], problem.gram, problem.value
    shared = len(gram) == 1
    gram = gram[0] if shared else gram.index_select(0, problem.owner)
    ridge = gram + torch.eye(m, dtype=gram.dtype, device=gram.device) / penalty
    smoother = torch.cholesky_solve(gram, torch.linalg.cholesky_ex(ridge).L)  # symmetric
    v, y = splits.value, splits.multiplier / penalty
    for _ in range(steps):
        right = v - c - y
        moved = right @ smoother if shared else (right.unsqueeze(-2) @ smoother).squeeze(-2)
        goal = OVERSHOOT * (c + moved) + (1 - OVERSHOOT) * v + y
        v = goal.clamp(problem.lower, problem.upper)
        y = goal - v
    return Splits(v, y * penalty)


def _face(problem: DualProblem, side: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multipliers y (L, m) of rows at their sides, ``c - K y`` (L, m), and where K_aa could not be factored (L,)."""
    active, m = ActiveRows.of(side), side.shape[-1]
    rows = active.rows(problem.gram, problem.owner)
    lower, broken = active.factor(rows)
    bound = torch.where(side < 0, problem.lower, problem.upper)
    right = active.gather(problem.value - torch.where(side != 0, bound, 0.0))
    y = torch.cholesky_solve(right.unsqueeze(-1), lower).squeeze(-1)
    reached = problem.value - (y.unsqueeze(-2) @ rows).squeeze(-2)
    off = active.gather(reached - torch.where(side != 0, bound, 0.0))  # what the ridge and rounding left
    more = torch.cholesky_solve(off.unsqueeze(-1), lower).squeeze(-1)
    reached = reached - (more.unsqueeze(-2) @ rows).squeeze(-2)
    return active.spread(y + more, m), reached, broken


def _sides(problem: DualProblem, side: Tensor, reached: Tensor, multiplier: Tensor) -> Tensor:
    """The sides that rows belong on, (L, m) int8; within rounding they keep their side."""
    largest = multiplier.abs().amax(-1, keepdim=True) if multiplier.shape[-1] else multiplier
    near = NEAR * (problem.size + multiplier.abs().sum(-1, keepdim=True))
    above = reached > problem.upper + near
    below = reached < problem.lower - near
    fresh = above.to(torch.int8) - below.to(torch.int8)
    stays = multiplier * side >= -NEAR * largest
    fresh = torch.where(side == 0, fresh, torch.where(stays, side, 0))
    return torch.where(equal_bounds(problem.lower, problem.upper), torch.ones_like(fresh), fresh)


def _from_inside(problem: DualProblem) -> Sides:
    """Sides by ``active_set``, over ``v = (e, C u)`` with ``F e - C u = -c`` and ``F F^T = K``."""
    m, gram, owner = problem.value.shape[-1], problem.gram, problem.owner
    if len(gram) > 1:
        gram, owner = gram.index_select(0, owner), torch.arange(len(owner), device=owner.device)
    values, vectors = torch.linalg.eigh(gram)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)  # F, (E, m, m)
    eye = torch.eye(m, dtype=root.dtype, device=root.device)
    matrix = torch.cat([root, -eye.expand_as(root)], -1)
    matrix = matrix[0] if len(matrix) == 1 else matrix
    own = root.square().sum(-1).index_select(0, owner)
    natural = torch.cat([torch.ones_like(own), own.clamp(min=STUCK)], -1)
    weight = torch.cat([natural[:, :m], SLACK * natural[:, m:]], -1)
    free = torch.full_like(own, torch.inf)
    lower, upper = torch.cat([-free, problem.lower], -1), torch.cat([free, problem.upper], -1)
    costed = torch.arange(2 * m, device=root.device) < m
    centre = torch.cat([torch.zeros_like(own), problem.value.clamp(problem.lower, problem.upper)], -1)
    faces = active_set.solve(
        QuadraticProblem(DenseRows(matrix), -problem.value, centre, weight, natural, lower, upper, costed)
    )
    side = faces.side[:, m:]
    multiplier, _, broken = _face(problem, side)
    return Sides(side, multiplier, faces.steps, faces.done & ~broken)
