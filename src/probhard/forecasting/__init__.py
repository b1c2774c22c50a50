"""Hierarchical forecasting: data, baselines, and evaluation of coherent draws."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from probhard.forecasting.data.datasets import load
from probhard.forecasting.data.frames import from_frame, to_long
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.models.baselines import last_value, seasonal_bootstrap, seasonal_naive
from probhard.forecasting.models.classical import BaseForecast, base_forecast, reconcile
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.nixtla import ProjectionReconciler
from probhard.forecasting.reconciliation.reconcile import Reconciled, Reconciliation
from probhard.forecasting.reconciliation.temporal import CrossTemporal, cross_temporal
from probhard.forecasting.report.evaluation import (
    Evaluation,
    Incoherence,
    calibration,
    crps_levels,
    evaluate,
    incoherence,
    pit_counts,
    pooled_crps,
)

if TYPE_CHECKING:
    from probhard.forecasting.forecaster import HierarchicalForecaster
    from probhard.forecasting.models.estimator import DeepVAREstimator

__all__ = [
    "BaseForecast",
    "CrossTemporal",
    "DeepVAREstimator",
    "Evaluation",
    "Forecasts",
    "HierarchicalData",
    "HierarchicalForecaster",
    "Incoherence",
    "ProjectionReconciler",
    "Reconciled",
    "Reconciliation",
    "base_forecast",
    "calibration",
    "cross_temporal",
    "crps_levels",
    "evaluate",
    "from_frame",
    "incoherence",
    "last_value",
    "load",
    "pit_counts",
    "pooled_crps",
    "reconcile",
    "seasonal_bootstrap",
    "seasonal_naive",
    "to_long",
]

LAZY = {  # they need GluonTS
    "DeepVAREstimator": "probhard.forecasting.models.estimator",
    "HierarchicalForecaster": "probhard.forecasting.forecaster",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
