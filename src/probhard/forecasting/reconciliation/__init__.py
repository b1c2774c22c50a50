"""Reconciliation: make the forecasts of any model coherent and feasible, without training.

``distributed.reconcile`` does the same with the workers of an executor.
"""

from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.nixtla import ProjectionReconciler
from probhard.forecasting.reconciliation.reconcile import Reconciliation
from probhard.forecasting.reconciliation.result import Reconciled
from probhard.forecasting.reconciliation.temporal import CrossTemporal, cross_temporal

__all__ = [
    "CrossTemporal",
    "Forecasts",
    "ProjectionReconciler",
    "Reconciled",
    "Reconciliation",
    "cross_temporal",
]
