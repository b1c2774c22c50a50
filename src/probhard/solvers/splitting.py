"""A fixed number of branch-free iterations for the multipliers of inequalities.

    min 1/2 y.K y - t0.y  over y in the normal cone of X at t,     t = t0 - K y,     X = intervals x L1 balls.

Each iteration of the alternating direction method of multipliers is one product with a constant matrix and one
projection on X, over-relaxed:

    t = t0 - L t0 + L (w - v),     x = a t + (1 - a) w + v,     w = X(x),     v = x - w,     L = rho K (I + rho K)^-1.

Then y = rho v. ``polished`` solves the face that the last iterate lies on, which is exact once the face is right.
K has a diagonal of about 1, and so has rho.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probhard._util.tensors import matvec
from probhard.rows.dense import cholesky_solve

PENALTY = 5.0  # rho: a compromise between simplices and dense rows (3) and profiles with bounds (10)
RELAXATION = 1.6
ROUNDS = 3  # faces that are solved after the iterations; each is that of the point before
RIDGE = 1e-10  # relative to K: dependent rows of a face; refined away


@dataclass(frozen=True)
class L1Block:
    """Rows whose distance from a center has a bounded sum.

    Args:
        start: First row.
        stop: Last row, plus one.
        center: (*batch, stop - start).
        radius: (*batch,).
    """

    start: int
    stop: int
    center: Tensor
    radius: Tensor

    def project(self, x: Tensor) -> Tensor:
        """The nearest points of the ball to x (*lead, k)."""
        offset = x - self.center
        size = offset.abs()
        above = size.sort(-1, descending=True).values.cumsum(-1) - self.radius.unsqueeze(-1)
        count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
        threshold = (above / count).amax(-1, keepdim=True).clamp(min=0)
        return self.center + offset.sign() * (size - threshold).clamp(min=0)


@dataclass(frozen=True)
class SplitProblem:
    """``t = t0 - K y`` with t in X: intervals for all rows, L1 balls for the last ones.

    Args:
        gram: K, (*batch, m, m).
        value: t0, (*lead, m).
        lower: (*batch, m); -inf for rows of balls.
        upper: (*batch, m); inf for rows of balls.
        blocks: The balls, in the order of the rows.
    """

    gram: Tensor
    value: Tensor
    lower: Tensor
    upper: Tensor
    blocks: tuple[L1Block, ...] = ()

    def project(self, x: Tensor) -> Tensor:
        """The nearest points of X to x (*lead, m)."""
        inside = torch.minimum(torch.maximum(x, self.lower), self.upper)
        if not self.blocks:
            return inside
        parts = [inside[..., : self.blocks[0].start]]
        parts += [block.project(x[..., block.start : block.stop]) for block in self.blocks]
        return torch.cat(parts, -1)

    def moved(self, y: Tensor) -> Tensor:
        """``t0 - K y``."""
        return self.value - matvec(self.gram, y)


def relaxation(gram: Tensor) -> Tensor:
    """L of K (*batch, m, m)."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    scaled = PENALTY * gram
    solved = torch.cholesky_solve(scaled, torch.linalg.cholesky_ex(eye + scaled).L)
    return 0.5 * (solved + solved.mT)


def iterate(problem: SplitProblem, matrix: Tensor, iterations: int) -> Tensor:
    """Multipliers y (*lead, m) after a fixed number of iterations.

    Args:
        problem: The problem; its K is not used.
        matrix: L, (*batch, m, m), of ``relaxation``.
        iterations: Their number.
    """
    base = problem.value - matvec(matrix, problem.value)
    w = problem.project(problem.value)
    v = torch.zeros_like(w)
    for _ in range(iterations):
        t = base + matvec(matrix, w - v)
        x = RELAXATION * t + (1 - RELAXATION) * w + v
        w = problem.project(x)
        v = x - w
    return PENALTY * v


