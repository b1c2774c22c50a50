"""Runs of the conformal table: random splits of exchangeable units, and rolling origins.

A model is fixed before its units are seen, so every unit is scored once. A split is a choice of calibration units,
whose scores give the threshold; the others measure coverage. For rolling origins the calibration units of an origin are
all those before it. Then nothing is promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from hierarchicalforecast.probabilistic_methods import Conformal
from torch import Tensor, nn

from experiments.conformal.tables import EACH, FAMILY, JOINT, PEER
from experiments.conformal.units import DATASETS, FIELDS, TREE, Case, field_case, origin_case, tree_case
from probhard.calibration import ConformalSet, Promise, conformal

CASES = (*FIELDS, TREE, *DATASETS)
LEVELS = (0.8, 0.9)
SPLITS, CALIBRATION, UNITS = 200, 100, 600
FIRST = 0.5  # share of the rolling origins that only calibrate
DRAWS = 20


@dataclass(frozen=True)
class Scored:
    """The sets of all units of a case, with one threshold to be chosen, and the scores of their targets."""

    case: Case

    @cached_property
    def joint(self) -> ConformalSet:
        """Joint sets."""
        return conformal(self.case.model, self.case.units, 0.5).region(self.case.units)

    @cached_property
    def family(self) -> ConformalSet:
        """Bands over the family."""
        return conformal(self.case.model, self.case.units, 0.5, self.case.family).region(self.case.units)

    @cached_property
    def target(self) -> Tensor:
        """Targets, (count, n)."""
        assert self.case.units.target is not None
        return self.case.units.target

    @cached_property
    def values(self) -> Tensor:
        """Functionals of the targets, (count, k)."""
        return self.case.family.rows(self.target.shape[-1]).apply(self.target)

    @cached_property
    def free(self) -> Tensor:
        """Functionals that the constraint leaves free, (k,) bool."""
        return (self.family.deviations.scales > 0).any(0)

    @cached_property
    def sizes(self) -> Tensor:
        """Mean absolute value of each functional, for relative widths, (k,)."""
        return self.values.abs().mean(0)

    @cached_property
    def relative(self) -> Tensor:
        """Deviations of functionals in units of their standard deviations, (count, k)."""
        scale = self.family.deviations.scales
        deviation = (self.values - self.family.deviations.centers).abs()
        return torch.where(scale > 0, deviation / torch.where(scale > 0, scale, 1.0), 0.0)

    @cached_property
    def scores(self) -> dict[str, Tensor]:
        """Scores of the targets, (count,), by kind of set."""
        return {JOINT: self.joint.score(self.target), FAMILY: self.family.score(self.target)}

    @cached_property
    def peer(self) -> tuple[np.ndarray, np.ndarray]:
        """For the same means in hierarchicalforecast: its matrix P (bottoms, n), and base forecasts (n, count)."""
        assert self.case.summation is not None
        tangent = self.joint.deviations.tangent
        assert tangent is not None
        n, bottoms = self.case.summation.shape
        matrix = tangent.apply(torch.eye(n, dtype=torch.float64)).mT.numpy()  # the columns of the projection
        return matrix[n - bottoms :], self.case.units.inputs.mT.numpy()

    def intervals(self, kind: str, calibration: np.ndarray, test: np.ndarray, level: float) -> tuple[Tensor, Tensor]:
        """Ends (test, k) of the intervals of functionals, from calibration units to test units."""
        if kind == PEER:
            return self._peer_intervals(calibration, test, level)
        if kind == EACH:
            rank = Promise.of(torch.zeros(len(calibration)), level, True, None).rank
            padded = nn.functional.pad(self.relative[calibration].sort(0).values, (0, 0, 0, 1), value=torch.inf)
            half = self.family.deviations.scales[test] * padded[rank - 1]
            half = torch.where(self.free, half, 0.0)
            center = self.family.deviations.centers[test]
            lower, upper = center - half, center + half
            return (lower.clamp(min=0), upper) if self.case.summation is not None else (lower, upper)
        sets = self.joint if kind == JOINT else self.family
        promise = Promise.of(self.scores[kind][calibration], level, True, None)
        lower, upper = replace(sets, promise=promise).intervals()
        return lower[test], upper[test]

    def _peer_intervals(self, calibration: np.ndarray, test: np.ndarray, level: float) -> tuple[Tensor, Tensor]:
        P, base = self.peer
        percent = round(100 * level)
        found = Conformal(
            self.case.summation, P, base[:, test], self.target.mT.numpy()[:, calibration], base[:, calibration]
        )
        ends = found.get_prediction_levels({}, [percent])
        return tuple(torch.from_numpy(ends[f"{end}-{percent}"].T) for end in ("lo", "hi"))  # type: ignore[return-value]

    def inside(self, kind: str, calibration: np.ndarray, test: np.ndarray, level: float) -> tuple[Tensor, ...]:
        """For every test unit: if all is covered, shares of covered functionals and negative ends, relative width."""
        lower, upper = self.intervals(kind, calibration, test, level)
        values, sizes, free = self.values, self.sizes, self.free
        if kind == JOINT:
            values, sizes, free = self.target, self.target.abs().mean(0), (self.joint.deviations.scales > 0).any(0)
        slack = 1e-9 * sizes.mean()
        held = ((lower - slack <= values[test]) & (values[test] <= upper + slack))[:, free]
        if kind in (JOINT, FAMILY):
            promise = Promise.of(self.scores[kind][calibration], level, True, None)
            obeys = self.joint.obeys(self.target)[test]
            covered = (self.scores[kind][test] <= promise.threshold) & obeys
        else:
            covered = held.all(-1)
        width = (upper - lower)[:, free].sum(-1) / sizes[free].sum()
        return covered.double(), held.double().mean(-1), (lower < 0).double().mean(-1), width


def kinds_of(case: Case) -> tuple[str, ...]:
    """The kinds of sets that are measured on a case."""
    return (JOINT, FAMILY, EACH) if case.summation is None else (JOINT, FAMILY, EACH, PEER)


def split_lines(case: Case, splits: int = SPLITS) -> list[dict[str, Any]]:
    """Result lines of a case whose units are exchangeable.

    Args:
        case: The case.
        splits: Number of random splits.
    """
    scored, random = Scored(case), np.random.default_rng(0)
    orders = [random.permutation(len(scored.target)) for _ in range(splits)]
    lines = []
    for kind in kinds_of(case):
        for level in LEVELS:
            parts = [scored.inside(kind, order[:CALIBRATION], order[CALIBRATION:], level) for order in orders]
            covered, share, negative, width = (torch.stack([part[i].mean() for part in parts]) for i in range(4))
            promise = Promise.of(torch.zeros(CALIBRATION), level, True, None)
            # of one split: the coverage of a threshold has a beta law, and the test units are binomial
            p, tests = promise.coverage, len(scored.target) - CALIBRATION
            expected = (p * (1 - p) * (1 / (CALIBRATION + 2) + (1 - 1 / (CALIBRATION + 2)) / tests)) ** 0.5
            measured = covered if kind in (JOINT, FAMILY) else share
            lines.append(
                {
                    "case": case.name,
                    "sets": kind,
                    "level": level,
                    "exchangeable": True,
                    "promised": promise.coverage,
                    "measured": float(measured.mean()),
                    "spread": float(measured.std()),
                    "expected_spread": expected,
                    "lowest": float(measured.quantile(0.05)),
                    "highest": float(measured.quantile(0.95)),
                    "at_once": float(covered.mean()),
                    "each": float(share.mean()),
                    "negative": float(negative.mean()),
                    "width": float(width.mean()),
                    "splits": splits,
                    "units": CALIBRATION,
                    **_shape(scored),
                }
            )
    return lines


def origin_lines(case: Case) -> list[dict[str, Any]]:
    """Result lines of a case whose units are rolling origins, in the order of time.

    Args:
        case: The case.
    """
    scored = Scored(case)
    count = len(scored.target)
    first = int(FIRST * count)
    lines = []
    for kind in kinds_of(case):
        for level in LEVELS:
            parts = [scored.inside(kind, np.arange(t), np.array([t]), level) for t in range(first, count)]
            covered, share, negative, width = (torch.cat([part[i] for part in parts]) for i in range(4))
            bounded = torch.isfinite(width)
            lines.append(
                {
                    "case": case.name,
                    "sets": kind,
                    "level": level,
                    "exchangeable": False,
                    "at_once": float(covered.mean()),
                    "each": float(share.mean()),
                    "negative": float(negative.mean()),
                    "width": float(width[bounded].mean()) if bool(bounded.any()) else None,
                    "unbounded": int((~bounded).sum()),
                    "origins": count - first,
                    "units": first,
                    **_shape(scored),
                }
            )
    return lines


def _shape(scored: Scored) -> dict[str, Any]:
    """Sizes of a case, and the worst relative violation of its means and draws."""
    case, center = scored.case, scored.joint.deviations.center
    some = slice(0, 50)
    inputs, context = case.units.inputs[some], case.units.context
    batch = (inputs, None, None, None if context is None else context[some])
    draws = case.model.sample(batch, DRAWS, torch.Generator().manual_seed(0))
    violation = max(
        float(case.model.constraint(case.units).relative_violation(center).max()),
        float(case.model.constraint(batch).relative_violation(draws).max()),
    )
    return {
        "variables": center.shape[-1],
        "functionals": len(scored.free),
        "left_out": int((~scored.free).sum()),
        "obey": float(scored.joint.obeys(scored.target).double().mean()),
        "violation": violation,
    }


def cases(names: Sequence[str], quick: bool = False) -> Iterator[tuple[Case, bool]]:
    """The named cases, by default all, and whether their units are exchangeable.

    Args:
        names: Some of ``CASES``.
        quick: Few units.
    """
    count = 200 if quick else UNITS
    for name in names or CASES:
        if name in FIELDS:
            yield field_case(name, count), True
        elif name == TREE:
            yield tree_case(count), True
        else:
            yield origin_case(name), False


def pieces(names: Sequence[str], quick: bool = False) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The work of the table, case by case.

    Args:
        names: As for ``cases``.
        quick: Few units and splits.
    """
    for case, exchangeable in cases(names, quick):
        yield partial(split_lines, case, 20 if quick else SPLITS) if exchangeable else partial(origin_lines, case)
