"""A fill-reducing order for a sparse symmetric matrix, as rounds of independent pivots.

Pivots that are not neighbours in the graph of ``A W A^T`` can be eliminated at the same time, so each round takes a
maximal set of independent rows of low degree (minimum degree, vectorised). What is left when the graph has become
small or dense is factored as one dense block. Found once per pattern; plain index arrays come out.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def cost(self) -> float:
        """Multiplications of one factorisation."""
        return float(sum(len(r.target) for r in self.rounds)) + len(self.block) ** 3 / 3


def plan_elimination(matrix: sp.csr_array) -> Plan:
    """Plan the elimination of ``A W A^T`` from the pattern of A (q x n)."""
    rows = matrix.shape[0]
    pattern = sp.csr_array((np.ones(matrix.nnz), matrix.indices, matrix.indptr), shape=matrix.shape)
    graph = sp.csr_array(pattern @ pattern.T)
    neighbours = [set(graph.indices[graph.indptr[i] : graph.indptr[i + 1]].tolist()) - {i} for i in range(rows)]
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


def _eliminate(chosen: list[int], neighbours: list[set[int]], entry: object) -> Round:
    """Record the arithmetic of one round and update the graph with its fill."""
    assert callable(entry)
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
