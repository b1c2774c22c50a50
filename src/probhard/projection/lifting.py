"""Polyhedral parts brought to rows and bounds alone, ``B v = b, lower <= v <= upper``, by auxiliary variables.

| part                    | rows                                     | auxiliary variables        |
|-------------------------|------------------------------------------|----------------------------|
| ``A u = b``             | as they are                              |                            |
| ``G u <= d``            | ``G u + s = d``                          | ``s >= 0``                 |
| monotone                | ``u_(i+1) - u_i - s_i = 0``              | ``s >= 0``                 |
| ``TV(u) <= bound``      | ``D u - p + m = 0``, ``sum p + m + s``   | ``p, m, s >= 0``           |
| ``weight TV(u)``        | ``D u - p + m = 0``                      | ``p, m >= 0``, at a cost   |

Under a metric that couples variables, ``W = R R^T``, the variables are ``e`` with ``u = z + R e``: rows are
multiplied by R, and a bounded ``u_i`` is an auxiliary variable of the row ``u_i - R_i e = z_i``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.lru import Recent
from probhard._util.tensors import broadcast
from probhard.constraints.inequality import Monotone, profile_width
from probhard.constraints.variation import TotalVariation, TotalVariationPenalty
from probhard.projection.parts import Parts
from probhard.rows.dense import NullRows
from probhard.rows.disjoint import DisjointRows
from probhard.rows.maps import SparseMap
from probhard.rows.system import LinearSystem

SLACK = 1e14  # weight of an auxiliary variable of one row, relative to its row: the cost of moving it is nothing
SHARED = 1e6  # ... and of one that several rows share, where more would cancel

_KNOWN: Recent[Lifting] = Recent()


@dataclass(frozen=True)
class Lifting:
    """The rows of all parts over the caller's n variables and some auxiliary ones."""

    system: LinearSystem | None  # None if there are no rows
    extra: int  # auxiliary variables, all bounded below by 0
    owner: Tensor  # the row of each auxiliary variable, (extra,)
    stiffness: Tensor  # SLACK or SHARED, (extra,)
    squares: SparseMap | None  # the squared entries of the caller's columns, to weigh rows

    def natural(self, weight: Tensor) -> Tensor:
        """Weights (*batch, extra) for auxiliary variables, like those of their rows."""
        assert self.squares is not None
        sums = self.squares.at(weight).apply(weight)
        floor = sums.amax(-1, keepdim=True)  # rows of auxiliary variables alone
        return torch.where(sums > 0, sums, floor).index_select(-1, self.owner.to(weight.device))


def lift(parts: Parts) -> Lifting:
    """The lifting of shared rows, made once for the same parts."""
    objects: list[Any] = [parts.linear.system] if parts.linear is not None else []
    objects += [part.prepared for part in parts.inequalities]
    shapes = tuple((type(s).__name__, getattr(s, "direction", ""), s.slices) for s in parts.shapes)
    key = (parts.variables, tuple(objects), parts.linear is None, shapes)
    return _KNOWN.get(key, lambda: _lifted(parts))


def shared(parts: Parts) -> bool:
    """Whether all rows are one matrix for the whole batch."""
    system = None if parts.linear is None else parts.linear.system
    fixed = system is None or system.matrix is not None
    if system is not None and isinstance(system.map, DisjointRows):
        fixed = system.map.constant
    return fixed and all(part.prepared.matrix is not None for part in parts.inequalities)


def _lifted(parts: Parts) -> Lifting:
    nothing = torch.zeros(0, dtype=torch.int64)
    if not parts.inequalities and not parts.shapes:
        system = None if parts.linear is None else parts.linear.system
        return Lifting(system, 0, nothing, nothing.double(), None)
    n = parts.variables
    blocks: list[tuple[sp.csr_array, sp.csr_array | None]] = []  # rows on u, and on their own auxiliary variables
    if parts.linear is not None:
        blocks.append((sp.csr_array(parts.linear.stackable()[0]), None))
    stiffness: list[np.ndarray] = []
    for part in parts.inequalities:
        assert part.prepared.matrix is not None
        count = part.prepared.matrix.shape[0]
        blocks.append((part.prepared.matrix, sp.csr_array(sp.eye_array(count))))
        stiffness.append(np.full(count, SLACK))
    for shape in parts.shapes:
        on_u, own, stiff = shape_rows(shape, n)
        blocks.append((on_u, own))
        stiffness.append(stiff)
    on_u = sp.csr_array(sp.vstack([u for u, _ in blocks]))
    offsets = np.cumsum([0, *(u.shape[0] for u, _ in blocks)])
    columns = [
        sp.vstack([sp.csr_array((before, own.shape[1])), own, sp.csr_array((on_u.shape[0] - after, own.shape[1]))])
        for (_, own), before, after in zip(blocks, offsets, offsets[1:])
        if own is not None
    ]
    extra = sp.csc_array(sp.hstack(columns))
    held = None if parts.linear is None else parts.linear.stackable()[2]
    system = LinearSystem.of(sp.csr_array(sp.hstack([on_u, extra])), held)
    owner = torch.from_numpy(extra.indices[extra.indptr[:-1]].astype(np.int64))
    return Lifting(
        system, extra.shape[1], owner, torch.from_numpy(np.concatenate(stiffness)), SparseMap(on_u.multiply(on_u))
    )


