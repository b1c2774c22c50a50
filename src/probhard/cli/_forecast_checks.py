"""Checks of a forecast: every draw against the constraint of its step, and the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probhard._util.atomic import check_space
from probhard._util.memory import check_memory
from probhard.cli._certificate import TOLERANCE, Certificate, Extent
from probhard.constraints import Constraint
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.report.evaluation import CHUNK, Incoherence, incoherence

SHOWN = 3  # steps that the summary names
WORKING = 2  # arrays of all draws that a forecast holds at a time
LINE, COPIES = 60, 20  # bytes of a number as text; copies of the history in fits, the model and the report
NOTHING_FEASIBLE = {"largest": None, "relative": None, "smallest_draw": None}
CONTRADICTION = "Bounds, caps and plans contradict each other, so nothing is forecast."
Constraints = list[tuple[np.ndarray, Constraint]]  # groups of steps, each with its constraint


class Checks:
    """What was found in the draws of n nodes over H steps.

    Args:
        data: The history.
        horizon: Number of steps H.
    """

    def __init__(self, data: HierarchicalData, horizon: int) -> None:
        self.data, self.after = data, Extent()
        self.wrong = np.zeros(horizon, dtype=np.int64)  # infeasible points of each step
        self.empty = np.zeros(horizon, dtype=bool)  # steps without a feasible point
        self.points = 0  # of a step
        self.gap: Incoherence | None = None

    def add(self, steps: slice, draws: np.ndarray, constraints: Constraints) -> None:
        """Check every draw (S, k, n) of some steps, and their mean, against the constraint of its step."""
        feasible = draws[~np.isnan(draws).any((1, 2))] if np.isnan(draws).any() else draws
        if len(feasible):
            gap, known = incoherence(feasible, self.data.hierarchy), self.gap
            self.gap = gap if known is None else known.worst(gap)
        mean = draws.mean(0, keepdims=True)
        self.points = len(draws) + 1
        wrong = np.full(draws.shape[1], self.points)  # of a step without a feasible point
        for group, constraint in constraints:
            wrong[group] = 0
            for points in (draws, mean):
                for chunk in torch.from_numpy(points).split(max(1, CHUNK // points[0].size)):
                    part = chunk[:, group]
                    relative = self.after.add(constraint, part, part.abs().amax(-1, keepdim=True))
                    wrong[group] += (~(relative <= TOLERANCE)).sum(0).numpy()
        self.wrong[steps], self.empty[steps] = wrong, np.isnan(draws).any(2).all(0)

    def certificate(self, setting: dict[str, Any]) -> Certificate:
        """The certificate, with the facts of the run."""
        data, horizon = self.data, len(self.wrong)
        certificate = Certificate(
            {
                **setting,
                "rows": len(data.index),
                "nodes": len(data.names),
                "steps": horizon,
                "gaps": int(np.isnan(data.observed[:, data.hierarchy.aggregates :]).sum()),
                "history": data.mended(),
                "regressors_used": list(data.feature_names),
                "levels": {level: len(nodes) for level, nodes in data.levels.items()},
                "incoherence": NOTHING_FEASIBLE if self.gap is None else vars(self.gap),
            },
            after=self.after,
        )
        self.after.points = self.points * horizon - int(self.wrong.sum())  # the others are counted apart
        for step in np.flatnonzero(self.wrong).tolist():
            found = f"{int(self.wrong[step])} of {self.points} draws do not obey the constraints."
            reason = CONTRADICTION if self.empty[step] else found
            certificate.flag(int(self.wrong[step]), field=f"{data.future(horizon)[step]}", reason=reason)
        return certificate


def check_room(data: HierarchicalData, horizon: int, options: Mapping[str, Any], output: Path) -> None:
    """Check memory for the draws and space for the files, before anything is trained.

    Raises:
        ParameterError: There is too little of one.
    """
    from probhard.forecasting.members import streamed

    values, draws, written = len(data.names) * horizon, options["num_samples"], options["draws"] or 0
    fix = "Ask for fewer draws (--draws, or num_samples in the configuration) or a shorter horizon."
    if streamed.fits_at_once(draws, horizon, len(data.names)):
        what = f"{draws} draws of {len(data.names)} nodes over {horizon} steps"
        check_memory(8.0 * WORKING * draws * values, what, fix)
    else:
        streamed.check_memory(draws, len(data.names), written * values)
    lines = values * (2 * len(options["level"]) + 2 + written)
    check_space(output, LINE * lines + COPIES * data.values.nbytes, "A forecast", fix)


def summary(certificate: Certificate, output: Path) -> str:
    """The verdict, the incoherence, and where the files are."""
    gap = {name: np.nan if x is None else x for name, x in certificate.setting["incoherence"].items()}
    verdict = "all feasible" if certificate.feasible else f"{certificate.infeasible} NOT feasible"
    steps = [record["field"] for record in certificate.flagged if record["reason"] == CONTRADICTION]
    where = f"{', '.join(steps[:SHOWN])}{', ...' if len(steps) > SHOWN else ''}: {CONTRADICTION}\n" if steps else ""
    return (
        f"{certificate.checked} points checked (every draw at every step): {verdict}.\n{where}"
        f"Largest incoherence {gap['largest']:.3g} ({gap['relative']:.1e} relative); "
        f"smallest value {gap['smallest_draw']:.6g}.\n"
        f"Forecasts, certificate.json, report.html and model/ are in {output}."
    )
