"""Models: DeepVAR, classical and naive forecasts, and pools of them."""
