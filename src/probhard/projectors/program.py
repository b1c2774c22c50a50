"""Convex programs: the nearest point of any set that cvxpy describes, with other convex constraints beside it.

    u*(z) = argmin 1/2 |R (u - z)|^2  subject to all constraints,     R^T R = W^-1.

cvxpy turns it into a cone program in ``x = (u, ...)``, minimise ``1/2 x^T P x + c^T x`` with ``A x + s = b`` and s in
a cone K. Clarabel solves it to about 1e-8, which is not hard. With ``w = y - s``, y the multipliers, its optimality is
one equation without inequalities,

    P x + A^T proj(w) + c = 0,     A x + proj(w) - w = b,     proj on the dual cone of K,

on which Newton's method goes on to rounding. The residual left proves that a point is nearest, whatever the solver said
of it, and the equation's Jacobian gives derivatives in z, W and all data through cvxpylayers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard.constraints.polyhedron import Monotone, profile_width
from probhard.constraints.program import ConvexProgram, optional
from probhard.constraints.variation import TotalVariationPenalty
from probhard.covariance import Covariance, Dense, Diagonal, safe_sqrt
from probhard.errors import InfeasibleError, ParameterError, ProbhardError, broadcast, checking
from probhard.projectors.base import Options, Projector, Solution, Stats
from probhard.projectors.gathered import Gathered
from probhard.tangent import Differential, tangent_of

FLOOR = 1e-12  # smallest weight, relative to the largest
ACCEPTED = {torch.float64: 1e-7, torch.float32: 1e-5}  # where Newton's steps fail, the cone solver's accuracy is left
STATIONARY = 1e-9  # of the optimality conditions, relative
DENSE_VARIABLES = 64  # up to here the Jacobian is formed
KEPT = 32  # compiled problems remembered
NEWTON = 30  # steps of refinement
PATIENCE = 4  # ... and of them without progress
NOISE = 1e-6  # of large terms, below which small ones are not asked for more
TIGHT = 1e-13  # asked of the cone solver, which stops where it makes no more progress
SCALES = (1.0, 1e3, 30.0, 1e6)  # of the objective, relative to |R z|; tried in turn

_COMPILED: OrderedDict[tuple[Any, ...], Compiled] = OrderedDict()


@dataclass(frozen=True)
class Term:
    """A part of the problem: cvxpy constraints, or a cost, made from u and parameters with this batch's data."""

    key: tuple[Any, ...]  # what the compiled form depends on; objects in it are compared by identity
    build: Callable[..., Any]
    data: tuple[Tensor, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    cost: bool = False


class ProgramProjector(Projector):
    """Convex programs with linear rows, bounds and shapes, under any weight."""

    moments_from = "monte-carlo"

    def __init__(self, parts: Gathered, weight: Covariance, options: Options) -> None:
        if parts.nonlinear is not None or parts.curved or parts.diminishing is not None:
            raise ParameterError(
                f"The constraint {parts.constraint!r} joins a ConvexProgram with functions of torch.",
                "A cone solver needs everything in cvxpy's terms.",
                "Write the functions in the description, such as cvxpy.norm(u) <= radius for a Ball.",
            )
        self.parts, self.options = parts, options
        self.equalities = parts.linear is not None
        self.weight, self.root = _rooted(weight)
        self.terms = _terms(parts)
        self.held = None if parts.linear is None else parts.linear.system.held

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        if not checking():
            raise ParameterError(
                "A ConvexProgram was projected on inside torch.compile, torch.export or torch.func.",
                "The cone solver runs outside of torch.",
                "Call the layer eagerly; gradients by backward() work.",
            )
        point = z.cpu().to(torch.float64)
        found, reports, lead = self._solved(point)
        steps = torch.tensor([report.steps for report in reports], dtype=torch.int64).reshape(lead)
        solved = torch.tensor([report.solved for report in reports], dtype=torch.bool).reshape(lead)
        found = found.reshape(*lead, point.shape[-1])
        point = point.expand(found.shape)
        value = torch.where(torch.isfinite(found), found, point.detach()).to(z)
        with torch.no_grad():
            inside = self._polished(value)
            size = torch.maximum(z.abs(), inside.abs()).amax(-1, keepdim=True)
            residual = self.parts.constraint.relative_violation(inside, size).nan_to_num(torch.inf)
        value = inside + (value - value.detach())  # exactly inside, with the gradients of the layer
        converged = solved.to(z.device) & (residual <= ACCEPTED[z.dtype])
        stats = Stats(steps.to(z.device), residual, converged)
        return Solution(value, ProgramTangent(self, point.detach()), stats)

    def moments(self, z: Tensor, cov: Covariance) -> tuple[Solution | None, Tensor, Tensor, Differential]:
        solution = self.solve(z)
        return solution, solution.value, safe_sqrt(solution.tangent.variance(cov)).to(z.dtype), solution.tangent

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        at = tuple(int(i) for i in torch.nonzero(~stats.converged)[0])
        point = z.detach().cpu().to(torch.float64).expand(*stats.converged.shape, -1)
        plain = torch.ones_like(self.root) if isinstance(self.weight, Diagonal) else torch.eye(point.shape[-1])
        origin = torch.zeros_like(point)
        if self.held is not None:
            origin[..., self.held.cpu()] = point[..., self.held.cpu()]
        with torch.no_grad():  # near the origin in a plain metric, so that no scaling passes for emptiness
            _, reports, _ = self._solved(origin, at, plain.to(point))
        if "PrimalInfeasible" not in reports[0].status:
            return None
        where = f" in batch element {at}" if at else ""
        return InfeasibleError(
            f"The constraints {self.parts.constraint!r} contradict each other{where}.",
            "The cone solver proved that no point satisfies all of them.",
            "Leave one out, or relax it.",
        )

    def _solved(
        self, z: Tensor, only: tuple[int, ...] | None = None, root: Tensor | None = None
    ) -> tuple[Tensor, list[Report], torch.Size]:
        """Points (k, n) over the flattened leading dimensions, or the one at ``only``, and how each went."""
        root = self.root if root is None else root
        diagonal, terms, n = isinstance(self.weight, Diagonal), list(self.terms), z.shape[-1]
        if self.held is not None:
            held = self.held.cpu()
            index, fixed = held.numpy(), z.index_select(-1, held)
            terms.append(Term(("held", *index), lambda u, b: [u[index] == b], (fixed,), ((len(index),),)))
        own = [(root, root.shape[-1 if diagonal else -2 :]), (z, (n,))]
        own += [(x, shape) for term in terms for x, shape in zip(term.data, term.shapes)]
        lead = broadcast(*(x.shape[: x.dim() - len(shape)] for x, shape in own))
        flat = [x.expand(*lead, *shape)[() if only is None else only].reshape(-1, *shape) for x, shape in own]
        moved = flat[0] * flat[1] if diagonal else (flat[0] @ flat[1].unsqueeze(-1)).squeeze(-1)  # R z
        size = moved.detach().norm(dim=-1)
        weights = flat[0].detach() if diagonal else flat[0].detach().norm(dim=-2)
        scale = 1 / torch.maximum(size, weights.amin(-1))
        found, reports = compiled_of(terms, n, diagonal)(flat[0], moved, flat[2:], scale)
        return found, reports, lead

    def _polished(self, value: Tensor) -> Tensor:
        """Linear equalities in closed form and bounds by clipping, after rounding to the caller's precision."""
        linear = self.parts.linear
        if linear is not None:
            value = tangent_of(linear.system, self.weight.to(value.device)).project(value, linear.b)
        lower, upper = self.parts.bounds(value)
        return torch.minimum(torch.maximum(value, lower), upper)


class ProgramTangent(Differential):
    """``du*/dz`` by backward passes of a problem solved once more; it has no gradients of its own."""

    def __init__(self, projector: ProgramProjector, z: Tensor) -> None:
        self.projector, self.z = projector, z
        self._graph: tuple[Tensor, Tensor] | None = None
        self._matrix: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.z.shape

    @property
    def matrix(self) -> Tensor:
        """The Jacobian, (*batch, n, n)."""
        n = self.z.shape[-1]
        if n > DENSE_VARIABLES:
            raise ParameterError(
                f"The Jacobian of a ConvexProgram was asked for {n} variables.",
                f"It takes one backward pass for each and is formed up to {DENSE_VARIABLES}.",
                "Use covariance='monte-carlo', and draws instead of products with the covariance.",
            )
        if self._matrix is None:
            rows = [self._pulled(unit.expand(self.z.shape)) for unit in torch.eye(n, dtype=torch.float64)]
            self._matrix = torch.stack(rows, -2)
        return self._matrix

    def apply(self, x: Tensor) -> Tensor:
        return (self.matrix.to(x.device) @ x.to(torch.float64).unsqueeze(-1)).squeeze(-1).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        lead = broadcast(x.shape, self.z.shape)
        each = x.cpu().to(torch.float64).expand(lead).reshape(-1, *self.z.shape)
        return torch.stack([self._pulled(one) for one in each]).reshape(lead).to(x)

    def variance(self, cov: Covariance) -> Tensor:
        matrix = self.matrix.to(cov.device)
        return (matrix @ cov.to(torch.float64).dense() * matrix).sum(-1).to(cov.dtype)

    def _pulled(self, x: Tensor) -> Tensor:
        """``P^T x`` for one x of the points' shape."""
        if self._graph is None:
            with torch.enable_grad():
                z = self.z.clone().requires_grad_()
                self._graph = z, self.projector._solved(z)[0].reshape(self.z.shape)
        z, found = self._graph
        return torch.autograd.grad(found, z, x, retain_graph=True)[0]


def _rooted(weight: Covariance) -> tuple[Covariance, Tensor]:
    """The weight with small variances raised to the floor, and R with ``R^T R = W^-1``: its diagonal, or a matrix."""
    if isinstance(weight, Diagonal):
        variance = weight.variance.cpu().to(torch.float64)
        top = variance.detach().amax(-1, keepdim=True)
        variance = torch.maximum(variance, FLOOR * torch.where(top > 0, top, 1.0))
        return Diagonal(variance), variance.rsqrt()
    matrix = weight.to("cpu", torch.float64).dense()
    top = matrix.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=torch.float64)
    factor = torch.linalg.cholesky(matrix + FLOOR * torch.where(top > 0, top, 1.0) * eye)
    return Dense(factor), torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)


