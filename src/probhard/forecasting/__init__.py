"""Hierarchical forecasting: data, baselines, and evaluation of coherent draws."""

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

__all__ = [
    "BaseForecast",
    "Evaluation",
    "HierarchicalData",
    "Incoherence",
    "base_forecast",
    "calibration",
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
