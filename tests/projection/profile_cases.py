"""Problems of profiles, and cvxpy as their oracle."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import torch

from probhard.laws.covariance import Diagonal
from probhard.projection.profiles import SHAPES, PooledProjector, ProfileSet

NX = 12
CASES = [(shape, bounds, row) for shape in SHAPES for bounds in (False, True) for row in (False, True)]


def problem(shape, bounds, row, batch=(), seed=0, nx=NX):
    """Arguments of a projector, feasible, and points with their weights; generic, so that no kink is near."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    z, weight = 1.5 * normal(*batch, nx), torch.exp(0.7 * normal(*batch, nx))
    amount = {"tv-penalty": 0.4, "tv-bound": 2.5}.get(shape)
    arguments = {
        "amount": None if amount is None else torch.full((*batch, 1), amount),
        "lower": torch.full((*batch, 1), -0.8) if bounds else None,
        "upper": torch.full((*batch, 1), 1.1) if bounds else None,
        "row": 0.2 + torch.rand(nx, generator=generator) if row else None,
        "mass": torch.full((*batch, 1), 1.0) if row else None,
    }
    return arguments, z, weight


def solved(shape, arguments, z, weight, slices=1, **options):
    return PooledProjector(ProfileSet(shape, **arguments, **options), Diagonal(weight), slices).solve(z)


def oracle(shape, z, weight, amount, lower, upper, row, mass):
    u = cp.Variable(len(z))
    objective = cp.sum_squares(cp.multiply(1 / np.sqrt(weight), u - z)) / 2
    variation = cp.norm1(cp.diff(u))
    constraints = []
    if shape == "tv-penalty":
        objective += float(amount) * variation
    else:
        kinds = {"increasing": cp.diff(u) >= 0, "decreasing": cp.diff(u) <= 0}
        constraints.append(kinds[shape] if shape in kinds else variation <= float(amount))
    if lower is not None:
        constraints += [u >= float(lower), u <= float(upper)]
    if row is not None:
        constraints.append(np.asarray(row) @ u == float(mass))
    program = cp.Problem(cp.Minimize(objective), constraints)
    program.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    assert program.status == cp.OPTIMAL
    return u.value


def variation(u):
    return u.diff(dim=-1).abs().sum(-1)


def assert_feasible(shape, u, arguments):
    """To rounding: bounds and order exactly, the row and the variation in relation to their terms."""
    lower, upper, row, mass = (arguments[name] for name in ("lower", "upper", "row", "mass"))
    assert lower is None or bool((u >= lower).all())
    assert upper is None or bool((u <= upper).all())
    if shape in ("increasing", "decreasing"):
        assert bool((u.diff(dim=-1) * (1 if shape == "increasing" else -1) >= 0).all())
    if shape == "tv-bound":
        assert bool((variation(u) <= arguments["amount"].squeeze(-1) * (1 + 1e-12)).all())
    if row is not None:
        terms = row * u
        off = (terms.sum(-1) - mass.squeeze(-1)).abs()
        assert float((off / (terms.abs().sum(-1) + mass.squeeze(-1).abs())).max()) < 1e-14
