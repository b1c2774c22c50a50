"""Why nodes of a pooled forecast moved, for the report page.

With weights w_k of the members, base means f_k and pulls p_k (``reconciliation.explain``), means over the steps:

    base = sum_k w_k f_k,      pull of an aggregate = sum_k w_k p_k,      rest = forecast - base - sum of pulls.

The rest comes from bounds and plans; without them the forecast is base + pulls, free of the noise of its draws. Members
that draw jointly are coherent: nothing pulls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.coherent import law_of
from probhard.forecasting.members.pooled import PooledForecast
from probhard.forecasting.reconciliation.explain import mean_pulls, node_pulls
from probhard.forecasting.reconciliation.family import tangents

SHOWN = 5  # pulls of a node
LARGEST = 60  # nodes that are explained
REST = "bounds and plans"
ROUNDING = 1e-9  # of the base forecast: a smaller pull has no name
SMALL = 0.005  # of all pulls: a smaller rest is not shown


@dataclass(frozen=True)
class Move:
    """Why a node moved from its base forecast to the coherent one; means over the steps.

    Args:
        base, reconciled: Its mean before and after the projection.
        pulls: Nodes that moved it, the strongest first: name and part of the difference.
    """

    base: float
    reconciled: float
    pulls: Sequence[tuple[str, float]] = ()


def moves_of(pool: PooledForecast, data: HierarchicalData, draws: np.ndarray, limited: bool) -> dict[int, Move]:
    """Explain the largest nodes of a pooled forecast.

    Args:
        pool: The fitted members, at the end of the history.
        data: The history of n nodes.
        draws: The forecast, (S, H, n).
        limited: Whether bounds or plans moved the draws too.
    """
    horizon = draws.shape[1]
    nodes = [int(i) for i in np.argsort(-np.nan_to_num(np.abs(data.values)).sum(0), kind="stable")[:LARGEST]]
    base, pulls = np.zeros(len(data.names)), {node: np.zeros(data.hierarchy.aggregates) for node in nodes}
    for made in pool.made:
        weight, tuned = pool.tuned.weights[made.name], pool.tuned.members[made.name]
        if made.draws is not None or tuned.metric is None:
            mean = made.draws[-1].mean(0) if made.draws is not None else made.bases[-1].mean
            base += weight * mean[:horizon].mean(0)
            continue
        law = law_of(made.bases[-1], tuned.scales, pool.recipe.correlation)
        base += weight * law.mean[:horizon].mean(0).numpy()
        if weight > 0:
            found = mean_pulls(law.at(slice(0, horizon)), tuned.metric, data.hierarchy, nodes)
            for node, part in zip(nodes, found):
                pulls[node] += weight * part
    moves = {}
    for node, part in pulls.items():
        after = np.nanmean(draws[..., node]) if limited else base[node] + part.sum()
        names = [f"{name} itself" if i == node else name for i, name in enumerate(data.names)]
        moves[node] = _move(float(base[node]), float(after), part, names)
    return moves


def step_moves(pool: PooledForecast, data: HierarchicalData, horizon: int) -> dict[str, np.ndarray]:
    """Base forecast and strongest pull of every node at every step, tables (H, n) by column.

    Args:
        pool: The fitted members, at the end of the history, with forecasts of at least ``horizon`` steps.
        data: The history of n nodes.
        horizon: Number of steps H.

    Returns:
        ``base``; ``pulled_by``, the name of the aggregate whose sum differed, empty if none does; its ``pull``.
    """
    hierarchy, names = data.hierarchy, np.array([*data.names, ""], dtype=object)
    base, laws = np.zeros((horizon, len(data.names))), []
    for one in pool.made:
        weight, tuned = pool.tuned.weights[one.name], pool.tuned.members[one.name]
        if one.draws is not None or tuned.metric is None:
            base += weight * (one.draws[-1].mean(0) if one.draws is not None else one.bases[-1].mean)[:horizon]
            continue
        law = law_of(one.bases[-1], tuned.scales, pool.recipe.correlation).at(slice(0, horizon))
        base += weight * law.mean.numpy()
        if weight > 0:
            laws.append((weight, law, list(tangents(law, tuned.metric, hierarchy))))
    strongest, pull = np.full(base.shape, -1), np.zeros(base.shape)
    for node in range(len(data.names)) if laws else ():
        pulls = np.sum([weight * node_pulls(law, made, hierarchy, node) for weight, law, made in laws], axis=0)
        first = np.abs(pulls).argmax(1)
        pull[:, node] = pulls[np.arange(horizon), first]
        strongest[:, node] = np.where(np.abs(pull[:, node]) > ROUNDING * np.abs(base[:, node]), first, -1)
    return {"base": base, "pulled_by": names[strongest], "pull": pull}


def _move(base: float, after: float, pulls: np.ndarray, names: Sequence[str]) -> Move:
    """Keep the strongest pulls, and the rest where it matters."""
    order = [int(i) for i in np.argsort(-np.abs(pulls), kind="stable")[:SHOWN] if pulls[i] != 0]
    listed = [(names[i], float(pulls[i])) for i in order]
    others = float(pulls.sum()) - sum(pull for _, pull in listed)
    rest = after - base - float(pulls.sum())
    size = SMALL * (abs(after - base) + float(np.abs(pulls).sum()))
    listed += [(name, part) for name, part in (("other nodes", others), (REST, rest)) if abs(part) > size]
    return Move(base, after, listed)
