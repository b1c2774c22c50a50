"""Polyhedral parts written as rows and bounds, ``B v = b, lower <= v <= upper``, with auxiliary variables.

| part                    | rows                                     | auxiliary variables        |
|-------------------------|------------------------------------------|----------------------------|
| ``A u = b``             | unchanged                                |                            |
| ``G u <= d``            | ``G u + s = d``                          | ``s >= 0``                 |
| a ``Shape``             | ``B u + C s = r``                        | ``s >= 0``, optional cost  |

Metrics that couple variables have a lifting of their own, in ``coupled``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.lru import Recent
from probhard._util.tensors import broadcast, checking, no_transforms
from probhard.constraints.shapes import SLACK
from probhard.laws.covariance import Covariance
from probhard.projection.diagnosis import check_capacity
from probhard.projection.parts import Parts
from probhard.rows.dense import NullRows
from probhard.rows.disjoint import DisjointRows
from probhard.rows.maps import SparseMap
from probhard.rows.system import LinearSystem

_KNOWN: Recent[Lifting] = Recent()


@dataclass(frozen=True)
class Lifting:
    """The rows of all parts over the n variables and the auxiliary ones."""

    system: LinearSystem | None  # None if there are no rows
    extra: int  # auxiliary variables, all bounded below by 0
    owner: Tensor  # the row of each auxiliary variable, (extra,)
    stiffness: Tensor  # SLACK or SHARED, (extra,)
    squares: SparseMap | None  # squared entries of the n columns, for the weights of rows
    face: LinearSystem | None  # the rows with no variable held, since faces hold variables by their weights

    def natural(self, weight: Tensor) -> Tensor:
        """Weights (*batch, extra) of auxiliary variables, like those of their rows, from weights (*batch, n)."""
        assert self.squares is not None
        sums = self.squares.at(weight).apply(weight)
        floor = sums.amax(-1, keepdim=True)  # rows of auxiliary variables alone
        return torch.where(sums > 0, sums, floor).index_select(-1, self.owner.to(weight.device))


@dataclass(frozen=True)
class Polyhedron:
    """Shared rows, bounds and costs in float64, independent of points and weights."""

    lifting: Lifting
    system: LinearSystem | None
    lower: Tensor  # (*batch, n)
    upper: Tensor  # (*batch, n)
    right: Tensor  # (*batch, q)
    costs: Tensor | None  # (*batch, extra)
    bounded_only: bool  # whether bounds are the only inequalities


def polyhedron(parts: Parts, like: Tensor, validate: bool) -> Polyhedron:
    """The polyhedron of the parts, cached for each device if the data is constant.

    Args:
        parts: Polyhedral parts with shared rows.
        like: A tensor of the dtype and device to work in.
        validate: Check that the bounds allow the rows.

    Raises:
        InfeasibleError: They do not.
    """
    if validate:
        check_capacity(parts, like)
    lifting = lift(parts)
    system = None if lifting.system is None else lifting.system.at(like)
    sides, costs = right_sides(parts, like), linear_costs(parts, like)
    right = joined(sides) if sides else like
    total = None if costs is None else joined(costs)
    lifted = Polyhedron(lifting, system, *parts.bounds(like), right, total, parts.bounded_only)
    if parts.kept is not None:
        parts.kept[Polyhedron, like.device, validate] = lifted
    return lifted


def lift(parts: Parts) -> Lifting:
    """The lifting of shared rows, from an LRU cache."""
    if not parts.inequalities and not parts.shapes:  # nothing to lift, and no cache that a compiled graph would change
        nothing = torch.zeros(0, dtype=torch.int64)
        system = None if parts.linear is None else without_complement(parts.linear.system)
        return Lifting(system, 0, nothing, nothing.double(), None, _unheld(system))
    objects: list[Any] = [parts.linear.system] if parts.linear is not None else []
    objects += [part.prepared for part in parts.inequalities]
    shapes = tuple(shape.key for shape in parts.shapes)
    key = (parts.variables, tuple(objects), parts.linear is None, shapes)
    with no_transforms():  # what is kept must not belong to one call of torch.func
        return _KNOWN.get(key, lambda: _lifted(parts))


def shared(parts: Parts) -> bool:
    """Whether the whole batch shares all rows."""
    system = None if parts.linear is None else parts.linear.system
    fixed = system is None or system.matrix is not None
    if system is not None and isinstance(system.map, DisjointRows):
        fixed = system.map.constant
    return fixed and all(part.prepared.matrix is not None for part in parts.inequalities)


def _lifted(parts: Parts) -> Lifting:
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
        rows = shape.lifted(parts.variables)
        blocks.append((rows.on_u, rows.own))
        stiffness.append(rows.stiffness)
    on_u = sp.csr_array(sp.vstack([u for u, _ in blocks]))
    offsets = np.cumsum([0, *(u.shape[0] for u, _ in blocks)])
    columns = [
        sp.vstack([sp.csr_array((before, own.shape[1])), own, sp.csr_array((on_u.shape[0] - after, own.shape[1]))])
        for (_, own), before, after in zip(blocks, offsets, offsets[1:])
        if own is not None
    ]
    extra = sp.csc_array(sp.hstack(columns))
    held = None if parts.linear is None else parts.linear.stackable()[2]
    system = without_complement(LinearSystem.of(sp.csr_array(sp.hstack([on_u, extra])), held))
    owner = torch.from_numpy(extra.indices[extra.indptr[:-1]].astype(np.int64))
    squares = SparseMap(on_u.multiply(on_u))
    stiff = torch.from_numpy(np.concatenate(stiffness))
    return Lifting(system, extra.shape[1], owner, stiff, squares, _unheld(system))


def _unheld(system: LinearSystem | None) -> LinearSystem | None:
    return system if system is None or system.held is None else replace(system, held=None)


def right_sides(parts: Parts, like: Tensor) -> list[Tensor]:
    """Right-hand sides (*batch, q) of each part, in the order of the rows, dtype and device of ``like``."""
    sides = [] if parts.linear is None else [parts.linear.b.to(like)]
    sides += [part.d.to(like) for part in parts.inequalities]
    return sides + [shape.right_side(parts.variables, like) for shape in parts.shapes]


def linear_costs(parts: Parts, like: Tensor) -> list[Tensor] | None:
    """Linear costs (*batch, k) of the auxiliary variables of each part, like ``like``; None without costs."""
    costs = [shape.cost(parts.variables, like) for shape in parts.shapes]
    if all(cost is None for cost in costs):
        return None
    free = [like.new_zeros(part.prepared.map.row_count) for part in parts.inequalities]
    counts = [len(shape.lifted(parts.variables).stiffness) for shape in parts.shapes]
    return free + [like.new_zeros(count) if cost is None else cost for cost, count in zip(costs, counts)]


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors (*batch, k) along the last dimension."""
    shape = broadcast(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, part.shape[-1]) for part in parts], -1)


