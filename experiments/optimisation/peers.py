"""Other ways to the same points: OSQP and local solves of the problems themselves, and Pi-net's projection.

A local solve of a non-convex problem minimises convex models of the objective,

    y+ = argmin  (y - c) D (y - c) / 2 + grad(c).(y - c)   over the set,     D = max(Q - p sin(c), floor),

with steps halved until the objective falls. It stops at a stationary point, which need not be the global minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.optimisation.programs import Program

TIGHT = {"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iter": 100_000, "polishing": True}
FLOOR = 0.05  # of the curvature in a local solve
ROUNDS, HALVINGS, SETTLED = 60, 12, 1e-10


@dataclass(frozen=True)
class Polyhedron:
    """The set of a program as OSQP takes it, ``low <= rows y <= high``."""

    rows: Any  # sparse (m, n)
    low: np.ndarray  # (k, m)
    high: np.ndarray  # (k, m)

    @classmethod
    def of(cls, program: Program, contexts: Tensor) -> Polyhedron:
        """The sets of some instances."""
        import scipy.sparse as sp

        right = program.right(contexts).numpy()
        if program.bounds is not None:
            more, (below, above) = np.eye(program.variables), program.bounds
        else:
            assert program.unequal is not None
            assert program.most is not None
            more, below, above = program.unequal, np.full(len(program.most), -np.inf), program.most
        rows = sp.csc_matrix(np.vstack([program.equal, more]))
        ends = (np.hstack([right, np.tile(x, (len(right), 1))]) for x in (below, above))
        return cls(rows, *ends)


def osqp_afresh(program: Program, contexts: Tensor) -> Callable[[], Tensor]:
    """OSQP with its default tolerances, set up for every instance, as DC3's code runs it.

    Args:
        program: A convex program.
        contexts: Instances, (k, c).

    Returns:
        A function that solves all of them one by one.
    """
    sets = Polyhedron.of(program, contexts)

    def solve() -> Tensor:
        return torch.from_numpy(
            np.stack([_solver(program, sets, k).solve().x for k in range(len(sets.low))])  # a new factor each
        )

    return solve


def osqp_updated(program: Program, contexts: Tensor, **settings: Any) -> Callable[[], Tensor]:
    """OSQP with one factor for all instances, which update the bounds and start at the last solution.

    Args:
        program: A convex program.
        contexts: Instances, (k, c).
        **settings: Of OSQP.
    """
    sets = Polyhedron.of(program, contexts)
    solver = _solver(program, sets, 0, **settings)

    def solve() -> Tensor:
        found = []
        for low, high in zip(sets.low, sets.high):
            solver.update(l=low, u=high)
            found.append(solver.solve().x)
        return torch.from_numpy(np.stack(found))

    return solve


def _solver(program: Program, sets: Polyhedron, k: int, **settings: Any) -> Any:
    import osqp
    import scipy.sparse as sp

    solver = osqp.OSQP()
    matrix = sp.diags(program.quadratic, format="csc")
    solver.setup(matrix, program.linear, sets.rows, sets.low[k], sets.high[k], verbose=False, **settings)
    return solver


def optima(program: Program, contexts: Tensor) -> Tensor:
    """Solutions (k, n): optimal ones of convex programs, local ones of others."""
    convex = osqp_updated(program, contexts, **TIGHT)()
    return local_optima(program, contexts, convex) if program.sine else convex


def local_optima(program: Program, contexts: Tensor, start: Tensor) -> Tensor:
    """Stationary points (k, n) of a non-convex program, from feasible points."""
    import osqp
    import scipy.sparse as sp

    sets, found = Polyhedron.of(program, contexts), []
    solver = osqp.OSQP()
    matrix = sp.diags(np.ones(program.variables), format="csc")
    solver.setup(matrix, program.linear, sets.rows, sets.low[0], sets.high[0], verbose=False, **TIGHT)
    q, p = program.quadratic, program.linear
    for low, high, point in zip(sets.low, sets.high, start.numpy()):
        solver.update(l=low, u=high)
        y, value = point, _value(program, point)
        for _ in range(ROUNDS):
            bend = np.maximum(q - p * np.sin(y), FLOOR)
            slope = q * y + p * np.cos(y)
            solver.update(Px=bend, q=slope - bend * y)
            step = solver.solve().x - y
            length = 1.0
            for _ in range(HALVINGS):
                trial = _value(program, y + length * step)
                if trial < value:
                    break
                length *= 0.5
            else:
                break
            y, gained, value = y + length * step, value - trial, trial
            if gained < SETTLED * abs(value):
                break
        found.append(y)
    return torch.from_numpy(np.stack(found))


def _value(program: Program, y: np.ndarray) -> float:
    return float(program.objective(torch.from_numpy(y)))


@dataclass(frozen=True)
class PinetSettings:
    """Iterations and parameters of Pi-net."""

    forward: int
    backward: int = 25
    sigma: float = 1.0
    omega: float = 1.7
    equilibrations: int = 0


DEFAULT = PinetSettings(200)
TUNED = PinetSettings(50, 25, 0.06806787572155291, 1.7, 25)  # as published for its small problem


@dataclass(frozen=True)
class Pinet:
    """Pi-net's layer on the sets of a program; pass points and contexts of one size, which it compiles for."""

    nearest: Callable[[Tensor, Tensor], Tensor]
    with_gradient: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # and slopes of a linear loss

    @classmethod
    def of(cls, program: Program, settings: PinetSettings = DEFAULT) -> Pinet:
        """The layer of a program."""
        import jax
        from jax import numpy as jnp
        from pinet import (
            AffineInequalityConstraint,
            BoxConstraint,
            BoxConstraintSpecification,
            EqualityConstraint,
            EqualityConstraintsSpecification,
            EquilibrationParams,
            Project,
            ProjectionInstance,
        )

        jax.config.update("jax_enable_x64", True)
        zero = jnp.zeros((1, len(program.equal), 1))
        equal = EqualityConstraint(jnp.asarray(program.equal)[None], zero, method=None, var_b=True)
        unequal = box = None
        if program.bounds is not None:
            lower, upper = (jnp.asarray(x)[None, :, None] for x in program.bounds)
            box = BoxConstraint(BoxConstraintSpecification(lb=lower, ub=upper))
        else:
            top = jnp.asarray(program.most)[None, :, None]
            rows = jnp.asarray(program.unequal)[None]
            unequal = AffineInequalityConstraint(rows, lb=jnp.full_like(top, -jnp.inf), ub=top)
        scaling = EquilibrationParams(max_iter=settings.equilibrations)
        layer = Project(eq_constraint=equal, ineq_constraint=unequal, box_constraint=box, equilibration_params=scaling)

        def projected(points: Any, right: Any) -> Any:
            instance = ProjectionInstance(x=points, eq=EqualityConstraintsSpecification(b=right))
            more = {"n_iter": settings.forward, "n_iter_bwd": settings.backward}
            return layer.call(y_raw=instance, sigma=settings.sigma, omega=settings.omega, **more)[0].x

        def pulled_back(points: Any, right: Any, slopes: Any) -> Any:
            value, pull = jax.vjp(lambda z: projected(z, right), points)
            return value, pull(slopes)[0]

        forward, both = jax.jit(projected), jax.jit(pulled_back)

        def columns(x: Tensor) -> Any:
            return jnp.asarray(x.detach().numpy())[..., None]

        def plain(x: Any) -> Tensor:
            return torch.from_numpy(np.array(x[..., 0]))

        def nearest(points: Tensor, contexts: Tensor) -> Tensor:
            return plain(forward(columns(points), columns(program.right(contexts))))

        def with_gradient(points: Tensor, contexts: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
            value, pulled = both(columns(points), columns(program.right(contexts)), columns(slopes))
            return plain(value), plain(pulled)

        return cls(nearest, with_gradient)
