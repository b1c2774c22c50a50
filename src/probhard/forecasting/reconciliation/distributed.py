"""Reconciliation of a huge frame in pieces that other processes or machines work on, equal to the whole to rounding.

By step: the projection of one step knows nothing of the others, so groups of steps are projected apart, under any
constraint. By subtree: for sums over a tree alone, with ``W = diag(w)`` and independent series of variances s. Cut the
tree at some nodes r. All that a subtree says of its root, with its projector P_r (upward pass, a Schur complement), is

    m = (P_r z)_r,      v = (P_r W P_r^T)_rr,      y = (P_r S P_r^T)_rr.

The top, with m, v, y in place of what was cut off, gives the roots' values x and their v* and y* in the same way. Given
x, subtrees know nothing of each other (downward pass): a subtree's points are projected with its root held at x. For
the variances, the rest of the tree is one more forecast of the root, of variance E and independent of the subtree.
Merged with the root's own it makes a root of

    1/w' = 1/w + 1/E,    1/E = 1/v* - 1/v,    s' = w'^2 (s / w^2 + (y* - a^2 y) / v*^2),    a = v* / v,

with which the subtree is projected as if it were alone. Of a subtree, only these few numbers per root and step travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import scipy.sparse as sp
import torch

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, check_choice
from probhard.executors import Executor
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import (
    CHUNK,
    Reconciled,
    Reconciliation,
    everywhere,
    mean_of_feasible,
)
from probhard.metric import DiagonalMetric
from probhard.projection.layer import DPPL
from probhard.rows.children import child_sets

SPLITS = ("subtree", "step")
SHARES = 4  # pieces per worker, so that none waits long for the last


def reconcile(
    rules: Reconciliation,
    base: Forecasts,
    pool: Executor,
    split: str | None = None,
    samples: int = 1000,
    seed: int = 0,
) -> Reconciled:
    """What ``rules(base, samples, seed)`` gives, by the workers of an executor.

    Args:
        rules: What forecasts must obey.
        base: Forecasts of all series.
        pool: From ``executors.executor``.
        split: One of ``SPLITS``; None goes by subtree where that is possible, else by step.
        samples: Draws, where there are none; by subtree, 0 leaves normal laws at means and spreads.
        seed: Of the draws.
    """
    if split is not None:
        check_choice("split", split, SPLITS)
    rules.check(base)
    parent = None if split == "step" or base.summing else _parents(rules)
    if split == "subtree" and parent is None:
        raise ParameterError(
            "Reconciliation by subtree got bounds, fixed or immutable nodes, sums that form no tree, or forecasts that "
            "add up.",
            "Only the plain sums of a tree over independent series leave subtrees independent, given their roots.",
            "Use split='step'.",
        )
    if base.draws is None and not base.certain:
        if samples < (1 if parent is None or base.stddev is None else 0):
            raise ParameterError(
                f"Got samples={samples}.",
                "The law of these forecasts is known by its draws alone.",
                "Ask for some; 0 is for normal laws that are split by subtree.",
            )
        base = replace(base, draws=base.drawn(samples, torch.Generator().manual_seed(seed)))
    return _by_step(rules, base, pool) if parent is None else _by_subtree(rules, base, pool, parent)


def _by_step(rules: Reconciliation, base: Forecasts, pool: Executor) -> Reconciled:
    """Groups of steps apart."""
    result, shape = _empty(base, rules.exact(base)), base.shape
    upper, fixed = (None if x is None else everywhere(x, np.nan, shape) for x in (rules.upper, rules.fixed))

    def pieces() -> Iterator[tuple[np.ndarray, Forecasts, np.ndarray | None, np.ndarray | None]]:
        for steps in np.array_split(np.arange(shape[0]), min(shape[0], SHARES * pool.workers)):
            high, known = (None if x is None else x[steps] for x in (upper, fixed))
            yield steps, base.at(steps), high, known

    for (steps, *_), (found, groups) in pool.unordered(partial(_steps, rules), pieces()):
        result.mean[steps] = found.mean
        if result.draws is not None:
            result.draws[:, steps] = found.draws
        if result.spread is not None:
            result.spread[steps] = found.spread
        result.constraints.extend((steps[group], rules.constraint(steps[group], shape)) for group in groups)
        result.reasons.update({int(steps[step]): reason for step, reason in found.reasons.items()})
    return result


def _steps(
    rules: Reconciliation, piece: tuple[np.ndarray, Forecasts, np.ndarray | None, np.ndarray | None]
) -> tuple[Reconciled, list[np.ndarray]]:
    """Some steps, reconciled; without what the caller has."""
    _, base, upper, fixed = piece
    found = replace(rules, upper=upper, fixed=fixed)(base)
    return replace(found, before=None, constraints=[]), [steps for steps, _ in found.constraints]


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a tree: the nodes at and below some roots, or the top, where each root is a leaf."""

    nodes: np.ndarray  # (k,), aggregates first
    summation: sp.csr_array  # (k, bottoms)
    roots: np.ndarray  # (r,), where the roots are among these nodes
    above: np.ndarray  # (r,), and where among those of the top


