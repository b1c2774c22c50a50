"""One case tried: projected mean and draws, their feasibility by NumPy, gradients, and what was raised."""

from __future__ import annotations

import time
import traceback
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probhard as ph
from experiments.reliability.cases import Case, case
from probhard.errors import ProbhardError

DRAWS = 4
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-4}  # of relative violations
SLOW = 20.0  # seconds


def trial(number: int) -> dict[str, Any]:
    """Try a case.

    Args:
        number: Number of the case.

    Returns:
        A record: the counts ``points``, ``flagged``, ``silent`` (infeasible, not flagged) and ``bad_gradients``, what
        was ``raised``, and the seconds.
    """
    started = time.perf_counter()
    record: dict[str, Any] = {"case": number, "raised": None, "points": 0, "flagged": 0, "silent": 0}
    record |= {"bad_gradients": 0, "nan": 0, "traceback": None, "why": None}
    try:
        made = case(number)
        record |= {"ordinary": made.ordinary, "sets": [part.name for part in made.parts], "text": str(made)}
        _project(made, record)
    except ProbhardError as error:
        record |= {"raised": type(error).__name__, "why": str(error)[:300]}
    except Exception as error:  # a bare traceback: a defect
        record |= {"raised": type(error).__name__, "traceback": traceback.format_exc()[-800:]}
    record["seconds"] = round(time.perf_counter() - started, 3)
    return record


def _project(made: Case, record: dict[str, Any]) -> None:
    loc = made.law.loc.clone().requires_grad_()
    law = ph.LocationScale(loc, made.law.cov, made.law.family)
    layer, constraint = ph.DPPL(made.metric, on_failure="flag"), made.constraint
    points = layer.project(loc, constraint, law)
    _count(made, loc, points.value, points.stats.converged, record)
    converged = points.stats.converged & torch.isfinite(points.value).all(-1)
    if loc.numel() and points.value.requires_grad:
        (gradient,) = torch.autograd.grad(points.value[converged].sum(), loc, allow_unused=True)
        bad = torch.zeros_like(converged) if gradient is None else ~torch.isfinite(gradient).all(-1)
        record["bad_gradients"] += int((bad & converged).sum())
    projected: Any = layer(law, constraint)
    mean = projected.mean.detach()
    status = getattr(projected, "stats", None)
    known = torch.isfinite(mean).all(-1) if status is None else status.converged.expand(mean.shape[:-1])
    _count(made, loc, mean, known & torch.isfinite(mean).all(-1), record)
    drawn = projected.draw((DRAWS,), torch.Generator().manual_seed(0))
    size = made.law.loc.abs() + made.law.stddev
    _count(made, size, drawn.value.detach(), drawn.stats.converged, record)


def _count(made: Case, z: Tensor, u: Tensor, converged: Tensor, record: dict[str, Any]) -> None:
    """Count points u (..., *batch, n) that are flagged, and those that are infeasible but not flagged."""
    values = u.detach().double().numpy()
    if not values.size:
        return
    finite = np.isfinite(values).all(-1)
    found = made.violation(np.where(finite[..., None], values, 0.0))
    size = z.detach().abs().double().amax(-1).numpy()
    moved = size / (np.abs(np.where(finite[..., None], values, 1.0)).max(-1) + 1e-300)
    passes = finite & (found <= TOLERANCES[made.law.loc.dtype] * np.maximum(1.0, moved))
    good = converged.numpy()
    record["points"] += good.size
    record["flagged"] += int((~good).sum())
    record["nan"] += int((good & ~finite).sum())
    record["silent"] += int((good & ~passes).sum())
