"""Pi-net's projection layer (JAX): Douglas-Rachford splitting of affine rows and a box, implicit gradients.

It has no total variation. Its iterations are the caller's choice: 200 forward and 100 backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
import torch
from jax import numpy as jnp
from pinet import AffineInequalityConstraint, BoxConstraint, BoxConstraintSpecification, EqualityConstraint, Project
from pinet import ProjectionInstance as Instance
from torch import Tensor

from benchmarks.convex import POINTS, Problem, Solved, comparisons
from benchmarks.timing import Comparison

FORWARD, BACKWARD = 200, 100
FIXED = "Pi-net takes its 200 iterations, whatever they reach, in one compiled loop; ours goes on to rounding."


def build(problem: Problem, z: Tensor, slope: Tensor) -> Callable[[], Solved]:
    """The compiled layer of a problem, forward and backward."""
    equal = unequal = box = None
    if problem.equal is not None:
        equal = EqualityConstraint(jnp.asarray(problem.equal[0])[None], jnp.asarray(problem.equal[1])[None, :, None])
    if problem.unequal is not None:
        rows, right = problem.unequal
        upper = jnp.asarray(right)[None, :, None]
        unequal = AffineInequalityConstraint(jnp.asarray(rows)[None], lb=jnp.full_like(upper, -jnp.inf), ub=upper)
    if problem.box is not None:
        lower, upper = (jnp.full((1, POINTS, 1), bound) for bound in problem.box)
        box = BoxConstraint(BoxConstraintSpecification(lb=lower, ub=upper))
    layer = Project(eq_constraint=equal, ineq_constraint=unequal, box_constraint=box)
    weights, points = (jnp.asarray(x.numpy())[..., None] for x in (slope, z))

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def value(y: jax.Array) -> tuple[jax.Array, jax.Array]:
            nearest = layer.call(y_raw=Instance(x=y), n_iter=FORWARD, n_iter_bwd=BACKWARD)[0].x
            return (nearest * weights).sum(), nearest

        (_, nearest), gradient = jax.value_and_grad(value, has_aux=True)(x)
        return nearest, gradient

    compiled = jax.jit(both)

    def solved() -> Solved:
        nearest, gradient = (torch.from_numpy(np.array(x[..., 0])) for x in compiled(points))
        return nearest, gradient

    return solved


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare on the three sets that it takes, in float64."""
    jax.config.update("jax_enable_x64", True)
    name = f"Pi-net, {FORWARD} iterations"
    yield from comparisons(name, build, quick, skip=("TV penalty + box",), explanation=FIXED)