def _terms(parts: Gathered) -> list[Term]:
    """Everything to satisfy, in cvxpy's terms."""
    cp = optional("cvxpy")
    like = torch.empty(0, dtype=torch.float64)
    terms = []
    for program in parts.programs:
        assert isinstance(program, ConvexProgram)
        make = program.programme.constraints
        data = tuple(x.to(like) for x in program.args)
        build = lambda u, *p, make=make: make(u, list(p))  # noqa: E731
        terms.append(Term((program.programme,), build, data, program.programme.shapes))
    if parts.linear is not None:
        system, linear = parts.linear.system, parts.linear.to(like)
        kept = slice(None) if system.redundancy is None else torch.from_numpy(system.redundancy.others)
        terms.append(_rows(("==", system), linear.A[..., kept, :], linear.b[..., kept], lambda x, b: x == b))
    for sign, bound in zip((1.0, -1.0), parts.bounds(like)):  # lower <= u and -upper <= -u
        finite = torch.isfinite(bound)
        index = np.flatnonzero(finite.reshape(-1, parts.variables).any(0).numpy())
        if len(index):
            mask, value = finite[..., index].to(like), torch.where(finite, sign * bound, -1.0)[..., index]
            beyond = lambda u, m, b, i=index, s=sign: [cp.multiply(m, s * u[i]) >= b]  # noqa: E731
            terms.append(Term((">=", sign, *index), beyond, (mask, value), ((len(index),),) * 2))
    for inequality in parts.rows:
        matrix, d = inequality.rows.map.at(like).dense(), inequality.d.to(like)
        finite = torch.isfinite(d)
        if not bool(finite.all()):  # rows without a bound in some element become 0 <= 1 there
            matrix, d = matrix * finite.unsqueeze(-1), torch.where(finite, d, 1.0)
        terms.append(_rows(("<=", inequality.rows), matrix, d, lambda x, d: x <= d, bool(finite.all())))
    return terms + [_shape(shape, parts.variables) for shape in parts.shapes]


