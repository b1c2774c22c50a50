"""How often projections fail: random constraints around known feasible points, checked by independent formulas."""
