"""DC3 (Donti, Rolnick and Kolter 2021): complete some variables from the equalities, then correct the others.

    y = (z, phi(z)),   h(z, phi(z)) = 0;     z <- z - d,   d <- rate * grad_z |relu(g(y(z)))|^2 + momentum * d,

K times. Linear equalities are solved in closed form, others by Newton's method with implicit gradients. DC3 corrects
nonlinear problems along the tangent of phi and lets equalities drift; here phi is solved again after every step.

With no step and affine equalities, the law of y is that of its free variables: a structural feasible latent
parameterisation (SLP-ProbHard; Bekele and D'Oria 2026) whose coordinates are variables of the problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from probhard._util.lru import Recent
from probhard._util.tensors import checking
from probhard.corrections.base import Bound, Correction, inapplicable
from probhard.corrections.rows import TwoSided, linear_rows
from probhard.corrections.sweeps import smooth_parts
from probhard.errors import ParameterError, RankError
from probhard.projection.parts import Parts

NAME = "DC3"
NEWTON, HALVINGS, SETTLED = 50, 10, 1e-12  # Newton steps, halvings of a step, residual relative to its first size
SINGULAR = 1e12  # condition number of the columns that are solved for
_CLOSED: Recent[tuple[Tensor, Tensor, tuple[int, ...]]] = Recent(16)


@dataclass(frozen=True)
class Completion(Correction):
    """DC3's completion and correction.

    Args:
        solved: Indices of the variables that the equalities are solved for, one per row. None takes those with the
            best-conditioned columns, by pivoted QR; nonlinear equalities need them.
        steps: Number of correction steps K.
        rate: Size of a step.
        momentum: Share of the last step that is repeated.

    Raises:
        ParameterError: A number is out of range.
    """

    kind: ClassVar[str] = "completion"
    solved: tuple[int, ...] | None = None
    steps: int = 10
    rate: float = 1e-7
    momentum: float = 0.5

    def __post_init__(self) -> None:
        if self.solved is not None:  # a list, in saved files
            object.__setattr__(self, "solved", tuple(int(index) for index in self.solved))
        if self.steps < 0 or self.rate <= 0 or not 0 <= self.momentum < 1:
            raise ParameterError(
                f"Got {self}.",
                "A correction descends by a fixed number of steps.",
                "Pass steps >= 0, rate > 0 and a momentum in [0, 1).",
            )

    def bound(self, parts: Parts, like: Tensor) -> Bound:
        if parts.semicontinuous or parts.convex_programs or parts.diminishing is not None:
            raise inapplicable(NAME, parts, "It descends a violation that has a gradient.", "Use 'probhard-or'.")
        if parts.nonlinear is None:
            return _LinearCompletion(self, parts, like)
        return _NewtonCompletion(self, parts, like)


class _Correcting(Bound):
    """Correction steps on the free variables, through a completion."""

    free: Tensor  # indices (k,)

    def __init__(self, settings: Completion, parts: Parts, like: Tensor) -> None:
        self.settings, self.parts = settings, parts
        self.rows = linear_rows(replace(parts, linear=None, kept=None), like)  # inequalities alone
        self.excesses = smooth_parts(parts)[1]
        self.unequal = bool(self.rows.count or self.excesses)
        self.steps = settings.steps if self.unequal else 0

    def __call__(self, z: Tensor) -> Tensor:
        y = self.complete(z[..., self.free], z)
        step: Tensor | None = None
        for _ in range(self.steps):
            step = self._next(self.pulled(self._slope(y), y), step)
            y = self.complete(y[..., self.free] - step, y)
        return y

    def _next(self, slope: Tensor, step: Tensor | None) -> Tensor:
        """The next step, with the momentum of the last one."""
        slope = self.settings.rate * slope
        return slope if step is None else slope + self.settings.momentum * step

    def complete(self, free: Tensor, start: Tensor) -> Tensor:
        """Points (*lead, n) on the equalities with free variables (*lead, k); ``start`` (*lead, n) for iterations."""
        raise NotImplementedError

    def pulled(self, slope: Tensor, y: Tensor) -> Tensor:
        """``(dy/dfree)^T slope`` (*lead, k) at y (*lead, n)."""
        raise NotImplementedError

    def _slope(self, y: Tensor) -> Tensor:
        """The gradient (*lead, n) of the squared violations of the inequalities at y."""
        matrix, excess = self.rows.matrix, self.rows.excess(y)
        slope = 2 * (excess @ matrix if matrix.dim() == 2 else (excess.unsqueeze(-2) @ matrix).squeeze(-2))
        for function in self.excesses:
            value, pull = torch.func.vjp(function.residual, y)[:2]
            slope = slope + 2 * pull(torch.relu(value))[0]
        return slope


class _LinearCompletion(_Correcting):
    """``y = E free + F b`` of linear equalities, or no completion if there are none."""

    def __init__(self, settings: Completion, parts: Parts, like: Tensor) -> None:
        super().__init__(settings, parts, like)
        n = parts.variables
        equal, self.right = like.new_zeros(0, n), like.new_zeros(0)
        if parts.linear is not None:
            equal, self.right = parts.linear.system.map.at(like).dense(), parts.linear.b.to(like)
        if equal.dim() > 2:
            raise inapplicable(
                NAME,
                parts,
                "Its equalities have rows that differ between batch elements, and the solved variables are shared.",
                "Use 'probhard-or', or share the rows.",
            )
        key = (tuple(equal.shape), equal.numpy(force=True).tobytes(), settings.solved)
        spread, shift, solved = _CLOSED.get(key, lambda: _closed_form(equal, settings.solved))
        self.spread, self.shift = spread.to(like), shift.to(like)  # E (n, k), F (n, q)
        self.free = torch.from_numpy(np.setdiff1d(np.arange(n), solved)).to(like.device)
        self.guaranteed = not self.unequal
        if not self.unequal:
            self.matrix = like.new_zeros(n, n).index_copy(1, self.free, self.spread)

    def __call__(self, z: Tensor) -> Tensor:
        if self.excesses or self.rows.matrix.dim() > 2 or not self.steps:
            return super().__call__(z)
        # linear inequalities of the free variables alone: the same steps on fewer numbers
        offset = self.right @ (self.rows.matrix @ self.shift).mT
        reduced = TwoSided(self.rows.matrix @ self.spread, self.rows.lower - offset, self.rows.upper - offset)
        free, step = z[..., self.free], None
        for _ in range(self.steps):
            step = self._next(2 * reduced.excess(free) @ reduced.matrix, step)
            free = free - step
        return self.complete(free, z)

    def complete(self, free: Tensor, start: Tensor) -> Tensor:
        return free @ self.spread.mT + self.right @ self.shift.mT

    def pulled(self, slope: Tensor, y: Tensor) -> Tensor:
        return slope @ self.spread


class _NewtonCompletion(_Correcting):
    """Newton's method on nonlinear equalities, with linear ones beside them."""

    def __init__(self, settings: Completion, parts: Parts, like: Tensor) -> None:
        super().__init__(settings, parts, like)
        if settings.solved is None:
            raise inapplicable(
                NAME,
                parts,
                "No choice of variables suits nonlinear equalities everywhere.",
                "Name one variable per equation, Step(correction=Completion(solved=(...))).",
            )
        assert parts.nonlinear is not None
        self.nonlinear, self.equal = parts.nonlinear, None
        if parts.linear is not None:
            none = replace(parts, inequalities=(), box=None, shapes=(), kept=None)
            self.equal = linear_rows(none, like)
        n = parts.variables
        self.solved = torch.tensor(settings.solved, device=like.device)
        self.free = torch.from_numpy(np.setdiff1d(np.arange(n), settings.solved)).to(like.device)

    def complete(self, free: Tensor, start: Tensor) -> Tensor:
        with torch.no_grad():
            y = self._newton(self._placed(free.detach(), start.detach()[..., self.solved]))
        if not torch.is_grad_enabled():
            return y
        # one more Newton step with a constant Jacobian: its derivative in ``free`` is that of the solution
        own = y[..., self.solved]
        residual, jacobian = self._linearised(self._placed(free, own))
        move = torch.linalg.solve(jacobian.detach()[..., self.solved], residual.unsqueeze(-1)).squeeze(-1)
        return self._placed(free, own - move)

    def pulled(self, slope: Tensor, y: Tensor) -> Tensor:
        _, jacobian = self._linearised(y)
        own = torch.linalg.solve(jacobian[..., self.solved].mT, slope[..., self.solved].unsqueeze(-1))
        return slope[..., self.free] - (jacobian[..., self.free].mT @ own).squeeze(-1)

    def _newton(self, y: Tensor) -> Tensor:
        """Points on the equalities, from y (*lead, n), by Newton steps in the solved variables, halved if needed."""
        residual, jacobian = self._linearised(y)
        self._check(residual)
        size = residual.abs().amax(-1)
        first = size.clamp(min=1.0)
        for _ in range(NEWTON):
            if checking() and bool((size <= SETTLED * first).all()):
                break
            square = jacobian[..., self.solved]
            move, failed = torch.linalg.solve_ex(square, residual.unsqueeze(-1))
            move = torch.where((failed == 0).unsqueeze(-1), move.squeeze(-1), 0.0)
            own, length = y[..., self.solved], torch.ones_like(size)
            best, lowest = y, size
            for _ in range(HALVINGS):
                trial = self._placed(y[..., self.free], own - length.unsqueeze(-1) * move)
                found = self._residual(trial).abs().amax(-1)
                better = found < lowest
                best = torch.where(better.unsqueeze(-1), trial, best)
                lowest = torch.where(better, found, lowest)
                if checking() and bool((better | (lowest < size) | (size <= SETTLED * first)).all()):
                    break
                length = torch.where(lowest < size, length, 0.5 * length)
            y, size = best, lowest
            residual, jacobian = self._linearised(y)
        return y

    def _residual(self, y: Tensor) -> Tensor:
        own = self.nonlinear.residual(y)
        return own if self.equal is None else torch.cat([_gap(self.equal, y), own], -1)

    def _linearised(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals (*lead, q) and their Jacobian (*lead, q, n)."""
        own = self.nonlinear.residual(y)
        jacobian = self.nonlinear.jacobian(y, own.shape[-1])
        if self.equal is None:
            return own, jacobian
        rows = self.equal.matrix.expand(*y.shape[:-1], *self.equal.matrix.shape[-2:])
        return torch.cat([_gap(self.equal, y), own], -1), torch.cat([rows, jacobian], -2)

    def _placed(self, free: Tensor, own: Tensor) -> Tensor:
        """Points (*lead, n) of free (*lead, k) and solved variables (*lead, q)."""
        y = free.new_zeros(*free.shape[:-1], self.parts.variables)
        return y.index_copy(-1, self.free, free).index_copy(-1, self.solved, own)

    def _check(self, residual: Tensor) -> None:
        if residual.shape[-1] != len(self.solved):
            raise inapplicable(
                NAME,
                self.parts,
                f"It has {residual.shape[-1]} equations, and solved names {len(self.solved)} variables.",
                "Name as many different variables as there are equations.",
            )


def _gap(rows: TwoSided, y: Tensor) -> Tensor:
    """``A y - b`` (*lead, q)."""
    return (rows.matrix @ y.unsqueeze(-1)).squeeze(-1) - rows.lower


def _closed_form(equal: Tensor, solved: tuple[int, ...] | None) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """E (n, k) and F (n, q) of ``y = E free + F b`` for rows (q, n), and the solved variables."""
    rows, (count, n) = equal.numpy(force=True), equal.shape
    if solved is None:
        order = scipy.linalg.qr(rows, mode="r", pivoting=True)[1] if count else np.empty(0, int)
        solved = tuple(sorted(int(index) for index in order[:count]))
    chosen = np.array(solved, dtype=np.int64)
    fits = len(np.unique(chosen)) == count and (not count or (chosen.min() >= 0 and chosen.max() < n))
    square = rows[:, chosen] if fits else rows[:, :0]
    if not fits or (count and np.linalg.cond(square) > SINGULAR):
        raise RankError(
            f"The equalities ({count} rows) cannot be solved for the variables {list(solved)[:10]}.",
            "Completion needs as many different variables as rows, with independent columns.",
            "Leave out solved=, or name other variables.",
        )
    free = np.setdiff1d(np.arange(n), chosen)
    spread, shift = np.zeros((n, len(free))), np.zeros((n, count))
    spread[free, np.arange(len(free))] = 1.0
    if count:
        spread[chosen] = -np.linalg.solve(square, rows[:, free])
        shift[chosen] = np.linalg.inv(square)
    return torch.from_numpy(spread), torch.from_numpy(shift), solved
