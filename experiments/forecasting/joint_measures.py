"""Measures of draws (S, H, n) against what happened, by group of levels.

    coverage of central 80 % intervals and CRPS, of single steps and of sums over the horizon,
    energy score of the whole path, each group divided by its mean size and by the square root of its number of nodes.

The CRPS is a sum over nodes and steps; divided by the summed ``|y|`` it can be compared between data sets.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from experiments.forecasting.joint_laws import GROUPS
from probhard import coverage, crps_ensemble, energy_score

LEVEL = 0.8
ENERGY_DRAWS = 200  # pairs of draws are compared


def measured(draws: Tensor, y: Tensor, masks: Tensor, size: Tensor) -> dict[str, Any]:
    """Score draws.

    Args:
        draws: (S, H, n).
        y: Observed values, (H, n).
        masks: Groups, (3, n) bool.
        size: Mean ``|y|`` of every node in the history, (n,).

    Returns:
        Fields of a result line.
    """
    sums, total = draws.sum(1), y.sum(0)
    inside, inside_sums = coverage(draws, y, LEVEL), coverage(sums, total, LEVEL)
    score, score_sums = crps_ensemble(draws, y, estimator="fair"), crps_ensemble(sums, total, estimator="fair")
    fields: dict[str, Any] = {}
    for name, mask in zip(GROUPS, masks):
        fields[name] = {
            "coverage": float(inside[:, mask].mean()),
            "coverage_sums": float(inside_sums[mask].mean()),
            "crps": float(score[:, mask].sum()),
            "crps_sums": float(score_sums[mask].sum()),
            "size": float(y[:, mask].abs().sum()),
        }
    count = masks.double().sum(1)
    weight = (1 / (masks.double() @ size / count * count.sqrt())) @ masks.double()  # (n,)
    few = (draws[:ENERGY_DRAWS] * weight).flatten(1)
    fields["energy"] = float(energy_score(few, (y * weight).flatten(), estimator="fair"))
    return fields
