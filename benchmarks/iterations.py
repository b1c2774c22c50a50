"""Accuracy of ``DPPL(iterations=K)`` against K: ``python -m benchmarks.iterations`` prints the table of the docs.

Points of spread 1 or 2, 200 of each kind, in float64: the share that the layer solves exactly, then the largest
distance of a frozen module from the exact points. The layer solves faces after its iterations, a frozen module does
not.
"""

from __future__ import annotations

import time

import torch

import probhard as ph
from probhard.constraints.base import Constraint

COUNTS = (10, 25, 50, 100, 200)


def sets() -> dict[str, tuple[int, float, Constraint]]:
    """Number of variables, spread of the points, and constraint of each kind."""
    groups = torch.kron(torch.eye(4), torch.ones(1, 5))
    hierarchy = ph.Hierarchy(torch.cat([torch.ones(1, 20), groups, torch.eye(20)]))
    A, G = torch.randn(50, 100), torch.randn(50, 100)
    d = (G @ torch.linalg.pinv(A)).abs().sum(-1)  # DC3's recipe
    return {
        "simplex, 50": (50, 1.0, ph.Simplex()),
        "simplex & turnover, 20": (20, 1.0, ph.Simplex() & ph.L1Ball(0.3, torch.full((20,), 0.05))),
        "increasing, 50": (50, 1.0, ph.Monotone()),
        "increasing & bounds, 50": (50, 1.0, ph.Monotone() & ph.Box(-0.5, 0.5)),
        "hierarchy & bounds, 25": (25, 2.0, hierarchy & ph.NonNegative()),
        "50 rows = and 50 rows <=, 100": (
            100,
            2.0,
            ph.LinearEquality(A, 2 * torch.rand(50) - 1) & ph.LinearInequality(G, d),
        ),
    }


def main() -> None:
    """Print one row for each kind of set."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    print("| set | " + " | ".join(f"K = {count}" for count in COUNTS) + " | exact ms | K = 50 ms |")
    for name, (n, spread, constraint) in sets().items():
        z, cells = spread * torch.randn(200, n), []
        exact, slow = timed(ph.DPPL("orthogonal", on_failure="flag"), z, constraint)
        known = exact.stats.converged
        for count in COUNTS:
            layer = ph.DPPL("orthogonal", iterations=count)
            found, fast = timed(layer, z, constraint)
            if count == 50:
                times = f"{slow:.0f} | {fast:.0f}"
            away = (layer.freeze(constraint, variables=n)(z)[0] - exact.value)[known].abs().max()
            cells.append(f"{100 * float(found.stats.converged.double().mean()):.0f} %, {float(away):.0e}")
        print(f"| {name} | " + " | ".join([*cells, times]) + " |", flush=True)
        print(f"  exact converged: {int(known.sum())} of {len(z)}")


def timed(layer: ph.DPPL, z: torch.Tensor, constraint: Constraint) -> tuple[ph.Solution, float]:
    """The projection of points and its CPU time in milliseconds, after one call that fills the caches."""
    layer.project(z[:2], constraint)
    start = time.process_time()
    with torch.no_grad():
        solution = layer.project(z, constraint)
    return solution, 1e3 * (time.process_time() - start)


if __name__ == "__main__":
    main()
