"""Algorithms for nearest points. They work on arrays, rows and functions, without projectors or gradients."""
