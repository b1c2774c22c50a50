"""Forecasts that were made by anyone, made coherent: arrays in, a coherent law out, nothing is trained.

For each of H steps, with base forecasts f of n series and draws z of their law,

    mean: argmin over u of |u - f|_Q^2,      draw: argmin over u of |u - z|_Q^2,      u feasible:

sums add up, and bounds and fixed nodes hold where there are any. ``Q^-1`` is ``diag(s^2)``, the series' own variances
(oblique), ``I`` (orthogonal, MinT's ols) or ``diag(S 1)`` (structural, MinT's wls_struct). Quantiles ``q_p`` stand for

    X = q(Z),      Z ~ N(0, 1),      q linear between the points (Phi^-1(p), q_p) and beyond the first and the last,

which is the normal law where they are normal. Series are independent of each other unless draws say otherwise; a mean
counts as the median where no median is given. A node that is immutable keeps its own law, clipped at its bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from scipy.special import ndtr, ndtri

from probhard.constraints import Box, Constraint, Hierarchy, LinearEquality
from probhard.errors import InfeasibleError, ParameterError, ShapeError, check_choice
from probhard.forecasting.data import summed
from probhard.metric import DiagonalMetric
from probhard.projection import DPPL

METRICS = ("oblique", "orthogonal", "structural")
CHUNK = 2_000_000  # numbers that are projected at a time
STRAIGHT = 1e-3  # of the spread: how far quantiles may be from normal ones and count as these
CERTAIN = 1e-3  # of the smallest spread of a step: what a spread of 0 counts as in the oblique metric


@dataclass(frozen=True, eq=False)
class Forecasts:
    """Forecasts of n series over H steps, not coherent: means, and normal laws, quantiles or draws if there are any.

    Args:
        mean: (H, n); None takes the mean of the reconciled draws.
        stddev: Of independent normal laws around the means, (H, n).
        draws: (S, H, n), dependent as they are; beside another law they are its draws.
        quantiles: Normal scores of their probabilities, ascending, (Q,), and their values, (Q, H, n).
    """

    mean: np.ndarray | None = None
    stddev: np.ndarray | None = None
    draws: np.ndarray | None = None
    quantiles: tuple[np.ndarray, np.ndarray] | None = None

    def __post_init__(self) -> None:
        parts = {"mean": self.mean, "stddev": self.stddev, "draws": self.draws}
        for name, array in {**parts, "quantiles": self.quantiles and self.quantiles[1]}.items():
            if array is None:
                continue
            bad = ~np.isfinite(array) | ((array < 0) if name == "stddev" else False)
            if bad.any():
                step, series = np.argwhere(bad)[0][-2:]
                raise ParameterError(
                    f"{bad.sum()} numbers of the forecasts' {name} are NaN, infinite or, of spreads, negative; the "
                    f"first is at step {step} of series {series}.",
                    "Nothing can be projected from there.",
                    "Fill in the missing forecasts.",
                )

    @classmethod
    def of_quantiles(
        cls,
        probabilities: Sequence[float],  # (Q,), each between 0 and 1
        values: np.ndarray,  # (Q, H, n)
        mean: np.ndarray | None = None,  # (H, n)
    ) -> Forecasts:
        """From quantiles; those that cross are sorted."""
        known, values = np.asarray(probabilities, dtype=np.float64), np.asarray(values, dtype=np.float64)
        if len(known) != len(values) or len(set(known)) != len(known) or not ((known > 0) & (known < 1)).all():
            raise ParameterError(
                f"There are {len(values)} quantiles of the probabilities {known.tolist()}.",
                "Each belongs to one probability between 0 and 1.",
                "Give every probability once, such as 0.1, 0.5 and 0.9.",
            )
        if mean is not None and not np.isclose(known, 0.5).any():
            known, values = np.append(known, 0.5), np.concatenate([values, mean[None]])
        if len(known) < 2:
            return cls(mean=values[0] if mean is None else mean)
        order = np.argsort(known)
        scores, values = ndtri(known[order]), np.sort(values[order], axis=0)
        line = np.linalg.pinv(np.stack([np.ones_like(scores), scores], -1)) @ values.reshape(len(scores), -1)
        centre, spread = line.reshape(2, *values.shape[1:])
        fitted = centre + spread * scores[:, None, None]
        if (np.abs(fitted - values) <= STRAIGHT * spread + 1e-12 * np.abs(values)).all():
            return cls(centre if mean is None else mean, np.maximum(spread, 0.0))
        return cls(mean, quantiles=(scores, values))

    @property
    def shape(self) -> tuple[int, int]:
        """Steps and series, (H, n)."""
        found = [x for x in (self.mean, self.draws, self.quantiles and self.quantiles[1]) if x is not None]
        if not found:
            raise ParameterError("There are no forecasts.", "Nothing is to be reconciled.", "Pass means or draws.")
        return found[0].shape[-2], found[0].shape[-1]

    @property
    def certain(self) -> bool:
        """Whether there is nothing but means."""
        return self.stddev is None and self.draws is None and self.quantiles is None

    def at(self, steps: np.ndarray) -> Forecasts:
        """Those of some steps."""
        mean, stddev = (None if x is None else x[steps] for x in (self.mean, self.stddev))
        quantiles = None if self.quantiles is None else (self.quantiles[0], self.quantiles[1][:, steps])
        return Forecasts(mean, stddev, None if self.draws is None else self.draws[:, steps], quantiles)

    @property
    def spread(self) -> np.ndarray | None:
        """Standard deviations, (H, n): given, of the law of quantiles, or of the draws if there are several."""
        if self.stddev is not None:
            return self.stddev
        if self.quantiles is not None:
            return _spread_of(*self.quantiles)
        return None if self.draws is None or len(self.draws) < 2 else self.draws.std(0, ddof=1)

    def drawn(self, samples: int, generator: torch.Generator) -> np.ndarray:
        """Draws, (S, H, n): their own, or so many."""
        if self.draws is not None:
            return self.draws
        noise = torch.randn(samples, *self.shape, dtype=torch.float64, generator=generator).numpy()
        if self.quantiles is None:
            assert self.mean is not None
            return self.mean + self.stddev * noise
        scores, values = self.quantiles
        piece = np.clip(np.searchsorted(scores, noise) - 1, 0, len(scores) - 2)  # (S, H, n)
        left, right = (np.take_along_axis(values, piece + i, 0) for i in (0, 1))
        return left + (noise - scores[piece]) / (scores[piece + 1] - scores[piece]) * (right - left)

    def summed(self, hierarchy: Hierarchy, samples: int = 1000, seed: int = 0) -> Forecasts:
        """Forecasts of all series from these of the bottom ones."""
        mean = None if self.mean is None else summed(hierarchy, self.mean)
        generator = torch.Generator().manual_seed(seed)
        return Forecasts(mean, draws=None if self.certain else summed(hierarchy, self.drawn(samples, generator)))


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
        shape = base.shape
        if shape[1] != self.hierarchy.variables:
            raise ShapeError(
                f"There are forecasts of {shape[1]} series, the hierarchy has {self.hierarchy.variables}.",
                "Every node has a forecast, aggregates first.",
                "Add the missing nodes, or sum bottom forecasts with Forecasts.summed.",
            )
        before = None if base.certain else base.drawn(samples, torch.Generator().manual_seed(seed))
        result = Reconciled(
            np.full(shape, np.nan),
            None if before is None else np.full_like(before, np.nan),
            np.full(shape, np.nan) if base.stddev is not None and not self._bounded else None,
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
            result.spread[steps] = layer(law, constraint).scale.numpy()

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


def _spread_of(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The standard deviation (H, n) of q(Z), from the moments of a normal law on each piece of q, ends included."""
    edges = np.array([-np.inf, *scores[1:-1], np.inf])
    slopes = np.diff(values, axis=0) / np.diff(scores)[:, None, None]  # (Q - 1, H, n)
    levels = values[:-1] - slopes * scores[:-1, None, None]
    density = np.exp(-np.square(edges) / 2) / np.sqrt(2 * np.pi)
    weighted = np.where(np.isfinite(edges), edges, 0.0) * density
    mass, first = np.diff(ndtr(edges)), -np.diff(density)
    second = mass - np.diff(weighted)
    shift = values.mean(0)  # else digits are lost where values are far from 0
    m, f, s = (part[:, None, None] for part in (mass, first, second))
    a, b = levels - shift, slopes
    mean = (a * m + b * f).sum(0)
    square = (a**2 * m + 2 * a * b * f + b**2 * s).sum(0)
    return np.sqrt(np.maximum(square - mean**2, 0.0))


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
