"""Hierarchical forecasting: data, models, reconciliation, and evaluation of coherent forecasts.

The names that need GluonTS are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from probhard.forecasting.data import HierarchicalData, from_frame, load, to_long
from probhard.forecasting.models import (
    SYSTEMS,
    BaseForecast,
    base_forecast,
    last_value,
    reconcile,
    seasonal_bootstrap,
    seasonal_naive,
)
from probhard.forecasting.reconciliation import (
    CrossTemporal,
    Explanation,
    Forecasts,
    MetricWeights,
    PastForecast,
    PathLaw,
    ProjectionReconciler,
    Reconciled,
    Reconciliation,
    cross_temporal,
    explain,
    learn_from_errors,
    learn_metric,
    learn_reconciliation,
    learn_scale,
    project_law,
    projected_moments,
)
from probhard.forecasting.report import (
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
    from probhard.forecasting.models.blocks import TemporalBlocks
    from probhard.forecasting.models.estimator import DeepVAREstimator
    from probhard.forecasting.views import cross_validation

__all__ = [
    "SYSTEMS",
    "BaseForecast",
    "CrossTemporal",
    "DeepVAREstimator",
    "Evaluation",
    "Explanation",
    "Forecasts",
    "HierarchicalData",
    "HierarchicalForecaster",
    "Incoherence",
    "MetricWeights",
    "PastForecast",
    "PathLaw",
    "ProjectionReconciler",
    "Reconciled",
    "Reconciliation",
    "TemporalBlocks",
    "base_forecast",
    "calibration",
    "cross_temporal",
    "cross_validation",
    "crps_levels",
    "evaluate",
    "explain",
    "from_frame",
    "incoherence",
    "last_value",
    "learn_from_errors",
    "learn_metric",
    "learn_reconciliation",
    "learn_scale",
    "load",
    "pit_counts",
    "pooled_crps",
    "project_law",
    "projected_moments",
    "reconcile",
    "seasonal_bootstrap",
    "seasonal_naive",
    "to_long",
]

LAZY = {  # need GluonTS or pandas
    "DeepVAREstimator": "models.estimator",
    "HierarchicalForecaster": "forecaster",
    "TemporalBlocks": "models.blocks",
    "cross_validation": "views",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
