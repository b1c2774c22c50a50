"""The rows of a constraint, analysed once: pins are substituted, the rank is known, the algorithm is chosen.

The algorithm is the first that applies:

| rows after substituting pins        | algorithm                                        | cost       |
|-------------------------------------|--------------------------------------------------|------------|
| none left                           | substitution                                     | O(n)       |
| no two rows share a variable        | elementwise (``disjoint``)                       | O(n)       |
| a forest (``[I | -S]`` by children)   | two sweeps (``tree``)                            | O(n)       |
| large and sparse                    | Cholesky in rounds (``sparse``)                  | O(fill)    |
| q <= n - q                          | dense Cholesky of ``A W A^T`` (``dense``)        | O(n q^2)   |
| q > n - q                           | dense Cholesky of the complement (``dense``)     | O(q (n-q)^2) |

In the last three cases, complete crossings of trees are swept axis by axis (``crossed``), in O(n), if the weights cross
too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import OnDevice, broadcast, checking
from probhard.rows.base import Factor, Mapped, Structure
from probhard.rows.children import child_rows
from probhard.rows.crossed import Crossing
from probhard.rows.dense import DenseRows, NullRows
from probhard.rows.disjoint import DisjointRows
from probhard.rows.elimination import plan_elimination
from probhard.rows.maps import DenseMap, SparseMap
from probhard.rows.presolve import Pins, find_pins
from probhard.rows.rank import Redundancy, find_redundancy
from probhard.rows.sparse import SparseRows
from probhard.rows.tree import Tree

SPARSE_ROWS = 48  # fewer rows are always factored densely
SPARSE_SHARE = 0.2  # ... and so are rows with a larger share of non-zero entries
SQUARED_LIMIT = 2048  # up to this many variables, squared entries of a fixed projector are cached


def choose(matrix: sp.csr_array, proven: bool) -> tuple[Structure, SparseMap | None] | None:
    """Choose the algorithm.

    Args:
        matrix: Rows of at least two variables each, (q, n).
        proven: Whether the rows are known to be independent.

    Returns:
        The structure and, if rows were rewritten, the map of right-hand sides. None if the rank is in doubt.
    """
    if np.diff(sp.csc_array(matrix).indptr).max(initial=0) <= 1:
        return DisjointRows.from_matrix(matrix), None
    children = child_rows(matrix)
    transform = None if children is None else SparseMap(children[1])
    rows = matrix if children is None else children[0]
    tree = Tree.find(rows)
    if tree is not None:
        return tree, transform
    if not proven and children is None:
        return None
    count, variables = rows.shape
    if count >= SPARSE_ROWS and rows.nnz <= SPARSE_SHARE * count * variables:
        plan = plan_elimination(rows)
        if plan.cost < count**3 / 6:
            return SparseRows(rows, plan), transform
    dense = matrix.toarray()
    if count <= variables - count:
        return DenseRows(torch.from_numpy(dense)), None
    return NullRows(dense), None


@dataclass(frozen=True, eq=False)
class LinearSystem(OnDevice):
    """Rows ``A u = b`` ready for projection; build it with ``of``, ``blocks``, ``batched`` or ``of_structure``.

    Args:
        map: A as the caller wrote it.
        core: The rows to be solved; None if there are only pins.
        pins: Variables that single rows fix.
        kept: Numbers of the rows in the core; None for all.
        transform: Map of right-hand sides, if rows were rewritten.
        held: Variables that no projection may move.
        crossing: The crossing of trees, if the rows form one.
        redundancy: Dependent rows, which are left out.
        matrix: All rows, if the batch shares them.
    """

    map: SparseMap | DenseMap | Structure
    core: Structure | None
    pins: Pins | None = None
    kept: Tensor | None = None
    transform: SparseMap | None = None
    held: Tensor | None = None
    crossing: Crossing | None = None
    redundancy: Redundancy | None = None
    matrix: sp.csr_array | None = None

    @classmethod
    def of(cls, matrix: sp.csr_array, held: np.ndarray | None = None, assume: bool = False) -> LinearSystem:
        """The system of a shared matrix; dependent rows are left out and recorded in ``redundancy``.

        Args:
            matrix: A, (q, n).
            held: Variables that no projection may move.
            assume: Take the rows as independent, without a search, unless a row has no variable left.
        """
        matrix = sp.csr_array(matrix, dtype=np.float64)
        system = cls._of_full_rank(matrix, held, proven=assume)
        if system is None:
            redundancy = find_redundancy(matrix)
            used = np.arange(matrix.shape[0]) if redundancy is None else redundancy.others
            system = cls._of_full_rank(sp.csr_array(matrix[used]), held, proven=True)
            assert system is not None
            if redundancy is not None:
                inner = np.arange(len(used)) if system.kept is None else system.kept.numpy()
                system = replace(
                    system,
                    kept=torch.from_numpy(used[inner].astype(np.int64)),
                    pins=None if system.pins is None else system.pins.renumbered(used),
                    redundancy=redundancy,
                )
        return replace(system, map=SparseMap(matrix), matrix=matrix)

    @classmethod
    def _of_full_rank(cls, matrix: sp.csr_array, held: np.ndarray | None, proven: bool = False) -> LinearSystem | None:
        """The system, or None if the rank is in doubt and not ``proven``."""
        pins, others, remaining, empty = find_pins(matrix)
        if len(empty):
            return None
        chosen = choose(remaining, proven) if len(others) else (None, None)
        if chosen is None:
            return None
        core, transform = chosen
        kept, crossing = None, None
        if len(others) < matrix.shape[0]:
            kept = torch.from_numpy(others.astype(np.int64))
        elif core is not None and core.double and len(others) >= SPARSE_ROWS:
            crossing = Crossing.find(matrix)
        fixed = None if held is None or not len(held) else torch.from_numpy(np.asarray(held, dtype=np.int64))
        return cls(SparseMap(matrix), core, pins, kept, transform, fixed, crossing)

    @classmethod
    def blocks(cls, weights: Tensor, row_count: int) -> LinearSystem:
        """One conservation row per slice: ``row_count`` consecutive blocks with the same weights (width,)."""
        core = DisjointRows.blocks(weights, row_count)
        return cls(core, core)

    @classmethod
    def of_structure(cls, structure: Structure) -> LinearSystem:
        """The system of a structure that needs no analysis."""
        return cls(structure.map if isinstance(structure, Mapped) else structure, structure)

    @classmethod
    def batched(cls, matrix: Tensor) -> LinearSystem:
        """The system of a dense matrix (*batch, q, n) that differs between points or requires gradients."""
        return cls(DenseMap(matrix), DenseRows(matrix))

    @property
    def row_count(self) -> int:
        """Number of rows q as the caller wrote them."""
        return self.map.row_count

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of A itself."""
        return self.map.matrix.shape[:-2] if isinstance(self.map, DenseMap) else torch.Size()

    @property
    def variables(self) -> int:
        """Number of variables n."""
        return self.map.variables

    @property
    def algorithm(self) -> str:
        """How this system is solved."""
        parts = [] if self.pins is None else [f"{len(self.pins.variable)} pinned variables substituted"]
        if self.core is not None:
            parts.append(self.core.algorithm)
        if self.crossing is not None:
            parts.append(
                f"sweeps along {len(self.crossing.axes)} crossed trees where the weights cross, as equal ones do"
            )
        return "; ".join(parts)

    @property
    def coupled(self) -> LinearSystem:
        """The same rows without substitution of pins, for metrics that couple variables."""
        return self if self.pins is None else self._coupled

    @cached_property
    def _coupled(self) -> LinearSystem:
        assert self.matrix is not None
        used = np.arange(self.row_count) if self.redundancy is None else self.redundancy.others
        matrix = sp.csr_array(self.matrix[used])
        chosen = choose(matrix, proven=True)
        assert chosen is not None
        core, transform = chosen
        kept = None if self.redundancy is None else torch.from_numpy(used.astype(np.int64))
        return LinearSystem(self.map, core, None, kept, transform, self.held, matrix=self.matrix)

    def movable(self, weight: Tensor) -> Tensor:
        """Weights (*batch, n) with 0 for pinned and held variables."""
        for index in (self.held, None if self.pins is None else self.pins.variable):
            if index is not None:
                weight = weight.index_fill(-1, index, 0.0)
        return weight

    def free(self, x: Tensor) -> Tensor:
        """Set pinned variables of x (..., n) to 0."""
        return x if self.pins is None else x.index_fill(-1, self.pins.variable, 0.0)

    def substitute(self, z: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Substitute the pinned variables.

        Returns:
            Points z (..., n) with pinned values, and the core's right-hand side from b (..., q), in the dtype of z.
        """
        values, right = self.right_side(b, z)
        if self.pins is not None and values is not None:
            shape = broadcast(z.shape[:-1], values.shape[:-1])
            z = z.expand(*shape, -1).index_copy(-1, self.pins.variable, values.expand(*shape, -1))
        return z, right

    def right_side(self, b: Tensor, like: Tensor) -> tuple[Tensor | None, Tensor]:
        """Pinned values (or None) and the core's right-hand side from b (..., q), in the dtype of ``like``.

        The result for the last constant b is cached.
        """
        last = vars(self).get("_last_side") if checking() else None
        key = (like.dtype, like.device)
        if last is not None and last[0] is b and last[1] == (b._version, key):
            return last[2]
        side = b.to(like.device, like.dtype)
        right = side if self.kept is None else side.index_select(-1, self.kept)
        values = None
        if self.pins is not None:
            values = self.pins.values(side)
            right = right - self.pins.coupling.apply(values)
        right = right if self.transform is None else self.transform.apply(right)
        if checking() and not b.requires_grad and not b.is_inference():
            vars(self)["_last_side"] = b, (b._version, key), (values, right)
        return values, right

    def factor(self, weight: Tensor) -> Factor:
        """The core's factor for weights (*batch, n); pinned and held variables get weight 0."""
        assert self.core is not None
        weight = self.movable(weight)
        crossed = None if self.crossing is None else self.crossing.factor(self.core, weight)
        return self.core.factor(weight) if crossed is None else crossed

    def unit_factor(self, like: Tensor) -> Factor:
        """The factor for W = I, cached for each dtype and device of ``like`` if A is constant."""
        assert self.core is not None
        cache = self.__dict__.setdefault("_unit_factors", {})
        key = (like.dtype, like.device)
        if key not in cache:
            factor = self.factor(torch.ones(self.variables, dtype=like.dtype, device=like.device))
            if not self.core.constant:
                return factor
            if self.variables <= SQUARED_LIMIT and factor.conditioned:
                factor = SquaredFactor(factor)
            if not checking():  # a cached tensor must not belong to a traced graph
                return factor
            cache[key] = factor
        return cache[key]


class SquaredFactor(Factor):
    """A fixed factor with the squared entries of P: ``diag(P S P^T) = (P * P) s``, a sum of squares."""

    def __init__(self, factor: Factor) -> None:
        self.factor, self.weight, self.structure = factor, factor.weight, factor.structure
        self.squared = factor.squared_entries()

    def squared_entries(self) -> Tensor:
        return self.squared

    def solve(self, r: Tensor) -> Tensor:
        return self.factor.solve(r)

    def variance(self, s: Tensor | None = None) -> Tensor:
        return (self.weight if s is None else s) @ self.squared

    def pivots(self) -> Tensor:
        return self.factor.pivots()
