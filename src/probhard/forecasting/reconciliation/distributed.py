"""Reconciliation of many forecasts by the workers of an executor, equal to the serial result up to rounding.

by step:     steps are projected independently of each other, under any constraint;
by subtree:  pieces of a tree exchange a few numbers per root and step, see ``subtrees``; plain sums only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from probhard.errors import ParameterError, check_choice
from probhard.executors import Executor
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import Reconciliation, everywhere
from probhard.forecasting.reconciliation.result import Reconciled, mean_of_feasible
from probhard.forecasting.reconciliation.subtrees import NodeValues, Piece, cut, downward, merged, parents, upward
from probhard.metric import DiagonalMetric

SPLITS = ("subtree", "step")
SHARES = 4  # pieces per worker, for an even load

StepsPiece = tuple[np.ndarray, Forecasts, np.ndarray | None, np.ndarray | None]  # steps, forecasts, upper, fixed


def reconcile(
    rules: Reconciliation,
    base: Forecasts,
    pool: Executor,
    split: str | None = None,
    samples: int = 1000,
    seed: int = 0,
) -> Reconciled:
    """Compute ``rules(base, samples, seed)`` with the workers of an executor.

    Args:
        rules: Constraints and metric.
        base: Forecasts of all n series over H steps.
        pool: From ``executors.executor``.
        split: One of ``SPLITS``; None prefers subtrees where they are possible.
        samples: Draws, if the forecasts have none; 0 skips them for independent normal laws split by subtree.
        seed: Seed of the draws.

    Raises:
        ProbhardError: If shapes do not fit, the split or samples are not possible, or nothing is feasible.
    """
    if split is not None:
        check_choice("split", split, SPLITS)
    rules.check(base)
    base = rules.dependent(base)
    parent = None if split == "step" or base.summing else _parents(rules, base)
    if split == "subtree" and parent is None:
        raise ParameterError(
            "Reconciliation by subtree got bounds, fixed or immutable nodes, sums that form no tree, correlated normal "
            "laws, or forecasts that add up.",
            "Subtrees are independent, given their roots, only for plain sums of a tree over independent series.",
            "Use split='step', or covariance='independent' where that is what you mean.",
        )
    if base.draws is None and not base.certain:
        if samples < (1 if parent is None or base.stddev is None else 0):
            raise ParameterError(
                f"Got samples={samples}.",
                "The law of these forecasts is represented by draws.",
                "Pass at least 1; 0 is possible for independent normal laws split by subtree.",
            )
        base = replace(base, draws=base.drawn(samples, torch.Generator().manual_seed(seed)))
    return _by_step(rules, base, pool) if parent is None else _by_subtree(rules, base, pool, parent)


def _by_step(rules: Reconciliation, base: Forecasts, pool: Executor) -> Reconciled:
    """Reconcile groups of steps independently."""
    result, shape = Reconciled.empty(base.shape, base.draws, rules.exact(base)), base.shape
    upper, fixed = (None if x is None else everywhere(x, np.nan, shape) for x in (rules.upper, rules.fixed))

    def pieces() -> Iterator[StepsPiece]:
        for steps in np.array_split(np.arange(shape[0]), min(shape[0], SHARES * pool.workers)):
            upper_here, fixed_here = (None if x is None else x[steps] for x in (upper, fixed))
            yield steps, base.at(steps), upper_here, fixed_here

    for (steps, *_), (reconciled, groups) in pool.unordered(partial(_steps, rules), pieces()):
        result.mean[steps] = reconciled.mean
        if result.draws is not None:
            result.draws[:, steps] = reconciled.draws
        if result.spread is not None:
            result.spread[steps] = reconciled.spread
        result.constraints.extend((steps[group], rules.constraint(steps[group], shape)) for group in groups)
        result.reasons.update({int(steps[step]): reason for step, reason in reconciled.reasons.items()})
    return result


def _steps(rules: Reconciliation, piece: StepsPiece) -> tuple[Reconciled, list[np.ndarray]]:
    """Reconcile some steps; the draws before and the constraints stay out of the answer, the caller has them."""
    _, base, upper, fixed = piece
    reconciled = replace(rules, upper=upper, fixed=fixed)(base)
    return replace(reconciled, before=None, constraints=[]), [steps for steps, _ in reconciled.constraints]


def _by_subtree(rules: Reconciliation, base: Forecasts, pool: Executor, parent: np.ndarray) -> Reconciled:
    """Reconcile subtrees upward, then the top, then subtrees downward."""
    steps, result = np.arange(base.shape[0]), Reconciled.empty(base.shape, base.draws, rules.exact(base))
    pairs = [(base.mean, result.mean), (base.draws, result.draws)]
    known_pairs = [(z, u) for z, u in pairs if z is not None and u is not None and z.size]
    metric = rules.weight(base)(steps)
    assert isinstance(metric, DiagonalMetric)
    weight = metric.values.numpy()
    variance = None if base.stddev is None else np.square(base.stddev)
    whole = NodeValues(tuple(z.reshape(-1, *base.shape) for z, _ in known_pairs), weight, variance)
    views = tuple(u.reshape(-1, *base.shape) for _, u in known_pairs)  # of the result, filled in place
    answer = NodeValues(views, np.empty_like(weight), result.spread)
    top, pieces = cut(rules.hierarchy, parent, SHARES * pool.workers)
    messages = whole.at(top.nodes)
    for (piece, _), message in pool.unordered(upward, ((piece, whole.at(piece.nodes)) for piece in pieces)):
        messages.put(piece.above, message)
    known = messages.projected(top)
    answer.put(top.nodes, known)

    def rooted(piece: Piece) -> NodeValues:
        values = whole.at(piece.nodes)
        roots = merged(values.at(piece.roots), messages.at(piece.above), known.at(piece.above))
        values.put(piece.roots, roots)
        return values

    for (piece, _), projected in pool.unordered(downward, ((piece, rooted(piece)) for piece in pieces)):
        answer.put(piece.nodes, projected)
    if result.spread is not None:
        np.sqrt(result.spread, out=result.spread)
    if base.mean is None and result.draws is not None:
        result.mean[:] = mean_of_feasible(result.draws)
    result.constraints.append((steps, rules.hierarchy))
    return result


def _parents(rules: Reconciliation, base: Forecasts) -> np.ndarray | None:
    """Return the parent of every node, (n,); None unless plain sums of a tree over independent series are asked for."""
    plain = not rules.nonnegative and rules.upper is None and rules.fixed is None
    spreads = base.correlation is not None and base.stddev is not None  # their variances need all nodes at once
    correlated = spreads or (base.error_correlation is not None and rules.weights(base).correlation > 0)
    return parents(rules.hierarchy) if plain and not correlated else None
