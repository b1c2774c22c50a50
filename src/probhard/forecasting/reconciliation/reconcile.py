"""Reconciliation of the forecasts of any model: arrays in, a coherent law out, without training.

For each of H steps, with base forecasts f of n series and draws z of their law,

    mean: argmin over feasible u of |u - f|_Q^2,      draw: argmin over feasible u of |u - z|_Q^2.

A feasible u adds up and obeys the bounds and fixed values. The weight ``W = Q^-1`` is a member of the family of
``learned``, given by its numbers or by a name:

| metric     | weight W                                                                                   |
|------------|--------------------------------------------------------------------------------------------|
| middle     | between the others, learned from past errors if any: the default where spreads are known     |
| oblique    | the covariance of the errors, scaled to the spreads; without errors the spreads squared     |
| orthogonal | I, as MinT's ols                                                                           |
| structural | diag(|S| 1), as MinT's wls_struct, the default for means alone                              |

The law of the draws z is separate from the metric, see ``dependence``. An immutable node keeps its forecast, clipped at
its bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from probhard.constraints import Box, Constraint, Hierarchy, LinearEquality
from probhard.errors import InfeasibleError, ParameterError, ShapeError, check_choice
from probhard.forecasting.reconciliation.dependence import COVARIANCES
from probhard.forecasting.reconciliation.family import MetricWeights, middle
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.joint_law import floored
from probhard.forecasting.reconciliation.learned import learn_from_errors
from probhard.forecasting.reconciliation.result import Reconciled, mean_of_feasible
from probhard.laws import Diagonal, LocationScale, LowRank
from probhard.metric import DiagonalMetric, LowRankMetric
from probhard.projection.layer import DPPL

__all__ = ["CHUNK", "METRICS", "Reconciled", "Reconciliation", "everywhere"]

METRICS = ("middle", "oblique", "orthogonal", "structural")
CHUNK = 2_000_000  # numbers per projection, to bound the memory


@dataclass(frozen=True, eq=False)
class Reconciliation:
    """The constraints on forecasts of n series over H steps, and the metric of the projection.

    Args:
        hierarchy: The sums, with immutable nodes if any.
        metric: One of ``METRICS``, or numbers such as those of ``learn_metric``; None chooses by what is known.
        nonnegative: Whether all series are at least 0.
        upper: Upper bounds: a number, (n,) or (H, n); inf or NaN for none.
        fixed: Values of fixed nodes: a number, (n,) or (H, n); NaN for free nodes.
        on_failure: ``"raise"``, or ``"flag"`` to mark infeasible points with NaN.
        covariance: Law of the draws: ``"errors"`` (the default where there are some), ``"hierarchy"`` or
            ``"independent"``. Forecasts that are joint draws keep their own.

    Raises:
        ParameterError: If the metric, the covariance or ``on_failure`` is unknown.
    """

    hierarchy: Hierarchy
    metric: str | MetricWeights | None = None
    nonnegative: bool = False
    upper: Any = None
    fixed: Any = None
    on_failure: str = "raise"
    covariance: str | None = None

    def __post_init__(self) -> None:
        check_choice("on_failure", self.on_failure, ("raise", "flag"))
        if self.metric is not None and not isinstance(self.metric, MetricWeights):
            check_choice("metric", self.metric, METRICS)
        if self.covariance is not None:
            check_choice("covariance", self.covariance, COVARIANCES)

    def __call__(self, base: Forecasts, samples: int = 1000, seed: int = 0) -> Reconciled:
        """Reconcile base forecasts.

        Args:
            base: Forecasts of all n series over H steps.
            samples: Number of draws S, if the forecasts have none.
            seed: Seed of the draws.

        Returns:
            The reconciled law.

        Raises:
            ProbhardError: If shapes or parameters are invalid, or a step is infeasible and ``on_failure="raise"``.
        """
        shape = self.check(base)
        if samples < 1:
            raise ParameterError(f"Got samples={samples}.", "Draws represent the law.", "Pass at least 1.")
        if not 0 <= seed < 2**63:
            raise ParameterError(
                f"Got seed={seed}.", "It seeds a torch generator.", "Pass a number from 0 to 2^63 - 1."
            )
        base = self.dependent(base)
        before = None if base.certain else base.drawn(samples, torch.Generator().manual_seed(seed))
        result = Reconciled.empty(shape, before, self.exact(base))
        numbers = self.weights(base)
        weight, pending = self.weight(base, numbers), self._groups(base, numbers)
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
        """Check that forecasts have all n nodes; return their steps and series, (H, n).

        Raises:
            ShapeError: If the number of series is not n.
        """
        shape = base.shape
        if shape[1] != self.hierarchy.variables:
            raise ShapeError(
                f"There are forecasts of {shape[1]} series, the hierarchy has {self.hierarchy.variables}.",
                "Every node needs a forecast, aggregates first.",
                "Add the missing nodes, or sum bottom forecasts with Forecasts.summed.",
            )
        return shape

    def constraint(self, steps: np.ndarray, shape: tuple[int, int]) -> Constraint:
        """Build the constraint on some steps.

        Args:
            steps: Numbers of k steps with the same fixed nodes, (k,).
            shape: All steps and series, (H, n).
        """
        constraint: Constraint = self.hierarchy
        value = everywhere(self.fixed, np.nan, shape)[steps]
        nodes = np.flatnonzero(~np.isnan(value[0]))
        if len(nodes):
            rows = sp.csr_array(sp.eye_array(shape[1], format="csr")[nodes])
            constraint = constraint & LinearEquality(rows, torch.from_numpy(value[:, nodes]), rank="reveal")
        if not self._bounded:
            return constraint
        return constraint & Box(*map(torch.from_numpy, self._bounds(steps, shape)))

    def _bounds(self, steps: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return lower and upper bounds of k steps, (k, n) each."""
        upper = everywhere(self.upper, np.inf, shape)[steps]
        upper = np.where(np.isnan(upper), np.inf, upper)
        return np.full_like(upper, 0.0 if self.nonnegative else -np.inf), upper

    def exact(self, base: Forecasts) -> bool:
        """Return whether the reconciled marginals are exactly normal, so that their spreads are known."""
        return base.stddev is not None and not self._bounded and not (base.summing and self.fixed is not None)

    def chosen(self, base: Forecasts) -> str:
        """Return the name of the metric for these forecasts; "learned" for numbers."""
        if isinstance(self.metric, MetricWeights):
            return "learned"
        return self.metric or ("structural" if base.spread is None and base.errors is None else "middle")

    def weights(self, base: Forecasts) -> MetricWeights:
        """Return the numbers of the metric for these forecasts; those of "middle" are learned from past errors."""
        if isinstance(self.metric, MetricWeights):
            return self.metric
        known, name = base.error_correlation is not None, self.chosen(base)
        if name == "middle":
            return self._middle(base)
        named = {"oblique": MetricWeights(1.0, float(known)), "orthogonal": MetricWeights(0.0, 0.0)}
        return {**named, "structural": MetricWeights(0.0, 0.0, 1.0)}[name]

    def _middle(self, base: Forecasts) -> MetricWeights:
        if base.errors is None or base.error_correlation is None:
            return middle(0)
        return learn_from_errors(torch.from_numpy(base.errors), base.error_correlation, self.hierarchy)

    def dependent(self, base: Forecasts) -> Forecasts:
        """Set the joint law of forecasts that have none.

        Raises:
            ParameterError: If there are no errors to take it from.
        """
        return base.dependent(
            self.covariance or ("hierarchy" if base.error_correlation is None else "errors"), self.hierarchy
        )

    @property
    def _bounded(self) -> bool:
        return self.nonnegative or self.upper is not None

    def _groups(self, base: Forecasts, weights: MetricWeights) -> list[np.ndarray]:
        """Group the steps by their fixed nodes, few enough at a time where a metric or law has a factor."""
        shape, columns = base.shape, 1
        group = np.zeros(shape[0], dtype=np.int64)
        if self.fixed is not None:
            free = np.isnan(everywhere(self.fixed, np.nan, shape))
            group = np.unique(free, axis=0, return_inverse=True)[1].ravel()
        if weights.correlation and base.error_correlation is not None:
            columns = base.error_correlation.factor_size
        size = max(1, 5 * CHUNK // (shape[1] * columns)) if columns > 1 else max(1, shape[0])
        groups = [np.flatnonzero(group == i) for i in range(group.max(initial=-1) + 1)]
        return [part for steps in groups for part in np.array_split(steps, -(-len(steps) // size))]

    def weight(
        self, base: Forecasts, weights: MetricWeights | None = None
    ) -> Callable[[np.ndarray], DiagonalMetric | LowRankMetric]:
        """Return a function from numbers of steps, (k,), to their metric.

        Args:
            base: The forecasts.
            weights: The numbers of the metric, if known already.

        Raises:
            ParameterError: If the metric needs spreads and the forecasts have none.
        """
        weights, spread, sizes = weights or self.weights(base), base.spread, self.hierarchy.sizes
        if spread is None and base.errors is not None:  # as MinT does
            with np.errstate(invalid="ignore"):
                errors = np.where(np.isnan(base.errors), 0.0, base.errors)
                spread = np.broadcast_to(np.sqrt(np.square(errors).mean(0)), base.shape)
        if spread is None:
            if weights.exponent or weights.correlation:
                raise ParameterError(
                    f"The metric {self.chosen(base)!r} got forecasts without spreads.",
                    "It moves uncertain series more than others.",
                    "Add intervals, quantiles or several draws to the forecasts, or use the metric 'structural'.",
                )
            spread = np.ones(base.shape)
        size = torch.from_numpy(np.zeros(base.shape) if base.mean is None else base.mean)
        stddev = floored(size, torch.from_numpy(np.ascontiguousarray(spread)))

        def metric(steps: np.ndarray) -> DiagonalMetric | LowRankMetric:
            weight = weights.weight(stddev[steps], base.error_correlation, sizes)
            if isinstance(weight, LowRank):
                return LowRankMetric(weight.factor, weight.diagonal_part)
            return DiagonalMetric(weight.diagonal())

        return metric

    def _fill(
        self, result: Reconciled, steps: np.ndarray, constraint: Constraint, base: Forecasts, layer: DPPL
    ) -> None:
        """Project the mean and draws of some steps into ``result``."""
        bounds = self._bounds(steps, base.shape)
        if base.mean is not None:
            result.mean[steps] = self._project(base.mean[steps], bounds, constraint, layer)
        if result.draws is None or result.before is None:
            return
        chunks = -(-len(result.draws) * len(steps) * base.shape[1] // CHUNK)
        for chunk in np.array_split(np.arange(len(result.draws)), chunks):
            entries = np.ix_(chunk, steps)
            result.draws[entries] = self._project(result.before[entries], bounds, constraint, layer)
        if base.mean is None:
            result.mean[steps] = mean_of_feasible(result.draws[:, steps])
        elif base.stddev is not None and result.spread is not None:
            mean, stddev = torch.from_numpy(base.mean[steps]), torch.from_numpy(base.stddev[steps])
            cov = Diagonal.from_stddev(stddev) if base.correlation is None else base.correlation.scaled(stddev)
            result.spread[steps] = stddev if base.summing else layer(LocationScale(mean, cov), constraint).scale

    def _project(
        self, points: np.ndarray, bounds: tuple[np.ndarray, np.ndarray], constraint: Constraint, layer: DPPL
    ) -> np.ndarray:
        """Project points (..., k, n) to the nearest feasible ones; NaN if the projection did not converge."""
        z, held = torch.from_numpy(points), self.hierarchy.system.held
        if held is not None:
            lower, upper = (torch.from_numpy(x)[..., held] for x in bounds)
            z = z.index_copy(-1, held, z[..., held].clamp(lower, upper))
        solution = layer.project(z, constraint)
        return torch.where(solution.stats.converged.unsqueeze(-1), solution.value, torch.nan).numpy()


def everywhere(value: Any, missing: float, shape: tuple[int, int]) -> np.ndarray:
    """Broadcast bounds or fixed values to every step and series.

    Args:
        value: A number, (n,), (H, n) or None.
        missing: Stands for None.
        shape: (H, n).

    Returns:
        A read-only array, (H, n).

    Raises:
        ShapeError: If the value does not broadcast.
    """
    array = np.asarray(missing if value is None else value, dtype=np.float64)
    try:
        return np.broadcast_to(array, shape)
    except ValueError as error:
        raise ShapeError(
            f"Bounds or fixed values have shape {array.shape}, there are {shape[0]} steps of {shape[1]} series.",
            "They apply to a series at every step, or at one step.",
            f"Pass one number, or shape {(shape[1],)} or {shape}.",
        ) from error
