"""Certificates: the largest violations of all means and draws before and after a projection.

They are those of ``Constraint.violation`` and ``Constraint.relative_violation``. A point passes if it is finite, its
projection converged, and its relative violation is at most ``TOLERANCE``.

Feasible is not plausible: a certificate also says how far the projection moved the means, in their own standard
deviations. Moves of many deviations mean that constraint and prediction contradict each other, for instance by units.
"""

from __future__ import annotations

import json
import math
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from probhard import __version__
from probhard._util.atomic import write_text
from probhard.constraints import Constraint

TOLERANCE = 1e-9
INFEASIBLE = 3  # exit status if any point is infeasible
IMPLAUSIBLE = 4  # exit status if means were moved implausibly far, or are far outside what the history supports
ROUNDING = 1e-12  # deviation, relative to a value, that is no deviation
FAR = 5.0  # deviations that count as far
FAR_TRAINED = 100.0  # the same for a network that was trained through the projection
FAR_SHARE = 0.1  # share of values moved far, from which constraint and prediction contradict each other
LISTED = 1000  # flagged fields that the certificate lists


@dataclass
class Extent:
    """Largest violations and the range of values over all points that were added."""

    violation: float = 0.0
    relative: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    points: int = 0

    def add(self, constraint: Constraint, points: Tensor, size: Tensor) -> Tensor:
        """Add points.

        Args:
            constraint: Constraint of the points.
            points: Points, (*samples, fields, n); those that are not finite are left out.
            size: Scale of the points, (*samples, fields, 1).

        Returns:
            Relative violations, (*samples, fields), NaN for points with NaN.
        """
        relative = constraint.relative_violation(points, size)
        finite = torch.isfinite(points).all(-1)
        if bool(finite.any()):
            self.violation = max(self.violation, float(constraint.violation(points)[finite].max()))
            self.relative = max(self.relative, float(relative[finite].max()))
            self.smallest = min(self.smallest, float(points[finite].min()))
            self.largest = max(self.largest, float(points[finite].max()))
            self.points += int(finite.sum())
        return relative


@dataclass
class Moves:
    """How far the projection moved means, in their own standard deviations.

    Args:
        limit: Deviations beyond which a move is implausible. A network that was trained through the projection is free
            in what the constraint fixes, so its moves may be larger.
    """

    limit: float = FAR
    total: float = 0.0
    worst: float = 0.0
    far: int = 0
    implausibly_far: int = 0
    values: int = 0

    def add(self, before: Tensor, after: Tensor, stddev: Tensor) -> None:
        """Add values and the standard deviations of their laws, of one shape; those of deviation 0 are left out."""
        known = (stddev > ROUNDING * before.abs()) & torch.isfinite(before) & torch.isfinite(after)
        moves = ((after - before).abs() / torch.where(known, stddev, 1.0))[known]
        if moves.numel():
            self.total += float(moves.sum())
            self.worst = max(self.worst, float(moves.max()))
            self.far += int((moves > FAR).sum())
            self.implausibly_far += int((moves > self.limit).sum())
            self.values += moves.numel()

    @property
    def implausible(self) -> bool:
        """Whether more than a tenth of the values was moved beyond the limit."""
        return self.implausibly_far > FAR_SHARE * self.values

    def content(self) -> dict[str, Any] | None:
        """Mean and worst move and the share of far ones; None without standard deviations."""
        if not self.values:
            return None
        share = self.far / self.values
        return {"mean": self.total / self.values, "worst": self.worst, "share_above_5": share}

    def lines(self) -> list[str]:
        """The moves in words."""
        if not self.values:
            return []
        share = self.far / self.values
        text = f"Means moved by {self.total / self.values:.2g} of their standard deviations on average, at most "
        lines = [f"{text}{self.worst:.2g}; {share:.1%} of the values by more than {FAR:g}."]
        if self.implausible:
            lines.append(
                "WARNING: constraint and prediction contradict each other. Check units, right-hand sides and axes."
            )
        return lines


@dataclass
class Certificate:
    """What a command certifies about its output.

    Args:
        setting: Facts of the run: input, hash, constraints, metric, seed.
        before: Extent of the input's points.
        after: Extent of the points that are written.
        flagged: One record for each field with infeasible points.
        infeasible: Number of infeasible points.
        moved: How far means were moved.
    """

    setting: dict[str, Any]
    before: Extent = field(default_factory=Extent)
    after: Extent = field(default_factory=Extent)
    flagged: list[dict[str, Any]] = field(default_factory=list)
    infeasible: int = 0
    moved: Moves = field(default_factory=Moves)

    @property
    def checked(self) -> int:
        """Number of means and draws that were checked."""
        return self.after.points + self.infeasible

    @property
    def feasible(self) -> bool:
        """Whether every point is feasible."""
        return self.infeasible == 0

    def flag(self, points: int, **record: Any) -> None:
        """Count infeasible points of one field, and keep a record of it."""
        self.infeasible += points
        if len(self.flagged) < LISTED:
            self.flagged.append(record)

    def content(self) -> dict[str, Any]:
        """The certificate as plain values, in the order of its file."""
        return {
            "feasible": self.feasible,
            "checked": self.checked,
            "infeasible": self.infeasible,
            "before": _plain(self.before),
            "after": _plain(self.after),
            "moved_in_deviations": self.moved.content(),
            "plausible": not self.moved.implausible,
            "tolerance": TOLERANCE,
            **self.setting,
            "flagged": self.flagged,
            "versions": versions(),
        }

    def save(self, path: Path) -> None:
        """Write JSON atomically."""
        text = json.dumps(self.content(), indent=2, allow_nan=False)
        write_text(path, text + "\n")

    def table(self) -> str:
        """The certificate as text."""
        rows = [("largest violation", "violation"), ("  relative", "relative")]
        rows += [("smallest value", "smallest"), ("largest value", "largest")]
        lines = [f"{'':18s}{'before':>14s}{'after':>14s}"]
        for title, name in rows:
            values = [f"{getattr(x, name):14.6g}" if x.points else f"{'-':>14s}" for x in (self.before, self.after)]
            lines.append(f"{title:18s}" + "".join(values))
        verdict = "all feasible" if self.feasible else f"{self.infeasible} NOT feasible and written as NaN"
        lines.append(f"{self.checked} means and draws checked, {verdict}.")
        lines += [f"  {flag['field']}: {flag['reason']}" for flag in self.flagged[:5]]
        if len(self.flagged) > 5:
            lines.append(f"  and {len(self.flagged) - 5} fields more, in the certificate.")
        return "\n".join([*lines, *self.moved.lines()])


def _plain(extent: Extent) -> dict[str, Any]:
    """An extent as plain values, None where it has no points."""
    return {name: value if name == "points" or extent.points else None for name, value in vars(extent).items()}


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {
        "probhard": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
    }
