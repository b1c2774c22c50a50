"""A fill-reducing order for a sparse symmetric matrix: as rounds of independent pivots, or one pivot after the other.

Pivots that are not neighbours in the graph of ``A W A^T`` can be eliminated at the same time, so each round takes a
maximal set of independent rows of low degree (minimum degree, vectorised). What is left when the graph has become
small or dense is factored as one dense block. ``Columns`` is plain minimum degree, for the compiled kernels. Found once
per pattern; plain index arrays come out. ``Assembly`` fills the entries so numbered.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard.structure.base import OnDevice

SMALL_BLOCK = 24  # a remaining block of this size is factored densely at once
LARGE_BLOCK = 2048  # never leave more than this to the dense block while pivots of low degree remain


@dataclass(eq=False)
class Round(OnDevice):
    """One set of independent pivots p with their later neighbours j; entries are numbered over the whole plan."""

    pivot: Tensor  # (k,) rows eliminated in this round
    diagonal: Tensor  # (k,) entry (p, p)
    entry: Tensor  # (m,) entries (p, j)
    owner: Tensor  # (m,) which of the k pivots
    neighbour: Tensor  # (m,) row j
    first: Tensor  # (t,) entry positions in 0..m of a pair (j, j')
    second: Tensor  # (t,)
    target: Tensor  # (t,) entry (j, j')
    distinct: Tensor  # (t,) 1.0 where j != j', else 0.0


@dataclass(eq=False)
class Plan(OnDevice):
    """Rounds of elimination and the dense rest, for a q x q matrix with ``entries`` entries, fill included."""

    rounds: tuple[Round, ...]
    block: Tensor  # (m,) rows of the dense rest
    block_entry: Tensor  # (m * m,) entry of each of its elements
    lower: Tensor  # (m (m + 1) / 2,) elements on and below its diagonal, each entry once
    entries: int
    entry_of: dict[tuple[int, int], int]
    graph: sp.csr_array  # which rows of A share a variable

    @cached_property
    def columns(self) -> Columns:
        """The same matrix, one pivot after the other."""
        return plan_columns(self)

    @property
    def cost(self) -> float:
        """Multiplications of one factorisation."""
        return float(sum(len(r.target) for r in self.rounds)) + len(self.block) ** 3 / 3


@dataclass(frozen=True)
class Columns:
    """Columns of L in the order of elimination; an entry (p, j) follows (p, p) in the column of the earlier row p."""

    start: np.ndarray  # (q + 1,) entry (p, p) of each column
    row: np.ndarray  # (entries,) row j of each entry, p itself first
    pair: np.ndarray  # (q + 1,) where the pairs of each column start
    target: np.ndarray  # (pairs,) entry (j, j') of neighbours j' <= j of p
    entry: np.ndarray  # (entries of the plan,) their numbers here, -1 for what is not filled in


def plan_columns(plan: Plan) -> Columns:
    """Eliminate the row of least degree until none is left."""
    neighbours = _neighbours(plan.graph)
    queue = [(len(around), p) for p, around in enumerate(neighbours)]
    heapq.heapify(queue)
    columns: list[list[int]] = []
    number: dict[tuple[int, int], int] = {}
    done: set[int] = set()
    while queue:
        degree, p = heapq.heappop(queue)
        if p in done or degree != len(neighbours[p]):  # an entry that has been overtaken
            continue
        done.add(p)
        around = sorted(neighbours[p])
        columns.append([p, *around])
        for j in columns[-1]:
            number[min(p, j), max(p, j)] = len(number)
        for j in around:
            neighbours[j] |= neighbours[p]
            neighbours[j] -= {j, p}
            heapq.heappush(queue, (len(neighbours[j]), j))
    target = [number[i, j] for _, *around in columns for at, j in enumerate(around) for i in around[: at + 1]]
    sizes = np.array([len(column) for column in columns], dtype=np.int64)
    return Columns(
        start=np.concatenate([[0], np.cumsum(sizes)]),
        row=np.array([j for column in columns for j in column], dtype=np.int64),
        pair=np.concatenate([[0], np.cumsum(sizes * (sizes - 1) // 2)]),
        target=np.array(target, dtype=np.int64),
        entry=np.array([number.get(pair, -1) for pair in plan.entry_of], dtype=np.int64),
    )


def _neighbours(graph: sp.csr_array) -> list[set[int]]:
    """The other rows that each row meets."""
    spans = zip(graph.indptr[:-1], graph.indptr[1:])
    return [set(graph.indices[first:last].tolist()) - {i} for i, (first, last) in enumerate(spans)]


def plan_elimination(matrix: sp.csr_array) -> Plan:
    """Plan the elimination of ``A W A^T`` from the pattern of A (q x n)."""
    rows = matrix.shape[0]
    pattern = sp.csr_array((np.ones(matrix.nnz), matrix.indices, matrix.indptr), shape=matrix.shape)
    graph = sp.csr_array(pattern @ pattern.T)
    neighbours = _neighbours(graph)
    entry_of: dict[tuple[int, int], int] = {}

    def entry(i: int, j: int) -> int:
        return entry_of.setdefault((i, j) if i < j else (j, i), len(entry_of))

    left, rounds = set(range(rows)), []
    while left:
        chosen = _independent(left, neighbours)
        size = len(left)
        crowded = sum(len(neighbours[p]) for p in left) > 0.5 * size * size
        if size <= SMALL_BLOCK or (size <= LARGE_BLOCK and (crowded or len(chosen) < max(2, size // 50))):
            break
        rounds.append(_eliminate(chosen, neighbours, entry))
        left -= set(chosen)
    block = sorted(left)
    block_entry = [entry(i, j) for i in block for j in block]
    for i in range(rows):
        entry(i, i)
    return Plan(
        rounds=tuple(rounds),
        block=torch.tensor(block, dtype=torch.int64),
        block_entry=torch.tensor(block_entry, dtype=torch.int64),
        lower=torch.tensor([i * len(block) + j for i in range(len(block)) for j in range(i + 1)], dtype=torch.int64),
        entries=len(entry_of),
        entry_of=entry_of,
        graph=graph,
    )


def _independent(left: set[int], neighbours: list[set[int]]) -> list[int]:
    """Rows of low degree, no two of them neighbours, smallest degree first."""
    order = sorted(left, key=lambda p: (len(neighbours[p]), p))
    limit = 2 * len(neighbours[order[0]]) + 2
    blocked: set[int] = set()
    chosen = []
    for p in order:
        if len(neighbours[p]) > limit:
            break
        if p not in blocked:
            chosen.append(p)
            blocked |= neighbours[p]
    return chosen


def _eliminate(chosen: list[int], neighbours: list[set[int]], entry: Callable[[int, int], int]) -> Round:
    """Record the arithmetic of one round and update the graph with its fill."""
    entries: list[int] = []
    owner: list[int] = []
    later: list[int] = []
    first: list[int] = []
    second: list[int] = []
    target: list[int] = []
    for k, p in enumerate(chosen):
        around = sorted(neighbours[p])
        base = len(entries)
        for a, j in enumerate(around):
            entries.append(entry(p, j))
            owner.append(k)
            later.append(j)
            for b in range(a + 1):
                first.append(base + a)
                second.append(base + b)
                target.append(entry(j, around[b]))
            neighbours[j] |= neighbours[p]
            neighbours[j] -= {j, p}
    indices = [[entry(p, p) for p in chosen], entries, owner, later, first, second, target]
    diagonal, entries_t, owner_t, later_t, first_t, second_t, target_t = (
        torch.tensor(values, dtype=torch.int64) for values in indices
    )
    return Round(
        pivot=torch.tensor(chosen, dtype=torch.int64),
        diagonal=diagonal,
        entry=entries_t,
        owner=owner_t,
        neighbour=later_t,
        first=first_t,
        second=second_t,
        target=target_t,
        distinct=(first_t != second_t).to(torch.float64),
    )


class Assembly(OnDevice):
    """The map from weights w to the entries of ``A diag(w) A^T`` and back to the quadratic forms q_i."""

    def __init__(self, matrix: sp.csr_array, plan: Plan) -> None:
        columns = sp.csc_array(matrix)
        place = sp.csr_array(matrix)  # the position of every entry among the rows' entries
        place.data = np.arange(1, place.nnz + 1, dtype=np.float64)
        place = sp.csc_array(place)
        first: list[int] = []
        second: list[int] = []
        variable: list[int] = []
        entry: list[int] = []
        twice: list[float] = []
        for i in range(matrix.shape[1]):
            span = slice(columns.indptr[i], columns.indptr[i + 1])
            rows, at = columns.indices[span].tolist(), (place.data[span] - 1).astype(int).tolist()
            for a, row in enumerate(rows):
                for c, other in enumerate(rows[: a + 1]):
                    variable.append(i)
                    entry.append(plan.entry_of[(row, other) if row < other else (other, row)])
                    first.append(at[a])
                    second.append(at[c])
                    twice.append(1.0 if row == other else 2.0)
        self.variables, self.entries = matrix.shape[1], plan.entries
        self.variable, self.entry = torch.tensor(variable), torch.tensor(entry)
        self.first, self.second = torch.tensor(first), torch.tensor(second)
        self.twice = torch.tensor(twice, dtype=torch.float64)
        self.product = self.form = self.twice
        self.fill(torch.from_numpy(sp.csr_array(matrix).data.astype(np.float64)))

    def fill(self, values: Tensor) -> None:
        """Put in the values (*batch, entries of A) of the rows, sorted by row and column."""
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
    """``x`` (k, *batch) with dimensions added after the first, to broadcast with ``like`` (k, *samples, *batch)."""
    return x.reshape(x.shape[0], *[1] * (like.dim() - x.dim()), *x.shape[1:])


def gather_sum(x: Tensor, segment: Tensor, count: int) -> Tensor:
    """Sums of x (k, ...) over equal entries of ``segment`` (k,), as (count, ...)."""
    return x.new_zeros(count, *x.shape[1:]).index_add(0, segment, x)
