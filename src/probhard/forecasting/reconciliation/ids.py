"""Hierarchies from the ids of nodes, such as "Total", "A" and "A/x".

An id joins keys by "/". A node is a tuple of keys, with "" for keys that are summed over. An aggregate is the sum of
the bottom nodes that agree with it in the other keys.

Crossed ids leave out keys in the middle, as Nixtla's ``aggregate`` writes them: below "A/x/u" there may be "A/x" and
"A/u". Parts are matched to keys by their values, in order: the first keys if they fit, else the only others that do.
An empty part, as in "A//u", is a key that is summed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import scipy.sparse as sp

from probhard.errors import ParameterError
from probhard.forecasting.data.keys import Keys
from probhard.forecasting.data.nodes import TOTAL, is_total


def tree(rows: Sequence[tuple[str, ...]], keys: Keys | None = None) -> tuple[sp.csr_array, list[tuple[str, ...]], bool]:
    """Build the summation matrix of nodes.

    Args:
        rows: Nodes as tuples of k keys, "" for keys that are summed over; repeats are allowed.
        keys: Names of the k keys and the levels above bottom nodes that come alone; nested by default.

    Returns:
        The summation matrix (n, m), its n nodes, and whether the rows had only bottom nodes, so that all
        aggregates were added.

    Raises:
        ParameterError: If there are no bottom nodes or no aggregates.
    """
    distinct = set(rows)
    bottoms = sorted(node for node in distinct if all(node))
    width = len(next(iter(distinct), ()))
    levels = {tuple(map(bool, node)) for node in distinct}
    only_bottoms = levels == {(True,) * width}
    if only_bottoms and (keys is None or len(keys.columns) == width):
        spec = Keys.of([str(i) for i in range(width)]) if keys is None else keys
        constant = [key for key, parts in zip(spec.columns, zip(*bottoms)) if len(set(parts)) == 1]
        levels = {tuple(key in level for key in spec.columns) for level in spec.within(constant).levels}
    nodes: list[tuple[str, ...]] = []
    blocks = []
    for level in sorted(levels, key=lambda level: (sum(level), [not kept for kept in level])):
        labels = [tuple(part if kept else "" for part, kept in zip(node, level)) for node in bottoms]
        row = {label: i for i, label in enumerate(sorted(set(labels)))}
        entries = [row[label] for label in labels], np.arange(len(bottoms))
        blocks.append(sp.csr_array((np.ones(len(bottoms)), entries), shape=(len(row), len(bottoms))))
        nodes += row
    if not bottoms or len(blocks) < 2:
        raise ParameterError(
            f"There are {len(bottoms)} bottom nodes and {len(nodes) - len(bottoms)} aggregates.",
            "Bottom nodes have all keys; an aggregate leaves some of them empty.",
            "Name the key columns with --keys, join ids by '/', or pass --summing.",
        )
    return sp.csr_array(sp.vstack(blocks)), nodes, only_bottoms


def split(ids: Sequence[str], keys: int) -> list[tuple[str, ...]]:
    """Split ids such as "Total", "A" and "A/B" into tuples of keys.

    Args:
        ids: Ids, one per row.
        keys: Number of keys that the caller expects; 0 if unknown.

    Returns:
        Tuples of equal length, "" for keys that are summed over.

    Raises:
        ParameterError: If the ids do not have that many keys, or do not show which node is the total.
    """
    parts = _trimmed([tuple(part.strip() for part in name.split("/")) for name in ids])
    depth = max(map(len, parts), default=0)
    if keys and depth not in (keys, keys + 1):
        raise ParameterError(
            f"--keys names {keys} columns that the forecasts do not have, and the ids have up to {depth} parts.",
            "Nodes are read from key columns, or from ids joined by '/', one part for each key.",
            "Correct --keys, or pass --summing.",
        )
    if depth == 1 and not keys and not any(is_total(name) for name in ids):
        raise ParameterError(
            f"The ids {', '.join(map(repr, sorted(set(ids))[:3]))}, ... have one part each, and none is {TOTAL!r}.",
            "The names do not show which of them is the sum of the others.",
            f"Call the sum {TOTAL!r}, join ids by '/', name key columns with --keys, or pass --summing.",
        )
    inner = {part[:i] for part in parts if len(part) == depth for i in range(1, depth)}
    total = {part for part in parts if len(part) == 1 and is_total(part[0])} - inner
    bottoms = {part for part in parts if len(part) == depth and all(part)}
    placed: dict[tuple[str, ...], tuple[str, ...]] = {}
    for part in set(parts):
        short = () if part in total else part
        crossed = bottoms and 0 < len(short) < depth and short not in inner and all(short)
        placed[part] = _matched(short, bottoms) if crossed else short + ("",) * (depth - len(short))
    return [placed[part] for part in parts]


def _trimmed(parts: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Leave out the last key while it is empty in all ids, as after a trailing "/"."""
    depth = max(map(len, parts), default=0)
    while depth > 1 and not any(part[-1] for part in parts if len(part) == depth):
        depth -= 1
        parts = [part[:depth] for part in parts]
    return parts


def _matched(part: tuple[str, ...], bottoms: set[tuple[str, ...]]) -> tuple[str, ...]:
    """Place the parts of a crossed id at the keys whose values they are.

    Raises:
        ParameterError: If there are several ways. With none, the first keys are taken.
    """
    depth = len(next(iter(bottoms)))
    ways = []
    for keys in combinations(range(depth), len(part)):
        if any(all(bottom[key] == value for key, value in zip(keys, part)) for bottom in bottoms):
            ways.append(tuple(part[keys.index(key)] if key in keys else "" for key in range(depth)))
    if len(ways) > 1:
        raise ParameterError(
            f"The id {'/'.join(part)!r} can be read as {' or as '.join('/'.join(way) for way in ways)}.",
            "Its parts are values of several keys.",
            "Write empty parts for the keys that are summed over, as in 'A//u', or pass --summing.",
        )
    return ways[0] if ways else part + ("",) * (depth - len(part))
