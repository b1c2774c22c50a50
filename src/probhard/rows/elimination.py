"""Fill-reducing elimination orders for a sparse symmetric matrix.

Pivots that are not neighbours in the graph of ``A W A^T`` can be eliminated at the same time. Each round takes a
maximal independent set of rows of low degree (minimum degree, vectorised). Once the graph is small or dense, the
remaining rows are factored as one dense block. ``Columns`` is an order of single pivots for the compiled kernels:
minimum degree, except for the first rounds of a large graph. Orders are computed once per pattern, by array operations
while the graph is large. ``Assembly`` computes the entries of ``A W A^T`` in the numbering of a plan.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import OnDevice

SMALL_BLOCK = 24  # remaining rows up to this number are always factored densely
SEQUENTIAL = 2048  # up to this many rows, a loop over single rows of minimum degree pays
LARGE_BLOCK = 2048  # largest dense block


class Numbering:
    """Numbers of the entries (i, j) = (j, i) of a symmetric matrix, in the order of the lists i and j, each (k,)."""

    def __init__(self, i: np.ndarray, j: np.ndarray, row_count: int) -> None:
        self.row_count = row_count
        codes = self._code(i, j)
        self.order = np.argsort(codes)
        self.codes = codes[self.order]

    def _code(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return np.minimum(i, j).astype(np.int64) * self.row_count + np.maximum(i, j)

    def of(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """The numbers (m,) of the entries (i, j), each (m,), which must be listed."""
        return self.order[np.searchsorted(self.codes, self._code(i, j))]

    def within(self, other: Numbering) -> np.ndarray:
        """The numbers (k,) in another numbering of the entries listed here; -1 for those that it lacks."""
        at = np.searchsorted(other.codes, self.codes).clip(max=len(other.codes) - 1)
        numbers = np.empty(len(self.codes), dtype=np.int64)
        numbers[self.order] = np.where(other.codes[at] == self.codes, other.order[at], -1)
        return numbers


@dataclass(eq=False)
class Round(OnDevice):
    """Independent pivots p with their later neighbours j; entries are numbered over the whole plan."""

    pivot: Tensor  # (k,) rows eliminated in this round
    diagonal: Tensor  # (k,) entry (p, p)
    entry: Tensor  # (m,) entries (p, j)
    owner: Tensor  # (m,) index of the pivot, from 0 to k - 1
    neighbour: Tensor  # (m,) row j
    first: Tensor  # (t,) indices, from 0 to m - 1, of the entries of a pair (j, j')
    second: Tensor  # (t,)
    target: Tensor  # (t,) entry (j, j')
    distinct: Tensor  # (t,) 1.0 where j != j', else 0.0


@dataclass(eq=False)
class Plan(OnDevice):
    """Rounds of elimination, then a dense block, for a q x q matrix."""

    rounds: tuple[Round, ...]
    block: Tensor  # (m,) rows of the dense block
    block_entry: Tensor  # (m * m,) the entry of each element of the block
    lower: Tensor  # (m (m + 1) / 2,) elements of the block on and below its diagonal
    early: int  # rounds after which at most SEQUENTIAL rows are left
    rest: sp.csr_array  # the graph of those rows
    numbers: Numbering  # of the entries

    @property
    def entries(self) -> int:
        """Number of entries on and below the diagonal, fill included."""
        return len(self.numbers.codes)

    @cached_property
    def columns(self) -> Columns:
        """The order of single pivots."""
        return plan_columns(self)

    @property
    def cost(self) -> float:
        """Number of multiplications in one factorisation."""
        return float(sum(len(r.target) for r in self.rounds)) + len(self.block) ** 3 / 3


@dataclass(frozen=True)
class Columns:
    """Columns of L in the order of elimination. The column of row p lists (p, p), then (p, j) for later rows j."""

    start: np.ndarray  # (q + 1,) entry (p, p) of each column
    row: np.ndarray  # (entries,) row j of each entry, p first
    pair: np.ndarray  # (q + 1,) where the pairs of each column start
    target: np.ndarray  # (pairs,) entry (j, j') of neighbours j' <= j of p
    entry: np.ndarray  # (entries of the plan,) their numbers here; -1 for entries that stay 0


def plan_columns(plan: Plan) -> Columns:
    """The columns of a plan: the pivots of its early rounds, then always the row of least degree."""
    early, late = plan.rounds[: plan.early], _minimum_degree(plan)
    sizes = [1 + np.bincount(step.owner.numpy(), minlength=len(step.pivot)) for step in early]
    pivots = [*(step.pivot.numpy() for step in early), np.array([column[0] for column in late], dtype=np.int64)]
    later = [
        *(step.neighbour.numpy() for step in early),
        np.array([j for _, *around in late for j in around], np.int64),
    ]
    size = np.concatenate([*sizes, np.array([len(column) for column in late], dtype=np.int64)])
    pivot, neighbour = np.concatenate(pivots), np.concatenate(later)
    row = _with_pivots(pivot, neighbour, size)
    numbers = Numbering(np.repeat(pivot, size), row, plan.numbers.row_count)
    first, second = pairs_within(size - 1)
    return Columns(
        start=np.concatenate([[0], np.cumsum(size)]),
        row=row,
        pair=np.concatenate([[0], np.cumsum(size * (size - 1) // 2)]),
        target=numbers.of(neighbour[first], neighbour[second]),
        entry=plan.numbers.within(numbers),
    )


def _minimum_degree(plan: Plan) -> list[list[int]]:
    """Columns of the rows after the early rounds, each a pivot and its later neighbours."""
    graph = plan.rest
    remaining = set(range(graph.shape[0])).difference(*(step.pivot.tolist() for step in plan.rounds[: plan.early]))
    neighbours = {p: set(graph.indices[graph.indptr[p] : graph.indptr[p + 1]].tolist()) for p in remaining}
    queue = [(len(around), p) for p, around in neighbours.items()]
    heapq.heapify(queue)
    columns: list[list[int]] = []
    while queue:
        degree, p = heapq.heappop(queue)
        if p not in neighbours or degree != len(neighbours[p]):  # an outdated entry of the queue
            continue
        around = neighbours.pop(p)
        columns.append([p, *sorted(around)])
        for j in around:
            neighbours[j] |= around
            neighbours[j] -= {j, p}
            heapq.heappush(queue, (len(neighbours[j]), j))
    return columns


def pairs_within(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions (first, second <= first) of all pairs within consecutive groups of these sizes (k,)."""
    start = np.cumsum(counts) - counts
    partners = np.arange(counts.sum()) - np.repeat(start, counts) + 1  # number of pairs of each first element
    first = np.repeat(np.arange(len(partners)), partners)
    offset = np.arange(len(first)) - np.repeat(np.cumsum(partners) - partners, partners)
    return first, np.repeat(np.repeat(start, counts), partners) + offset


