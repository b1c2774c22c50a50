"""Checks of a forecast: every draw against the constraint of its step, and the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probhard._util.atomic import check_space
from probhard._util.memory import check_memory
from probhard.cli._certificate import TOLERANCE, Certificate
from probhard.constraints import Constraint
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.report.evaluation import CHUNK, incoherence

WORKING = 2  # arrays of all draws that a forecast holds at a time
LINE, COPIES = 60, 20  # bytes of a number as text; copies of the history in fits, the model and the report
NOTHING_FEASIBLE = {"largest": None, "relative": None, "smallest_draw": None}
Constraints = list[tuple[np.ndarray, Constraint]]  # groups of steps, each with its constraint


def certify(
    draws: np.ndarray, constraints: Constraints, data: HierarchicalData, setting: dict[str, Any]
) -> Certificate:
    """Check every draw (S, H, n), and their mean, against the constraint of its step."""
    feasible = draws[~np.isnan(draws).any((1, 2))]
    certificate = Certificate(
        {
            **setting,
            "rows": len(data.index),
            "nodes": len(data.names),
            "steps": draws.shape[1],
            "gaps": int(np.isnan(data.observed[:, data.hierarchy.aggregates :]).sum()),
            "history": data.mended(),
            "regressors_used": list(data.feature_names),
            "levels": {level: len(nodes) for level, nodes in data.levels.items()},
            "incoherence": vars(incoherence(feasible, data.hierarchy)) if len(feasible) else NOTHING_FEASIBLE,
        }
    )
    points = torch.from_numpy(np.concatenate([draws, draws.mean(0, keepdims=True)]))
    wrong = torch.full((draws.shape[1],), len(points), dtype=torch.int64)  # of a step without a feasible point
    for steps, constraint in constraints:
        wrong[steps] = 0
        for chunk in points[:, steps].split(max(1, CHUNK // points[0].numel())):
            relative = certificate.after.add(constraint, chunk, chunk.abs().amax(-1, keepdim=True))
            wrong[steps] += (~(relative <= TOLERANCE)).sum(0)
    certificate.after.points = len(points) * len(wrong) - int(wrong.sum())  # the others are counted apart
    for step in wrong.nonzero()[:, 0].tolist():
        reason = f"{int(wrong[step])} of {len(points)} draws do not obey the constraints."
        certificate.flag(int(wrong[step]), field=f"{data.future(draws.shape[1])[step]}", reason=reason)
    return certificate


def check_room(data: HierarchicalData, horizon: int, options: Mapping[str, Any], output: Path) -> None:
    """Check memory for the draws and space for the files, before anything is trained.

    Raises:
        ParameterError: There is too little of one.
    """
    values, draws, written = len(data.names) * horizon, options["num_samples"], options["draws"] or 0
    fix = "Ask for fewer draws (--draws, or num_samples in the configuration) or a shorter horizon."
    check_memory(8.0 * WORKING * draws * values, f"{draws} draws of {len(data.names)} nodes over {horizon} steps", fix)
    lines = values * (2 * len(options["level"]) + 2 + written)
    check_space(output, LINE * lines + COPIES * data.values.nbytes, "A forecast", fix)


def summary(certificate: Certificate, output: Path) -> str:
    """The verdict, the incoherence, and where the files are."""
    gap = {name: np.nan if x is None else x for name, x in certificate.setting["incoherence"].items()}
    verdict = "all feasible" if certificate.feasible else f"{certificate.infeasible} NOT feasible"
    return (
        f"{certificate.checked} points checked (every draw at every step): {verdict}.\n"
        f"Largest incoherence {gap['largest']:.3g} ({gap['relative']:.1e} relative); "
        f"smallest value {gap['smallest_draw']:.6g}.\n"
        f"Forecasts, certificate.json, report.html and model/ are in {output}."
    )
