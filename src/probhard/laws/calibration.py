"""The numbers of a calibration, applied to a law before its projection.

    C = D + G G^T   ->   diag(s) (own^2 D + shared^2 G G^T) diag(s),          s_i = by_group[groups_i] or 1.

D is what each variable has of its own, G G^T what variables share. A covariance without such parts is multiplied by
``own^2``; then ``own = shared``. The location stays, and so does the metric of the projection, which is that of the law
before: projected means do not move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import Covariance, Factored
from probhard.laws.distribution import LocationScale


@dataclass(frozen=True)
class Calibration:
    """A few positive numbers that correct the spread of a law.

    Args:
        own: Factor on the standard deviations of what each variable has of its own.
        shared: Factor on those of the correlated part; equal to ``own`` for covariances without parts.
        by_group: Factor for each group of variables; empty without groups.
        groups: The group of each variable, (n,); empty without groups.

    Raises:
        ParameterError: A factor is not positive and finite, or a variable belongs to no group.
    """

    own: float = 1.0
    shared: float = 1.0
    by_group: tuple[float, ...] = ()
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_group", tuple(float(x) for x in self.by_group))
        object.__setattr__(self, "groups", tuple(int(x) for x in self.groups))
        if not all(0 < x < math.inf for x in (self.own, self.shared, *self.by_group)):
            raise ParameterError(
                f"The factors of a calibration are {(self.own, self.shared, *self.by_group)}.",
                "They multiply standard deviations, so they must be positive and finite.",
                "Use calibrate, which fits them on a logarithmic scale.",
            )
        if bool(self.groups) != bool(self.by_group) or not set(self.groups) <= set(range(len(self.by_group))):
            raise ParameterError(
                f"The calibration has {len(self.by_group)} groups, and variables in {sorted(set(self.groups))}.",
                "Each variable belongs to one group, counted from 0.",
                "Pass one factor for each group, and one group for each variable.",
            )

    @property
    def proportional(self) -> bool:
        """Whether the calibrated covariance is a multiple of the one before."""
        return self.own == self.shared and len(set(self.by_group)) <= 1

    def apply(self, law: LocationScale) -> LocationScale:
        """The calibrated law.

        Args:
            law: The law before, over (*batch, n).

        Returns:
            A law with the same location and family.

        Raises:
            ParameterError: The weights of two parts differ, and the covariance has no such parts.
            ShapeError: The groups belong to another number of variables.
        """
        numbers = torch.tensor([self.own, self.shared, *self.by_group], dtype=torch.float64)
        labels = torch.tensor(self.groups, dtype=torch.int64) if self.groups else None
        return calibrated(law, numbers, labels)

    def record(self) -> dict[str, Any]:
        """Plain values to save."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Calibration:
        """Restore a calibration from the values that ``record`` returned.

        Raises:
            ParameterError: A field is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(record, Mapping) or set(record) != names:
            raise ParameterError(
                f"The saved calibration {record!r} does not fit this version.",
                f"It has the fields {', '.join(sorted(names))}.",
                "Calibrate the model again.",
            )
        return cls(**record)

    def __str__(self) -> str:
        if self.own == self.shared:
            parts = [f"standard deviations times {self.own:.4g}"] if self.own != 1 or not self.by_group else []
        else:
            parts = [f"own part times {self.own:.4g}", f"correlated part times {self.shared:.4g}"]
        parts += [f"group {group} times {factor:.4g}" for group, factor in enumerate(self.by_group)]
        return "; ".join(parts)


def calibrated(law: LocationScale, numbers: Tensor, labels: Tensor | None) -> LocationScale:
    """Apply the numbers of a calibration, with gradients.

    Args:
        law: The law before, over (*batch, n).
        numbers: own, shared and one factor for each group, (2 + groups,).
        labels: Group of each variable, (n,) int64; None without groups.

    Returns:
        The law with the calibrated covariance.

    Raises:
        ParameterError: own and shared differ, and the covariance has no such parts.
        ShapeError: There is another number of labels than of variables.
    """
    numbers = numbers.to(law.loc)
    cov: Covariance = law.cov
    if isinstance(cov, Factored):
        cov = cov.weighted(numbers[0], numbers[1])
    else:
        if bool(numbers[0] != numbers[1]):
            raise ParameterError(
                f"The calibration has the weights {float(numbers[0]):.4g} and {float(numbers[1]):.4g} of two parts.",
                f"A {type(cov).__name__} covariance has no own and correlated part.",
                "Calibrate the model that gives this law.",
            )
        cov = cov.scaled(numbers[0].expand(law.event_shape))
    if labels is not None:
        check_labels(labels, law.event_shape[-1])
        cov = cov.scaled(numbers[2:].index_select(0, labels.to(numbers.device)))
    return LocationScale(law.loc, cov, law.family, validate_args=False)


def check_labels(labels: Tensor, n: int) -> None:
    """Check that there is one label for each of n variables.

    Raises:
        ShapeError: The labels have another shape than (n,).
    """
    if labels.shape != (n,):
        raise ShapeError(
            f"The groups have shape {tuple(labels.shape)}, the law {n} variables.",
            "Each variable belongs to one group.",
            f"Pass {n} integers, such as the level of each node.",
        )


def labels_of(groups: Any, n: int) -> Tensor:
    """Labels renumbered from 0 in increasing order, (n,)."""
    labels = torch.as_tensor(groups)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ParameterError(
            f"The groups have the dtype {labels.dtype}.",
            "Each variable has the number of its group.",
            "Pass integers.",
        )
    check_labels(labels, n)
    return labels.cpu().unique(return_inverse=True)[1]
