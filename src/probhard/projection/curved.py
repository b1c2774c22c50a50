"""Curved inequalities, and curved equalities with bounds: their active parts are found first.

``solvers.sequential`` finds the sides. There the bounds are substituted and all active functions are equations, so the
nearest point is that of ``solvers.newton``; every multiplier is then looked at once more. Inequality functions carry a
slack, ``g(u) + s = 0``, held at 0 while active. For convex functions the point found is the nearest; for others it is a
local one, and the statistics say so.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import broadcast
from probhard.constraints.nonlinear import NonlinearEquality, check_start
from probhard.constraints.shapes import SLACK
from probhard.errors import ParameterError
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals
from probhard.projection.base import Options, Projector, Solution
from probhard.projection.nonlinear import NonlinearProjector, NonlinearTangent
from probhard.projection.parts import Parts
from probhard.projection.polyhedral import finished, within
from probhard.rows.base import Structure
from probhard.solvers import sqp, sqp_active
from probhard.solvers.quadratic import HELD, QuadraticProblem
from probhard.tangent import Differential

ROUNDS = 3
SWEEPS = 12  # of the sides, where bounds are the only inequalities
TRIES = 2  # sweeps that a point may end without coming to rest on its face
NEAR = 1e-9  # how far beyond a bound counts as on it, relative to the terms
ROUNDING = 1e-12  # of a function, relative to its terms


class CurvedProjector(Projector):
    """Functions, bounds and rows under a diagonal weight."""

    def __init__(self, parts: Parts, weight: Covariance, options: Options) -> None:
        if not isinstance(weight, Diagonal):
            raise ParameterError(
                f"The constraint {parts.constraint!r} got a metric that couples variables.",
                "Curved constraints with inequalities are solved under diagonal metrics.",
                "Use a diagonal covariance, metric='orthogonal', or a DiagonalMetric.",
            )
        if any(not hasattr(shape, "sign") for shape in parts.shapes):
            raise ParameterError(
                f"The constraint {parts.constraint!r} joins a total variation with curved functions.",
                "There is no method for both at once.",
                "Leave one out, or describe the set as a ConvexProgram.",
            )
        self.parts = parts
        self.options = replace(options, exact=options.exact or bool(parts.curved))
        self.weight = weight.variance.to(torch.float64)
        self.moments_from = "censored" if parts.bounded_only else "monte-carlo"
        self.has_equalities = True
        self.local = parts.nonlinear is not None or not all(part.convex for part in parts.curved)
        self.function = Functions(parts, self.weight.new_empty(0))

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        function, n = self.function, self.parts.variables
        double = z.to(torch.float64)
        lower, upper = self.parts.bounds(double)
        lead = broadcast(*(x.shape[:-1] for x in (double, self.weight, lower, upper)), function.batch_shape)
        double, lower, upper = (x.expand(*lead, n) for x in (double, lower, upper))
        double, lower, upper = function.pinned(double, lower, upper)
        if self.options.validate:
            check_start(function.equation(), torch.cat([double.detach(), function.nothing(lead)], -1))
        weight = self.weight.expand(*lead, n)
        side, state, settled = self._sides(double.detach(), weight.detach(), lower.detach(), upper.detach(), start)
        free = side == 0
        masked = _masked(function, weight, side)
        active = function.active(side)
        inner = NonlinearProjector(None, function.equation(active), Diagonal(masked), self.options)
        bound = torch.where(side[..., :n] < 0, lower, upper)
        point = torch.where(free[..., :n], double, torch.where(torch.isfinite(bound), bound, 0.0))
        slack = state.u[..., n:]
        whole = torch.cat([point, torch.zeros_like(slack)], -1)
        value = inner._attached(whole, state)[..., :n]
        value = torch.where(free[..., :n], value, point)
        value = within(value, double, lower, upper)
        tangent = MaskedTangent(NonlinearTangent(inner, whole, torch.cat([value, slack], -1), state), free, n)
        return finished(self.parts, z, value, tangent, state.steps, settled, self.local)

    def projected_shape(self, base: LocationScale) -> torch.Size:
        batch = broadcast(base.loc.shape[:-1], self.weight.shape[:-1], self.parts.batch_shape)
        return torch.Size((*batch, self.parts.variables))

    def censored(self, base: LocationScale) -> CensoredMarginals:
        assert self.parts.nonlinear is not None
        weight = Diagonal(self.weight.to(base.loc.dtype))
        inner = NonlinearProjector(self.parts.linear, self.parts.nonlinear, weight, self.options)
        _, loc, scale, _ = inner.moments(base.loc, base.cov)
        lower, upper = self.parts.bounds(loc)
        return CensoredMarginals(loc, scale, base.family, lower, upper, validate_args=False)

    @torch.no_grad()
    def _sides(
        self, z: Tensor, weight: Tensor, lower: Tensor, upper: Tensor, start: Tensor | None
    ) -> tuple[Tensor, sqp.State, Tensor]:
        """The sides of variables and slacks, the points there, and who came to rest."""
        function, n, lead = self.function, z.shape[-1], z.shape[:-1]
        count = function.inequalities
        equation = function.flat(lead)
        flat = [x.reshape(-1, n) for x in (z, weight, lower, upper)]
        z, weight, lower, upper = flat
        slack = z.new_zeros(len(z), count)
        low, high = torch.cat([lower, slack], -1), torch.cat([upper, slack + torch.inf], -1)
        natural = _natural(function, weight)
        loose = torch.cat([weight, SLACK * natural[..., n:]], -1)  # inactive functions cost nothing
        costed = torch.arange(n + count, device=z.device) < n if count else None
        problem = QuadraticProblem(None, z[..., :0], torch.cat([z, slack], -1), loose, natural, low, high, costed)
        guess = z.clamp(lower, upper) if start is None else start.detach().to(z).expand(*lead, n).reshape(-1, n)
        side = torch.zeros(len(z), n + count, dtype=torch.int8, device=z.device)
        settled = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        state: sqp.State | None = None
        left = torch.arange(len(z), device=z.device)
        if not count:  # sides by themselves, each sweep one solve; what does not come to rest goes on below
            side, state, settled = self._swept(equation, problem, guess)
            left = torch.nonzero(~settled).squeeze(-1)
        for _ in range(ROUNDS if len(left) else 0):
            part = equation.select(left, torch.Size((len(z),)))
            assert part is not None
            few = problem.select(left)
            found = sqp_active.faces(part, few, guess.index_select(0, left), function.unequal)
            sides = found.side
            points, good, turned = self._polished(part, few, sides, found.value)
            rest = found.done & good & (turned == sides).all(-1)
            side = side.index_copy(0, left, sides)
            settled = settled.index_copy(0, left, rest)
            state = points if state is None else _placed(state, left, points)
            guess = guess.index_copy(0, left, found.value[..., :n].clamp(few.lower[..., :n], few.upper[..., :n]))
            left = torch.nonzero(~settled).squeeze(-1)
            if len(left) == 0:
                break
        assert state is not None
        whole = sqp.State(*(x.reshape(torch.Size((*lead, *x.shape[1:]))) for x in vars(state).values()))
        return side.reshape(*lead, -1), whole, settled.reshape(lead)

    def _swept(
        self, equation: NonlinearEquality, problem: QuadraticProblem, guess: Tensor
    ) -> tuple[Tensor, sqp.State, Tensor]:
        """Sides by a primal-dual sweep: those beyond a bound are put on it, those pulled off it are let go."""
        left = torch.arange(len(guess), device=guess.device)
        side = (problem.lower == problem.upper).to(torch.int8)
        settled = torch.zeros(len(guess), dtype=torch.bool, device=guess.device)
        state: sqp.State | None = None
        failures = torch.zeros_like(left)
        for _ in range(SWEEPS):
            part, few = equation.select(left, settled.shape), problem.select(left)
            assert part is not None
            before = side.index_select(0, left)
            points, good, after = self._polished(part, few, before, guess.index_select(0, left))
            state = points if state is None else _placed(state, left, points)
            done = good & (after == before).all(-1)
            settled = settled.index_copy(0, left, done)
            side, guess = side.index_copy(0, left, after), guess.index_copy(0, left, points.u)
            failures = failures.index_add(0, left, (~good).to(failures.dtype))
            left = left[~done & (failures.index_select(0, left) < TRIES)]
            if len(left) == 0:
                break
        assert state is not None
        return side, state, settled

    def _polished(
        self, equation: NonlinearEquality, problem: QuadraticProblem, side: Tensor, value: Tensor
    ) -> tuple[sqp.State, Tensor, Tensor]:
        """The points on the faces of some sides, who came to rest there, and the sides that these points ask for."""
        n, free = self.parts.variables, side == 0
        bound = torch.where(side < 0, problem.lower, problem.upper)
        centre = problem.centre
        held = torch.where(free, centre, torch.where(torch.isfinite(bound), bound, 0.0))
        natural = torch.cat([problem.weight[..., :n], problem.natural[..., n:]], -1)
        weight = torch.where(free, natural, _held(problem.natural, n))
        guess = torch.where(free, torch.cat([value[..., :n], centre[..., n:]], -1), held)
        part = self.function.switched(equation, self.function.active(side))
        exact = self.options.hessian or bool(self.parts.curved)
        state = sqp.solve(part, held, Diagonal(weight), guess, exact)
        pull = part.jacobian_rows(state.u).transpose(state.multiplier)
        moved = torch.cat([centre[..., :n], held[..., n:]], -1) - natural * pull
        slack = torch.cat([state.u[..., :n], self.function.slacks(equation, state.u)], -1)
        target = torch.where(free, slack, moved)
        near = NEAR * (target.abs() + held.abs() + centre.abs())
        if bool((free & (target < 0))[..., n:].any()):  # beyond a function: by more than it is rounded by?
            near = torch.cat([near[..., :n], near[..., n:] + ROUNDING * self.function.sizes(equation, state.u)], -1)
        # of a point that hardly moves, multipliers are rounding, and so is what they pull off
        way, size = (state.u - centre)[..., :n].abs().amax(-1), centre[..., :n].abs().amax(-1)
        moves = (way > sqp.STATIONARY * size).unsqueeze(-1)
        after = side.masked_fill((side < 0) & (target > problem.lower + near) & moves, 0)
        after = after.masked_fill(
            (side > 0) & (target < problem.upper - near) & (problem.lower < problem.upper) & moves, 0
        )
        after = after.masked_fill(free & (target < problem.lower - near), -1)
        after = after.masked_fill(free & (target > problem.upper + near), 1)
        return state, (state.residual <= sqp.ACCEPTED) & (state.left <= sqp.STATIONARY), after


def _placed(state: sqp.State, where: Tensor, points: sqp.State) -> sqp.State:
    """A state with some of its points replaced."""
    return sqp.State(*(a.index_copy(0, where, b) for a, b in zip(vars(state).values(), vars(points).values())))


class Functions:
    """All functions of the parts as one: equalities, linear rows, and inequality functions with their slacks."""

    def __init__(self, parts: Parts, like: Tensor) -> None:
        self.parts, self.variables = parts, parts.variables
        self.system = None if parts.linear is None else parts.linear.system.at(like)
        pieces: list[tuple[NonlinearEquality, bool]] = []  # a function of u alone, and whether it is an inequality
        if parts.nonlinear is not None:
            pieces.append((parts.nonlinear, False))
        if self.system is not None and self.system.core is not None:
            assert parts.linear is not None
            _, right = self.system.substitute(like.new_zeros(parts.variables), parts.linear.b.to(like))
            pieces.append((_rows_function(self.system.core, right), False))
        pieces += [(part.function, True) for part in parts.curved]
        for part in parts.inequalities:
            dense = part.prepared.map.at(like).dense()
            pieces.append((_dense_function(dense, part.d.to(like)), True))
        for shape in parts.shapes:
            rows = torch.from_numpy(-shape.lifted(parts.variables).on_u.toarray()).to(like)
            pieces.append((_dense_function(rows, like.new_zeros(rows.shape[0])), True))
        self.pieces = pieces
        self.batch_shape = _batch_shape(pieces)
        kinds = [unequal for piece, unequal in pieces for _ in range(self._count(piece, like))]
        self.unequal = torch.tensor(kinds, dtype=torch.bool, device=like.device)  # (q,)
        self.inequalities = sum(kinds)

    def _count(self, piece: NonlinearEquality, like: Tensor) -> int:
        point = like.new_zeros(*self.batch_shape, self.variables)
        return piece.residual(point).shape[-1]

    def equation(self, active: Tensor | None = None) -> NonlinearEquality:
        """``h(u) = 0`` and ``g(u) + s = 0``; where a function is not active, ``s = 0`` alone."""
        if self.plain:  # no slacks: the function itself, with the structure of its rows
            return self.pieces[0][0]
        splits: list[tuple[int, int]] = []
        args: list[Any] = []
        for piece, _ in self.pieces:
            splits.append((len(args), len(args) + len(piece.args)))
            args += list(piece.args)
        n = self.variables

        def fn(v: Tensor, *data: Any) -> Tensor:
            u, s, used, found = v[..., :n], v[..., n:], 0, []
            for (piece, unequal), (first, last) in zip(self.pieces, splits):
                h = piece.fn(u, *data[first:last])
                if unequal:
                    own = slice(used, used + h.shape[-1])
                    h, used = h * data[-1][..., own] + s[..., own], used + h.shape[-1]
                found.append(h)
            return torch.cat(found, -1)

        def jacobian(v: Tensor, *data: Any) -> Tensor:
            u, rows, used = v[..., :n], [], 0
            for (piece, unequal), (first, last) in zip(self.pieces, splits):
                block = piece.with_args(data[first:last]).jacobian(u)
                count = block.shape[-2]
                slack = block.new_zeros(*block.shape[:-1], v.shape[-1] - n)
                if unequal:
                    block = block * data[-1][..., used : used + count].unsqueeze(-1)
                    slack[..., torch.arange(count), used + torch.arange(count)] = 1.0
                    used += count
                rows.append(torch.cat([block, slack], -1))
            return torch.cat(rows, -2)

        switch = torch.ones(self.inequalities, dtype=torch.float64) if active is None else active
        return NonlinearEquality(fn, (*args, switch), jacobian)

    @property
    def plain(self) -> bool:
        """Whether one equality function is all there is."""
        return len(self.pieces) == 1 and not self.inequalities

    def switched(self, equation: NonlinearEquality, active: Tensor) -> NonlinearEquality:
        """The same functions, with other ones active."""
        if self.plain:
            return equation
        return equation.with_args((*equation.args[:-1], active))

    def active(self, side: Tensor) -> Tensor:
        """1 for inequality functions whose slack is held at 0, else 0; (*lead, inequalities)."""
        return (side[..., self.variables :] != 0).to(torch.float64)

    def nothing(self, lead: torch.Size) -> Tensor:
        """Slacks of 0."""
        return torch.zeros(*lead, self.inequalities, dtype=torch.float64, device=self.unequal.device)

    def flat(self, lead: torch.Size) -> NonlinearEquality:
        """The functions of points whose leading dimensions are flattened to one."""
        lead = lead or torch.Size((1,))
        count = math.prod(lead)
        found = self.equation().select(torch.arange(count), lead)
        if found is None:
            raise ParameterError(
                f"The data of the functions does not broadcast with a batch of shape {tuple(lead)}.",
                "Points are solved apart from each other, each with its own data.",
                "Give every tensor in args the shape (*batch, own dimension).",
            )
        return found

    def slacks(self, equation: NonlinearEquality, v: Tensor) -> Tensor:
        """``-g(u)`` at the variables of v, (L, inequalities)."""
        return -equation.residual(self._plain(v))[..., self.unequal]

    def sizes(self, equation: NonlinearEquality, v: Tensor) -> Tensor:
        """The terms of ``g(u)`` that should cancel, (L, inequalities)."""
        return equation.scale(self._plain(v))[..., self.unequal]

    def _plain(self, v: Tensor) -> Tensor:
        return torch.cat([v[..., : self.variables], self.nothing(v.shape[:-1])], -1)

    def pinned(self, z: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Known values as bounds that leave no room."""
        if self.system is None or self.system.pins is None:
            return z, lower, upper
        assert self.parts.linear is not None
        index = self.system.pins.variable
        z, _ = self.system.substitute(z, self.parts.linear.b.to(z))
        lead = z.shape[:-1]
        known = z.index_select(-1, index)
        lower = lower.expand(*lead, -1).index_copy(-1, index, known)
        return z, lower, upper.expand(*lead, -1).index_copy(-1, index, known)


