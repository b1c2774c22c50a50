"""Algorithms that find nearest points; they know arrays and structures, not constraints' classes or gradients."""
