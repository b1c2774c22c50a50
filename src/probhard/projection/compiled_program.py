"""Projections as parametrised cone programs, compiled by cvxpy once and solved for whole batches.

    minimise  1/2 |R u - R z|^2 + costs     subject to the constraints of all terms.

R, ``R z`` and the data of the terms are parameters, so problems that differ only in numbers share a compiled form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.lru import Recent
from probhard.constraints.convex_program import cvx
from probhard.constraints.shapes import Term
from probhard.solvers.cone import ConeSolver, Report

SCALES = (1.0, 1e3, 30.0, 1e6)  # of the objective, relative to |R z|; tried in turn


class Compiled:
    """A problem that cvxpy has turned into a cone program with parameters.

    Args:
        terms: The parts of the problem.
        n: Number of variables.
        diagonal: Whether R is given by its diagonal.
    """

    def __init__(self, terms: list[Term], n: int, diagonal: bool) -> None:
        cp, layers = cvx("cvxpy"), cvx("cvxpylayers.torch")
        interface = cvx("cvxpylayers.interfaces.base").SolverInterface
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
        """Solve k problems; unsolved ones are tried again at other scales.

        Args:
            root: R, or its diagonal.
            moved: ``R z``.
            data: Data of the terms.
            scale: Scale of the objective.

        Returns:
            The nearest points (k, n) and one report each.
        """
        points, reports = moved.new_zeros(moved.shape), [Report()] * len(moved)
        left = torch.arange(len(moved))
        for factor in SCALES:
            if not len(left):
                break
            size = factor * scale
            values = [(root, size), (moved, size)]
            values += [(data[i], size.square() if cost else torch.ones_like(size)) for i, cost in self.used]
            scaled = [x[left] * s[left].reshape(-1, *[1] * (x.dim() - 1)) for x, s in values]
            self.solver.reports = []
            points = points.index_copy(0, left, self.layer(*scaled)[0])
            for i, report in zip(left.tolist(), self.solver.reports):
                reports[i] = report
            left = torch.tensor([i for i in left.tolist() if not reports[i].solved], dtype=torch.int64)
        return points, reports


_COMPILED: Recent[Compiled] = Recent()


def compiled_of(terms: list[Term], n: int, diagonal: bool) -> Compiled:
    """The compiled problem of the terms, from an LRU cache.

    Args:
        terms: The parts of the problem.
        n: Number of variables.
        diagonal: Whether R is given by its diagonal.

    Returns:
        A problem to call with this batch's data.
    """
    key = (n, diagonal, *(term.key for term in terms))
    return _COMPILED.get(key, lambda: Compiled(terms, n, diagonal))
