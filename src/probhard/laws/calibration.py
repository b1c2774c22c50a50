"""The numbers of a calibration, applied to a law before its projection.

    C = D + G G^T   ->   diag(s) (own^2 D + shared^2 G G^T) diag(s),          s_i = by_group[groups_i] or 1.

D is what each variable has of its own, G G^T what variables share. A law may first get the correlation of past errors
between its own standard deviations. Of a spectral covariance, the amplitudes of waves
are also multiplied by one number for each octave. A covariance without such parts is multiplied by
``own^2``; then ``own = shared``. The location stays, and so does the metric of the projection, which is that of the law
before: projected means do not move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from probhard._util.tensors import safe_sqrt
from probhard.errors import ParameterError, ShapeError
from probhard.laws._transforms import wave_numbers
from probhard.laws.covariance import Covariance, Factored, LowRank
from probhard.laws.distribution import LocationScale
from probhard.laws.field_correlation import resized
from probhard.laws.spectral import Spectral


@dataclass(frozen=True)
class Calibration:
    """A few positive numbers that correct the spread of a law.

    Args:
        own: Factor on the standard deviations of what each variable has of its own.
        shared: Factor on those of the correlated part; equal to ``own`` for covariances without parts.
        by_group: Factor for each group of variables; empty without groups.
        groups: The group of each variable, (n,); empty without groups.
        by_octave: Factor for waves of each octave of a spectral covariance, long waves first; empty for one of all.
        correlation: Correlation that replaces that of the law: ``LowRank`` or ``Spectral`` with unit diagonal; or None.

    Raises:
        ParameterError: A factor is not positive and finite, or a variable belongs to no group.
    """

    own: float = 1.0
    shared: float = 1.0
    by_group: Sequence[float] = ()
    groups: Sequence[int] = ()
    by_octave: Sequence[float] = ()
    correlation: Factored | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("by_group", "by_octave"):
            object.__setattr__(self, name, tuple(float(x) for x in getattr(self, name)))
        object.__setattr__(self, "groups", tuple(int(x) for x in self.groups))
        factors = (self.own, self.shared, *self.by_group, *self.by_octave)
        if not all(0 < x < math.inf for x in factors):
            raise ParameterError(
                f"The factors of a calibration are {factors}.",
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
        return (
            self.correlation is None
            and self.own == self.shared
            and len(set(self.by_group)) <= 1
            and set(self.by_octave) <= {1.0}
        )

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
        own, shared, by_group, by_octave = (
            torch.tensor(x, dtype=torch.float64) for x in (self.own, self.shared, self.by_group, self.by_octave)
        )
        labels = torch.tensor(self.groups, dtype=torch.int64)
        return calibrated(correlated(law, self.correlation), Numbers(own, shared, by_group, labels, by_octave))

    def on_grid(self, shape: Sequence[int]) -> Calibration | None:
        """The same for fields on another grid of the same domain; None if that cannot be said."""
        grid, old = tuple(shape), self.correlation
        if old is None or (isinstance(old, Spectral) and old.shape_of_field == grid):
            return self
        if self.groups or not isinstance(old, Spectral) or len(grid) != len(old.shape_of_field):
            return None
        new = resized(old, grid)
        count = int(octaves(new).max()) + 1 if self.by_octave else 0
        numbers = (tuple(self.by_octave) + tuple(self.by_octave[-1:]) * count)[:count]
        return replace(self, by_octave=numbers, correlation=new)

    def record(self) -> dict[str, Any]:
        """Plain values and tensors to save."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "correlation": None if self.correlation is None else _stored(self.correlation)}

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
        stored = record["correlation"]
        return cls(**{**record, "correlation": None if stored is None else _restored(stored)})

    def __str__(self) -> str:
        if self.own == self.shared:
            parts = [f"standard deviations times {self.own:.4g}"] if self.own != 1 or not self.by_group else []
        else:
            parts = [f"own part times {self.own:.4g}", f"correlated part times {self.shared:.4g}"]
        if self.correlation is not None:
            parts.append(f"correlated as past errors ({type(self.correlation).__name__})")
        parts += [f"group {group} times {factor:.4g}" for group, factor in enumerate(self.by_group)]
        parts += [f"waves of octave {octave} times {factor:.4g}" for octave, factor in enumerate(self.by_octave)]
        return "; ".join(parts)


class Numbers(NamedTuple):
    """The numbers of a calibration as tensors, which may carry gradients."""

    own: Tensor  # ()
    shared: Tensor  # ()
    by_group: Tensor  # (groups,), empty without groups
    labels: Tensor  # group of each variable, (n,) int64, empty without groups
    by_octave: Tensor  # (octaves,), empty for one number of all waves


