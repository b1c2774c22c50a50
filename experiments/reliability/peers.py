"""What other libraries do on the same cases: violations, NaN, crashes and CPU time, beside ours on the same points.

| peer                 | cases that it can express                                         | metric     |
|----------------------|-------------------------------------------------------------------|------------|
| cvxpylayers          | convex ones of one point, with its default solver and tolerances  | the case's |
| Pi-net               | rows and bounds of one point, 200 iterations                      | orthogonal |
| hierarchicalforecast | hierarchies, with non-negativity or alone: MinT of equal weights  | orthogonal |

A point violates the set if NumPy finds a relative violation above ``TOLERATED``; ours are judged by the same number.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import probhard as ph
from experiments.reliability.cases import Case, build
from experiments.reliability.oracle import weight_of
from experiments.reliability.recipes import Recipe
from experiments.reliability.trial import TimeLimitError, limited
from probhard.projection.parts import parts_of

TOLERATED, LIMIT = 1e-6, 60
FORWARD, BACKWARD = 200, 100  # iterations of Pi-net
AFFINE = {"box", "nonnegative", "mass", "simplex", "equalities", "inequalities", "hierarchy"}
Answer = tuple[np.ndarray, np.ndarray | None]  # the point and the gradient of its sum


def expresses(peer: str, recipe: Recipe) -> bool:
    """Whether a peer can express a case."""
    if recipe.certain or recipe.batch or recipe.dtype != "float64":
        return False
    if peer == "cvxpylayers":
        return not set(recipe.parts) & {"sphere", "lots", "fading"}
    if peer == "Pi-net":
        return set(recipe.parts) <= AFFINE
    return "hierarchy" in recipe.parts and set(recipe.parts) <= {"hierarchy", "nonnegative"}


def beside(peer: str, recipe: Recipe) -> dict[str, Any]:
    """The record of a peer and of ours on one case: ``ended``, ``violation`` and ``seconds`` of each."""
    made = build(recipe, TOLERATED)
    metric = made.metric if peer == "cvxpylayers" else "orthogonal"
    record: dict[str, Any] = {}
    for name, solve in (("peer", PEERS[peer]), ("ours", lambda case: _ours(case, metric))):
        started = time.process_time()
        ended, violation = "solved", None
        try:
            with limited(LIMIT), warnings.catch_warnings(action="ignore"):
                point, gradient = solve(made)
            if not np.isfinite(point).all():
                ended = "nan"
            else:
                violation = float(made.violation(np.asarray(point, dtype=float)))
                ended = "infeasible" if not violation <= TOLERATED else ended
                if gradient is not None and not np.isfinite(gradient).all():
                    ended = "nan gradient" if ended == "solved" else ended
        except TimeLimitError:
            ended = "slow"
        except Exception as error:  # what a peer raises is its answer
            ended = "flagged" if isinstance(error, ph.errors.ProbhardError) else f"crashed: {type(error).__name__}"
        seconds = round(time.process_time() - started, 4)
        record |= {f"{name}_ended": ended, f"{name}_violation": violation, f"{name}_seconds": seconds}
    return record


def _ours(made: Case, metric: str | ph.Metric) -> Answer:
    z = made.law.loc.clone().requires_grad_()
    value = ph.DPPL(metric, on_failure="raise").project(z, made.constraint, made.law).value
    (gradient,) = torch.autograd.grad(value.sum(), z)
    return value.detach().numpy(), gradient.numpy()


def _cvxpylayers(made: Case) -> Answer:
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    values, vectors = np.linalg.eigh(weight_of(made))
    root = (vectors / np.sqrt(np.maximum(values, 1e-300) / values[-1])) @ vectors.T
    u, point = cp.Variable(len(root)), cp.Parameter(len(root))
    terms = [term for part in made.parts for term in part.terms(u)]  # type: ignore[misc]
    problem = cp.Problem(cp.Minimize(cp.sum_squares(root @ u - point)), terms)
    layer = CvxpyLayer(problem, parameters=[point], variables=[u])
    z = made.law.loc.clone().requires_grad_()
    (value,) = layer(torch.from_numpy(root) @ z)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    return value.detach().numpy(), gradient.numpy()


def _pinet(made: Case) -> Answer:
    import jax
    from jax import numpy as jnp
    from pinet import AffineInequalityConstraint, BoxConstraint, BoxConstraintSpecification, EqualityConstraint, Project
    from pinet import ProjectionInstance as Instance

    jax.config.update("jax_enable_x64", True)
    n = made.feasible.shape[-1]
    parts, like = parts_of(made.constraint, n), torch.empty(0, dtype=torch.float64)
    equal = unequal = box = None
    if parts.linear is not None:
        rows, right = parts.linear.A.to(like).numpy(), parts.linear.b.to(like).numpy()
        equal = EqualityConstraint(jnp.asarray(rows)[None], jnp.asarray(right)[None, :, None])
    if parts.inequalities:
        (part,) = parts.inequalities
        top = jnp.asarray(part.d.to(like).numpy())[None, :, None]
        dense = jnp.asarray(part.prepared.map.at(like).dense().numpy())[None]
        unequal = AffineInequalityConstraint(dense, lb=jnp.full_like(top, -jnp.inf), ub=top)
    if parts.box is not None:
        ends = (jnp.asarray(bound.numpy())[None, :, None] for bound in parts.bounds(like))
        box = BoxConstraint(BoxConstraintSpecification(*ends))
    layer = Project(eq_constraint=equal, ineq_constraint=unequal, box_constraint=box)

    def total(y: Any) -> Any:
        nearest = layer.call(y_raw=Instance(x=y), n_iter=FORWARD, n_iter_bwd=BACKWARD)[0].x
        return nearest.sum(), nearest

    z = jnp.asarray(made.law.loc.numpy())[None, :, None]
    (_, nearest), gradient = jax.value_and_grad(total, has_aux=True)(z)
    return np.asarray(nearest)[0, :, 0], np.asarray(gradient)[0, :, 0]


def _hierarchicalforecast(made: Case) -> Answer:
    from hierarchicalforecast.methods import MinTrace

    hierarchy = next(part for part in made.parts if part.name == "hierarchy")
    summing = hierarchy.constraint.S.to_dense().numpy()  # type: ignore[attr-defined]
    method = MinTrace("ols", nonnegative="nonnegative" in made.recipe.parts, num_threads=1)
    mean = method.fit_predict(S=summing, y_hat=made.law.loc.numpy()[:, None])["mean"]
    return np.asarray(mean)[:, 0], None


PEERS: dict[str, Callable[[Case], Answer]] = {
    "cvxpylayers": _cvxpylayers,
    "Pi-net": _pinet,
    "hierarchicalforecast": _hierarchicalforecast,
}
