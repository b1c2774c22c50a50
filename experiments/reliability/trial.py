"""One case tried: projected points, mean and draws, their feasibility by NumPy, gradients, and what was raised."""

from __future__ import annotations

import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probhard as ph
from experiments.reliability.cases import Case, build
from experiments.reliability.oracle import farther
from experiments.reliability.recipes import Recipe
from probhard.errors import ParameterError, ProbhardError, RankError

DRAWS, MOMENT_DRAWS = 4, 16  # draws that are checked, and fixed draws of means
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-4}  # of relative violations
SLOW, LIMIT = 20.0, 60  # CPU seconds that count as slow, and after which a case is stopped
COUNTS = ("points", "flagged", "silent", "nan", "bad_gradients", "compared", "farther")


class TimeLimitError(Exception):
    """A case took longer than ``LIMIT``."""


def trial(recipe: Recipe, compare: bool = False) -> dict[str, Any]:
    """Try a case.

    Args:
        recipe: What it is made from.
        compare: Compare distances with Clarabel's, in float64 where cvxpy can describe the set of one point.

    Returns:
        A record: the counts of points that were tried, ``flagged``, ``silent`` (infeasible, not flagged), ``nan`` and
        ``bad_gradients`` (not flagged), ``farther`` (than Clarabel's); what was ``raised``; and CPU ``seconds``.
    """
    started = time.process_time()
    record: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {"raised": None, "refused": False, "why": None}
    try:
        with limited(LIMIT), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            made = build(recipe)
            record |= {"text": str(made)}
            _project(made, record, compare)
    except (ParameterError, RankError) as error:  # no solver joins these parts, or rows repeat each other
        record |= {"raised": type(error).__name__, "refused": True, "why": str(error)[:300]}
    except ProbhardError as error:
        record |= {"raised": type(error).__name__, "why": str(error)[:300]}
    except TimeLimitError:
        record |= {"raised": "TimeLimitError", "why": f"stopped after {LIMIT} s"}
    except Exception as error:  # a bare traceback: a defect
        record |= {"raised": type(error).__name__, "why": traceback.format_exc()[-600:], "bare": True}
    record["seconds"] = round(time.process_time() - started, 3)
    return record


def broken(record: dict[str, Any]) -> bool:
    """Whether a record shows a broken promise: infeasible, NaN, a bad gradient or a bare traceback without a flag."""
    return bool(record.get("bare") or record["silent"] or record["nan"] or record["bad_gradients"])


def failed(record: dict[str, Any]) -> bool:
    """Whether points were flagged, or an error raised, although a feasible point is known."""
    return bool(record["flagged"] or (record["raised"] and not record["refused"] and not record.get("bare")))


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Stop the block after a number of CPU seconds, where the system has such timers."""
    if not hasattr(signal, "ITIMER_PROF"):
        yield
        return

    def stop(*_: object) -> None:
        raise TimeLimitError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _project(made: Case, record: dict[str, Any], compare: bool) -> None:
    loc = made.law.loc.clone().requires_grad_()
    law = ph.LocationScale(loc, made.law.cov, made.law.family)
    layer, constraint = ph.DPPL(made.metric, on_failure="flag", draws=MOMENT_DRAWS), made.constraint
    points = layer.project(loc, constraint, law)
    _count(made, loc, points.value, points.stats.converged, record)
    converged = points.stats.converged & torch.isfinite(points.value).all(-1)
    if loc.numel() and points.value.requires_grad:
        (gradient,) = torch.autograd.grad(points.value[converged].sum(), loc, allow_unused=True)
        bad = torch.zeros_like(converged) if gradient is None else ~torch.isfinite(gradient).all(-1)
        record["bad_gradients"] += int((bad & converged).sum())
    if compare and made.convex and loc.dtype == torch.float64 and bool(converged):
        worse = farther(made, points.value.detach().double().numpy())
        record["compared"] += int(worse is not None)
        record["farther"] += int(bool(worse))
    projected: Any = layer(law, constraint)
    mean, known = projected.mean, projected.stats.converged.expand(projected.batch_shape)
    finite = torch.isfinite(mean).all(-1)
    _count(made, loc, mean, known & finite, record)
    if mean.requires_grad and bool((known & finite).any()):
        total = mean[known & finite].sum() + projected.variance[known & finite].sum()
        (gradient,) = torch.autograd.grad(total, loc, allow_unused=True)
        bad = torch.zeros_like(finite) if gradient is None else ~torch.isfinite(gradient).all(-1)
        record["bad_gradients"] += int((bad & known & finite).sum())
    drawn = projected.draw((DRAWS,), torch.Generator().manual_seed(0))
    _count(made, made.law.loc.abs() + made.law.stddev, drawn.value, drawn.stats.converged, record)


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