def _rows(key: Any, matrix: Tensor, right: Tensor, relation: Any, shared: bool = True) -> Term:
    """Rows that are constants where all elements share them, parameters where they differ or are trained."""
    count = matrix.shape[-2]
    if shared and matrix.dim() == 2 and not matrix.requires_grad:
        fixed = sp.csr_array(matrix.numpy())
        return Term(key, lambda u, b: [relation(fixed @ u, b)], (right,), ((count,),))
    shapes = (tuple(matrix.shape[-2:]), (count,))
    return Term((key[0], count), lambda u, a, b: [relation(a @ u, b)], (matrix, right), shapes)


def _shape(shape: Any, n: int) -> Term:
    """Monotone profiles, or a bound or a cost on their variation."""
    cp, slices, width = optional("cvxpy"), shape.slices, profile_width(n, shape.slices)
    step = sp.diags_array([-1.0, 1.0], offsets=[0, 1], shape=(width - 1, width))
    steps = sp.csr_array(sp.kron(sp.eye_array(slices), step))
    key = (type(shape), slices, getattr(shape, "direction", ""))
    if isinstance(shape, Monotone):
        return Term(key, lambda u: [shape.sign * (steps @ u) >= 0])
    sums = sp.csr_array(sp.kron(sp.eye_array(slices), np.ones((1, width - 1))))
    amounts = shape.amounts(torch.empty(0, dtype=torch.float64))
    amounts = amounts.expand(*amounts.shape[:-1], slices)
    if isinstance(shape, TotalVariationPenalty):
        return Term(key, lambda u, a: a @ (sums @ cp.abs(steps @ u)), (amounts,), ((slices,),), cost=True)
    return Term(key, lambda u, a: [sums @ cp.abs(steps @ u) <= a], (amounts,), ((slices,),))