def correlated(law: LocationScale, correlation: Factored | None) -> LocationScale:
    """The law with another correlation between its own standard deviations; None leaves it as it is.

    Raises:
        ShapeError: The correlation has another number of variables.
    """
    if correlation is None:
        return law
    if correlation.shape != law.event_shape:
        raise ShapeError(
            f"The correlation is of {tuple(correlation.shape)} variables, the law of {law.event_shape[-1]}.",
            "It has one row for each variable, and no batch.",
            "Estimate it from errors of this model.",
        )
    stddev = safe_sqrt(law.cov.diagonal())
    return LocationScale(law.loc, correlation.to(stddev).scaled(stddev), law.family, validate_args=False)


def _stored(cov: Factored) -> dict[str, Any]:
    """A correlation as plain values and tensors."""
    if isinstance(cov, Spectral):
        values = {name: getattr(cov, name) for name in ("power", "scale", "diagonal_part")}
        return {"kind": "spectral", "shape": list(cov.shape_of_field), "boundary": cov.boundary, **values}
    if isinstance(cov, LowRank):
        return {"kind": "low rank", "factor": cov.factor, "diagonal_part": cov.diagonal_part}
    raise ParameterError(
        f"A correlation of the kind {type(cov).__name__} cannot be saved.",
        "Files hold low-rank and spectral ones.",
        "Use shrunk_correlation or spectral_correlation.",
    )


def _restored(values: Mapping[str, Any]) -> Factored:
    try:
        if values["kind"] == "spectral":
            power, scale, own = (values[name] for name in ("power", "scale", "diagonal_part"))
            return Spectral(tuple(values["shape"]), power, scale, own, values["boundary"])
        return LowRank(values["factor"], values["diagonal_part"])
    except (KeyError, TypeError) as error:
        raise ParameterError(
            f"The saved correlation does not fit this version ({error}).",
            "A value is missing.",
            "Calibrate the model again.",
        ) from error


def calibrated(law: LocationScale, numbers: Numbers) -> LocationScale:
    """Apply the numbers of a calibration, with gradients.

    Args:
        law: The law before, over (*batch, n).
        numbers: The numbers.

    Returns:
        The law with the calibrated covariance.

    Raises:
        ParameterError: There are weights of parts, or of octaves, that the covariance does not have.
        ShapeError: There is another number of labels than of variables.
    """
    own, shared, by_group, by_octave = (
        x.to(law.loc) for x in (numbers.own, numbers.shared, numbers.by_group, numbers.by_octave)
    )
    cov: Covariance = law.cov
    if len(by_octave):
        cov = _in_octaves(cov, by_octave)
    if isinstance(cov, Factored):
        cov = cov.weighted(own, shared)
    else:
        if bool(own != shared):
            raise ParameterError(
                f"The calibration has the weights {float(own):.4g} and {float(shared):.4g} of two parts.",
                f"A {type(cov).__name__} covariance has no own and correlated part.",
                "Calibrate the model that gives this law.",
            )
        cov = cov.scaled(own.expand(law.event_shape))
    if len(by_group):
        check_labels(numbers.labels, law.event_shape[-1])
        cov = cov.scaled(by_group.index_select(0, numbers.labels.to(by_group.device)))
    return LocationScale(law.loc, cov, law.family, validate_args=False)


def _in_octaves(cov: Covariance, by_octave: Tensor) -> Spectral:
    """A spectral covariance with the amplitudes of its waves multiplied by one number for each octave."""
    labels = octaves(cov)
    if len(by_octave) != int(labels.max()) + 1:
        raise ParameterError(
            f"The calibration has {len(by_octave)} octaves, the covariance {int(labels.max()) + 1}.",
            "It was fitted to fields on another grid.",
            "Calibrate the model that gives this law.",
        )
    assert isinstance(cov, Spectral)
    power = by_octave.square().index_select(0, labels.to(by_octave.device))
    return replace(cov, power=cov.power * power)


def octaves(cov: Covariance) -> Tensor:
    """The octave of each wave number of a spectral covariance, (n,) int64: 0 for the mean, then by powers of 2.

    Raises:
        ParameterError: The covariance is not spectral.
    """
    if not isinstance(cov, Spectral):
        raise ParameterError(
            f"One number for each octave was asked for, of a {type(cov).__name__} covariance.",
            "Only a spectral covariance has wave numbers.",
            "Use groups of variables, or a law with a Spectral covariance.",
        )
    size = wave_numbers(cov.shape_of_field, cov.boundary).square().sum(-1).sqrt()
    octave = torch.where(size > 0, 1 + size.clamp(min=1).log2().floor(), 0.0)
    return octave.unique(return_inverse=True)[1]


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
