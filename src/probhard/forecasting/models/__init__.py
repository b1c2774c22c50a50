"""Models: DeepVAR under constraints, classical and naive forecasts, linear pools of forecasts.

The DeepVAR classes need GluonTS and are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from probhard.forecasting.models.baselines import last_value, seasonal_bootstrap, seasonal_naive
from probhard.forecasting.models.classical import BaseForecast, base_forecast, reconcile
from probhard.forecasting.models.systems import SYSTEMS

if TYPE_CHECKING:
    from probhard.forecasting.models.blocks import TemporalBlocks
    from probhard.forecasting.models.estimator import DeepVAREstimator
    from probhard.forecasting.models.network import DeepVAR
    from probhard.forecasting.models.pool import best_weights, pooled
    from probhard.forecasting.models.predictor import DeepVARPredictor

__all__ = [
    "SYSTEMS",
    "BaseForecast",
    "DeepVAR",
    "DeepVAREstimator",
    "DeepVARPredictor",
    "TemporalBlocks",
    "base_forecast",
    "best_weights",
    "last_value",
    "pooled",
    "reconcile",
    "seasonal_bootstrap",
    "seasonal_naive",
]

LAZY = {
    "DeepVAR": "network",
    "DeepVAREstimator": "estimator",
    "DeepVARPredictor": "predictor",
    "TemporalBlocks": "blocks",
    "best_weights": "pool",
    "pooled": "pool",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
