"""Figures that no run of ours changes: those that the paper prints, and bounds on what any method can reach.

Keys are (problem, score) or (problem, range of the exponent m, score). Units are those of ``tables.UNITS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# MSE (1e-5) of the field nearest to the exact one that obeys mass, bounds and monotonicity. Exact fields miss the
# trapezoid law a little. Stefan's figure is all due to u(0, 0) = 1, where the law and u >= 0 ask for 0.
NEAREST = {"heat": 0.0, "pme": 0.0317, "stefan": 50.4, "advection": 2.27}
_LINEAR = ("probhard-ob", "probhard-or", "hardc", "probconserv", "softc", "base")
_NONLINEAR = ("probhard-ob", "probhard-or", "probhard-inf", "probconserv", "base")


def _paper(names: Sequence[str], mse: Sequence[float], crps: Sequence[float]) -> dict[str, tuple[float, float]]:
    return dict(zip(names, zip(mse, crps)))


# MSE and CRPS as printed.
PAPER: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {
    ("heat", "crps"): _paper(
        _LINEAR, (0.036, 0.031, 0.031, 0.027, 0.051, 0.029), (0.304, 0.271, 0.275, 0.392, 0.354, 0.396)
    ),
    ("heat", "nll"): _paper(_LINEAR, (0.047, 0.301, 0.090, 1.26, 0.156, 2.01), (0.37, 0.713, 0.452, 4.27, 1.129, 4.39)),
    ("pme", "crps"): _paper(_LINEAR, (9.59, 9.01, 8.87, 8.80, 8.19, 7.95), (2.01, 1.80, 1.785, 2.03, 2.07, 2.02)),
    ("pme", "nll"): _paper(_LINEAR, (6.16, 11.08, 10.55, 10.5, 7.36, 8.13), (2.65, 1.80, 1.667, 2.49, 2.44, 2.43)),
    ("advection", "crps"): _paper(_LINEAR, (131, 88.1, 104, 134, 148, 149), (4.19, 2.94, 3.24, 3.88, 3.96, 3.98)),
    ("advection", "nll"): _paper(_LINEAR, (262, 311, 458, 277, 599, 605), (7.03, 8.67, 11.2, 7.90, 9.70, 10.1)),
    ("stefan", "crps"): _paper(_LINEAR, (186, 395, 394, 303, 432, 425), (7.52, 14.1, 14.4, 7.85, 9.88, 9.51)),
    ("stefan", "nll"): _paper(_LINEAR, (207, 433, 433, 273, 429, 425), (7.85, 14.7, 14.5, 8.33, 10.1, 10.2)),
    ("pme", (2, 3), "crps"): _paper(_NONLINEAR, (5.04, 9.38, 78.2, 88.5, 80.3), (8.65, 11.3, 19.0, 20.7, 20.8)),
    ("pme", (3, 4), "crps"): _paper(_NONLINEAR, (296, 3.19, 158, 185, 162), (11.2, 7.10, 22.6, 24.7, 23.7)),
    ("pme", (4, 5), "crps"): _paper(_NONLINEAR, (425, 1.59, 280, 277, 199), (10.8, 5.62, 23.3, 25.4, 27.2)),
    ("pme", (2, 3), "nll"): _paper(_NONLINEAR, (107, 43.5, 86.1, 94.5, 89.2), (18.9, 14.8, 33.0, 36.7, 37.1)),
    ("pme", (3, 4), "nll"): _paper(_NONLINEAR, (471, 135, 200, 276, 202), (16.9, 11.2, 30.4, 35.1, 48.5)),
    ("pme", (4, 5), "nll"): _paper(_NONLINEAR, (717, 206, 332, 620, 342), (19.9, 9.36, 32.4, 41.3, 35.9)),
}


PAPER_CE: dict[tuple[Any, ...], dict[str, float]] = {  # of the rows that miss; 0 for the others
    ("heat", "crps"): {"softc": 0.852, "base": 1.76},
    ("heat", "nll"): {"softc": 4.806, "base": 34.3},
    ("pme", "crps"): {"softc": 17.1, "base": 20.2},
    ("pme", "nll"): {"softc": 29.3, "base": 27.2},
    ("advection", "crps"): {"softc": 19.3, "base": 18.9},
    ("advection", "nll"): {"softc": 183, "base": 182},
    ("stefan", "crps"): {"softc": 167, "base": 180},
    ("stefan", "nll"): {"softc": 169, "base": 169},
    ("pme", (2, 3), "crps"): {"base": 0.020},
    ("pme", (2, 3), "nll"): {"base": 0.028},
    ("pme", (3, 4), "crps"): {"base": 14.8},
    ("pme", (3, 4), "nll"): {"base": 34.1},
    ("pme", (4, 5), "crps"): {"base": 22.8},
    ("pme", (4, 5), "nll"): {"base": 59.7},
}


def smallest_of_paper(problem: tuple[Any, ...], index: int) -> float:
    """Return the paper's smallest figure for a problem over all rows and scores.

    Args:
        problem: The key without its score.
        index: 0 for the MSE, 1 for the CRPS.
    """
    return min(row[index] for key, rows in PAPER.items() if key[:-1] == problem for row in rows.values())
