"""Local functionals on a grid: each touches only the points of a small box.

    f . u = sum over the points i of a box of value_i u_{origin + i}

Functionals whose boxes have the same shape form one group. Sums over pairs of points are then transforms of boxes.
"""

from __future__ import annotations

import copy
import math
from itertools import product

import torch
from torch import Tensor

from probhard._util.tensors import CACHES, OnDevice, checking
from probhard.rows.maps import SparseMap

GROUPS = 32  # with more shapes of boxes than this, none is treated apart


class Boxes(OnDevice):
    """Functionals on boxes of one shape.

    Args:
        shape: Points of a box along each axis.
        functional: Their numbers, (b,).
        origin: The first point of each box, (b, axes).
        cell: The points of each box in the flattened field, (b, points).
        value: Coefficients there, (b, points).
    """

    def __init__(self, shape: tuple[int, ...], functional: Tensor, origin: Tensor, cell: Tensor, value: Tensor) -> None:
        self.shape, self.functional, self.origin, self.cell, self.value = shape, functional, origin, cell, value


class LocalFunctionals(OnDevice):
    """Functionals F (k, n) of fields on a grid, in groups of boxes and the rest, whose boxes are large.

    Args:
        functionals: F.
        shape: Points of the grid along each axis.
    """

    def __init__(self, functionals: SparseMap, shape: tuple[int, ...]) -> None:
        at = torch.stack(torch.unravel_index(functionals.column, shape), -1)  # (entries, axes)
        zero = at.new_zeros(functionals.row_count, len(shape))
        owner = functionals.row.unsqueeze(-1).expand_as(at)
        origin = zero.scatter_reduce(0, owner, at, "amin", include_self=False)
        size = zero.scatter_reduce(0, owner, at, "amax", include_self=False) - origin + 1
        kinds, kind = torch.unique(size, dim=0, return_inverse=True)
        small = [tuple(box) for box in kinds.tolist() if 2 ** len(shape) * math.prod(box) <= math.prod(shape)]
        groups = small if len(kinds) <= GROUPS else []
        self.boxes = tuple(
            _boxes(functionals, shape, box, (kind == number).nonzero().squeeze(-1), origin, at)
            for number, box in enumerate(map(tuple, kinds.tolist()))
            if box in groups
        )
        known = torch.zeros(functionals.row_count, dtype=torch.bool)
        for boxes in self.boxes:
            known[boxes.functional] = True
        self.rest = (~known).nonzero().squeeze(-1)  # numbers of the other functionals
        self.rest_map = _chosen(functionals, self.rest)
        self.count = functionals.row_count

    @classmethod
    def of(cls, functionals: SparseMap, shape: tuple[int, ...]) -> LocalFunctionals:
        """The groups, kept with the functionals for the next call."""
        known = functionals.__dict__.setdefault("_boxes", {})
        if shape not in known:
            local = cls(functionals, shape)
            if not checking():
                return local
            known[shape] = local
        return known[shape]

    def collect(self, boxes: list[Tensor], rest: Tensor) -> Tensor:
        """Values of all functionals, (..., k), from those of each group (..., b) and those of the rest."""
        order = torch.cat([*(group.functional for group in self.boxes), self.rest])
        return torch.cat([*boxes, rest], -1).index_select(-1, torch.argsort(order))


def _boxes(
    functionals: SparseMap, shape: tuple[int, ...], box: tuple[int, ...], chosen: Tensor, origin: Tensor, at: Tensor
) -> Boxes:
    """The functionals ``chosen``, whose boxes have the shape ``box``."""
    number = torch.full((functionals.row_count,), -1).scatter(0, chosen, torch.arange(len(chosen)))[functionals.row]
    inside = number >= 0
    offset = (at - origin[functionals.row])[inside]
    strides = [math.prod(box[axis + 1 :]) for axis in range(len(box))]
    place = (offset * torch.tensor(strides)).sum(-1)
    value = functionals.value.new_zeros(len(chosen), math.prod(box))
    value.index_put_((number[inside], place), functionals.value[inside], accumulate=True)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    within = torch.tensor([sum(i * s for i, s in zip(point, steps)) for point in product(*map(range, box))])
    cell = (origin[chosen] * torch.tensor(steps)).sum(-1, keepdim=True) + within
    return Boxes(box, chosen, origin[chosen], cell, value)


def _chosen(functionals: SparseMap, rows: Tensor) -> SparseMap:
    """The map of some of the rows."""
    number = torch.full((functionals.row_count,), -1).scatter(0, rows, torch.arange(len(rows)))[functionals.row]
    inside = number >= 0
    twin = copy.copy(functionals)
    for cache in CACHES:
        twin.__dict__.pop(cache, None)
    twin.row, twin.column, twin.value = number[inside], functionals.column[inside], functionals.value[inside]
    twin.row_count = len(rows)
    return twin
