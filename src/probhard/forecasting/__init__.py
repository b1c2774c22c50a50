"""Hierarchical forecasting: data, baselines, and evaluation of coherent draws."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from probhard.forecasting.baselines import last_value, seasonal_bootstrap, seasonal_naive
from probhard.forecasting.classical import BaseForecast, base_forecast, reconcile
from probhard.forecasting.data import HierarchicalData
from probhard.forecasting.datasets import load
from probhard.forecasting.evaluation import (
    Evaluation,
    Incoherence,
    calibration,
    crps_levels,
    evaluate,
    incoherence,
    pit_counts,
    pooled_crps,
)
from probhard.forecasting.frames import from_frame, to_long
from probhard.forecasting.given import Forecasts
from probhard.forecasting.nixtla import ProjectionReconciler
from probhard.forecasting.reconciliation import Reconciled, Reconciliation
from probhard.forecasting.temporal import CrossTemporal, cross_temporal

if TYPE_CHECKING:
    from probhard.forecasting.estimator import DeepVAREstimator
    from probhard.forecasting.forecaster import HierarchicalForecaster

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
    "DeepVAREstimator": "probhard.forecasting.estimator",
    "HierarchicalForecaster": "probhard.forecasting.forecaster",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
