"""Reconciliation: forecasts by anyone, made coherent."""

from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import Reconciled, Reconciliation

__all__ = ["Forecasts", "Reconciled", "Reconciliation"]
