"""Coherent sums: every aggregate equals the sum of its bottom series, ``[I | -S] u = 0`` (paper, equation "tscons").

Rows are rewritten as sums of direct children (``rows.children``), so that a projection on a tree costs O(n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import narwhals as nw
import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard.constraints.base import Arrays, immutable
from probhard.constraints.equality import LinearEquality, scipy_from_sparse
from probhard.errors import ParameterError, ShapeError
from probhard.rows.children import child_rows
from probhard.rows.maps import SparseMap, arrays_of, matrix_of
from probhard.rows.system import LinearSystem


@immutable
class Hierarchy(LinearEquality):
    """Coherence of n series with m bottom series; aggregates come first.

    Args:
        S: Summation matrix (n, m), its last m rows the identity; torch, numpy, scipy, or a numeric frame.
        names: Labels of the n series, for errors and ``index``.
        tags: Level name to the labels of its nodes.
        immutable: Nodes (numbers or labels) whose forecasts must not change. See also ``fix``.

    Raises:
        ShapeError: S has no aggregate, or the number of names differs from n.
        ParameterError: S is not a summation matrix, or a node does not exist.
    """

    stored_as: ClassVar[str | None] = "hierarchy"
    names: tuple[str, ...] | None
    tags: dict[str, tuple[str, ...]]
    bottoms: int
    aggregates: int
    sizes: Tensor
    summation: sp.csr_array
    upper: SparseMap

    def __init__(
        self,
        S: Any,
        names: Sequence[str] | None = None,
        tags: Mapping[str, Sequence[str]] | None = None,
        immutable: Sequence[int | str] = (),
    ) -> None:
        summation = _summation(S)
        nodes, bottoms = summation.shape
        aggregates = nodes - bottoms
        self._set(
            names=None if names is None else tuple(map(str, names)),
            tags={} if tags is None else {level: tuple(map(str, nodes)) for level, nodes in tags.items()},
        )
        if self.names is not None and len(self.names) != nodes:
            raise ShapeError(
                f"The hierarchy has {nodes} series and {len(self.names)} names.",
                "Names label the rows of S.",
                "Give one name per row.",
            )
        self._set(bottoms=bottoms, aggregates=aggregates)
        _check_summation(summation, self.names)
        held = np.asarray([self.index(node) for node in immutable], dtype=np.int64)
        upper = sp.csr_array(summation[:aggregates])
        matrix = sp.csr_array(sp.hstack([sp.eye_array(aggregates, format="csr"), -upper]))
        sizes = torch.from_numpy(np.asarray(abs(summation).sum(1), dtype=np.float64).ravel())
        self._set(sizes=sizes, summation=summation, upper=SparseMap(upper))
        self._prepare(LinearSystem.of(matrix, held), 0.0)

    @property
    def nodes(self) -> int:
        """Number of series n."""
        return self.aggregates + self.bottoms

    def index(self, node: int | str) -> int:
        """Number of a node from its number or label; raises ParameterError if there is none."""
        if isinstance(node, str):
            if self.names is None or node not in self.names:
                raise ParameterError(
                    f"There is no node {node!r}.",
                    "A label must be one of the hierarchy's names.",
                    "Pass names=... to the hierarchy, or use the node's number.",
                )
            return self.names.index(node)
        if not -self.nodes <= node < self.nodes:
            raise ParameterError(
                f"There is no node {node}.",
                f"The hierarchy has {self.nodes} nodes.",
                "Count from 0, aggregates first.",
            )
        return int(node) % self.nodes

    def fix(self, nodes: Sequence[int | str], values: Any) -> LinearEquality:
        """Coherence with nodes (numbers or labels) fixed to values (*batch, len(nodes)), such as a budget."""
        columns = np.asarray([self.index(node) for node in nodes], dtype=np.int64)
        count = len(columns)
        pick = sp.csr_array((np.ones(count), (np.arange(count), columns)), shape=(count, self.nodes))
        return self & LinearEquality(pick, values)

    def aggregate(self, bottom: Tensor) -> Tensor:
        """All series (*batch, n) from the bottom ones (*batch, m); raises ShapeError unless there are m."""
        if bottom.dim() == 0 or bottom.shape[-1] != self.bottoms:
            raise ShapeError(
                f"aggregate() got {tuple(bottom.shape)}, the hierarchy has {self.bottoms} bottom series.",
                "Bottom series lie along the last dimension.",
                f"Pass (..., {self.bottoms}).",
            )
        return torch.cat([self.upper.at(bottom).apply(bottom), bottom], -1)

    def stackable(self) -> tuple[sp.csr_array, Tensor, np.ndarray]:
        matrix, b, held = super().stackable()
        children = child_rows(matrix)
        return (matrix if children is None else children[0]), b, held

    def stored(self) -> tuple[dict[str, Any], Arrays]:
        held = self.stackable()[2]
        return {"names": self.names, "tags": self.tags}, {**arrays_of(self.summation), "held": held}

    @classmethod
    def restored(cls, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Hierarchy:
        return Hierarchy(matrix_of(arrays), values["names"], values["tags"], [int(node) for node in arrays["held"]])

    @classmethod
    def from_frame(cls, frame: Any, spec: Sequence[Sequence[str]], **options: Any) -> Hierarchy:
        """Build the hierarchy from a frame of key columns.

        Args:
            frame: pandas or polars. Rows with the same keys are one series.
            spec: Nixtla's levels, the bottom last: ``[["Country"], ["Country", "State"]]``. Labels join keys by "/".
            options: Further arguments of the class.

        Raises:
            ParameterError: Keys are missing, not in the last level, or give two nodes one label.
        """
        table = nw.from_native(frame, eager_only=True)
        missing = sorted({key for level in spec for key in level} - set(table.columns))
        if not spec or missing:
            raise ParameterError(
                f"The spec names keys {missing} that the frame does not have." if missing else "The spec is empty.",
                "Every level is a list of key columns.",
                f"Choose among the columns {list(table.columns)}.",
            )
        keys = list(dict.fromkeys(key for level in spec for key in level))
        if set(keys) - set(spec[-1]):
            raise ParameterError(
                f"The last level {list(spec[-1])} does not hold the keys {sorted(set(keys) - set(spec[-1]))}.",
                "It is the bottom level: every other level groups it.",
                "Add the missing keys to the last level.",
            )
        distinct = table.select(list(spec[-1])).unique().sort(list(spec[-1]))
        if any(distinct.get_column(key).is_null().any() for key in spec[-1]):
            raise ParameterError(
                "A key column has missing values.",
                "A series with a missing key has no parent.",
                "Fill or drop those rows.",
            )
        columns = {key: [str(v) for v in distinct.get_column(key).to_list()] for key in spec[-1]}
        tuples = {"/".join(level): list(zip(*(columns[key] for key in level))) for level in spec}
        labels = {name: ["/".join(parts) for parts in level] for name, level in tuples.items()}
        for name, level in tuples.items():
            owners: dict[str, tuple[str, ...]] = {}
            for label, parts in zip(labels[name], level):
                if owners.setdefault(label, parts) != parts:
                    raise ParameterError(
                        f"The keys {owners[label]} and {parts} of the level {name!r} have one label, {label!r}.",
                        "Labels join keys by '/', so these nodes would be the same.",
                        "Replace '/' in the keys by another character.",
                    )
        tags = {level: sorted(set(nodes)) for level, nodes in labels.items()}
        bottom = list(labels.values())[-1]
        tags[next(reversed(labels))] = bottom
        return cls._from_labels(labels, tags, **options)

    @classmethod
    def from_tags(cls, tags: Mapping[str, Sequence[str]], S: Any = None, **options: Any) -> Hierarchy:
        """Build the hierarchy from Nixtla's tags. Grouped levels such as "Country/Purpose" work too.

        Args:
            tags: ``{"Country/State": ["Australia/NSW", ...], ...}``, the bottom level last.
            S: Summation matrix (n, m), whose rows the tags then name.
            options: Further arguments of the class.

        Raises:
            ParameterError: Labels do not match the keys of their level, or are missing or repeated.
        """
        levels = {level: [str(node) for node in nodes] for level, nodes in tags.items()}
        if S is not None:
            names = [node for nodes in levels.values() for node in nodes]
            return cls(S, names=names, tags=levels, **options)
        if not levels:
            raise ParameterError("There are no tags.", "Tags name the levels.", "Pass at least the bottom level.")
        *_, (bottom_level, bottoms) = levels.items()
        keys = bottom_level.split("/")
        parts = [node.split("/") for node in bottoms]
        wrong = [node for node, split in zip(bottoms, parts) if len(split) != len(keys)]
        if wrong:
            raise ParameterError(
                f"The bottom label {wrong[0]!r} does not have one part for each of the keys {keys}.",
                "Labels are matched to levels by their parts.",
                "Join the parts of a label by '/', in the order of the level's keys.",
            )
        labels = {}
        for level in levels:
            unknown = [key for key in level.split("/") if key not in keys]
            if unknown:
                raise ParameterError(
                    f"The level {level!r} has keys {unknown} that the bottom level {bottom_level!r} does not have.",
                    "Every level groups the bottom one.",
                    "Put all keys into the bottom level's name.",
                )
            position = [keys.index(key) for key in level.split("/")]
            labels[level] = ["/".join(split[i] for i in position) for split in parts]
        return cls._from_labels(labels, levels, **options)

    @classmethod
    def _from_labels(
        cls, labels: Mapping[str, Sequence[str]], tags: Mapping[str, Sequence[str]], **options: Any
    ) -> Hierarchy:
        """Build from the label of each bottom series at every level, and the ordered nodes of every level."""
        blocks = []
        for level, nodes in tags.items():
            position = {node: i for i, node in enumerate(nodes)}
            unknown = sorted(set(labels[level]) - set(nodes))
            idle = sorted(set(nodes) - set(labels[level]))
            if unknown or idle or len(position) != len(nodes):
                fault = f"misses {unknown[:3]}" if unknown else f"lists {idle[:3]} without a bottom series"
                raise ParameterError(
                    f"The level {level!r} {fault if unknown or idle else 'lists a node twice'}.",
                    "The rows of S for this level would not add up to the total.",
                    "List every node of the level once.",
                )
            row = [position[node] for node in labels[level]]
            ones = np.ones(len(row))
            blocks.append(sp.csr_array((ones, (row, np.arange(len(row)))), shape=(len(nodes), len(row))))
        names = [node for nodes in tags.values() for node in nodes]
        return cls(sp.csr_array(sp.vstack(blocks)), names=names, tags=tags, **options)


def _summation(S: Any) -> sp.csr_array:
    """S as a scipy matrix of float64."""
    if isinstance(S, Tensor) and S.layout != torch.strided:
        return scipy_from_sparse(S)
    if isinstance(S, Tensor):
        S = S.detach().cpu().double().numpy()
    if sp.issparse(S):
        return sp.csr_array(S, dtype=np.float64)
    values = np.asarray(S.to_numpy() if hasattr(S, "to_numpy") else S)
    try:
        values = values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ParameterError(
            "S has entries that are not numbers.",
            "It is the summation matrix, (n, m).",
            "Drop label columns such as unique_id, or pass them as names.",
        ) from error
    if values.ndim != 2:
        raise ShapeError(f"S has shape {values.shape}.", "It is the summation matrix, (n, m).", "Pass a 2-D array.")
    return sp.csr_array(values)


def _check_summation(summation: sp.csr_array, names: tuple[str, ...] | None) -> None:
    nodes, bottoms = summation.shape

    def name(row: int) -> str:
        return f"{row}" if names is None else f"{row} ({names[row]!r})"

    if not np.isfinite(summation.data).all():
        raise ParameterError("S has NaN or infinite entries.", "Its entries say which series add up.", "Use 0 and 1.")
    if nodes <= bottoms:
        raise ShapeError(
            f"S has shape {(nodes, bottoms)}.",
            "It needs at least one aggregate above its bottom series.",
            "Rows are all series, columns the bottom ones; transpose S if it is the other way round.",
        )
    wrong = abs(summation[nodes - bottoms :] - sp.eye_array(bottoms, format="csr")).sum(1)
    if np.any(wrong > 0):
        row = nodes - bottoms + int(np.flatnonzero(wrong > 0)[0])
        raise ParameterError(
            f"The last {bottoms} rows of S are not the identity: row {name(row)} does not add up to its own series.",
            "Bottom series come last, in the order of the columns.",
            "Reorder the rows of S.",
        )
    empty = np.flatnonzero(np.diff(summation.indptr)[: nodes - bottoms] == 0)
    empty_data = np.flatnonzero(np.asarray(abs(summation).sum(1)).ravel()[: nodes - bottoms] == 0)
    if len(empty) or len(empty_data):
        row = int((empty if len(empty) else empty_data)[0])
        raise ParameterError(
            f"Row {name(row)} of S adds up nothing.",
            "An aggregate needs at least one bottom series.",
            "Remove it.",
        )
