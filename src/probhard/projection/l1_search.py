"""The search for faces: two roots for an L1 ball with at most one row and bounds, active sets for all others."""

from __future__ import annotations

import numpy as np
import torch

from probhard._util.jit import AVAILABLE
from probhard._util.tensors import checking
from probhard.constraints.l1_ball import L1Ball
from probhard.projection.parts import Parts
from probhard.solvers import active_set, l1_row
from probhard.solvers.quadratic import Faces, QuadraticProblem


def search(parts: Parts, problem: QuadraticProblem) -> Faces:
    """The faces of the nearest points.

    Args:
        parts: The parts of the constraint.
        problem: Their rows with auxiliary variables, flattened over the batch.
    """
    row = _row(parts, problem)
    if row is None:
        return active_set.solve(problem)
    faces = l1_row.solve(problem, parts.variables, row)
    left = faces.unfinished
    if len(left):
        faces = faces.placed(left, active_set.solve(problem.select(left)))
    return faces


def _row(parts: Parts, problem: QuadraticProblem) -> np.ndarray | None:
    """The coefficients of the only row, 0 for none; None for other sets."""
    if not AVAILABLE or not checking() or len(parts.shapes) != 1 or not isinstance(parts.shapes[0], L1Ball):
        return None
    n, linear = parts.variables, parts.linear
    rows = 0 if linear is None else linear.system.map.row_count
    plain = not parts.inequalities and rows <= 1 and problem.right.shape[-1] == rows + n + 1
    if not plain or bool((problem.weight[:, :n] <= 0).any()):
        return None
    if linear is None:
        return np.zeros(n)
    return linear.system.map.at(torch.empty(0, dtype=torch.float64)).dense().numpy(force=True)[0]