@dataclass(frozen=True)
class Face:
    """A face of X.

    Args:
        side: Of intervals, -1 at the lower and 1 at the upper bound; in balls the signs; (*lead, m).
        held: Rows with one value, (*lead, m) bool.
        target: Their values, else 0, (*lead, m).
        sums: Signs of the rows of each ball that is at its radius, else 0, (*lead, balls, m).
        radius: What these sums are, (*lead, balls), including that of the center.
    """

    side: Tensor
    held: Tensor
    target: Tensor
    sums: Tensor
    radius: Tensor

    @classmethod
    def of(cls, problem: SplitProblem, x: Tensor) -> Face:
        """The face that the nearest point of X to x (*lead, m) lies on."""
        lower, upper = problem.lower, problem.upper
        side = (x > upper).to(x.dtype) - (x < lower).to(x.dtype)
        side = torch.where(lower == upper, torch.ones_like(side), side)
        held, target = side != 0, torch.where(side > 0, upper, lower)
        target = torch.where(held, target, 0.0)
        signs, hold, goal = [], [], []
        rows, radii = [], []
        for block in problem.blocks:
            part = x[..., block.start : block.stop]
            full = ((part - block.center).abs().sum(-1) > block.radius).unsqueeze(-1)
            sign = torch.where(full, (block.project(part) - block.center).sign(), 0.0)
            signs.append(sign)
            hold.append(full & (sign == 0))
            goal.append(torch.where(hold[-1], block.center, 0.0))
            before = sign.new_zeros(*sign.shape[:-1], block.start)
            after = sign.new_zeros(*sign.shape[:-1], x.shape[-1] - block.stop)
            rows.append(torch.cat([before, sign, after], -1))
            radii.append(torch.where(full[..., 0], block.radius + (sign * block.center).sum(-1), 0.0))
        if not rows:
            none = x.new_zeros(*x.shape[:-1], 0)
            return cls(side, held, target, none.unsqueeze(-1).expand(*none.shape, x.shape[-1]), none)
        first = problem.blocks[0].start
        side, held = torch.cat([side[..., :first], *signs], -1), torch.cat([held[..., :first], *hold], -1)
        target = torch.cat([target[..., :first], *goal], -1)
        return cls(side, held, target, torch.stack(rows, -2), torch.stack(radii, -1))

    @property
    def directions(self) -> Face:
        """The subspace parallel to the face."""
        return replace(self, target=torch.zeros_like(self.target), radius=torch.zeros_like(self.radius))

    def normal(self, y: Tensor) -> Tensor:
        """Multipliers y (*lead, m), restricted to the normals of the face."""
        kept = torch.where(self.held, y, 0.0)
        if not self.sums.shape[-2]:
            return kept
        count = self.sums.abs().sum(-1).clamp(min=1)
        mean = (self.sums * y.unsqueeze(-2)).sum(-1) / count
        return kept + (mean.unsqueeze(-1) * self.sums).sum(-2)

    def solve(self, gram: Tensor, t: Tensor) -> Tensor:
        """The y of the face's normals for which ``t - K y`` lies on the face; t (..., *lead, m)."""
        held = self.held.to(t.dtype)
        gap = [held * (t - self.target)]
        active = [held]
        wide = gram
        if self.sums.shape[-2]:
            gap.append((self.sums * t.unsqueeze(-2)).sum(-1) - self.radius)
            active.append((self.sums != 0).any(-1).to(t.dtype))
            crossed = self.sums @ gram
            below = torch.cat([crossed, crossed @ self.sums.mT], -1)
            top = torch.cat([gram.expand(*crossed.shape[:-2], *gram.shape[-2:]), crossed.mT], -1)
            wide = torch.cat([top, below], -2)
        mask, r = torch.cat(active, -1), torch.cat(gap, -1)
        masked = mask.unsqueeze(-1) * wide * mask.unsqueeze(-2)
        lower = torch.linalg.cholesky_ex(masked + torch.diag_embed(RIDGE * mask + (1 - mask))).L
        solved = cholesky_solve(lower, r)
        for _ in range(2):
            solved = solved + cholesky_solve(lower, r - matvec(masked, solved))
        m = gram.shape[-1]
        y = held * solved[..., :m]
        if not self.sums.shape[-2]:
            return y
        return y + (solved[..., m:].unsqueeze(-1) * self.sums).sum(-2)


def polished(problem: SplitProblem, y: Tensor) -> tuple[Tensor, Face, Tensor]:
    """The best of the given multipliers and those of a few faces after them.

    Args:
        problem: The problem.
        y: Multipliers, (*lead, m).

    Returns:
        Multipliers (*lead, m), their face, and ``max |t - X(t + y)|``, (*lead,), which is 0 at the solution.
    """
    t = problem.moved(y)
    best, error = y, _error(problem, t, y)
    for _ in range(ROUNDS):
        face = Face.of(problem, t + y)
        y = face.normal(y)
        y = y + face.solve(problem.gram, problem.moved(y))
        t = problem.moved(y)
        again = _error(problem, t, y)
        better = again < error
        best, error = torch.where(better.unsqueeze(-1), y, best), torch.where(better, again, error)
    return best, Face.of(problem, problem.moved(best) + best), error


def _error(problem: SplitProblem, t: Tensor, y: Tensor) -> Tensor:
    return (t - problem.project(t + y)).abs().amax(-1)