@dataclass(frozen=True, eq=False)
class Numbers:
    """What is known of k nodes."""

    points: tuple[np.ndarray, ...]  # (S, H, k) each: the mean, the draws
    weight: np.ndarray  # w, (k,) or (H, k)
    variance: np.ndarray | None  # s, (H, k)

    def at(self, nodes: np.ndarray) -> Numbers:
        """A copy of those of some nodes."""
        variance = None if self.variance is None else self.variance[..., nodes]
        return Numbers(tuple(z[..., nodes] for z in self.points), self.weight[..., nodes], variance)

    def put(self, nodes: np.ndarray, found: Numbers) -> None:
        """Replace those of some nodes."""
        for mine, its in zip(self.points, found.points):
            mine[..., nodes] = its
        self.weight[..., nodes] = found.weight
        if self.variance is not None:
            self.variance[..., nodes] = found.variance

    def projected(self, piece: Piece, held: np.ndarray | tuple[()] = ()) -> Numbers:
        """Points, with some nodes held, and both variances, all of them free."""
        layer, free = DPPL(DiagonalMetric(torch.from_numpy(self.weight))), Hierarchy(piece.summation)
        bound = Hierarchy(piece.summation, immutable=[int(node) for node in held]) if len(held) else free
        found = []
        for points in self.points:
            parts = np.array_split(points, min(len(points), -(-points.size // CHUNK)))
            values = [layer.project(torch.from_numpy(part), bound).value.numpy() for part in parts]
            found.append(np.concatenate(values))

        def variance(own: np.ndarray) -> np.ndarray:
            scale = torch.from_numpy(np.sqrt(own))
            return layer((torch.zeros_like(scale), scale), free).variance.numpy()

        return Numbers(tuple(found), variance(self.weight), None if self.variance is None else variance(self.variance))


def _up(work: tuple[Piece, Numbers]) -> Numbers:
    """What subtrees say of their roots: m, v, y."""
    piece, numbers = work
    return numbers.projected(piece).at(piece.roots)


def _down(work: tuple[Piece, Numbers]) -> Numbers:
    """Subtrees whose roots are known."""
    piece, numbers = work
    return numbers.projected(piece, piece.roots)


def _merged(own: Numbers, message: Numbers, known: Numbers) -> Numbers:
    """Roots that stand for the rest of the tree too: x, w', s'."""
    outside = (1 / known.weight - 1 / message.weight).clip(min=0.0)
    weight = 1 / (1 / own.weight + outside)
    if own.variance is None or message.variance is None or known.variance is None:
        return Numbers(known.points, weight, None)
    rest = known.variance - np.square(known.weight / message.weight) * message.variance
    rest = rest.clip(min=0.0) / np.square(known.weight)
    return Numbers(known.points, weight, np.square(weight) * (own.variance / np.square(own.weight) + rest))


def _by_subtree(rules: Reconciliation, base: Forecasts, pool: Executor, parent: np.ndarray) -> Reconciled:
    """Upward, the top, downward."""
    steps, result = np.arange(base.shape[0]), _empty(base, rules.exact(base))
    pairs = [(base.mean, result.mean), (base.draws, result.draws)]
    given = [(z, u) for z, u in pairs if z is not None and u is not None and z.size]
    weight = rules.weight(base)(steps).values.numpy()
    variance = None if base.stddev is None else np.square(base.stddev)
    whole = Numbers(tuple(z.reshape(-1, *base.shape) for z, _ in given), weight, variance)
    answer = Numbers(tuple(u.reshape(-1, *base.shape) for _, u in given), np.empty_like(weight), result.spread)
    top, pieces = cut(rules.hierarchy, parent, SHARES * pool.workers)
    message = whole.at(top.nodes)
    for (piece, _), found in pool.unordered(_up, ((piece, whole.at(piece.nodes)) for piece in pieces)):
        message.put(piece.above, found)
    known = message.projected(top)
    answer.put(top.nodes, known)

    def rooted(piece: Piece) -> Numbers:
        numbers = whole.at(piece.nodes)
        merged = _merged(numbers.at(piece.roots), message.at(piece.above), known.at(piece.above))
        numbers.put(piece.roots, merged)
        return numbers

    for (piece, _), found in pool.unordered(_down, ((piece, rooted(piece)) for piece in pieces)):
        answer.put(piece.nodes, found)
    if result.spread is not None:
        np.sqrt(result.spread, out=result.spread)
    if base.mean is None and result.draws is not None:
        result.mean[:] = mean_of_feasible(result.draws)
    result.constraints.append((steps, rules.hierarchy))
    return result


def cut(hierarchy: Hierarchy, parent: np.ndarray, pieces: int) -> tuple[Piece, list[Piece]]:
    """The top of a tree, and what is below in about so many pieces of similar size."""
    summation, aggregates = hierarchy.summation, hierarchy.aggregates
    depth, ancestor = np.zeros_like(parent), parent
    while (ancestor >= 0).any():
        depth += ancestor >= 0
        ancestor = np.where(ancestor >= 0, parent[ancestor], -1)
    levels = [np.flatnonzero(depth == d) for d in range(1, depth.max() + 1)]
    size = np.ones_like(parent)
    for level in reversed(levels):
        np.add.at(size, parent[level], size[level])
    large = size > min(max(1, len(parent) // pieces), size.max() - 1)
    below = (parent < 0) | large[parent]
    roots = np.flatnonzero(~large & below & (np.arange(len(parent)) < aggregates))
    last = np.cumsum(size[roots])
    number = np.full_like(parent, -1)  # of the piece that a node is in
    number[roots] = (last - size[roots]) * pieces // max(1, last.max(initial=0))
    for level in levels:
        number[level] = np.where(number[level] < 0, number[parent[level]], number[level])
    leaves = np.flatnonzero((number < 0) & ~large)
    leaves = np.sort(np.concatenate([leaves, roots]))
    nodes = np.concatenate([np.flatnonzero(large), leaves])
    first = summation.indices[summation.indptr[leaves]]  # a bottom node of each leaf stands for it
    none = np.empty(0, dtype=np.int64)
    top = Piece(nodes, sp.csr_array(summation[nodes][:, first]), none, none)
    place = np.empty_like(parent)
    place[nodes] = np.arange(len(nodes))
    found = []
    order = np.argsort(number, kind="stable")
    for nodes in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        if number[nodes[0]] >= 0:
            inside = nodes[nodes >= aggregates] - aggregates
            mine = np.flatnonzero(np.isin(nodes, roots))
            found.append(Piece(nodes, sp.csr_array(summation[nodes][:, inside]), mine, place[nodes[mine]]))
    return top, found


def _parents(rules: Reconciliation) -> np.ndarray | None:
    """The parent of every node, -1 at a root; None unless the plain sums of a tree are all there is."""
    hierarchy = rules.hierarchy
    plain = not rules.nonnegative and rules.upper is None and rules.fixed is None and hierarchy.system.held is None
    if not plain or (hierarchy.summation.data != 1).any():
        return None
    row, child = child_sets(sp.csr_array(hierarchy.summation[: hierarchy.aggregates])).nonzero()
    if len(np.unique(child)) < len(child):
        return None
    parent = np.full(hierarchy.variables, -1, dtype=np.int64)
    parent[child] = row
    return parent


def _empty(base: Forecasts, exact: bool) -> Reconciled:
    """Room for the answer."""
    spread = np.full(base.shape, np.nan) if exact else None
    draws = None if base.draws is None else np.full_like(base.draws, np.nan)
    return Reconciled(np.full(base.shape, np.nan), draws, spread, base.draws)