def compiled_of(terms: list[Term], n: int, diagonal: bool) -> Compiled:
    """The compiled problem of some terms, made once while it is remembered."""
    key = (n, diagonal, *(term.key for term in terms))
    if key not in _COMPILED:
        _COMPILED[key] = Compiled(terms, n, diagonal)
        if len(_COMPILED) > KEPT:
            _COMPILED.popitem(last=False)
    _COMPILED.move_to_end(key)
    return _COMPILED[key]


class Compiled:
    """A problem that cvxpy has turned into a cone program with parameters."""

    def __init__(self, terms: list[Term], n: int, diagonal: bool) -> None:
        cp, layers = optional("cvxpy"), optional("cvxpylayers.torch")
        interface = optional("cvxpylayers.interfaces.base").SolverInterface
        u, root, moved = cp.Variable(n), cp.Parameter(n if diagonal else (n, n)), cp.Parameter(n)
        cost = 0.5 * cp.sum_squares((cp.multiply(root, u) if diagonal else root @ u) - moved)
        constraints, own = [], []
        for term in terms:
            parameters = [cp.Parameter(shape, nonneg=term.cost) for shape in term.shapes]
            own += [(parameter, term.cost) for parameter in parameters]
            if term.cost:
                cost = cost + term.build(u, *parameters)
            else:
                constraints += term.build(u, *parameters)
        problem = cp.Problem(cp.Minimize(cost), constraints)
        used = {parameter.id for parameter in problem.parameters()}
        self.used = [(i, cost) for i, (parameter, cost) in enumerate(own) if parameter.id in used]
        self.solver = ConeSolver()
        bridge = interface.from_functions(self.solver.solve, self.solver.derivative, canon_solver="CLARABEL")
        parameters = [root, moved, *(own[i][0] for i, _ in self.used)]
        self.layer = layers.CvxpyLayer(problem, parameters, [u], solver=bridge)
        self.solver.attach(self.layer.ctx)

    def __call__(
        self,
        root: Tensor,  # (k, n) or (k, n, n)
        moved: Tensor,  # R z, (k, n)
        data: list[Tensor],  # each (k, *own shape)
        scale: Tensor,  # of the objective, (k,)
    ) -> tuple[Tensor, list[Report]]:
        """The nearest points (k, n) and how each went."""
        found, reports = moved.new_zeros(moved.shape), [Report()] * len(moved)
        left = torch.arange(len(moved))
        for factor in SCALES:
            if not len(left):
                break
            size = factor * scale
            values = [(root, size), (moved, size)]
            values += [(data[i], size.square() if cost else torch.ones_like(size)) for i, cost in self.used]
            given = [x[left] * s[left].reshape(-1, *[1] * (x.dim() - 1)) for x, s in values]
            self.solver.reports = []
            found = found.index_copy(0, left, self.layer(*given)[0])
            for i, report in zip(left.tolist(), self.solver.reports):
                reports[i] = report
            left = torch.tensor([i for i in left.tolist() if not reports[i].solved], dtype=torch.int64)
        return found, reports


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
        self.names = optional("cvxpy.reductions.solvers.conic_solvers.clarabel_conif").dims_to_solver_cones(dims)
        self.cones, self.own = _cones(dims), context.var_recover[0].primal

    def solve(self, P: Any, q: Any, A: Any, dims: Any, options: Any, needs: bool) -> tuple[Any, Any, Any]:
        """The answer x and multipliers y of one problem, and the conditions at it."""
        clarabel = optional("clarabel")
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
        self.rows = _inverse(np.abs(matrix).max(1))
        matrix = matrix * self.rows[:, None]
        self.columns = _inverse(np.abs(matrix).max(0))
        matrix = matrix * self.columns
        self.inverse = None
        with np.errstate(all="ignore"):
            *self.triangles, flag = scipy.linalg.lapack.dgetrf(matrix)
            share = scipy.linalg.lapack.dgecon(self.triangles[0], np.abs(matrix).sum(0).max())[0]
        if flag or not share > 1e-14:
            self.inverse = np.linalg.pinv(matrix, rcond=1e-10)

    def solve(self, right: np.ndarray, transposed: bool = False) -> np.ndarray:
        left, after = (self.columns, self.rows) if transposed else (self.rows, self.columns)
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
    if (x > 0 and x * np.exp(min(y / x, 600.0)) <= -np.e * z) or (x == 0 and y <= 0 and z <= 0):
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
