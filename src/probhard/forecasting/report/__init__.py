"""Reports: evaluation, backtests and the report page."""
