"""A reconciler for Nixtla's hierarchicalforecast."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.forecasting.reconciliation.columns import LONE, Columns, is_quantile, probabilities
from probhard.forecasting.reconciliation.dependence import COVARIANCES
from probhard.forecasting.reconciliation.family import MetricWeights
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.ids import split, tree
from probhard.forecasting.reconciliation.reconcile import METRICS, Reconciliation
from probhard.forecasting.reconciliation.result import Reconciled

__all__ = ["LONE", "Columns", "ProjectionReconciler", "is_quantile", "probabilities", "split", "tree"]

OWN = "own forecast"  # fixed value of a node that keeps its forecast
FEW = 3  # most nodes whose bounds or values are spelled out in a column's name


class ProjectionReconciler:
    """A method for hierarchicalforecast's ``HierarchicalReconciliation``; every mean and sample is feasible.

    A node is the number of a row of ``S_df``, a label in ``names``, or a level in ``tags`` (all its nodes). With a
    ``Y_df`` that has fitted values, the errors give the joint law and shape the metric.

    Args:
        metric: A name of ``Reconciliation``, or numbers as of ``learn_metric``; None chooses by what is known.
        covariance: ``"errors"`` (the default with fitted values), ``"hierarchy"`` (without) or ``"independent"``.
        nonnegative: Whether means, quantiles and samples are at least 0.
        upper: Upper bound of all nodes, or by node; a number or one per step.
        fixed: Values by node; a number, one per step, or ``"own forecast"`` to keep the forecast.
        names: Labels of the n rows of ``S_df``.
        num_samples, seed: Draws behind quantiles without closed form; the seed is added to that of ``reconcile``.
    Raises ParameterError for an unknown metric, or bounds and values that are not numbers.
    """

    fitted = False
    is_sparse_method = True
    is_strictly_hierarchical = False
    insample = False
    sampler: ProjectionReconciler | None = None

    def __init__(
        self,
        metric: str | MetricWeights | None = None,
        nonnegative: bool = False,
        upper: float | Mapping[int | str, Any] | None = None,
        fixed: Mapping[int | str, Any] | None = None,
        names: Sequence[str] | None = None,
        num_samples: int = 200,
        seed: int = 0,
        covariance: str | None = None,
    ) -> None:
        if metric is not None and not isinstance(metric, MetricWeights):
            check_choice("metric", metric, METRICS)
        if covariance is not None:
            check_choice("covariance", covariance, COVARIANCES)
        self.metric, self.nonnegative, self.upper, self.fixed = metric, nonnegative, upper, fixed or {}
        self.covariance = covariance
        self.names = None if names is None else [str(name) for name in names]
        self.num_samples, self.seed = num_samples, seed
        self._init_params: dict[str, Any] = {"nonnegative": nonnegative}  # part of the column names
        if metric is not None:
            label = (
                "-".join(f"{number:g}" for number in astuple(metric)) if isinstance(metric, MetricWeights) else metric
            )
            self._init_params = {"metric": label, **self._init_params}
        if covariance is not None:
            self._init_params["covariance"] = covariance
        for name, values in (("upper", upper), ("fixed", fixed)):
            if isinstance(values, Mapping):
                _check_values(name, values)
            if values is not None and values != {}:
                self._init_params[name] = _label(values)
        if seed:
            self._init_params["seed"] = seed

    def fit_predict(
        self,
        S: Any,  # (n, m), scipy sparse or dense
        y_hat: np.ndarray,  # (n, H)
        sigmah: np.ndarray | None = None,  # (n, H)
        level: Sequence[float] | None = None,
        seed: int | None = None,
        tags: Mapping[str, np.ndarray] | None = None,
        y_insample: np.ndarray | None = None,  # (n, T)
        y_hat_insample: np.ndarray | None = None,  # (n, T)
    ) -> dict[str, np.ndarray]:
        """Reconcile forecasts of n nodes over H steps.

        Args:
            S: Summation matrix, (n, m).
            y_hat: Means, (n, H).
            sigmah: Standard deviations, (n, H).
            level: L interval levels in percent.
            seed: Added to the seed of the reconciler.
            tags: Rows of each level.
            y_insample: Observed values of the history, (n, T).
            y_hat_insample: Its fitted values, (n, T).

        Returns:
            ``mean`` (n, H) and, with levels, ``quantiles`` (n, H, 2 L) in ascending order.

        Raises:
            ProbhardError: If standard deviations are missing, a node is unknown, or nothing is feasible.
        """
        errors = None
        if y_insample is not None and y_hat_insample is not None and np.shape(y_insample) == np.shape(y_hat_insample):
            errors = np.ascontiguousarray((np.asarray(y_insample) - np.asarray(y_hat_insample)).T)
        if sigmah is None and (level is not None or (self.metric == "oblique" and errors is None)):
            raise ParameterError(
                f"ProjectionReconciler(metric={self.metric!r}) got no standard deviations.",
                "hierarchicalforecast passes them only with level=... and intervals_method='normality'.",
                "Call reconcile with both, or use metric='structural' without levels.",
            )
        shape = y_hat.shape[1], y_hat.shape[0]
        kept = [node for node, value in self.fixed.items() if isinstance(value, str) and value == OWN]
        immutable = np.concatenate([np.empty(0, int), *(self._rows(node, tags, shape[1]) for node in kept)])
        upper: Any = self.upper
        if isinstance(upper, Mapping):
            upper = self._table(upper, tags, shape)
        values = {node: value for node, value in self.fixed.items() if node not in kept}
        self._rules = Reconciliation(
            Hierarchy(S, names=self.names, immutable=immutable.tolist()),
            self.metric,
            self.nonnegative,
            upper,
            self._table(values, tags, shape) if values else None,
            covariance=self.covariance,
        )
        self._base = Forecasts(y_hat.T, None if sigmah is None else sigmah.T, errors=errors)
        self._seed = self.seed + (seed or 0)
        reconciled = self._reconciled(self.num_samples)
        self.fitted, self.sampler = True, None if sigmah is None else self
        result = {"mean": reconciled.mean.T}
        if level is not None:
            result["quantiles"] = reconciled.quantiles(probabilities(level)).transpose(2, 1, 0)
        return result

    __call__ = fit_predict

    def sample(self, num_samples: int) -> np.ndarray:
        """Draw from the law that was reconciled last.

        Returns:
            Feasible draws, (n, H, num_samples).

        Raises:
            ParameterError: Before ``fit_predict``, or if it had no standard deviations.
        """
        draws = self._reconciled(num_samples).draws if self.fitted else None
        if draws is None:
            raise ParameterError(
                "There is no reconciled law to sample from.",
                "Samples need standard deviations.",
                "Call fit_predict with sigmah first.",
            )
        return draws.transpose(2, 1, 0)

    def _reconciled(self, samples: int) -> Reconciled:
        return self._rules(self._base, samples, self._seed)

    def _rows(self, node: int | str, tags: Mapping[str, np.ndarray] | None, count: int) -> np.ndarray:
        """Return the rows of S of a node or a level."""
        if isinstance(node, str) and tags is not None and node in tags:
            return np.asarray(tags[node])
        if isinstance(node, str) and self.names is not None and node in self.names:
            return np.array([self.names.index(node)])
        if isinstance(node, str) or not -count <= node < count:
            raise ParameterError(
                f"There is no node or level {node!r} among {count} nodes.",
                "Bounds and fixed values belong to nodes.",
                "Name a level of tags, use the number of a row of S_df, or pass names=S_df['unique_id'].",
            )
        return np.array([node])

    def _table(
        self, values: Mapping[int | str, Any], tags: Mapping[str, np.ndarray] | None, shape: tuple[int, int]
    ) -> np.ndarray:
        """Arrange values by node as a table (H, n), NaN for the other nodes."""
        table = np.full(shape, np.nan)
        for node, value in values.items():
            column = np.asarray(value, dtype=np.float64).reshape(-1, 1)
            if len(column) not in (1, shape[0]):
                raise ShapeError(
                    f"The node {node!r} has {len(column)} values for {shape[0]} steps.",
                    "A bound or a fixed value applies to every step or to one.",
                    "Pass one number, or one per step.",
                )
            table[:, self._rows(node, tags, shape[1])] = column
        return table


def _check_values(name: str, values: Mapping[int | str, Any]) -> None:
    """Raise unless all values are numbers, or ``OWN`` for fixed nodes."""
    for node, value in values.items():
        if name == "fixed" and isinstance(value, str) and value == OWN:
            continue
        try:
            numbers = np.asarray(() if isinstance(value, str) else value, dtype=np.float64)
        except (TypeError, ValueError):
            numbers = np.empty(0)
        if not numbers.size or np.isnan(numbers).any():
            raise ParameterError(
                f"{name} of the node {node!r} is {value!r}.",
                "Bounds and fixed values are numbers; a fixed node may also keep its forecast.",
                f"Pass a number, one per step, or {OWN!r} as a fixed value.",
            )


def _label(values: Any) -> str:
    """Format bounds or fixed values for a column's name; a checksum stands for more than a few."""
    if not isinstance(values, Mapping):
        return str(values)
    text = ",".join(
        f"{node}:{value if np.ndim(value) == 0 else np.asarray(value).tolist()}" for node, value in values.items()
    )
    few = len(values) <= FEW and all(np.ndim(value) == 0 for value in values.values())
    return text if few else f"{len(values)}-nodes-{zlib.crc32(text.encode()):08x}"
