"""Certificates: the largest violations of all means and draws before and after a projection.

They are those of ``Constraint.violation`` and ``Constraint.relative_violation``. A point passes if it is finite, its
projection converged, and its relative violation is at most ``TOLERANCE``.
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

from probhard import __version__
from probhard._util.atomic import replacing
from probhard.constraints import Constraint
from probhard.errors import ParameterError

TOLERANCE = 1e-9
INFEASIBLE = 3  # exit status if any point is infeasible
UNSUPPORTED = 4  # exit status if all are feasible, but far outside what the history supports
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
class Certificate:
    """What a command certifies about its output.

    Args:
        setting: Facts of the run: input, hash, constraints, metric, seed.
        before: Extent of the input's points.
        after: Extent of the points that are written.
        flagged: One record for each field with infeasible points.
        infeasible: Number of infeasible points.
    """

    setting: dict[str, Any]
    before: Extent = field(default_factory=Extent)
    after: Extent = field(default_factory=Extent)
    flagged: list[dict[str, Any]] = field(default_factory=list)
    infeasible: int = 0

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
            "tolerance": TOLERANCE,
            **self.setting,
            "flagged": self.flagged,
            "versions": versions(),
        }

    def save(self, path: Path) -> None:
        """Write JSON atomically."""
        text = json.dumps(self.content(), indent=2, allow_nan=False)
        with replacing(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")

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
        return "\n".join(lines)


def _plain(extent: Extent) -> dict[str, Any]:
    """An extent as plain values, None where it has no points."""
    return {name: value if name == "points" or extent.points else None for name, value in vars(extent).items()}


def conclude(certificate: Certificate, path: Path, text: str) -> None:
    """Save the certificate beside the output, and print a summary.

    Args:
        certificate: The certificate.
        path: File of the output.
        text: Summary to print.

    Raises:
        typer.Exit: Some points are infeasible (status 3).
    """
    certificate_path = path.with_suffix(".json")
    certificate.save(certificate_path)
    typer.echo(f"{text}\nCertificate: {certificate_path}")
    if not certificate.feasible:
        raise typer.Exit(INFEASIBLE)


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {
        "probhard": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
    }


def sha256(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder with their names."""
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
    """Check a path of output.

    Args:
        path: Path to write to.
        option: Option that named it.
        suffixes: Suffixes that it may have.
        source: Path of the input.

    Raises:
        ParameterError: It has another suffix, lies in no folder, or is the input.
    """
    if path.suffix not in suffixes or not path.parent.is_dir() or path.resolve() == source.resolve():
        raise ParameterError(
            f"{option} {path} cannot be written.",
            f"It must end in {' or '.join(suffixes)}, lie in a folder that exists, and not be the input.",
            "Pass another path.",
        )
