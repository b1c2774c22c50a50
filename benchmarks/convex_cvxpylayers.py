"""cvxpylayers, solved by Clarabel and by SCS, its default, with the tolerances that it sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import cvxpy as cp
from cvxpylayers.torch import CvxpyLayer
from torch import Tensor

from benchmarks.convex import POINTS, Problem, Solved, backward, comparisons
from benchmarks.timing import Comparison

GOALS = {"TV penalty + box": 500, "box + mass": 150, "polyhedron of 20 rows": 20}


def build(method: str, problem: Problem, z: Tensor, slope: Tensor) -> Callable[[], Solved]:
    """The layer of a problem, forward and backward."""
    u, point = cp.Variable(POINTS), cp.Parameter(POINTS)
    rows = []
    if problem.box is not None:
        rows += [u >= problem.box[0], u <= problem.box[1]]
    if problem.equal is not None:
        rows.append(problem.equal[0] @ u == problem.equal[1])
    if problem.unequal is not None:
        rows.append(problem.unequal[0] @ u <= problem.unequal[1])
    cost = 0.5 * cp.sum_squares(u - point)
    cost = cost + problem.variation * cp.tv(u) if problem.variation else cost
    layer = CvxpyLayer(cp.Problem(cp.Minimize(cost), rows), parameters=[point], variables=[u])
    options = {"solve_method": method, "n_jobs_forward": 1, "n_jobs_backward": 1}
    return lambda: backward(lambda x: layer(x, solver_args=options)[0], z, slope)


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare with both solvers."""
    yield from comparisons("cvxpylayers, Clarabel", partial(build, "Clarabel"), quick, GOALS)
    yield from comparisons("cvxpylayers, SCS", partial(build, "SCS"), quick)
