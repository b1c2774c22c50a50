"""Forecasts that were made by anyone, made coherent: arrays in, a coherent law out, nothing is trained.

For each of H steps, with base forecasts f of n series and draws z of their law,

    mean: argmin over u of |u - f|_Q^2,      draw: argmin over u of |u - z|_Q^2,      u feasible:

sums add up, and bounds and fixed nodes hold where there are any. ``Q^-1`` is ``diag(s^2)``, the series' own variances
(oblique), ``I`` (orthogonal, MinT's ols) or ``diag(|S| 1)`` (structural, MinT's wls_struct). The laws of base forecasts
are those of ``given``; a node that is immutable keeps its own, clipped at its bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from scipy.special import ndtri

from probhard.constraints import Box, Constraint, Hierarchy, LinearEquality
from probhard.errors import InfeasibleError, ParameterError, ShapeError, check_choice
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.metric import DiagonalMetric
from probhard.projection.layer import DPPL

METRICS = ("oblique", "orthogonal", "structural")
CHUNK = 2_000_000  # numbers that are projected at a time
CERTAIN = 1e-3  # of the smallest spread of a step: what a spread of 0 counts as in the oblique metric


@dataclass(frozen=True, eq=False)
class Reconciled:
    """Coherent forecasts; NaN where a point could not be made feasible, which ``reasons`` tell by step.

    Args:
        mean: (H, n).
        draws: (S, H, n); None where there were only means.
        spread: Exact standard deviations of normal margins, (H, n), where these are known.
        before: The draws as they were, (S, H, n).
        constraints: Steps, (k,), and the constraint that they obey.
    """

    mean: np.ndarray
    draws: np.ndarray | None = None
    spread: np.ndarray | None = None
    before: np.ndarray | None = None
    constraints: list[tuple[np.ndarray, Constraint]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def explain(self) -> None:
        """Give a reason to every step with points that are not feasible."""
        gone = np.isnan(self.mean).any(1)
        lost = np.zeros_like(gone, dtype=np.int64) if self.draws is None else np.isnan(self.draws[..., 0]).sum(0)
        for step in np.flatnonzero(gone | (lost > 0)):
            also = " and the mean" if gone[step] else ""
            self.reasons.setdefault(int(step), f"{lost[step]} draws{also} could not be made feasible.")

    def quantiles(self, probabilities: Sequence[float]) -> np.ndarray:
        """Quantiles of each series, (Q, H, n): in closed form where that is exact, else of the feasible draws."""
        if self.draws is None:
            raise ParameterError(
                "Quantiles were asked of forecasts that are means alone.",
                "Nothing tells how uncertain they are.",
                "Add intervals, quantiles or draws to the forecasts, or leave out the levels.",
            )
        if self.spread is not None:
            return self.mean + self.spread * ndtri(np.asarray(probabilities))[:, None, None]
        lost = np.isnan(self.draws[..., 0])  # (S, H)
        if not lost.any():
            return np.quantile(self.draws, probabilities, axis=0)
        found = np.full((len(probabilities), *self.mean.shape), np.nan)
        for step in np.flatnonzero(~lost.all(0)):
            found[:, step] = np.quantile(self.draws[~lost[:, step], step], probabilities, axis=0)
        return found


@dataclass(frozen=True, eq=False)
class Reconciliation:
    """What forecasts must obey, and how far they may move.

    Args:
        hierarchy: The sums, and immutable nodes if it has any.
        metric: One of ``METRICS``; None is oblique, or structural for means alone.
        nonnegative: No series is below 0.
        upper: Bounds: a number, (n,) or (H, n); inf or NaN for none.
        fixed: Values that nodes must have, (n,) or (H, n); NaN for nodes that are free.
        on_failure: ``"raise"``, or ``"flag"`` points that cannot be made feasible.
    """

    hierarchy: Hierarchy
    metric: str | None = None
    nonnegative: bool = False
    upper: Any = None
    fixed: Any = None
    on_failure: str = "raise"

    def __post_init__(self) -> None:
        check_choice("on_failure", self.on_failure, ("raise", "flag"))
        if self.metric is not None:
            check_choice("metric", self.metric, METRICS)

    def __call__(self, base: Forecasts, samples: int = 1000, seed: int = 0) -> Reconciled:
        """The coherent law of base forecasts, with so many draws where they have none of their own."""
        shape = self.check(base)
        if samples < 1:
            raise ParameterError(f"Got samples={samples}.", "Draws are made from the law.", "Ask for at least one.")
        if not 0 <= seed < 2**63:
            raise ParameterError(f"Got seed={seed}.", "It starts a generator.", "Pass a number from 0 to 2^63 - 1.")
        before = None if base.certain else base.drawn(samples, torch.Generator().manual_seed(seed))
        result = Reconciled(
            np.full(shape, np.nan),
            None if before is None else np.full_like(before, np.nan),
            np.full(shape, np.nan) if self.exact(base) else None,
            before,
        )
        weight, pending = self.weight(base), self._alike(shape)
        while pending:
            steps = pending.pop()
            try:
                constraint = self.constraint(steps, shape)
                self._fill(result, steps, constraint, base, DPPL(weight(steps), on_failure=self.on_failure))
            except InfeasibleError as error:
                if self.on_failure == "raise":
                    raise
                if len(steps) > 1:
                    pending += np.array_split(steps, 2)
                else:
                    result.reasons[int(steps[0])] = str(error)
            else:
                result.constraints.append((steps, constraint))
        result.explain()
        return result

    def check(self, base: Forecasts) -> tuple[int, int]:
        """The steps and series of forecasts that have all nodes."""
        shape = base.shape
        if shape[1] != self.hierarchy.variables:
            raise ShapeError(
                f"There are forecasts of {shape[1]} series, the hierarchy has {self.hierarchy.variables}.",
                "Every node has a forecast, aggregates first.",
                "Add the missing nodes, or sum bottom forecasts with Forecasts.summed.",
            )
        return shape

    def constraint(self, steps: np.ndarray, shape: tuple[int, int]) -> Constraint:
        """What these of H steps must obey; the same nodes must be fixed in all of them."""
        found: Constraint = self.hierarchy
        value = everywhere(self.fixed, np.nan, shape)[steps]
        nodes = np.flatnonzero(~np.isnan(value[0]))
        if len(nodes):
            rows = sp.csr_array(sp.eye_array(shape[1], format="csr")[nodes])
            found = found & LinearEquality(rows, torch.from_numpy(value[:, nodes]), rank="reveal")
        return found & Box(*map(torch.from_numpy, self._bounds(steps, shape))) if self._bounded else found

    def _bounds(self, steps: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds of some steps, (k, n)."""
        upper = everywhere(self.upper, np.inf, shape)[steps]
        upper = np.where(np.isnan(upper), np.inf, upper)
        return np.full_like(upper, 0.0 if self.nonnegative else -np.inf), upper

    def exact(self, base: Forecasts) -> bool:
        """Whether the reconciled margins are normal laws of known spreads; those of sums are, unless some are fixed."""
        return base.stddev is not None and not self._bounded and not (base.summing and self.fixed is not None)

    def chosen(self, base: Forecasts) -> str:
        """The metric for these forecasts."""
        return self.metric or ("structural" if base.certain else "oblique")

    @property
    def _bounded(self) -> bool:
        return self.nonnegative or self.upper is not None

    def _alike(self, shape: tuple[int, int]) -> list[np.ndarray]:
        """The steps in groups that have the same fixed nodes."""
        if self.fixed is None:
            return [np.arange(shape[0])] if shape[0] else []
        free = np.isnan(everywhere(self.fixed, np.nan, shape))
        group = np.unique(free, axis=0, return_inverse=True)[1].ravel()
        return [np.flatnonzero(group == i) for i in range(group.max(initial=-1) + 1)]

    def weight(self, base: Forecasts) -> Any:
        """The metric of given steps."""
        metric, spread = self.chosen(base), base.spread
        if metric != "oblique":
            sizes = self.hierarchy.sizes if metric == "structural" else torch.ones_like(self.hierarchy.sizes)
            return lambda steps: DiagonalMetric(sizes)
        if spread is None:
            raise ParameterError(
                "The oblique metric got forecasts without spreads.",
                "It moves uncertain series more than certain ones.",
                "Add intervals, quantiles or several draws to the forecasts, or use the metric 'structural'.",
            )
        least = np.where(spread > 0, spread, np.inf).min(1, keepdims=True)
        spread = np.where(spread > 0, spread, CERTAIN * np.where(np.isfinite(least), least, 1.0))
        return lambda steps: DiagonalMetric(torch.from_numpy(np.square(spread[steps])))

    def _fill(
        self, result: Reconciled, steps: np.ndarray, constraint: Constraint, base: Forecasts, layer: DPPL
    ) -> None:
        """Write the projected mean and draws of some steps."""
        bounds = self._bounds(steps, base.shape)
        if base.mean is not None:
            result.mean[steps] = self._project(base.mean[steps], bounds, constraint, layer)
        if result.draws is None or result.before is None:
            return
        parts = -(-len(result.draws) * len(steps) * base.shape[1] // CHUNK)
        for part in np.array_split(np.arange(len(result.draws)), parts):
            at = np.ix_(part, steps)
            result.draws[at] = self._project(result.before[at], bounds, constraint, layer)
        if base.mean is None:
            result.mean[steps] = mean_of_feasible(result.draws[:, steps])
        elif base.stddev is not None and result.spread is not None:
            law = torch.from_numpy(base.mean[steps]), torch.from_numpy(base.stddev[steps])
            result.spread[steps] = law[1] if base.summing else layer(law, constraint).scale

    def _project(
        self, points: np.ndarray, bounds: tuple[np.ndarray, np.ndarray], constraint: Constraint, layer: DPPL
    ) -> np.ndarray:
        """The nearest feasible points, NaN where none was found."""
        z, held = torch.from_numpy(points), self.hierarchy.system.held
        if held is not None:
            lower, upper = (torch.from_numpy(x)[..., held] for x in bounds)
            z = z.index_copy(-1, held, z[..., held].clamp(lower, upper))
        solution = layer.project(z, constraint)
        return torch.where(solution.stats.converged.unsqueeze(-1), solution.value, torch.nan).numpy()


def everywhere(value: Any, missing: float, shape: tuple[int, int]) -> np.ndarray:
    """A number, (n,) or (H, n) for every step and series."""
    array = np.asarray(missing if value is None else value, dtype=np.float64)
    try:
        return np.broadcast_to(array, shape)
    except ValueError as error:
        raise ShapeError(
            f"Bounds or fixed values have shape {array.shape}, there are {shape[0]} steps of {shape[1]} series.",
            "Each belongs to a series, at every step or at one.",
            f"Give one number, {(shape[1],)} or {shape}.",
        ) from error


def mean_of_feasible(draws: np.ndarray) -> np.ndarray:
    """The mean of the draws that are feasible, (k, n); NaN where none is."""
    count = (~np.isnan(draws)).sum(0)
    return np.where(count > 0, np.nansum(draws, 0) / np.maximum(count, 1), np.nan)