class MaskedTangent(Differential):
    """A tangent whose held variables and slacks are left out."""

    def __init__(self, inner: NonlinearTangent, free: Tensor, variables: int) -> None:
        self.inner, self.free, self.variables = inner, free, variables

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.free.shape[:-1], self.variables))

    def apply(self, x: Tensor) -> Tensor:
        return self._cut(self.inner.apply(self._padded(x))).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        return self._cut(self.inner.transpose(self._padded(x))).to(x.dtype)

    def variance(self, cov: Covariance) -> Tensor:
        if isinstance(cov, Diagonal):
            return self._cut(self.inner.variance(Diagonal(self._padded(cov.variance)))).to(cov.dtype)
        return super().variance(cov)

    def _padded(self, x: Tensor) -> Tensor:
        x = torch.where(self.free[..., : self.variables], x.to(torch.float64), 0.0)
        extra = self.free.shape[-1] - self.variables
        return torch.cat([x, x.new_zeros(*x.shape[:-1], extra)], -1) if extra else x

    def _cut(self, x: Tensor) -> Tensor:
        return torch.where(self.free, x, 0.0)[..., : self.variables]


def _natural(function: Functions, weight: Tensor) -> Tensor:
    """Weights of variables, and of slacks like the largest of them."""
    floor = weight.amax(-1, keepdim=True)
    slack = floor.expand(*weight.shape[:-1], function.inequalities)
    return torch.cat([torch.maximum(weight, 1e-12 * floor), slack], -1)


