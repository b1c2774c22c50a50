"""A Fourier neural operator that predicts a distribution, with a mean and a variance head.

A Fourier layer keeps the modes |k| <= K of its input, mixes channels per mode and adds a pointwise linear map:

    v  <-  activation( F^-1( R(k) F(v)(k) ) + W v )                    (Li et al., 2021; the paper's VarianceNO)

With K far below the size of the grid, the truncated transform F is cheapest as real matrix products, axis by axis. They
use cosines and sines of every axis, and one fixed matrix of size 2^d that combines their products into exp(-i k x) for
all signs of k. There are no complex numbers, so the network compiles, and grids of prime size cost nothing extra.

With a rank or a spectrum, points are correlated; ``heads`` says how channels become a law.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad

from probhard.errors import ParameterError, ShapeError
from probhard.laws.distribution import LocationScale
from probhard.pde.heads import FLOOR, Head

__all__ = ["FLOOR", "HEAD", "FourierLayer", "VarianceNO"]

HEAD = 128  # width of the hidden layer between channels and outputs


class FourierLayer(nn.Module):
    """Mixes the channels of every low mode: ``F^-1 R F``.

    The first axis keeps the modes 0 .. K-1 (the field is real), every other axis -K .. K-1.

    Args:
        width: Number of channels in and out.
        modes: K of each of the d axes.
    """

    combination: Tensor
    multiplicity: Tensor

    def __init__(self, width: int, modes: Sequence[int]) -> None:
        super().__init__()
        self.width, self.modes = width, tuple(modes)
        self.signs = tuple(itertools.product((1,), *[(1, -1)] * (len(self.modes) - 1)))
        count = len(self.signs) * math.prod(self.modes)
        # Rows 0 .. width-1 are the real parts of R, the others its imaginary parts.
        self.weight = nn.Parameter(torch.rand(count, 2 * width, width) / width**2)
        self.register_buffer("combination", _combination(self.signs), persistent=False)
        one_sided = torch.full((self.modes[0], *[1] * (len(self.modes) - 1)), 2.0)
        one_sided[0] = 1.0  # other modes of the first axis count twice, for their conjugates
        self.register_buffer("multiplicity", one_sided, persistent=False)

    def forward(self, v: Tensor, inward: Sequence[Tensor], outward: Sequence[Tensor]) -> Tensor:
        """Apply the layer.

        Args:
            v: Input, (batch, width, *in).
            inward: Cosines and sines at the input's points, (in, 2 * (K + 1)) per axis.
            outward: Cosines and sines at the output's points, divided by the period, (out, 2 * (K + 1)) per axis.

        Returns:
            (batch, width, *out).
        """
        return self._synthesis(self._mixed(self._analysis(v, inward)), outward)

    def _analysis(self, v: Tensor, bases: Sequence[Tensor]) -> Tensor:
        """Real and imaginary parts of the kept modes of v, (count, 2, batch, width)."""
        batch, axes = v.shape[0], len(self.modes)
        v = v.flatten(0, 1)
        for basis in reversed(bases):
            v = (v @ basis).movedim(-1, 1)
        v = v.reshape(len(v), *itertools.chain.from_iterable((2, k + 1) for k in self.modes))
        v = v.permute(0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2))  # (batch * width, *2, *K+1)
        v = self.combination @ v.flatten(1, axes).flatten(2)
        v = v.unflatten(1, (len(self.signs), 2)).unflatten(-1, [k + 1 for k in self.modes])
        v = torch.stack([self._kept(v[:, i], i) for i in range(len(self.signs))], 2)
        return v.flatten(2).unflatten(0, (batch, self.width)).permute(3, 2, 0, 1)

    def _mixed(self, modes: Tensor) -> Tensor:
        """``R`` times every mode, (count, 2, batch, width), as one real product of stacked parts."""
        real, imaginary = modes.unbind(1)
        stacked = torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], 1)
        return (stacked @ self.weight).unflatten(1, (2, modes.shape[2]))

    def _synthesis(self, modes: Tensor, bases: Sequence[Tensor]) -> Tensor:
        """The real part of the field (batch, width, *out) with these modes, (count, 2, batch, width)."""
        batch, axes = modes.shape[2], len(self.modes)
        v = modes.permute(2, 3, 1, 0).flatten(0, 1).unflatten(-1, (len(self.signs), *self.modes)) * self.multiplicity
        v = torch.stack([self._spread(v[:, :, i], i) for i in range(len(self.signs))], 1)
        v = self.combination.T @ v.flatten(3).flatten(1, 2)
        v = v.unflatten(1, (2,) * axes).unflatten(-1, [k + 1 for k in self.modes])  # (batch * width, *2, *K+1)
        v = v.permute(0, *itertools.chain.from_iterable((1 + a, 1 + axes + a) for a in range(axes)))
        v = v.reshape(len(v), *[2 * (k + 1) for k in self.modes])
        for basis in bases:
            v = v.movedim(1, -1) @ basis.T
        return v.unflatten(0, (batch, self.width))

    def _kept(self, v: Tensor, index: int) -> Tensor:
        """The modes of a sign pattern among 0 .. K of every axis: 0 .. K-1 for plus, 1 .. K for minus."""
        for axis, (sign, k) in enumerate(zip(self.signs[index], self.modes), 2):
            v = v.narrow(axis, 0 if sign > 0 else 1, k)
        return v

    def _spread(self, v: Tensor, index: int) -> Tensor:
        """The modes of a sign pattern, padded to 0 .. K of every axis; inverse of ``_kept``."""
        sides = [(0, 1) if sign > 0 else (1, 0) for sign in reversed(self.signs[index])]
        return pad(v, tuple(itertools.chain.from_iterable(sides)))


class VarianceNO(nn.Module):
    """A Fourier neural operator whose output is a distribution over flattened fields (the paper's VarianceNO).

    Calls may use different grids. Padding on the right allows fields that are not periodic.

    Args:
        channels: Number of input channels.
        modes: Modes +-K kept per axis; one number for each of one to three axes.
        width: Number of channels inside.
        layers: Number of Fourier layers.
        padding: Points added on the right of each axis.
        dropout: Rate of dropout after each layer; see ``MCDropout``.
        rank: Number of columns of the factor that correlates the points; 0 for independent points.
        covariance: ``"spectral"`` for points that are correlated by a learned power spectrum; None for the rank.
        boundary: Of the spectrum: ``"reflecting"``, ``"periodic"`` or ``"zero"``.

    Raises:
        ParameterError: If a number is out of range, or a name is not known.
    """

    def __init__(
        self,
        channels: int = 3,
        modes: Sequence[int] = (12, 12),
        width: int = 32,
        layers: int = 4,
        padding: int = 9,
        dropout: float = 0.0,
        rank: int = 0,
        covariance: str | None = None,
        boundary: str = "reflecting",
    ) -> None:
        super().__init__()
        sizes = min((channels, width, layers, *modes), default=0) >= 1 and padding >= 0 and 1 <= len(modes) <= 3
        if not sizes or not 0 <= dropout < 1:
            raise ParameterError(
                f"Got channels={channels}, modes={tuple(modes)}, width={width}, layers={layers}, padding={padding}, "
                f"dropout={dropout}.",
                "A neural operator needs at least one of each on a grid of one to three axes, and a rate of dropout.",
                "Pass positive numbers, one entry of modes per axis, and a dropout from 0 to below 1.",
            )
        self.channels, self.modes, self.width, self.padding = channels, tuple(modes), width, padding
        self.law = Head(rank, covariance, boundary, len(modes))
        self.lift = nn.Linear(channels, width)
        self.spectral = nn.ModuleList(FourierLayer(width, modes) for _ in range(layers))
        self.pointwise = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        joint = self.law.channels > 2
        self.hidden, self.head = nn.Linear(width, HEAD), nn.Linear(HEAD, 1 if joint else 2)
        self.spread = nn.Linear(HEAD, self.law.channels - 1) if joint else None
        self.dropout = nn.Dropout(dropout)
        self.network: Callable[[Tensor], Tensor] | None = None  # the compiled ``moments``, if compiled

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile ``moments``; arguments as of ``torch.compile``. Copies and pickles are not compiled."""
        self.network = torch.compile(self.moments, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # A compiled function cannot be pickled, and in a copy it would run with the weights of the original.
        return {**super().__getstate__(), "network": None}

    def forward(self, inputs: Tensor) -> LocationScale:
        """Predict the law of flattened fields.

        Args:
            inputs: (batch, channels, *grid).

        Returns:
            The law, batch (batch,), over all grid points, with the first axis slowest.

        Raises:
            ParameterError: If inputs are not floating point.
            ShapeError: If inputs do not fit, or the grid is too small for the modes.
        """
        self._check(inputs)
        return self.law((self.network or self.moments)(inputs))

    def moments(self, inputs: Tensor) -> Tensor:
        """Mean, own variance and shared part at every point, (batch, parts, *grid), for inputs of ``forward``."""
        features = self.features(inputs)
        outputs = pointwise(self.head, features)
        if self.spread is not None:
            # Spreads and factor read the features that the mean learns; their gradients would hold the mean back.
            outputs = torch.cat([outputs, pointwise(self.spread, features.detach())], 1)
        return self.law.moments(outputs)

    def features(self, inputs: Tensor) -> Tensor:
        """The features that the last layer reads, (batch, HEAD, *grid), for inputs of ``forward``."""
        grid = inputs.shape[2:]
        padded = [n + self.padding for n in grid]
        whole = [_basis(n, n, k, inputs) for n, k in zip(padded, self.modes)]
        inside = [_basis(points, n, k, inputs) for points, n, k in zip(grid, padded, self.modes)]
        v = pointwise(self.lift, inputs)
        last = len(self.spectral) - 1
        for index, (spectral, linear) in enumerate(zip(self.spectral, self.pointwise)):
            # The padding is empty before the first layer and unused after the last one.
            inward, outward = (inside if index == 0 else whole), (inside if index == last else whole)
            mixed = spectral(v, inward, [basis / n for basis, n in zip(outward, padded)])
            if index == 0 < last:
                v = pad(v, (0, self.padding) * len(grid))
            if index == last > 0:
                for axis, n in enumerate(grid, 2):
                    v = v.narrow(axis, 0, n)
            v = mixed + pointwise(cast(nn.Linear, linear), v)
            if index < last:
                v = self.dropout(gelu(v))
        return gelu(pointwise(self.hidden, v))

    def _check(self, inputs: Tensor) -> None:
        if not inputs.is_floating_point():
            raise ParameterError(
                f"The inputs are {inputs.dtype}.",
                "Weights are floating point.",
                "Pass inputs.float() or .double().",
            )
        grid = tuple(inputs.shape[2:])
        if len(grid) != len(self.modes) or inputs.shape[1] != self.channels:
            raise ShapeError(
                f"The input has shape {tuple(inputs.shape)}.",
                f"This operator takes {self.channels} channels on a grid of {len(self.modes)} axes.",
                f"Pass (batch, {self.channels}, *grid).",
            )
        if any(n + self.padding < 2 * k for n, k in zip(grid, self.modes)):
            raise ShapeError(
                f"The grid {grid} with {self.padding} points of padding is too small for the modes {self.modes}.",
                "The modes -K .. K-1 need at least 2 K points.",
                "Use a finer grid, or build the operator with fewer modes or more padding.",
            )


def _combination(signs: Sequence[Sequence[int]]) -> Tensor:
    """Real and imaginary parts of exp(-i s.x) from products of cosines (0) and sines (1), (2 * signs, 2^d)."""
    rows = []
    for sign in signs:
        kinds = itertools.product((0, 1), repeat=len(sign))
        product = [math.prod((-1j * s) ** kind for s, kind in zip(sign, pattern)) for pattern in kinds]
        rows += [[value.real for value in product], [value.imag for value in product]]
    return torch.tensor(rows, dtype=torch.get_default_dtype())


def pointwise(linear: nn.Linear, v: Tensor) -> Tensor:
    """A linear map of the channels at every point: (batch, in, *grid) to (batch, out, *grid)."""
    mapped = torch.baddbmm(linear.bias[:, None], linear.weight.expand(len(v), -1, -1), v.flatten(2))
    return mapped.unflatten(-1, v.shape[2:])


def _basis(points: int, period: int, modes: int, like: Tensor) -> Tensor:
    """Cosines and sines of the modes 0 .. K at the first points of a period, (points, 2 * (K + 1))."""
    x = torch.arange(points, dtype=torch.float64, device=like.device) * (2 * math.pi / period)
    angle = x[:, None] * torch.arange(modes + 1, dtype=torch.float64, device=like.device)
    return torch.cat([angle.cos(), angle.sin()], -1).to(like.dtype)
