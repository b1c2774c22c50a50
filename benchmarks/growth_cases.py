"""Constraints in growing sizes, and the exponent of cost that the structure of each allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

import probhard as ph
from benchmarks.bandwidth import mass, slices
from benchmarks.hierarchies import tree

KEYS = ("case", "axis", "size")  # of the result lines
AXES = {"n": "variables", "batch": "batch elements of 100 variables", "q": "rows"}

Build = Callable[[int], ph.Constraint]


@dataclass(frozen=True)
class Case:
    """A constraint that grows along one axis.

    Args:
        name: Names constraint, metric and projected quantity.
        axis: The growing quantity: ``"n"``, ``"batch"`` or ``"q"``.
        sizes: From small to large.
        build: The constraint of a size.
        variables: Their number, if the constraint does not say it.
        law: Whether mean and variances are projected; if not, points are.
        metric: Of the layer.
        allowed: The exponent that the structure allows.
    """

    name: str
    axis: str
    sizes: tuple[int, ...]
    build: Build
    variables: int | None = None
    law: bool = True
    metric: str = "oblique"
    allowed: float = 1.0

    def data(self, constraint: ph.Constraint, size: int) -> tuple[Tensor, Tensor]:
        """Return points near feasible ones and their standard deviations, both ``(*batch, n)``."""
        count = constraint.variables or self.variables or size
        shape = (size, count) if self.axis == "batch" else (count,)
        linear = getattr(constraint, "linear", constraint)
        if isinstance(linear, ph.Hierarchy):
            truth = linear.aggregate(torch.rand(*shape[:-1], linear.bottoms, dtype=torch.float64) + 0.2)
            stddev = 0.5 * truth.sqrt()
        else:
            place = torch.linspace(0, 1, count, dtype=torch.float64)
            truth, stddev = 0.5 + 0.3 * torch.sin(9 * place), 0.2 + 0.2 * torch.rand(shape, dtype=torch.float64)
        return (truth + stddev * torch.randn_like(stddev)).requires_grad_(), stddev.requires_grad_()


def summing(*keys: np.ndarray) -> sp.csr_array:
    """The summation matrix of levels, each given by the node that every bottom series belongs to; bottoms last."""
    bottoms = len(keys[0])
    nodes = [*keys, np.arange(bottoms)]
    blocks = [
        sp.csr_array((np.ones(bottoms), (key, np.arange(bottoms))), shape=(key.max() + 1, bottoms)) for key in nodes
    ]
    return sp.csr_array(sp.vstack(blocks))


def tens(size: int) -> ph.Hierarchy:
    """A tree of ten children per node."""
    return tree((10,) * round(math.log10(size)))


def crossed(size: int, places: int = 10) -> ph.Hierarchy:
    """Places x products: totals of each place, of each product, and of all."""
    product = np.arange(size) % (size // places)
    return ph.Hierarchy(summing(np.zeros(size, dtype=np.int64), np.arange(size) // (size // places), product))


def groups(rows: int, size: int = 100_000) -> ph.Hierarchy:
    """A total and rows - 1 groups of as many series."""
    keys = [np.zeros(size, dtype=np.int64)]
    if rows > 1:
        keys.append(np.arange(size) * (rows - 1) // size)
    return ph.Hierarchy(summing(*keys))


def dense(rows: int, size: int = 2000) -> ph.Constraint:
    matrix = torch.randn(rows, size, dtype=torch.float64)
    return ph.LinearEquality(matrix, matrix @ torch.full((size,), 0.5, dtype=torch.float64))


def cases(quick: bool = False) -> tuple[Case, ...]:
    """Return all cases; with ``quick``, in sizes that take seconds."""
    n = tuple(10**k for k in range(2, 4 if quick else 7))
    batch = tuple(10**k for k in range(3 if quick else 5))
    q = (1, 3, 10, 30) if quick else (1, 3, 10, 30, 100, 300, 1000)
    positive = ph.NonNegative()
    return (
        Case("tree, oblique", "n", n, tens),
        Case("tree, orthogonal", "n", n, tens, metric="orthogonal"),
        Case("tree, non-negative, points", "n", n, lambda k: tens(k) & positive, law=False),
        Case("crossed, oblique", "n", n, crossed),
        Case("crossed, orthogonal", "n", n, crossed, metric="orthogonal"),
        Case("crossed, non-negative, points", "n", n, lambda k: crossed(k) & positive, law=False),
        Case("one mass row, oblique", "n", n, mass),
        Case("one mass row, orthogonal", "n", n, mass, metric="orthogonal"),
        Case("a mass row per 100, oblique", "n", n, lambda k: slices(k // 100, 100)),
        Case("box and mass, points", "n", n, lambda k: mass(k) & ph.Box(0.0, 1.0), law=False),
        Case("TV penalty, points", "n", n, lambda _: ph.TotalVariationPenalty(1.0), law=False),
        Case("monotone, points", "n", n, lambda _: ph.Monotone("increasing"), law=False),
        Case("tree, oblique", "batch", batch, lambda _: tens(100)),
        Case("tree, non-negative, points", "batch", batch, lambda _: tens(100) & positive, law=False),
        Case("crossed, oblique", "batch", batch, lambda _: crossed(100)),
        Case("one mass row, oblique", "batch", batch, lambda _: mass(100)),
        Case("box and mass, points", "batch", batch, lambda _: mass(100) & ph.Box(0.0, 1.0), law=False),
        Case("TV penalty, points", "batch", batch, lambda _: ph.TotalVariationPenalty(1.0), 100, law=False),
        Case("monotone, points", "batch", batch, lambda _: ph.Monotone("increasing"), 100, law=False),
        Case("dense rows, n = 2,000", "q", q, dense, allowed=2.0),
        Case("mass rows, n = 100,000", "q", q, lambda k: slices(k, 100_000 // k), allowed=0.0),
        Case("groups, n = 100,000", "q", q, groups, allowed=0.0),
    )
