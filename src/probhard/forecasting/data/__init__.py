"""Data: tables of hierarchical series, long frames in and out, time stamps and named data sets."""

from probhard.forecasting.data.datasets import load
from probhard.forecasting.data.frames import from_frame, to_long
from probhard.forecasting.data.stamps import Place
from probhard.forecasting.data.table import HierarchicalData

__all__ = ["HierarchicalData", "Place", "from_frame", "load", "to_long"]
