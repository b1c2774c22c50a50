"""Covariances of fields on a grid: a power spectrum between two pointwise scales, plus independent noise.

    C = diag(d) + diag(s) T^T diag(p) T diag(s)

T is an orthonormal transform (``_transforms``), p the power of each wave number, s a pointwise scale. With s constant
the second part is stationary. A product costs one pair of fast transforms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from probhard._util.tensors import broadcast, check_finite, safe_sqrt
from probhard.errors import ShapeError, check_choice
from probhard.laws import _transforms
from probhard.laws._local_variance import box_variance, kernel
from probhard.laws.base import LinearMap, in_chunks
from probhard.laws.factored import Factored


@dataclass(frozen=True, eq=False)
class Spectral(Factored):
    """``C = diag(d) + diag(s) T^T diag(p) T diag(s)`` for fields flattened with the first axis slowest.

    Args:
        shape_of_field: Points along each axis; their product is n.
        power: p >= 0, (*batch, n), in the order of the transform; a periodic spectrum is made even in k.
        scale: s, (*batch, n).
        diagonal_part: d >= 0, (*batch, n).
        boundary: ``"periodic"``, ``"reflecting"`` (cosines) or ``"zero"`` (sines).

    Raises:
        ShapeError: If the sizes do not fit the grid.
        ParameterError: If the boundary is not known.
    """

    shape_of_field: tuple[int, ...]
    power: Tensor  # (*batch, n)
    scale: Tensor  # (*batch, n)
    diagonal_part: Tensor  # (*batch, n)
    boundary: str = "periodic"

    def __post_init__(self) -> None:
        check_choice("boundary", self.boundary, _transforms.BOUNDARIES)
        object.__setattr__(self, "shape_of_field", tuple(self.shape_of_field))
        sizes = [x.shape[-1] if x.dim() else 0 for x in (self.power, self.scale, self.diagonal_part)]
        if set(sizes) != {math.prod(self.shape_of_field)}:
            raise ShapeError(
                f"Spectral got a grid {self.shape_of_field}, and power, scale and diagonal of {sizes} entries.",
                "Each has one entry per point of the grid, and per wave number.",
                "Flatten the fields to (*batch, n), with the first axis slowest.",
            )

    @classmethod
    def normalised(
        cls,
        shape: tuple[int, ...],
        power: Tensor,
        stddev: Tensor,
        share: Tensor | float = 1.0,
        boundary: str = "periodic",
    ) -> Spectral:
        """The covariance with given standard deviations, of which a share of the variance follows the spectrum.

        Args:
            shape: Points along each axis.
            power: p > 0 up to a factor, (*batch, n).
            stddev: Standard deviations, (*batch, n).
            share: Share of the variance that is correlated, in (0, 1], broadcasting with (*batch, n).
            boundary: As for the class.
        """
        even = _transforms.even(power, shape) if boundary == "periodic" else power
        level = safe_sqrt(_transforms.squared(even, tuple(shape), boundary))
        share = torch.as_tensor(share, dtype=stddev.dtype, device=stddev.device)
        scale, own = stddev * safe_sqrt(share) / level, stddev.square() * (1 - share)
        size = broadcast(scale.shape, own.shape)
        return cls(tuple(shape), power, scale.expand(size), own.expand(size), boundary)

    @property
    def shape(self) -> torch.Size:
        return broadcast(self.power.shape, self.scale.shape, self.diagonal_part.shape)

    @property
    def factor_size(self) -> int:
        return self.power.shape[-1]

    @cached_property
    def even_power(self) -> Tensor:
        """The power spectrum that is used, (*batch, n)."""
        return _transforms.even(self.power, self.shape_of_field) if self.boundary == "periodic" else self.power

    def factor_apply(self, e: Tensor) -> Tensor:
        return self.scale * _transforms.backward(safe_sqrt(self.even_power) * e, self.shape_of_field, self.boundary)

    def factor_transpose(self, x: Tensor) -> Tensor:
        return safe_sqrt(self.even_power) * _transforms.forward(self.scale * x, self.shape_of_field, self.boundary)

    def factor_diagonal(self) -> Tensor:
        level = _transforms.squared(self.even_power, self.shape_of_field, self.boundary)
        return self.scale.square() * level

    def factor_norms(self, weight: Tensor) -> Tensor:
        return self.even_power * (self.scale.square() * weight).mean(-1, keepdim=True)

    def apply(self, x: Tensor) -> Tensor:
        filtered = _transforms.filtered(self.scale * x, self.even_power, self.shape_of_field, self.boundary)
        return torch.addcmul(self.scale * filtered, self.diagonal_part, x)

    def functional_variance(self, rows: LinearMap) -> Tensor:
        find = getattr(rows.at(self.diagonal_part), "local", None)  # of a SparseMap
        if find is None:
            return super().functional_variance(rows)
        parts, power = find(self.shape_of_field), self.even_power
        covariance = kernel(power, self.shape_of_field, self.boundary)
        shared = [
            box_variance(self.scale[..., b.cell] * b.value, covariance, b.shape, b.origin, self.boundary)
            for b in parts.boxes
        ]
        rest = in_chunks(parts.rest_map, self.diagonal(), lambda x: self.factor_transpose(x).square().sum(-1))
        own = rows.at(self.diagonal_part).squared(self.diagonal_part)
        return own + parts.collect(shared, rest)

    def scaled(self, scale: Tensor) -> Spectral:
        return replace(self, scale=self.scale * scale, diagonal_part=self.diagonal_part * scale.square())

    def weighted(self, own: Tensor | float, shared: Tensor | float) -> Spectral:
        return replace(self, scale=shared * self.scale, diagonal_part=own**2 * self.diagonal_part)

    def to(self, *args: object, **kwargs: object) -> Spectral:
        power, scale, own = (
            x.to(*args, **kwargs)  # type: ignore[call-overload]
            for x in (self.power, self.scale, self.diagonal_part)
        )
        return Spectral(self.shape_of_field, power, scale, own, self.boundary)

    def validate(self) -> None:
        check_finite("The power spectrum", self.power, minimum=0.0)
        check_finite("The scale of the spectral covariance", self.scale)
        check_finite("The diagonal of the spectral covariance", self.diagonal_part, minimum=0.0)
