"""Algorithms that find nearest points; they know arrays, structures and functions, not projectors or gradients."""
