"""The face of a curved projection: which bounds and functions are active, and the nearest point there.

A primal-dual sweep guesses the sides if bounds are the only inequalities: variables beyond a bound are put on it, those
pulled off it are released. Otherwise, and for points where the sweep does not settle, ``solvers.sqp_active`` finds
them. On a face the bounds are substituted and all active functions are equations, so ``solvers.sqp`` finds the point.
The signs of its multipliers then confirm the sides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.constraints.shapes import SLACK
from probhard.laws.covariance import Diagonal
from probhard.projection.curved_functions import JointFunction, held_weight, natural_weight
from probhard.solvers import barrier, restoration, sqp, sqp_active, sqp_dense
from probhard.solvers.linearised import Linearised
from probhard.solvers.quadratic import QuadraticProblem
from probhard.solvers.sqp_steps import STATIONARY, Iterates

BARRIER, ACTIVE = "barrier", "active"  # methods
ROUNDS = 3  # of active sets, for many variables
SWEEPS = 12  # over the sides
TRIES = 2  # sweeps in which a point may fail to converge on its face
NEAR = 1e-9  # distance to a bound that counts as 0, relative to the terms
SMALL = 0.1  # size of points, relative to z, below which they are moved onto the set again
SHARPER = 2  # steps of that
STILL = 1e-11  # distance of held variables from their bounds that is rounding, relative to the point
ROUNDING = 1e-12  # of a function, relative to its terms


@dataclass(frozen=True)
class FacePoints:
    """Points on faces, over leading dimensions (*lead)."""

    side: Tensor  # (*lead, N) int8, of variables and slacks: -1 at lower, 1 at upper, 0 if free
    iterates: Iterates
    settled: Tensor  # (*lead,) bool: the points ask for no other side

    @property
    def unsettled(self) -> Tensor:
        """Indices (k,) of points that are not settled."""
        return torch.nonzero(~self.settled).squeeze(-1)

    def placed(self, index: Tensor, part: FacePoints) -> FacePoints:
        """A copy whose points with these indices (k,) come from ``part``."""
        return FacePoints(
            self.side.index_copy(0, index, part.side),
            self.iterates.placed(index, part.iterates),
            self.settled.index_copy(0, index, part.settled),
        )

    def taken(self, index: Tensor) -> FacePoints:
        """The points with these indices (k,)."""
        return FacePoints(self.side[index], self.iterates.take(index), self.settled[index])

    def reshaped(self, lead: torch.Size) -> FacePoints:
        """The points with their first dimension split into ``lead``."""
        iterates = self.iterates.map(lambda x: x.reshape(torch.Size((*lead, *x.shape[1:]))))
        return FacePoints(self.side.reshape(*lead, self.side.shape[-1]), iterates, self.settled.reshape(lead))


@dataclass(frozen=True)
class FaceSearch:
    """Finds the faces of one constraint.

    Args:
        function: The functions of the constraint.
        exact: Use exact Hessians in every step.
        restarts: Number of shifted starts for points that fail.
    """

    function: JointFunction
    exact: bool
    restarts: int

    @torch.no_grad()
    def solve(self, z: Tensor, weight: Tensor, lower: Tensor, upper: Tensor, start: Tensor | None) -> FacePoints:
        """Find the faces of the nearest points.

        Args:
            z: Points to project, (*lead, n), as the next four.
            weight: Diagonal of W.
            lower: Lower bounds.
            upper: Upper bounds.
            start: Where to begin; at the clipped points if None.

        Returns:
            The points and their sides over (*lead).
        """
        lead, n = z.shape[:-1], z.shape[-1]
        equation = self.function.flat(lead)
        z, weight, lower, upper = (x.reshape(-1, n) for x in (z, weight, lower, upper))
        problem = self._problem(z, weight, lower, upper)
        guess = z.clamp(lower, upper) if start is None else start.detach().to(z).expand(*lead, n).reshape(-1, n)
        points = self._swept(equation, problem, guess, 0)
        for method, number in self._attempts(equation, problem):
            left = points.unsettled
            if len(left) == 0:
                break
            part, few = _select(equation, left, len(z)), problem.select(left)
            tried = self._tried(method, number, part, few, guess.index_select(0, left))
            kept = torch.nonzero(tried.settled).squeeze(-1)  # failures are explained near z
            points = points.placed(left[kept], tried.taken(kept))
        return self._sharpened(equation, problem, points).reshaped(lead)

    def _attempts(self, equation: NonlinearEquality, problem: QuadraticProblem) -> list[tuple[str, int]]:
        """What is tried in turn for points that the sweep does not settle: a method, and the number of a start."""
        if not sqp_dense.small(equation, Diagonal(problem.weight)):
            return [(ACTIVE, 0)] * ROUNDS
        if self.function.convex:  # no other start leads elsewhere
            return [(BARRIER, 0), (ACTIVE, 1), (ACTIVE, 0)]
        started = [(method, number) for number in range(1, self.restarts + 1) for method in (ACTIVE, BARRIER)]
        return [(BARRIER, 0), *started[:2], (ACTIVE, 0), *started[2:]]

    def _tried(
        self, method: str, number: int, equation: NonlinearEquality, problem: QuadraticProblem, guess: Tensor
    ) -> FacePoints:
        """Points on the faces that one method finds from a guess (L, n), or from points of the set if numbered."""
        unequal = self.function.unequal
        if number:
            guess = restoration.nearest_restored(equation, problem, unequal, number)
        if method == ACTIVE:
            faces = sqp_active.faces(equation, problem, guess, unequal)
        else:
            faces = barrier.faces(equation, problem, guess)
        value = faces.value[..., : self.function.variables]
        return self._swept(equation, problem, value, faces.steps, faces.side, 1 if number else TRIES)

    def _sharpened(self, equation: NonlinearEquality, problem: QuadraticProblem, points: FacePoints) -> FacePoints:
        """Settled points that are far smaller than z, moved onto the set: they have the rounding of z."""
        n = self.function.variables
        z, u = problem.centre[..., :n].abs().amax(-1), points.iterates.u[..., :n].abs().amax(-1)
        index = torch.nonzero(points.settled & (u < SMALL * z)).squeeze(-1)
        if len(index) == 0:
            return points
        side, iterates = points.side[index], points.iterates.take(index)
        part = self.function.switched(_select(equation, index, len(z)), self.function.active(side))
        weight = Diagonal((side == 0).to(u.dtype))
        for _ in range(SHARPER):
            near = Linearised.at(part, iterates.u, weight)
            moved = iterates.u - near.images(near.h)[0]
            better = near.regular & (part.residual(moved).abs().amax(-1) < near.h.abs().amax(-1))
            iterates = replace(iterates, u=torch.where(better.unsqueeze(-1), moved, iterates.u))
        return points.placed(index, replace(points.taken(index), iterates=iterates))

    def _problem(self, z: Tensor, weight: Tensor, lower: Tensor, upper: Tensor) -> QuadraticProblem:
        """Centres, weights and bounds of variables and slacks, (L, N); it has no rows."""
        n, count = z.shape[-1], self.function.inequalities
        slack = z.new_zeros(len(z), count)
        natural = natural_weight(self.function, weight)
        return QuadraticProblem(
            None,
            z[..., :0],
            torch.cat([z, slack], -1),
            torch.cat([weight, SLACK * natural[..., n:]], -1),  # inactive functions cost nothing
            natural,
            torch.cat([lower, slack], -1),
            torch.cat([upper, slack + torch.inf], -1),
            torch.arange(n + count, device=z.device) < n if count else None,
        )

    def _swept(
        self,
        equation: NonlinearEquality,
        problem: QuadraticProblem,
        guess: Tensor,
        steps: Tensor | int,
        side: Tensor | None = None,
        tries: int = TRIES,
    ) -> FacePoints:
        """Sides by a primal-dual sweep, one projection each; stops for points that fail on their face."""
        left = torch.arange(len(guess), device=guess.device)
        side = (problem.lower == problem.upper).to(torch.int8) if side is None else side
        settled = torch.zeros(len(guess), dtype=torch.bool, device=guess.device)
        points: FacePoints | None = None
        failures = torch.zeros_like(left)
        for _ in range(SWEEPS):
            part, few = _select(equation, left, len(settled)), problem.select(left)
            before = side.index_select(0, left)
            iterates = self._on_face(part, few, before, guess.index_select(0, left))
            after = self._asked_sides(part, few, before, iterates)
            off = _off(_held_point(few, before), before, iterates.u)
            moved = torch.nonzero(iterates.converged & (after == before).all(-1) & (off > STILL)).squeeze(-1)
            if len(moved):
                own = self._unmoved(
                    _select(part, moved, len(before)), few.select(moved), before[moved], iterates.u[moved]
                )
                iterates = iterates.placed(moved, own)
                after = self._asked_sides(part, few, before, iterates)
            done = iterates.converged & (after == before).all(-1)
            fresh = FacePoints(torch.where(done.unsqueeze(-1), before, after), iterates, done)
            points = fresh if points is None else points.placed(left, fresh)
            side, guess = points.side, guess.index_copy(0, left, iterates.u[..., : guess.shape[-1]])
            failures = failures.index_add(0, left, (~iterates.converged).to(failures.dtype))
            left = left[~done & (failures.index_select(0, left) < tries)]
            if len(left) == 0:
                break
        assert points is not None
        return FacePoints(points.side, replace(points.iterates, steps=points.iterates.steps + steps), points.settled)

    def _on_face(self, equation: NonlinearEquality, problem: QuadraticProblem, side: Tensor, value: Tensor) -> Iterates:
        """The nearest points with variables and slacks held on their sides, from a guess (L, N)."""
        n, free, held = self.function.variables, side == 0, _held_point(problem, side)
        weight = torch.where(free, self._free_weight(problem), held_weight(problem.natural, n))
        guess = torch.where(free, torch.cat([value[..., :n], problem.centre[..., n:]], -1), held)
        part = self.function.switched(equation, self.function.active(side))
        return sqp.solve(part, held, Diagonal(weight), guess, self.exact, None)

    def _unmoved(self, equation: NonlinearEquality, problem: QuadraticProblem, side: Tensor, value: Tensor) -> Iterates:
        """The nearest points from (L, N) once more, where strong multipliers moved held variables off their bounds.

        Those have a small weight in ``_on_face``, here none. Points that need them to move have not converged.
        """
        free, held = side == 0, _held_point(problem, side)
        weight = torch.where(free, self._free_weight(problem), 0.0)
        part = self.function.switched(equation, self.function.active(side))
        iterates = sqp.solve(part, held, Diagonal(weight), torch.where(free, value, held), True, None)
        exact = _off(held, side, iterates.u) <= STILL
        return replace(iterates, left=torch.where(exact, iterates.left, torch.inf), done=iterates.done & exact)

    def _asked_sides(
        self, equation: NonlinearEquality, problem: QuadraticProblem, side: Tensor, iterates: Iterates
    ) -> Tensor:
        """The sides that points on a face ask for, (L, N) int8.

        A held variable is released if its multiplier pulls it off the bound, a free one beyond a bound is held.
        """
        n, free, held, centre = self.function.variables, side == 0, _held_point(problem, side), problem.centre
        part = self.function.switched(equation, self.function.active(side))
        pull = part.jacobian_rows(iterates.u).transpose(iterates.multiplier)
        released = torch.cat([centre[..., :n], held[..., n:]], -1) - self._free_weight(problem) * pull
        current = torch.cat([iterates.u[..., :n], self.function.slacks(equation, iterates.u)], -1)
        target = torch.where(free, current, released)
        near = NEAR * (target.abs() + held.abs() + centre.abs())
        if bool((free & (target < 0))[..., n:].any()):  # is a function violated by more than rounding?
            rounding = ROUNDING * self.function.magnitudes(equation, iterates.u)
            near = torch.cat([near[..., :n], near[..., n:] + rounding], -1)
        # multipliers of a point that hardly moves are rounding errors and release nothing
        way, size = (iterates.u - centre)[..., :n].abs().amax(-1), centre[..., :n].abs().amax(-1)
        moves = (way > STATIONARY * size).unsqueeze(-1)
        lower, upper = problem.lower, problem.upper
        after = side.masked_fill((side < 0) & (target > lower + near) & moves, 0)
        after = after.masked_fill((side > 0) & (target < upper - near) & (lower < upper) & moves, 0)
        after = after.masked_fill(free & (target < lower - near), -1)
        return after.masked_fill(free & (target > upper + near), 1)

    def _free_weight(self, problem: QuadraticProblem) -> Tensor:
        """Weights of free variables and slacks, (L, N)."""
        n = self.function.variables
        return torch.cat([problem.weight[..., :n], problem.natural[..., n:]], -1)


def _held_point(problem: QuadraticProblem, side: Tensor) -> Tensor:
    """The centres where free, the bounds elsewhere, (L, N)."""
    bound = torch.where(side < 0, problem.lower, problem.upper)
    return torch.where(side == 0, problem.centre, torch.where(torch.isfinite(bound), bound, 0.0))


def _off(held: Tensor, side: Tensor, u: Tensor) -> Tensor:
    """How far held variables of points u (L, N) are from their bounds, relative to the points, (L,)."""
    far = torch.where(side == 0, 0.0, held - u).abs().amax(-1)
    return far / u.abs().amax(-1).clamp(min=TINY)


def _select(equation: NonlinearEquality, index: Tensor, count: int) -> NonlinearEquality:
    """The equation of some of ``count`` points."""
    part = equation.select(index, torch.Size((count,)))
    assert part is not None
    return part