def shape_rows(shape: Any, n: int) -> tuple[sp.csr_array, sp.csr_array, np.ndarray]:
    """Rows on u, rows on auxiliary variables, and the stiffness of these."""
    slices, width = shape.slices, profile_width(n, shape.slices)
    difference = sp.diags_array([-np.ones(width - 1), np.ones(width - 1)], offsets=[0, 1], shape=(width - 1, width))
    difference = sp.kron(sp.eye_array(slices), difference)
    count = slices * (width - 1)
    if isinstance(shape, Monotone):
        return sp.csr_array(shape.sign * difference), sp.csr_array(-sp.eye_array(count)), np.full(count, SLACK)
    split = sp.hstack([-sp.eye_array(count), sp.eye_array(count)])
    if isinstance(shape, TotalVariationPenalty):
        return sp.csr_array(difference), sp.csr_array(split), np.full(2 * count, SHARED)
    total = sp.kron(sp.eye_array(slices), np.ones((1, width - 1)))
    on_u = sp.vstack([difference, sp.csr_array((slices, n))])
    lower = sp.hstack([total, total, sp.eye_array(slices)])
    own = sp.vstack([sp.hstack([split, sp.csr_array((count, slices))]), lower])
    stiff = np.concatenate([np.full(2 * count, SHARED), np.full(slices, SLACK)])
    return sp.csr_array(on_u), sp.csr_array(own), stiff


def right_sides(parts: Parts, like: Tensor) -> list[Tensor]:
    """The right-hand sides of all rows, in their order, each (*batch, rows)."""
    sides = [] if parts.linear is None else [parts.linear.b.to(like)]
    sides += [part.d.to(like) for part in parts.inequalities]
    for shape in parts.shapes:
        count = parts.variables - shape.slices
        sides.append(like.new_zeros(count))
        if isinstance(shape, TotalVariation):
            amounts = shape.amounts(like)
            sides.append(amounts.expand(*amounts.shape[:-1], shape.slices))
    return sides


def linear_costs(parts: Parts, like: Tensor) -> list[Tensor] | None:
    """Linear costs of the auxiliary variables (*batch, extra), by part; None if there are none."""
    if not any(isinstance(shape, TotalVariationPenalty) for shape in parts.shapes):
        return None
    costs = [like.new_zeros(part.prepared.map.row_count) for part in parts.inequalities]
    for shape in parts.shapes:
        width = profile_width(parts.variables, shape.slices) - 1
        count = shape.slices * width
        if isinstance(shape, TotalVariationPenalty):
            weight = shape.amounts(like)
            each = weight.expand(*weight.shape[:-1], shape.slices).repeat_interleave(width, -1)
            costs.append(torch.cat([each, each], -1))
        else:
            costs.append(like.new_zeros(count if isinstance(shape, Monotone) else 2 * count + shape.slices))
    return costs


def joined(parts: list[Tensor]) -> Tensor:
    """Parts (*batch, k) one after the other in the last dimension."""
    shape = broadcast(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, part.shape[-1]) for part in parts], -1)


def without_complement(system: LinearSystem) -> LinearSystem:
    """The system with a factor of ``B W B^T`` itself: the complement's would divide by weights that are almost 0."""
    if not isinstance(system.core, NullRows):
        return system
    if "_rows_form" not in vars(system):
        twin = object.__new__(LinearSystem)
        twin.__dict__ = {k: v for k, v in vars(system).items() if not k.startswith("_")}
        twin.core = system.core.rows_form
        vars(system)["_rows_form"] = twin
    return vars(system)["_rows_form"]