def _masked(function: Functions, weight: Tensor, side: Tensor) -> Tensor:
    """Weights of free variables and slacks; next to nothing for those held."""
    natural = _natural(function, weight.detach())
    free = torch.cat([weight, natural[..., weight.shape[-1] :]], -1)
    return torch.where(side == 0, free, _held(natural, weight.shape[-1]))


def _held(natural: Tensor, n: int) -> Tensor:
    """Next to nothing for variables at their bounds; nothing for slacks, which would hide a violation."""
    return torch.cat([HELD * natural[..., :n], torch.zeros_like(natural[..., n:])], -1)


def _rows_function(core: Structure, right: Tensor) -> NonlinearEquality:
    def jacobian(u: Tensor, b: Tensor) -> Tensor:
        dense = core.at(u).dense()
        return dense.expand(*u.shape[:-1], *dense.shape[-2:])

    return NonlinearEquality(lambda u, b: core.at(u).apply(u) - b, (right,), jacobian)


def _dense_function(rows: Tensor, right: Tensor) -> NonlinearEquality:
    def jacobian(u: Tensor, d: Tensor) -> Tensor:
        return rows.to(u).expand(*u.shape[:-1], *rows.shape[-2:])

    return NonlinearEquality(lambda u, d: u @ rows.to(u).mT - d, (right,), jacobian)


def _batch_shape(pieces: list[tuple[NonlinearEquality, bool]]) -> torch.Size:
    shapes = [a.shape[:-1] for piece, _ in pieces for a in piece.args if isinstance(a, Tensor) and a.dim() > 1]
    return broadcast(*shapes) if shapes else torch.Size()