def without_complement(system: LinearSystem) -> LinearSystem:
    """The system factored by ``B W B^T``, since the complement would divide by weights that are almost 0."""
    if not isinstance(system.core, NullRows):
        return system
    twin: LinearSystem | None = vars(system).get("_rows_form")
    if twin is None:
        twin = replace(system, core=system.core.rows_form)
        if checking():  # tensors of a traced graph must not outlive it
            vars(system)["_rows_form"] = twin
    return twin


def root_of(parts: Parts, weight: Covariance) -> Tensor:
    """R with ``W = R R^T``, (*batch, n, r); 0 in the rows of variables that constraints hold."""
    root = weight.to(torch.float64).root_matrix()
    if parts.linear is not None and parts.linear.system.held is not None:
        root = root.index_fill(-2, parts.linear.system.held.to(root.device), 0.0)
    return root


def sides_of(parts: Parts, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows on u (*batch, p, n) and on auxiliary variables (p, k), and their two sides (*batch, p).

    The last rows are those of bounds: on u, and 0 for auxiliary variables.
    """
    n, free = parts.variables, torch.inf
    on_u: list[Tensor] = []
    own: list[Tensor] = []
    lower: list[Tensor] = []
    sides = right_sides(parts, like)
    if parts.linear is not None:
        rows = parts.linear.system.map.at(like).dense()
        on_u, own, lower = [rows], [like.new_zeros(rows.shape[-2], 0)], [sides[0]]
    for part in parts.inequalities:
        on_u.append(part.prepared.map.at(like).dense())
        own.append(like.new_zeros(on_u[-1].shape[-2], 0))
        lower.append(like.new_full((on_u[-1].shape[-2],), -free))
    for shape in parts.shapes:
        lifted = shape.lifted(n)
        on_u.append(torch.from_numpy(lifted.on_u.toarray()).to(like))
        own.append(torch.from_numpy(lifted.own.toarray()).to(like))
        lower.append(sides[len(lower)])
    extra = torch.block_diag(*own, like.new_zeros(n, 0)) if own else like.new_zeros(n, 0)
    count = extra.shape[-1]
    box = parts.bounds(like)
    shape_ = broadcast(*(rows.shape[:-2] for rows in on_u)) if on_u else torch.Size()
    ends = [torch.eye(n).to(like), like.new_zeros(count, n)]
    matrix = torch.cat([rows.expand(*shape_, *rows.shape[-2:]) for rows in (*on_u, *ends)], -2)
    extra = torch.cat([extra, torch.eye(count).to(like)])
    zeros = like.new_zeros(count)
    return matrix, extra, joined([*lower, box[0], zeros]), joined([*sides, box[1], zeros + free])
