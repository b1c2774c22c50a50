"""Covariances along a hierarchy: one factor per aggregate, which loads on its bottoms, and independent noise.

    C = diag(d) + (S B) (S B)^T

S (n, bottoms) sums bottoms to nodes, and ``B[b, a]`` is the loading of bottom b on the factor of aggregate a that
contains it. Nodes load by sums, so the shared noise is coherent: a projection on the hierarchy leaves it as it is.
Products cost one pass over the pairs of bottoms and aggregates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import OnDevice, broadcast, check_finite, segment_sum
from probhard.errors import ShapeError
from probhard.laws.factored import Factored


class HierarchyPattern(OnDevice):
    """The pairs of a hierarchy: which bottoms belong to which nodes and factors.

    Args:
        summing: S, (n, bottoms), dense or sparse; rows with several bottoms are aggregates.
    """

    def __init__(self, summing: Any) -> None:
        dense = summing.to_dense().cpu().numpy() if isinstance(summing, Tensor) else summing
        matrix = sp.csr_array(dense, dtype=np.float64)
        matrix.eliminate_zeros()
        self.nodes, self.bottoms = matrix.shape
        aggregates = np.flatnonzero(np.diff(matrix.indptr) > 1)
        loads = sp.coo_array(matrix[aggregates])  # (factors, bottoms)
        self.factors, self.loads = len(aggregates), loads.nnz
        entries = sp.coo_array(matrix)
        self.node, self.member = _index(entries.coords[0]), _index(entries.coords[1])  # entries of S
        self.value = torch.from_numpy(entries.data.astype(np.float64))
        self.factor, self.bottom = _index(loads.coords[0]), _index(loads.coords[1])  # entries of B
        # every loading counts for all nodes above its bottom: triples (node, factor) of the entries of S and B
        number = sp.csr_array(
            (np.arange(1, loads.nnz + 1), (loads.coords[1], loads.coords[0])), (self.bottoms, self.factors)
        )
        counts = np.diff(number.indptr)[entries.coords[1]]
        first = number.indptr[entries.coords[1]]
        at = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum())
        self.triple_load = _index(number.data[at] - 1)
        self.triple_value = torch.from_numpy(np.repeat(entries.data, counts).astype(np.float64))
        pair = np.repeat(entries.coords[0].astype(np.int64), counts) * max(1, self.factors) + number.indices[at]
        unique, inverse = np.unique(pair, return_inverse=True)
        self.triple_pair, self.pair_node = _index(inverse), _index(unique // max(1, self.factors))
        self.pair_factor = _index(unique % max(1, self.factors))


@dataclass(frozen=True, eq=False)
class HierarchyFactors(Factored):
    """``C = diag(d) + (S B) (S B)^T`` over the nodes of a hierarchy.

    Args:
        pattern: The pairs of the hierarchy.
        loadings: Entries of B, (*batch, pattern.loads), in the order of ``pattern.factor`` and ``pattern.bottom``.
        diagonal_part: d >= 0, (*batch, n).
        scale: Multiplies the nodes after summing, (*batch, n); None for 1. The shared noise is coherent only then.

    Raises:
        ShapeError: If the sizes do not fit the hierarchy.
    """

    pattern: HierarchyPattern
    loadings: Tensor  # (*batch, loads)
    diagonal_part: Tensor  # (*batch, n)
    scale: Tensor | None = None  # (*batch, n)

    def __post_init__(self) -> None:
        if (self.loadings.shape[-1], self.diagonal_part.shape[-1]) != (self.pattern.loads, self.pattern.nodes):
            raise ShapeError(
                f"Got {self.loadings.shape[-1]} loadings and {self.diagonal_part.shape[-1]} variances.",
                f"The hierarchy has {self.pattern.loads} pairs of aggregate and bottom, {self.pattern.nodes} nodes.",
                "Give one loading for each pair in pattern.factor and pattern.bottom.",
            )

    @property
    def shape(self) -> torch.Size:
        batch = broadcast(self.loadings.shape[:-1], self.diagonal_part.shape[:-1])
        shape = torch.Size((*batch, self.pattern.nodes))
        return shape if self.scale is None else broadcast(shape, self.scale.shape)

    @property
    def factor_size(self) -> int:
        return self.pattern.factors

    def factor_apply(self, e: Tensor) -> Tensor:
        at = self.pattern.at(self.loadings)
        bottoms = segment_sum(self.loadings * e.index_select(-1, at.factor), at.bottom, at.bottoms)
        return self._nodes(segment_sum(bottoms.index_select(-1, at.member) * at.value, at.node, at.nodes))

    def factor_transpose(self, x: Tensor) -> Tensor:
        at = self.pattern.at(self.loadings)
        x = self._nodes(x)
        bottoms = segment_sum(x.index_select(-1, at.node) * at.value, at.member, at.bottoms)
        return segment_sum(self.loadings * bottoms.index_select(-1, at.bottom), at.factor, at.factors)

    def factor_diagonal(self) -> Tensor:
        at = self.pattern.at(self.loadings)
        return self._nodes(self._nodes(segment_sum(self._pairs(at).square(), at.pair_node, at.nodes)))

    def factor_norms(self, weight: Tensor) -> Tensor:
        at = self.pattern.at(self.loadings)
        pairs = self._pairs(at).square() * self._nodes(self._nodes(weight)).index_select(-1, at.pair_node)
        return segment_sum(pairs, at.pair_factor, at.factors)

    @torch.no_grad()
    def combination(self) -> Tensor:
        """A combination of all columns of the factor with fixed random weights, (*batch, n)."""
        weights = torch.rand(self.factor_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return self.factor_apply(weights.to(self.loadings) + 0.5)

    def _pairs(self, at: HierarchyPattern) -> Tensor:
        """The entries of ``S B``, (*batch, pairs of node and factor)."""
        triples = self.loadings.index_select(-1, at.triple_load) * at.triple_value
        return segment_sum(triples, at.triple_pair, len(at.pair_node))

    def _nodes(self, x: Tensor) -> Tensor:
        return x if self.scale is None else self.scale * x

    def scaled(self, scale: Tensor) -> HierarchyFactors:
        return replace(self, diagonal_part=self.diagonal_part * scale.square(), scale=self._nodes(scale))

    def weighted(self, own: Tensor | float, shared: Tensor | float) -> HierarchyFactors:
        own_part = own**2 * self.diagonal_part
        if isinstance(shared, Tensor) and shared.dim() and shared.shape[-1] > 1:
            return replace(self, diagonal_part=own_part, scale=self._nodes(shared))
        return replace(self, loadings=shared * self.loadings, diagonal_part=own_part)

    def to(self, *args: object, **kwargs: object) -> HierarchyFactors:
        loadings, own = (x.to(*args, **kwargs) for x in (self.loadings, self.diagonal_part))  # type: ignore[call-overload]
        scale = None if self.scale is None else self.scale.to(*args, **kwargs)  # type: ignore[call-overload]
        return HierarchyFactors(self.pattern.at(loadings), loadings, own, scale)

    def validate(self) -> None:
        check_finite("The loadings", self.loadings)
        check_finite("The diagonal of the covariance along the hierarchy", self.diagonal_part, minimum=0.0)


def _index(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
