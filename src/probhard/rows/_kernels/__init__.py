"""Compiled loops over rows, and the autograd functions that call them."""
