"""What conformal sets promise, and what was measured.

    threshold = the k-th smallest of n scores,      k = ceil((n + 1) level),
    P(score of a new unit <= threshold) >= k / (n + 1)

for exchangeable units; with equality if no two scores are equal. If k > n the threshold is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import Tensor

from probhard.errors import ParameterError


@dataclass(frozen=True)
class Promise:
    """What a conformal model promises.

    Args:
        level: The coverage that was asked for.
        units: Number n of calibration units.
        rank: ``k = ceil((n + 1) level)``.
        threshold: The k-th smallest score of the units; infinite if k > n.
        exchangeable: Whether the caller takes the units as exchangeable.
        functionals: Plain values of the family of functionals; None for joint sets.
        elements: Batch elements of one unit, which are covered at once.
    """

    level: float
    units: int
    rank: int
    threshold: float
    exchangeable: bool = True
    functionals: dict[str, Any] | None = None
    elements: int = 1

    @classmethod
    def of(
        cls, scores: Tensor, level: float, exchangeable: bool, functionals: dict[str, Any] | None, elements: int = 1
    ) -> Promise:
        """The promise of the scores (n * elements,) of calibration units; the largest of a unit counts.

        Raises:
            ParameterError: There is not a whole number of units.
        """
        if elements < 1 or len(scores) % elements:
            raise ParameterError(
                f"Got {len(scores)} batch elements and elements={elements}.",
                "That many consecutive batch elements form one unit.",
                "Pass the number of elements of one unit, such as slices of a sample, and whole units.",
            )
        scores = scores.unflatten(0, (-1, elements)).amax(-1)
        units = len(scores)
        rank = math.ceil((units + 1) * level - 1e-9)  # the product is rounded, and may be just above an integer
        threshold = math.inf if rank > units else float(scores.sort().values[rank - 1])
        return cls(level, units, rank, threshold, exchangeable, functionals, elements)

    @property
    def coverage(self) -> float:
        """The promised coverage ``k / (n + 1)``; 1 if sets are unbounded."""
        return min(1.0, self.rank / (self.units + 1))

    @property
    def bounded(self) -> bool:
        """Whether there were enough units for the level."""
        return self.rank <= self.units

    def record(self) -> dict[str, Any]:
        """Plain values to save."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Promise:
        """Restore a promise from the values that ``record`` returned.

        Raises:
            ParameterError: A field is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        record = {"elements": 1, **record}
        if set(record) != names:
            raise ParameterError(
                f"The saved conformal record has the fields {sorted(record)}.",
                f"This version reads {sorted(names)}.",
                "Calibrate the sets again.",
            )
        return cls(**record)

    def __str__(self) -> str:
        if not self.exchangeable:
            return (
                "No guarantee: the units are not taken as exchangeable, as with rolling origins of a time series. "
                f"The level {self.level:g} is a wish; compare it with the measured coverage."
            )
        what = "its target lies in its set"
        if self.functionals is not None:
            what = "all functionals of its target lie in their intervals at once"
        text = (
            f"With probability at least {self.rank}/{self.units + 1} = {self.coverage:.4f}, {what}, for a new unit. "
            f"This holds if the {self.units} calibration units and the new one are exchangeable, were not used for "
            "training, early stopping or calibrate, and have targets that obey the constraint. It is an average over "
            "draws of the calibration units and of the new one, not a promise for every input. The set carries it, "
            "not the quantiles of draws."
        )
        if not self.bounded:
            least = math.ceil(self.level / (1 - self.level) - 1e-9)
            text = (
                f"The sets are unbounded: {self.units} calibration units are too few for the level {self.level:g}, "
                f"which takes {least}. Every feasible point lies in the set."
            )
        return text


@dataclass(frozen=True)
class CoverageReport:
    """Promised and measured coverage of a batch, side by side; ``str`` is the certificate.

    Args:
        promised: ``k / (n + 1)``; None without a guarantee.
        measured: Share of the targets in their sets.
        level: The coverage that was asked for.
        units: Number of targets.
        obey: Share of the targets that obey the constraint.
        size: Mean width of the intervals.
        left_out: Functionals that the constraint fixes; they are not counted.
    """

    promised: float | None
    measured: float
    level: float
    units: int
    obey: float
    size: float
    left_out: int

    @classmethod
    def joined(cls, reports: Sequence[CoverageReport]) -> CoverageReport:
        """The report of several batches of one conformal model."""
        units = sum(report.units for report in reports)
        means = {
            name: sum(getattr(report, name) * report.units for report in reports) / units
            for name in ("measured", "obey", "size")
        }
        return replace(reports[0], units=units, left_out=max(report.left_out for report in reports), **means)

    def __str__(self) -> str:
        error = math.sqrt(self.measured * (1 - self.measured) / self.units)
        promised = f"level {self.level:g}, no guarantee" if self.promised is None else f"{self.promised:.4f}"
        lines = [
            f"promised coverage: {promised}",
            f"measured coverage: {self.measured:.4f} of {self.units} units (standard error {error:.4f})",
            f"targets that obey the constraint: {100 * self.obey:.4g} %",
            f"mean width: {self.size:.6g}",
        ]
        return "\n".join(
            lines + [f"functionals left out, fixed by the constraint: {self.left_out}"] * (self.left_out > 0)
        )
