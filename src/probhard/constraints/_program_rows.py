"""Values of cvxpy constraints at a point, and the sizes that rounding and tolerances are measured by.

Every row has units of its own: ``u / 1e10 <= 1`` and ``u <= 1e10`` say the same. With J the row's slope in u,

    scale = |left| + |right| + |J| |u|,     unit = |J| 1.

Inequalities between expressions have one row for each element. Cones have one row, with the largest of the sizes of
their arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from probhard.errors import optional


class ProgramRows:
    """Rows of cvxpy constraints, evaluated at the present values of their variable and parameters.

    Args:
        constraints: Equalities, or inequalities and cones.
        u: The variable, (n,).
    """

    def __init__(self, constraints: list[Any], u: Any) -> None:
        kinds = optional("cvxpy", "cvx", "ConvexProgram").constraints
        plain = kinds.Inequality, kinds.NonPos, kinds.NonNeg, kinds.Equality, kinds.Zero
        self._rows = [(c, isinstance(c, plain)) for c in constraints]
        self._u = u
        self.plain = all(isinstance(c, kinds.Inequality | kinds.NonPos) for c in constraints)
        self.count = sum(c.size if single else 1 for c, single in self._rows)

    def residuals(self) -> np.ndarray:
        """Left minus right sides of equalities, (count,)."""
        return np.concatenate([np.ravel(c.expr.value, order="F") for c, _ in self._rows])

    def excesses(self) -> np.ndarray:
        """Violations of inequalities, and distances from cones, (count,)."""
        with np.errstate(all="ignore"):  # cvxpy divides by norms, also by 0
            values = [np.ravel(c.residual if single else np.max(c.residual), order="F") for c, single in self._rows]
        return np.concatenate(values).astype(float)

    def smooth(self) -> tuple[np.ndarray, np.ndarray]:
        """Left minus right sides of inequalities between expressions, (count,), and their slopes, (count, n)."""
        with np.errstate(all="ignore"):
            values, slopes = self.residuals(), [slope(c.expr, self._u, np.nan) for c, _ in self._rows]
        return values, np.concatenate(slopes)

    def scales(self) -> np.ndarray:
        """Size of the terms that cancel in each row, (count,)."""
        point, found = np.abs(self._u.value), []
        for constraint, single in self._rows:
            sizes = [np.abs(np.ravel(side.value, order="F")) for side in constraint.args]
            if single:
                found.append(sum(sizes) + self._reach(constraint.expr) @ point)
            else:
                both = [size + self._reach(side) @ point for size, side in zip(sizes, constraint.args)]
                found.append(np.concatenate(both).max(keepdims=True))
        return np.concatenate(found)

    def units(self) -> np.ndarray:
        """How much each row may change if all variables change by 1, (count,)."""
        found = []
        for constraint, single in self._rows:
            if single:
                found.append(self._reach(constraint.expr).sum(-1))
            else:
                found.append(np.concatenate([self._reach(side).sum(-1) for side in constraint.args]).max(keepdims=True))
        return np.concatenate(found)

    def _reach(self, expression: Any) -> np.ndarray:
        return np.abs(slope(expression, self._u))


def slope(expression: Any, u: Any, none: float = 0.0) -> np.ndarray:
    """The derivative of an expression in u, (size, n); ``none`` where it has none."""
    found = expression.grad.get(u)
    if found is None:
        return np.full((expression.size, u.size), none)
    return np.asarray(found.toarray() if sp.issparse(found) else found).reshape(u.size, expression.size).T
