"""The last projection of a forecast: bounds, caps, fixed nodes and plans, and series that have ended.

Every draw z_h of n coherent nodes is moved to the nearest u that adds up and obeys

    0 <= u,      u <= upper_h,      u_i = fixed_(h,i) for fixed nodes,      u_i = 0 for series that have ended,

in the metric of the draws' variances: uncertain nodes give way first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import narwhals as nw
import numpy as np
import torch

from probhard.constraints import Constraint, Hierarchy
from probhard.errors import ParameterError
from probhard.forecasting.data.nodes import check_columns, eager, numbers
from probhard.forecasting.data.stamps import read_stamps
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import Reconciled, Reconciliation
from probhard.method import Method


@dataclass(frozen=True, eq=False)
class Limits:
    """What the forecasts of a run must obey besides adding up.

    Args:
        nonnegative: Whether all nodes are at least 0.
        upper: Upper bounds: a number, by node name, or (H, n); NaN for none.
        fixed: Values of fixed nodes: by node name, or (H, n); NaN for free nodes.
    """

    nonnegative: bool = False
    upper: Any = None
    fixed: Any = None

    def rules(self, data: HierarchicalData, horizon: int, on_failure: str = "flag") -> Reconciliation:
        """Build the constraints of H steps, with ended series fixed to 0.

        Args:
            data: The history.
            horizon: Number of steps H.
            on_failure: As in ``Reconciliation``.

        Raises:
            ParameterError: If a node is unknown.
        """
        upper = _table(self.upper, data, horizon) if isinstance(self.upper, Mapping) else self.upper
        fixed = _table(self.fixed, data, horizon)
        ended = data.ended & (np.arange(len(data.names)) >= data.hierarchy.aggregates)
        fixed = np.where(ended & np.isnan(fixed), 0.0, fixed)  # a plan for an ended series counts
        none = bool(np.isnan(fixed).all())
        return Reconciliation(data.hierarchy, "oblique", self.nonnegative, upper, None if none else fixed, on_failure)

    def at(self, steps: slice) -> Limits:
        """Return the limits of some steps."""
        upper, fixed = (x[steps] if np.ndim(x) == 2 else x for x in (self.upper, self.fixed))
        return replace(self, upper=upper, fixed=fixed)

    def active(self, data: HierarchicalData) -> bool:
        """Return whether there is anything to obey besides the sums."""
        return self.nonnegative or self.upper is not None or self.fixed is not None or bool(data.ended.any())

    @property
    def unbounded(self) -> bool:
        """Whether there are no bounds."""
        return not self.nonnegative and self.upper is None

    def apply(self, draws: np.ndarray, data: HierarchicalData, on_failure: str = "raise") -> Reconciled:
        """Project draws.

        Args:
            draws: Coherent draws, (S, H, n).
            data: The history.
            on_failure: ``"raise"``, or ``"flag"`` to mark infeasible draws with NaN.

        Returns:
            The projected draws, with the constraint of every step.

        Raises:
            InfeasibleError: If no point obeys all limits of a step.
        """
        return self.rules(data, draws.shape[1], on_failure)(Forecasts(draws=draws), len(draws))


def by_method(method: Method, draws: np.ndarray, constraint: Constraint | None) -> np.ndarray:
    """Project draws (S, H, n) of a network as its method does, if it projects onto more than linear equalities."""
    layer = method.inference.layer()
    if layer is None or method.inference.linear_only or constraint is None:
        return draws
    return layer.project_samples(torch.from_numpy(draws), constraint).value.numpy()


def held(data: HierarchicalData, nodes: list[str]) -> HierarchicalData:
    """Return the data with immutable nodes, whose base forecasts no projection changes.

    Raises:
        ParameterError: If a node is unknown.
    """
    if not nodes:
        return data
    hierarchy = data.hierarchy
    return replace(data, hierarchy=Hierarchy(hierarchy.summation, data.names, hierarchy.tags, nodes))


def read_plan(frame: Any, data: HierarchicalData, horizon: int, time_col: str, id_col: str = "unique_id") -> np.ndarray:
    """Read a long frame of values by node and stamp, such as a budget.

    Args:
        frame: A frame with a column of node names, one of numbers, and one of stamps if values differ between steps.
        data: The history.
        horizon: Number of steps H.
        time_col: Column of stamps.
        id_col: Column of node names.

    Returns:
        The values, (H, n), NaN where there is none.

    Raises:
        ParameterError: If a node is unknown, columns are missing, or no row lies within the horizon.
    """
    table, ahead = eager(frame), data.future(horizon)
    check_columns(table, [id_col], "Plans are rows of node names, stamps and values.", "Name it so")
    others = [name for name in table.columns if name not in (id_col, time_col)]
    values = [name for name in others if table.get_column(name).dtype.is_numeric()]
    if len(values) != 1:
        raise ParameterError(
            f"The plan has {len(values)} columns of numbers besides {id_col!r} and {time_col!r}.",
            "It holds one value for each node and stamp.",
            f"Keep one; there are {list(table.columns)}.",
        )
    nodes = [data.hierarchy.index(str(name)) for name in table.get_column(id_col).to_list()]
    plan = np.full((horizon, len(data.names)), np.nan)
    value = numbers(table.get_column(values[0]).cast(nw.Float64))
    if time_col not in table.columns:
        plan[:, nodes] = value
        return plan
    rows = ahead.get_indexer(read_stamps(table.get_column(time_col), data.freq)[0])
    if (rows < 0).all():
        raise ParameterError(
            f"No row of the plan lies in {ahead[0]} to {ahead[-1]}.",
            "These are the steps of the forecast.",
            "Correct the stamps, or the horizon.",
        )
    inside = rows >= 0
    plan[rows[inside], np.asarray(nodes)[inside]] = value[inside]
    return plan


def _table(value: Any, data: HierarchicalData, horizon: int) -> np.ndarray:
    """Values by node name, (H, n) or None as (H, n)."""
    table = np.full((horizon, len(data.names)), np.nan)
    if isinstance(value, Mapping):
        for node, number in value.items():
            table[:, data.hierarchy.index(node)] = number
    elif value is not None:
        table[:] = value
    return table
