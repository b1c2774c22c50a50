"""Cone programs solved to rounding: an interior point method (Clarabel), then Newton's method on the KKT conditions.

    minimise  1/2 x^T P x + c^T x     subject to  A x + s = b,   s in a cone K.

Clarabel stops at a relative accuracy of about 1e-8. Its answer is refined by ``kkt``, whose residual proves optimality
and whose Jacobian gives the derivatives. ``ConeSolver`` has the interface that cvxpylayers calls: ``solve`` returns x
and the multipliers y, ``derivative`` the gradients in the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from probhard.constraints.convex_program import cvx
from probhard.errors import ParameterError
from probhard.solvers.cone_units import Units, units_of
from probhard.solvers.dual_cones import dual_cones
from probhard.solvers.kkt import STATIONARY, Conditions, KKTPoint

TIGHT = 1e-13  # accuracy asked of the cone solver, which stops once it makes no more progress
BALANCE = 1e6  # largest factor between multipliers and slacks that is corrected


@dataclass(frozen=True)
class Report:
    """How one cone program was solved."""

    status: str = "not tried"
    steps: int = 0
    left: float = np.inf  # relative residual of the optimality conditions

    @property
    def solved(self) -> bool:
        """Whether the conditions prove the point nearest."""
        return self.left <= STATIONARY


@dataclass(frozen=True)
class Solved:
    """A solution of the scaled program, and its units."""

    point: KKTPoint
    units: Units


class ConeSolver:
    """Clarabel and Newton's method on one cone program at a time, as cvxpylayers calls them."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def attach(self, context: Any) -> None:
        """Read the sparsity of P and ``(-A, b)`` and the cones, as cvxpy orders them for Clarabel.

        Args:
            context: The context of a ``CvxpyLayer``.

        Raises:
            ParameterError: The program needs power cones.
        """
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
        self.cones, self.own = dual_cones(dims), context.var_recover[0].primal
        flat = dims.zero + dims.nonneg  # rows with units of their own
        blocks = [size for size, _ in self.cones[2:]]
        self.numbers = np.concatenate([np.arange(flat), flat + np.repeat(np.arange(len(blocks)), blocks)])

    def solve(self, P: Any, q: Any, A: Any, dims: Any, options: Any, needs: bool) -> tuple[Any, Any, Any]:
        """Solve one problem.

        Args:
            P: Entries of P, as cvxpylayers passes them.
            q: c, followed by a constant.
            A: Entries of ``(-A, b)``.
            dims: Sizes of the cones.
            options: Not used.
            needs: Not used.

        Returns:
            x, the multipliers y, and what ``derivative`` needs.
        """
        clarabel = cvx("clarabel")
        whole = sp.csc_matrix((A, self.entries, self.pointers), shape=self.shape)
        rows, b, c = -whole[:, :-1], whole[:, -1].toarray().ravel(), np.asarray(q[:-1], dtype=float)
        entries, pointers, shape = self.quadratic
        square = sp.csc_matrix((P, entries, pointers), shape=shape)
        rows.eliminate_zeros()
        units = units_of(rows, b, self.numbers, self.own, square.diagonal() > 0)
        across, down = sp.diags(units.rows), sp.diags(units.columns)
        rows, b = sp.csc_matrix(across @ rows @ down), units.rows * b
        square, c = sp.csc_matrix(down @ square @ down), units.columns * c
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = TIGHT
        answer = clarabel.DefaultSolver(sp.triu(square, format="csc"), c, rows, b, self.names, settings).solve()
        x, y, s = (np.array(values) for values in (answer.x, answer.z, answer.s))
        balance = _balance(s[dims.zero :], y[dims.zero :])
        conditions = Conditions(
            balance * square.toarray(), rows.toarray(), b, balance * c, self.cones, balance, self.own
        )
        point = conditions.refined(x, balance * y - s)
        self.reports.append(Report(str(answer.status), answer.iterations + point.steps, point.left))
        return units.columns * point.x, units.rows * point.y / balance, Solved(point, units)

    def derivative(self, gradient: Any, _: Any, solved: Solved) -> tuple[None, Any, Any]:
        """Pull a gradient back to the data.

        Args:
            gradient: Gradient in x, (n,).
            _: Not used.
            solved: The solution.

        Returns:
            None, and the gradients in q and the entries of ``(-A, b)``; 0 if the problem was not solved.
        """
        n, point, units = self.shape[1] - 1, solved.point, solved.units
        if not point.solved:
            return None, np.zeros(n + 1), np.zeros(len(self.entries))
        full = np.concatenate([units.columns * gradient, np.zeros_like(point.y)])
        adjoint = point.factor.solve(full, transposed=True)
        first, second = np.append(units.columns * adjoint[:n], 0.0), units.rows * adjoint[n:]
        x, y = np.append(units.columns * point.x, 1.0), units.rows * point.y
        entries = y[self.entries] * first[self.columns] + second[self.entries] * x[self.columns]
        return None, -point.conditions.balance * first, entries


def _balance(slack: np.ndarray, multiplier: np.ndarray) -> float:
    """The factor that brings multipliers to the size of slacks, within limits."""
    sizes = [float(np.abs(values).max(initial=0.0)) for values in (slack, multiplier)]
    return float(np.clip(sizes[0] / sizes[1], 1 / BALANCE, BALANCE)) if min(sizes) > 0 else 1.0