def plan_elimination(matrix: sp.csr_array) -> Plan:
    """Plan the elimination of ``A W A^T`` from the pattern of A (q x n)."""
    rows = matrix.shape[0]
    pattern = sp.csr_array((np.ones(matrix.nnz), matrix.indices, matrix.indptr), shape=matrix.shape)
    graph = _simple(sp.coo_array(pattern @ pattern.T), np.zeros(rows, dtype=bool))
    remaining = np.arange(rows)
    drafts: list[tuple[np.ndarray, sp.csr_array]] = []
    early, rest = 0, graph
    while len(remaining):
        chosen = _independent(remaining, graph)
        size = len(remaining)
        crowded = graph.nnz > 0.5 * size * size
        if size <= SMALL_BLOCK or (size <= LARGE_BLOCK and (crowded or len(chosen) < max(2, size // 50))):
            break
        around = graph[chosen]
        drafts.append((chosen, around))
        gone = np.zeros(rows, dtype=bool)
        gone[chosen] = True
        first, second = pairs_within(np.diff(around.indptr))
        i, j = around.indices[first], around.indices[second]
        old = sp.coo_array(graph)
        at = np.concatenate([old.coords[0], i, j]), np.concatenate([old.coords[1], j, i])
        graph = _simple(sp.coo_array((np.ones(len(at[0]), dtype=np.int8), at), shape=graph.shape), gone)
        if len(remaining) > SEQUENTIAL:
            early, rest = len(drafts), graph
        remaining = remaining[~gone[remaining]]
    across, down = np.tril_indices(len(remaining))
    sizes = [np.diff(around.indptr) + 1 for _, around in drafts]
    rows_of = [_with_pivots(chosen, around.indices, size) for (chosen, around), size in zip(drafts, sizes)]
    pivots = [np.repeat(chosen, size) for (chosen, _), size in zip(drafts, sizes)]
    numbers = Numbering(np.concatenate([*pivots, remaining[across]]), np.concatenate([*rows_of, remaining[down]]), rows)
    return Plan(
        rounds=tuple(_round(numbers, chosen, around) for chosen, around in drafts),
        block=torch.from_numpy(remaining),
        block_entry=torch.from_numpy(
            numbers.of(np.repeat(remaining, len(remaining)), np.tile(remaining, len(remaining)))
        ),
        lower=torch.from_numpy(across * len(remaining) + down),
        early=early,
        rest=rest,
        numbers=numbers,
    )


def _with_pivots(chosen: np.ndarray, neighbours: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Rows of the columns of these sizes, each pivot first."""
    return np.insert(neighbours.astype(np.int64), np.cumsum(size - 1) - (size - 1), chosen)


def _simple(edges: sp.coo_array, gone: np.ndarray) -> sp.csr_array:
    """The graph of these edges without repetitions, loops and eliminated rows."""
    i, j = edges.coords
    kept = (i != j) & ~gone[i] & ~gone[j]
    graph = sp.csr_array((np.ones(kept.sum(), dtype=np.int8), (i[kept], j[kept])), shape=edges.shape)
    graph.sort_indices()
    return graph


def _independent(remaining: np.ndarray, graph: sp.csr_array) -> np.ndarray:
    """A maximal independent set among rows of low degree, smallest degree first."""
    degree = np.diff(graph.indptr)[remaining]
    low = degree <= 2 * degree.min() + 2
    order = remaining[low][np.argsort(degree[low], kind="stable")]
    blocked = np.zeros(graph.shape[0], dtype=bool)
    chosen = []
    for p, first, last in zip(order.tolist(), graph.indptr[order].tolist(), graph.indptr[order + 1].tolist()):
        if not blocked[p]:
            chosen.append(p)
            blocked[graph.indices[first:last]] = True
    return np.array(chosen, dtype=np.int64)


def _round(numbers: Numbering, chosen: np.ndarray, around: sp.csr_array) -> Round:
    """The index arrays of one round."""
    counts = np.diff(around.indptr)
    owner, later = np.repeat(np.arange(len(chosen)), counts), around.indices.astype(np.int64)
    first, second = pairs_within(counts)
    return Round(
        pivot=torch.from_numpy(chosen),
        diagonal=torch.from_numpy(numbers.of(chosen, chosen)),
        entry=torch.from_numpy(numbers.of(chosen[owner], later)),
        owner=torch.from_numpy(owner),
        neighbour=torch.from_numpy(later),
        first=torch.from_numpy(first),
        second=torch.from_numpy(second),
        target=torch.from_numpy(numbers.of(later[first], later[second])),
        distinct=torch.from_numpy((first != second).astype(np.float64)),
    )


class Assembly(OnDevice):
    """The map from weights w to the entries of ``A diag(w) A^T``, and from the entries of X to ``a_i^T X a_i``.

    Args:
        matrix: A, (q, n).
        plan: The plan whose numbering the entries follow.
    """

    def __init__(self, matrix: sp.csr_array, plan: Plan) -> None:
        place = sp.csr_array(matrix, dtype=np.float64)  # the position of each entry of A in row order
        place.data = np.arange(place.nnz, dtype=np.float64)
        columns = sp.csc_array(place)
        counts, row, at = np.diff(columns.indptr), columns.indices, columns.data.astype(np.int64)
        first, second = pairs_within(counts)
        self.variables, self.entries = matrix.shape[1], plan.entries
        self.variable = torch.from_numpy(np.repeat(np.arange(self.variables), counts * (counts + 1) // 2))
        self.entry = torch.from_numpy(plan.numbers.of(row[first], row[second]))
        self.first, self.second = torch.from_numpy(at[first]), torch.from_numpy(at[second])
        self.twice = torch.from_numpy(np.where(first == second, 1.0, 2.0))
        self.product = self.form = self.twice
        self.fill(torch.from_numpy(sp.csr_array(matrix).data.astype(np.float64)))

    def fill(self, values: Tensor) -> None:
        """Set the values (*batch, entries of A), sorted by row and column."""
        leading = values.movedim(-1, 0)
        self.product = leading.index_select(0, self.first) * leading.index_select(0, self.second)
        self.form = self.product * lift(self.twice, self.product)

    def assemble(self, weight: Tensor) -> Tensor:
        """Entries (E, *batch) of ``A diag(w) A^T`` for weights (n, *batch)."""
        terms = weight.index_select(0, self.variable) * lift(self.product, weight)
        return gather_sum(terms, self.entry, self.entries)

    def forms(self, entries: Tensor) -> Tensor:
        """``a_i^T X a_i`` (n, *batch) from the entries (E, *batch) of X."""
        terms = entries.index_select(0, self.entry) * lift(self.form, entries)
        return gather_sum(terms, self.variable, self.variables)


def lift(x: Tensor, like: Tensor) -> Tensor:
    """``x`` (k, *batch) with dimensions inserted after the first, to broadcast with ``like`` (k, *samples, *batch)."""
    return x.reshape(x.shape[0], *[1] * (like.dim() - x.dim()), *x.shape[1:])


def gather_sum(x: Tensor, segment: Tensor, count: int) -> Tensor:
    """Sums (count, ...) of x (k, ...) over equal entries of ``segment`` (k,)."""
    return x.new_zeros(count, *x.shape[1:]).index_add(0, segment, x)
