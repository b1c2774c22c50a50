"""Ready families of functionals: block means on a grid, levels of a hierarchy, sums over the horizon.

| family                   | functionals                                                      | groups             |
|--------------------------|------------------------------------------------------------------|--------------------|
| BlockMeans(shape, sizes) | means over the blocks of a grid, which do not overlap            | one per block size |
| Levels(hierarchy)        | every node as the sum of its bottom series                       | one per level      |
| Horizons(steps, nodes)   | for every node, sums over the first h steps                      | one per h          |

Random directions of equal spread see hardly anything of a correlation; sums of neighbours do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._score.functionals import Functionals, matrix_from_values, matrix_values, same_matrix, scipy_matrix
from probhard.errors import ParameterError, ShapeError
from probhard.rows.children import strictly_below

TOTAL = "total"


@dataclass(frozen=True)
class BlockMeans(Functionals):
    """Means over blocks of a field on a grid, flattened with its first axis slowest.

    Blocks of one size do not overlap. Those at the far edges are smaller if the size does not divide the axis.

    Args:
        shape: Shape of the grid, of one to three axes.
        sizes: Block sizes. An integer is the length along every axis, at most that of the axis; a tuple has one
            length per axis; ``"total"`` is the mean over the grid. Sizes that give the same blocks count once.

    Raises:
        ParameterError: If the grid does not have one to three axes, or a size is not positive or does not fit.
    """

    shape: tuple[int, ...]
    sizes: tuple[int | tuple[int, ...] | str, ...]
    kind: ClassVar[str] = "block-means"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(length) for length in self.shape))
        sizes = tuple(tuple(size) if isinstance(size, tuple | list) else size for size in self.sizes)
        object.__setattr__(self, "sizes", sizes)
        if not 1 <= len(self.shape) <= 3 or min(self.shape) < 1:
            raise ParameterError(
                f"BlockMeans got the shape {self.shape}.",
                "A grid has one to three axes with at least one cell each.",
                "Pass the shape of the field before it was flattened, such as (20, 100).",
            )
        if not sizes:
            raise ParameterError("BlockMeans got no sizes.", "There are no blocks.", "Pass some, such as (2, 4, 8).")
        for size in sizes:
            self._block(size)

    def _block(self, size: int | tuple[int, ...] | str) -> tuple[int, ...]:
        """The lengths of a block of this size."""
        if size == TOTAL:
            return self.shape
        lengths = size if isinstance(size, tuple) else (size,) * len(self.shape)
        valid = all(isinstance(length, int | np.integer) and length >= 1 for length in lengths)
        if not valid or len(lengths) != len(self.shape):
            raise ParameterError(
                f"BlockMeans got the block size {size!r} on a grid of shape {self.shape}.",
                "A block has a positive number of cells along every axis.",
                f"Pass a positive integer, a tuple of {len(self.shape)} of them, or {TOTAL!r}.",
            )
        return tuple(min(int(length), axis) for length, axis in zip(lengths, self.shape))

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the blocks, one per group."""
        return tuple(dict.fromkeys(self._block(size) for size in self.sizes))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(
            self._name(block)
            for block in self.blocks
            for _ in range(math.prod(-(-axis // length) for axis, length in zip(self.shape, block)))
        )

    def _name(self, block: tuple[int, ...]) -> str:
        if block == self.shape:
            return TOTAL
        return "cells" if max(block) == 1 else f"blocks of {' x '.join(map(str, block))}"

    def _matrix(self) -> sp.csr_array:
        return sp.csr_array(sp.vstack([self._means(block) for block in self.blocks]))

    def _means(self, block: tuple[int, ...]) -> sp.csr_array:
        """Means over blocks of one shape, (number of blocks, n)."""
        counts = [-(-axis // length) for axis, length in zip(self.shape, block)]
        along = np.ix_(*(np.arange(axis) // length for axis, length in zip(self.shape, block)))
        owner = np.ravel_multi_index(np.broadcast_arrays(*along), counts).ravel()  # (n,)
        mean = 1 / np.bincount(owner)[owner]
        return sp.csr_array((mean, (owner, np.arange(owner.size))), shape=(math.prod(counts), owner.size))

    def _values(self) -> dict[str, Any]:
        sizes = [list(size) if isinstance(size, tuple) else size for size in self.sizes]
        return {"shape": list(self.shape), "sizes": sizes}

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> BlockMeans:
        return cls(tuple(values["shape"]), tuple(values["sizes"]))


@dataclass(frozen=True, eq=False, init=False)
class Levels(Functionals):
    """Every node of a hierarchy as the sum of its bottom series, grouped by level.

    The law is over all n nodes, bottoms last. Sums of bottoms are scored even if the law is not coherent, with as many
    products as S has entries. For a law that was projected on the same hierarchy they are the nodes themselves.

    Args:
        hierarchy: A ``Hierarchy``, or a summation matrix S (n, bottoms).
        tags: Level name to its nodes, by row number or by label of the hierarchy. None takes the hierarchy's own tags;
            without any, the level of a node is its distance from the root.

    Raises:
        ShapeError: If S has more columns than rows.
        ParameterError: If the tags do not name every node once.
    """

    summation: sp.csr_array
    level: tuple[str, ...]
    kind: ClassVar[str] = "levels"

    def __init__(self, hierarchy: Any, tags: Mapping[str, Sequence[int | str]] | None = None) -> None:
        summation = scipy_matrix(getattr(hierarchy, "summation", hierarchy))
        if summation.shape[0] < summation.shape[1]:
            raise ShapeError(
                f"Levels got a summation matrix of shape {summation.shape}.",
                "Its rows are all nodes, its columns the bottom series.",
                "Transpose it.",
            )
        tags = getattr(hierarchy, "tags", None) if tags is None else tags
        object.__setattr__(self, "summation", summation)
        object.__setattr__(self, "level", _tagged(hierarchy, summation, tags) if tags else _depths(summation))

    @property
    def labels(self) -> tuple[str, ...]:
        return self.level

    def variables_of(self, law: Any) -> Tensor | None:
        known = getattr(getattr(law, "constraint", None), "summation", None)  # of a law on a Hierarchy
        if known is None or not law.feasible or not same_matrix(self.summation, known):
            return super().variables_of(law)
        return torch.arange(self.variables)

    def _matrix(self) -> sp.csr_array:
        nodes, bottoms = self.summation.shape
        return sp.csr_array(sp.hstack([sp.csr_array((nodes, nodes - bottoms)), self.summation]))

    def _values(self) -> dict[str, Any]:
        return {**matrix_values(self.summation), "labels": list(self.labels)}

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> Levels:
        tags: dict[str, list[int | str]] = {}
        for node, label in enumerate(values["labels"]):
            tags.setdefault(label, []).append(node)
        return cls(matrix_from_values(values), tags)

    def __eq__(self, other: object) -> bool:
        same = self.level == getattr(other, "level", None)
        return isinstance(other, Levels) and same and same_matrix(self.summation, other.summation)

    def __hash__(self) -> int:
        return hash((self.summation.shape, self.summation.nnz, self.level))


def _tagged(hierarchy: Any, summation: sp.csr_array, tags: Mapping[str, Sequence[int | str]]) -> tuple[str, ...]:
    """The level of each node by tags."""
    names = getattr(hierarchy, "names", None)
    number = {} if names is None else {name: node for node, name in enumerate(names)}
    levels: list[str | None] = [None] * summation.shape[0]
    for level, nodes in tags.items():
        for node in nodes:
            at = number.get(node) if isinstance(node, str) else int(node)
            if at is None or not 0 <= at < len(levels) or levels[at] is not None:
                raise ParameterError(
                    f"The level {level!r} lists the node {node!r}, which does not exist or belongs to another level.",
                    "Each node is scored in one group.",
                    "Use row numbers of S, or the labels of a Hierarchy with names, each of them once.",
                )
            levels[at] = str(level)
    missing = [node for node, level in enumerate(levels) if level is None]
    if missing:
        raise ParameterError(
            f"The tags leave out {len(missing)} nodes, such as number {missing[0]}.",
            "Each node is scored in one group.",
            "List every node in a level.",
        )
    return tuple(level for level in levels if level is not None)


def _depths(summation: sp.csr_array) -> tuple[str, ...]:
    """The level of each node: its distance from the root, by the longest chain of nodes that hold its bottoms."""
    pattern = sp.csr_array((np.ones(summation.nnz), summation.indices, summation.indptr), shape=summation.shape)
    above, below = strictly_below(pattern, np.diff(pattern.indptr))
    depth = np.zeros(summation.shape[0], dtype=np.int64)
    while True:
        deeper = depth.copy()
        np.maximum.at(deeper, below, depth[above] + 1)
        if (deeper == depth).all():
            return tuple(f"level {level}" for level in depth)
        depth = deeper


@dataclass(frozen=True)
class Horizons(Functionals):
    """Sums over the first h steps of every node, for events that flatten (steps, nodes), time-major.

    Args:
        steps: Number of steps T.
        nodes: Number of nodes.
        sums: Numbers h of steps to add up; None takes 2, 4, 8, ... and the whole horizon T.

    Raises:
        ParameterError: If a number is not positive, or a sum is longer than the horizon.
    """

    steps: int
    nodes: int = 1
    sums: tuple[int, ...] | None = None
    kind: ClassVar[str] = "horizons"

    def __post_init__(self) -> None:
        doubled = tuple(2**k for k in range(1, max(1, int(self.steps)).bit_length()) if 2**k < self.steps)
        sums = (*doubled, self.steps) if self.sums is None else tuple(dict.fromkeys(map(int, self.sums)))
        object.__setattr__(self, "sums", sums)
        if self.nodes < 1 or not sums or min(sums) < 1 or max(sums) > self.steps:
            raise ParameterError(
                f"Horizons got steps={self.steps}, nodes={self.nodes} and sums={sums}.",
                "Sums run over at least one step and at most the whole horizon.",
                "Pass the length of the horizon, the number of series, and sums between 1 and that length.",
            )

    @property
    def labels(self) -> tuple[str, ...]:
        assert self.sums is not None
        names = ("sum of all steps" if h == self.steps else f"sum of {h} steps" for h in self.sums)
        return tuple(name for name in names for _ in range(self.nodes))

    def _matrix(self) -> sp.csr_array:
        assert self.sums is not None
        first = np.arange(self.steps) < np.asarray(self.sums)[:, None]  # (sums, steps)
        return sp.csr_array(sp.kron(sp.csr_array(first.astype(np.float64)), sp.eye_array(self.nodes)))

    def _values(self) -> dict[str, Any]:
        assert self.sums is not None
        return {"steps": self.steps, "nodes": self.nodes, "sums": list(self.sums)}

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> Horizons:
        return cls(values["steps"], values["nodes"], tuple(values["sums"]))
