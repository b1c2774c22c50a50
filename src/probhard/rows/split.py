"""Functionals split by the rows that their variables belong to.

If the rows of A share no variables, a functional f is a sum of parts, ``f = sum_r f_r``, one per row r that it touches.
Under a diagonal covariance the parts are uncorrelated after the projection, so that variances of parts add up.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from probhard._util.tensors import CACHES, OnDevice, checking
from probhard.rows.maps import SparseMap


class SplitFunctionals(OnDevice):
    """The parts of functionals F (k, n), one for each pair of a functional and a row.

    Args:
        functionals: F.
        group: The row of each variable, (n,).
        row_count: Number of rows q.
    """

    def __init__(self, functionals: SparseMap, group: Tensor, row_count: int) -> None:
        pairs, part = torch.unique(functionals.row * row_count + group[functionals.column], return_inverse=True)
        self.functional, self.row = pairs // row_count, pairs % row_count  # (p,)
        self.map = copy.copy(functionals)
        for cache in CACHES:
            self.map.__dict__.pop(cache, None)
        self.map.row, self.map.row_count = part, len(pairs)
        self.count = functionals.row_count
        self.group = group

    @classmethod
    def of(cls, functionals: SparseMap, group: Tensor, row_count: int) -> SplitFunctionals:
        """The parts, kept with the functionals for the next call."""
        known: list[SplitFunctionals] = functionals.__dict__.setdefault("_splits", [])
        for split in known:
            if split.group.shape == group.shape and torch.equal(split.group, group):
                return split
        split = cls(functionals, group, row_count)
        if checking():
            known.append(split)
        return split

    def add_up(self, parts: Tensor) -> Tensor:
        """Sums over the parts of each functional, (..., k), from values of parts (..., p)."""
        return parts.new_zeros(*parts.shape[:-1], self.count).index_add(-1, self.functional, parts)
