"""Reconciliation: make the forecasts of any model coherent and feasible, without training.

``distributed.reconcile`` does the same with the workers of an executor.
"""

from probhard.forecasting.reconciliation.explain import Explanation, explain
from probhard.forecasting.reconciliation.family import MetricWeights, middle, project_law, projected_moments
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.joint_law import PathLaw
from probhard.forecasting.reconciliation.learned import (
    PastForecast,
    learn_from_errors,
    learn_metric,
    learn_reconciliation,
    learn_scale,
)
from probhard.forecasting.reconciliation.nixtla import ProjectionReconciler
from probhard.forecasting.reconciliation.reconcile import Reconciliation
from probhard.forecasting.reconciliation.result import Reconciled
from probhard.forecasting.reconciliation.temporal import CrossTemporal, cross_temporal

__all__ = [
    "CrossTemporal",
    "Explanation",
    "Forecasts",
    "MetricWeights",
    "PastForecast",
    "PathLaw",
    "ProjectionReconciler",
    "Reconciled",
    "Reconciliation",
    "cross_temporal",
    "explain",
    "learn_from_errors",
    "learn_metric",
    "learn_reconciliation",
    "learn_scale",
    "middle",
    "project_law",
    "projected_moments",
]
