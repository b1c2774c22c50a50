"""Why a node moved: which aggregates pulled it, and by how much.

With base means f, the incoherence ``r = f_a - S_a f_b`` of the aggregates (what each was forecast above the sum of its
bottoms) and the tangent P, the reconciled mean of node i is

    u_i = f_i + sum_a (P_ia - [a = i]) r_a,

because coherent means stay as they are. The terms are the pulls: an aggregate that was forecast above its bottoms pulls
them up, and they pull it down. They add up to the move exactly. Bounds and fixed nodes add a term of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard.constraints import Hierarchy
from probhard.forecasting.data.table import node_names, require
from probhard.forecasting.reconciliation.family import MetricWeights, tangents
from probhard.forecasting.reconciliation.joint_law import PathLaw
from probhard.tangent.linear import Tangent

BOUNDS = "bounds and fixed nodes"
SHOWN = 5  # pulls of a step that a frame shows


@dataclass(frozen=True, eq=False)
class Explanation:
    """The move of one node over H steps.

    Args:
        node: Name of the node.
        base: Base means, (H,).
        reconciled: Reconciled means, (H,).
        names: Names of the q aggregates.
        incoherence: Base mean of each aggregate less the sum of its bottoms, (H, q).
        pulls: What each aggregate's incoherence adds to the node, (H, q).
    """

    node: str
    base: np.ndarray
    reconciled: np.ndarray
    names: tuple[str, ...]
    incoherence: np.ndarray
    pulls: np.ndarray

    @property
    def rest(self) -> np.ndarray:
        """The part of the move that comes from bounds and fixed nodes, (H,)."""
        return self.reconciled - self.base - self.pulls.sum(1)

    def frame(self, stamps: Any = None, shown: int = SHOWN) -> Any:
        """The largest pulls as a pandas frame: one row per step and puller.

        Args:
            stamps: Labels of the steps, (H,); by default 1, 2, ...
            shown: Number of pulls per step; smaller ones are added up as "others".
        """
        pandas = require("pandas", "A frame of pulls")
        rows = []
        for h in range(len(self.base)):
            order = np.argsort(-np.abs(self.pulls[h]), kind="stable")
            terms = [(self.names[a], self.incoherence[h, a], self.pulls[h, a]) for a in order[:shown]]
            terms += [("others", np.nan, self.pulls[h, order[shown:]].sum())] if len(order) > shown else []
            largest = np.abs(self.pulls[h]).max(initial=0) + np.abs(self.base[h])
            terms += [(BOUNDS, np.nan, self.rest[h])] if abs(self.rest[h]) > 1e-9 * largest else []
            label = h + 1 if stamps is None else stamps[h]
            rows += [(label, self.node, self.base[h], self.reconciled[h], *term) for term in terms]
        columns = ["step" if stamps is None else "ds", "node", "base", "reconciled", "pulled_by", "incoherence", "pull"]
        return pandas.DataFrame(rows, columns=columns)


def explain(
    law: PathLaw,
    weights: MetricWeights,
    hierarchy: Hierarchy,
    node: int | str,
    reconciled: np.ndarray | None = None,
) -> Explanation:
    """Explain the move of a node.

    Args:
        law: The base law, (H, n).
        weights: The metric.
        hierarchy: The sums.
        node: Number or name of the node.
        reconciled: Reconciled means of all nodes, (H, n), where bounds or fixed nodes were obeyed; by default those of
            the sums alone.

    Raises:
        ParameterError: If there is no such node.
    """
    number, count = hierarchy.index(node), hierarchy.aggregates
    names = node_names(hierarchy)
    mean = law.mean
    incoherence = mean[:, :count] - hierarchy.aggregate(mean[:, count:])[:, :count]
    row = torch.cat([_row(tangent, number, part) for part, tangent in tangents(law, weights, hierarchy)])
    if number < count:
        row[:, number] -= 1.0
    pulls = row[:, :count] * incoherence
    moved = mean[:, number] + pulls.sum(1) if reconciled is None else torch.from_numpy(reconciled[:, number])
    return Explanation(
        names[number],
        mean[:, number].numpy(),
        moved.numpy(),
        tuple(names[:count]),
        incoherence.numpy(),
        pulls.numpy(),
    )


def mean_pulls(law: PathLaw, weights: MetricWeights, hierarchy: Hierarchy, nodes: Sequence[int]) -> np.ndarray:
    """Pulls of several nodes, means over the steps, (nodes, q); the tangents are made once.

    Args:
        law: The base law, (H, n).
        weights: The metric.
        hierarchy: The sums.
        nodes: Numbers of the nodes.
    """
    count, mean = hierarchy.aggregates, law.mean
    incoherence = mean[:, :count] - hierarchy.aggregate(mean[:, count:])[:, :count]
    pulls = torch.zeros(len(nodes), count, dtype=torch.float64)
    for steps, tangent in tangents(law, weights, hierarchy):
        for number, node in enumerate(nodes):
            row = _row(tangent, node, steps)[:, :count]
            if node < count:
                row[:, node] -= 1.0
            pulls[number] += (row * incoherence[steps]).sum(0) / len(mean)
    return pulls.numpy()


def node_pulls(law: PathLaw, made: Sequence[tuple[slice, Tangent]], hierarchy: Hierarchy, node: int) -> np.ndarray:
    """Pulls of one node at every step, (H, q).

    Args:
        law: The base law, (H, n).
        made: The tangents of groups of steps, from ``tangents``.
        hierarchy: The sums.
        node: Number of the node.
    """
    count = hierarchy.aggregates
    incoherence = law.mean[:, :count] - hierarchy.aggregate(law.mean[:, count:])[:, :count]
    row = torch.cat([_row(tangent, node, steps)[:, :count] for steps, tangent in made])
    if node < count:
        row[:, node] -= 1.0
    return (row * incoherence).numpy()


def _row(tangent: Tangent, node: int, steps: slice) -> Tensor:
    """Row ``P_i`` of the tangents of some steps, (k, n); entries of immutable nodes are kept."""
    unit = torch.zeros(steps.stop - steps.start, tangent.system.variables, dtype=torch.float64)
    unit[:, node] = 1.0
    return unit - tangent.core.transpose(tangent.multiplier(tangent.core.apply(tangent.weight.apply(unit))))
