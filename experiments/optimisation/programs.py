"""Quadratic programs and control problems that networks learn to solve, by the published recipes.

    min  y Q y / 2 + p.y  (or p.sin(y))     subject to  A y = x,   G y <= d,   lower <= y <= upper,

for many x. Recipes: DC3 (Donti, Rolnick and Kolter 2021), numpy's legacy generator with the seed 17; and Pi-net
(Grontas et al. 2025), JAX's generator with the seed 42, the same form and a control problem in the plane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probhard as ph

VARIABLES, EQUALITIES, INEQUALITIES, INSTANCES = 100, 50, 50, 10_000
HELD_OUT = 0.0833  # share of the validation instances, and of the test instances


@dataclass(frozen=True)
class Program:
    """A family of problems; the context x of an instance is what the network sees."""

    name: str
    quadratic: np.ndarray  # (n,) diagonal of Q
    linear: np.ndarray  # (n,) p
    equal: np.ndarray  # (q, n) A
    unequal: np.ndarray | None  # (r, n) G
    most: np.ndarray | None  # (r,) d
    bounds: tuple[np.ndarray, np.ndarray] | None  # (n,) each
    contexts: np.ndarray  # (instances, c)
    sine: bool = False  # whether the objective has p.sin(y)
    constant: float = 0.0  # of the objective

    @property
    def variables(self) -> int:
        return len(self.linear)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts for training, validation and test, in their order."""
        count = len(self.contexts)
        first, second = int(count * (1 - 2 * HELD_OUT)), int(count * (1 - HELD_OUT))
        contexts = torch.from_numpy(self.contexts)
        return contexts[:first], contexts[first:second], contexts[second:]

    def right(self, contexts: Tensor) -> Tensor:
        """Right-hand sides (*batch, q) of the equalities: contexts with zeros behind."""
        missing = len(self.equal) - contexts.shape[-1]
        return torch.nn.functional.pad(contexts, (0, missing))

    def objective(self, y: Tensor) -> Tensor:
        """The objective (*batch,) of points (*batch, n)."""
        q, p = (torch.from_numpy(x).to(y) for x in (self.quadratic, self.linear))
        return (0.5 * q * y.square() + p * (torch.sin(y) if self.sine else y)).sum(-1) + self.constant

    def constraint(self, contexts: Tensor) -> ph.Constraint:
        """The set of each instance; what all share is prepared once."""
        return ph.LinearEquality(self._rows.system, self.right(contexts)) & self._shared

    @cached_property
    def _rows(self) -> ph.LinearEquality:
        return ph.LinearEquality(torch.from_numpy(self.equal), torch.zeros(len(self.equal), dtype=torch.float64))

    @cached_property
    def _shared(self) -> ph.Constraint:
        if self.bounds is not None:
            return ph.Box(*(torch.from_numpy(x) for x in self.bounds))
        assert self.unequal is not None
        assert self.most is not None
        return ph.LinearInequality(torch.from_numpy(self.unequal), torch.from_numpy(self.most))

    def violations(self, contexts: Tensor, y: Tensor) -> tuple[float, float]:
        """Largest violation of an equality and of an inequality, absolute."""
        equal = (y @ torch.from_numpy(self.equal).to(y).mT - self.right(contexts)).abs().max()
        return float(equal), max(float(self._shared.violation(y).max()), 0.0)


def dc3(sine: bool = False) -> Program:
    """DC3's problem, or its non-convex one.

    Args:
        sine: Whether it is the non-convex one.
    """
    random = np.random.RandomState(17)
    quadratic, linear = random.random_sample(VARIABLES), random.random_sample(VARIABLES)
    equal = random.normal(size=(EQUALITIES, VARIABLES))
    contexts = random.uniform(-1, 1, size=(INSTANCES, EQUALITIES))
    unequal = random.normal(size=(INEQUALITIES, VARIABLES))
    name = "DC3, non-convex" if sine else "DC3, convex"
    return Program(name, quadratic, linear, equal, unequal, _reach(equal, unequal), None, contexts, sine)


def pinet_program() -> Program:
    """Pi-net's small convex problem."""
    with _published_bits() as random:
        keys = random.split(random.PRNGKey(42), 5)
        quadratic = np.array(random.uniform(keys[0], (VARIABLES,)))
        linear = np.array(random.uniform(keys[1], (1, VARIABLES, 1))).ravel()
        equal = np.array(random.normal(keys[2], (1, EQUALITIES, VARIABLES)))[0]
        contexts = np.array(random.uniform(keys[3], (INSTANCES, EQUALITIES, 1), minval=-1.0, maxval=1.0))[..., 0]
        unequal = np.array(random.normal(keys[4], (1, INEQUALITIES, VARIABLES)))[0]
    return Program("Pi-net, convex", quadratic, linear, equal, unequal, _reach(equal, unequal), None, contexts)


def pinet_control(steps: int = 20) -> Program:
    """Pi-net's control problem: a point in the plane moves to a target, from random beginnings.

    The states x_0 ... x_T obey ``x_{t+1} = x_t - u_t`` with ``|x| <= 10`` and ``|u| <= 1``, and the objective is
    ``sum |x_t - target|^2 + sum |u_t|^2``.

    Args:
        steps: T.
    """
    states, inputs = 2 * (steps + 1), 2 * steps
    back = np.eye(steps + 1) - np.eye(steps + 1, k=-1)
    push = np.eye(steps + 1, k=-1)[:, :-1]
    equal = np.hstack([np.kron(back, np.eye(2)), np.kron(push, np.eye(2))])
    target = np.tile([3.0, -12.0], steps + 1)
    linear = np.concatenate([-2 * target, np.zeros(inputs)])
    upper = np.concatenate([np.full(states, 10.0), np.ones(inputs)])
    with _published_bits() as random:
        contexts = np.array(random.uniform(random.PRNGKey(42), (INSTANCES, 2), minval=-10.0, maxval=10.0))
    quadratic = np.full(states + inputs, 2.0)
    constant = float(target @ target)
    return Program(
        "Pi-net, control", quadratic, linear, equal, None, None, (-upper, upper), contexts, constant=constant
    )


@contextmanager
def _published_bits() -> Iterator[Any]:
    """JAX's random numbers in float64, by the generator that was its default when the data was published."""
    import jax

    jax.config.update("jax_enable_x64", True)
    with jax.threefry_partitionable(False):
        yield jax.random


def _reach(equal: np.ndarray, unequal: np.ndarray) -> np.ndarray:
    """``d = sum |G A^+|``, so that ``A^+ x`` is feasible for all x in [-1, 1]."""
    return np.abs(unequal @ np.linalg.pinv(equal)).sum(1)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "dc3-convex": dc3,
    "dc3-nonconvex": lambda: dc3(sine=True),
    "pinet-convex": pinet_program,
    "pinet-control": pinet_control,
}
