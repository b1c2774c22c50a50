"""Tables of hierarchical forecasts."""
