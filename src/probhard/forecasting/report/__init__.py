"""Reports: scores of forecasts, backtests against baselines, and the report page.

The function ``backtest`` stays in the module of the same name.
"""

from probhard.forecasting.report.backtest import Backtest, held_out
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
from probhard.forecasting.report.page import Report

__all__ = [
    "Backtest",
    "Evaluation",
    "Incoherence",
    "Report",
    "calibration",
    "crps_levels",
    "evaluate",
    "held_out",
    "incoherence",
    "pit_counts",
    "pooled_crps",
]
