"""A certificate: what was checked, how far it was from the constraints before, and how far it is now.

Violations are those of ``Constraint.violation`` and ``Constraint.relative_violation``, over means and draws alike; a
point passes if it is finite, was called converged, and its relative violation is at most ``TOLERANCE``.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
import typer
from torch import Tensor

import probhard
from probhard._util.atomic import replacing
from probhard.constraints import Constraint
from probhard.errors import ParameterError

TOLERANCE = 1e-9
INFEASIBLE = 3  # exit status if any point is
LISTED = 1000  # flagged fields that are named one by one


@dataclass
class Extent:
    """The worst over all points seen: violations, and the range of their values."""

    violation: float = 0.0
    relative: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    points: int = 0

    def add(self, constraint: Constraint, points: Tensor, size: Tensor) -> Tensor:
        """Take in points (*samples, fields, n); returns their relative violations, NaN for points with NaN."""
        relative = constraint.relative_violation(points, size)
        kept = torch.isfinite(points).all(-1)
        if bool(kept.any()):
            self.violation = max(self.violation, float(constraint.violation(points)[kept].max()))
            self.relative = max(self.relative, float(relative[kept].max()))
            self.smallest = min(self.smallest, float(points[kept].min()))
            self.largest = max(self.largest, float(points[kept].max()))
            self.points += int(kept.sum())
        return relative


@dataclass
class Certificate:
    """What a command certifies of its output.

    Args:
        setting: Facts of the run: input, hash, constraints, metric, seed.
        before: Of the points as they came.
        after: Of the points as they are written.
        flagged: Fields with points that are not feasible, each as a record.
    """

    setting: dict[str, Any]
    before: Extent = field(default_factory=Extent)
    after: Extent = field(default_factory=Extent)
    flagged: list[dict[str, Any]] = field(default_factory=list)
    infeasible: int = 0

    @property
    def feasible(self) -> bool:
        """Whether every point is."""
        return self.infeasible == 0

    def flag(self, points: int, **record: Any) -> None:
        """Note points of one field that are not feasible."""
        self.infeasible += points
        if len(self.flagged) < LISTED:
            self.flagged.append(record)

    def content(self) -> dict[str, Any]:
        """All of it, as plain values."""
        seen = {name: _plain(extent) for name, extent in (("before", self.before), ("after", self.after))}
        counts = {"checked": self.after.points + self.infeasible, "infeasible": self.infeasible}
        return {
            "feasible": self.feasible,
            **counts,
            **seen,
            "tolerance": TOLERANCE,
            **self.setting,
            "flagged": self.flagged,
            "versions": versions(),
        }

    def save(self, path: Path) -> None:
        """Write JSON, replacing the file in one step."""
        text = json.dumps(self.content(), indent=2, allow_nan=False)
        with replacing(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")

    def table(self) -> str:
        """The same as text."""
        rows = [("largest violation", "violation"), ("  relative", "relative")]
        rows += [("smallest value", "smallest"), ("largest value", "largest")]
        lines = [f"{'':18s}{'before':>14s}{'after':>14s}"]
        for title, name in rows:
            seen = [f"{getattr(x, name):14.6g}" if x.points else f"{'-':>14s}" for x in (self.before, self.after)]
            lines.append(f"{title:18s}" + "".join(seen))
        checked = self.after.points + self.infeasible
        verdict = "all feasible" if self.feasible else f"{self.infeasible} NOT feasible and written as NaN"
        lines.append(f"{checked} means and draws checked, {verdict}.")
        lines += [f"  {flag['field']}: {flag['reason']}" for flag in self.flagged[:5]]
        if len(self.flagged) > 5:
            lines.append(f"  and {len(self.flagged) - 5} fields more, in the certificate.")
        return "\n".join(lines)


def _plain(extent: Extent) -> dict[str, Any]:
    return {name: value if name == "points" or extent.points else None for name, value in vars(extent).items()}


def conclude(certificate: Certificate, path: Path, text: str) -> None:
    """Save the certificate beside what was written, print a text, and end with a status that tells."""
    beside = path.with_suffix(".json")
    certificate.save(beside)
    typer.echo(f"{text}\nCertificate: {beside}")
    if not certificate.feasible:
        raise typer.Exit(INFEASIBLE)


def versions() -> dict[str, str]:
    """Of everything that the numbers depend on."""
    found = {"probhard": probhard.__version__, "torch": str(torch.__version__), "numpy": np.__version__}
    return {**found, "scipy": scipy.__version__, "python": platform.python_version()}


def sha256(path: Path) -> str:
    """Of a file, or of a folder's files with their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        if path.is_dir():
            digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def check_path(path: Path, option: str, suffixes: tuple[str, ...], source: Path) -> None:
    """Refuse a path that cannot be written, or that is the input."""
    if path.suffix not in suffixes or not path.parent.is_dir() or path.resolve() == source.resolve():
        raise ParameterError(
            f"{option} {path} cannot be written.",
            f"It must end in {' or '.join(suffixes)}, lie in a folder that exists, and not be the input.",
            "Pass another path.",
        )
