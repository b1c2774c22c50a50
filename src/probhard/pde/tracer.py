"""A tracer that a steady flow stirs on a periodic square, from a small spectral solver.

    c_t + div(v c) = kappa laplace(c),     v = (d psi / dy, - d psi / dx),     integral of c = constant.

The stream function psi has a few random modes, so v has no divergence. Initial fields are sums of Gaussian blobs.
Space derivatives are exact for the resolved modes. Products are cut at two thirds of them, against aliasing. Time steps
are those of Runge and Kutta (order 4) for ``exp(kappa |k|^2 t) c``, which makes diffusion exact. The mode k = 0 has no
tendency, so the sum over the grid is conserved to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from probhard.constraints.conservation import Conservation
from probhard.errors import ParameterError

SIDE = 2 * math.pi  # of the square
BLOBS = 6  # per initial field
STREAM_MODES = 2  # of the stream function, per axis
COURANT = 0.5  # largest product of speed, largest wave number and time step


class Flow(NamedTuple):
    """Initial fields and stream functions, (*batch, points, points) each."""

    initial: Tensor
    stream: Tensor


@dataclass(frozen=True)
class Tracer:
    """Random flows on a grid of points x points, and the tracer's field after some time.

    Args:
        points: Grid points per axis, even.
        time: When the field is asked for; a speed of 1 crosses the square in 2 pi.
        diffusivity: kappa.
        speed: Root mean square speed of the flows.
        dtype: Dtype of all results.

    Raises:
        ParameterError: If a number is out of range.
    """

    points: int = 64
    time: float = 1.5
    diffusivity: float = 0.02
    speed: float = 0.7
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        numbers = (self.time, self.diffusivity, self.speed)
        if self.points < 8 or self.points % 2 or not all(0 < number < math.inf for number in numbers):
            raise ParameterError(
                f"Got {self}.",
                "The solver needs an even grid that resolves blobs, and a flow that mixes for a while.",
                "Pass an even points >= 8 and positive time, diffusivity and speed.",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a field."""
        return self.points, self.points

    @cached_property
    def axis(self) -> Tensor:
        """Grid points of an axis, (points,)."""
        return torch.arange(self.points, dtype=torch.float64) * (SIDE / self.points)

    @cached_property
    def waves(self) -> tuple[Tensor, Tensor]:
        """Wave numbers of both axes for ``rfft2``, (points, 1) and (points / 2 + 1,)."""
        both = torch.fft.fftfreq(self.points, 1 / self.points, dtype=torch.float64)
        return both[:, None], torch.fft.rfftfreq(self.points, 1 / self.points, dtype=torch.float64)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Flow:
        """Draw initial fields and flows.

        Args:
            count: Number of samples.
            generator: Source of random numbers; torch's global one for None.
        """
        unit = torch.rand(count, BLOBS, 4, generator=generator, dtype=torch.float64)
        center, width, height = SIDE * unit[..., :2], 0.3 + 0.4 * unit[..., 2:3], 0.3 + unit[..., 3]
        away = torch.remainder(self.axis - center[..., None] + SIDE / 2, SIDE) - SIDE / 2  # (count, blobs, 2, points)
        bells = torch.exp(-0.5 * (away / width[..., None]).square())
        initial = torch.einsum("cb,cbx,cby->cxy", height, bells[..., 0, :], bells[..., 1, :])
        k = torch.arange(-STREAM_MODES, STREAM_MODES + 1, dtype=torch.float64)
        size = 1 / (1 + k[:, None].square() + k.square())
        amplitude = size * torch.randn(count, len(k), len(k), generator=generator, dtype=torch.float64)
        phase = SIDE * torch.rand(count, len(k), len(k), generator=generator, dtype=torch.float64)
        angle = k[:, None, None, None] * self.axis[:, None] + k[:, None, None] * self.axis
        stream = torch.einsum("ckl,klxy->cxy", amplitude * phase.cos(), angle.cos())
        stream = stream - torch.einsum("ckl,klxy->cxy", amplitude * phase.sin(), angle.sin())
        speed = torch.stack(self.velocity(stream)).square().sum(0).mean((-2, -1)).sqrt()
        return Flow(initial.to(self.dtype), (stream * (self.speed / speed)[:, None, None]).to(self.dtype))

    def velocity(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Both components of v at the grid points, (*batch, points, points) each, of stream functions of that shape."""
        modes = torch.fft.rfft2(stream.double())
        first, second = self.waves
        return self._field(1j * second * modes), -self._field(1j * first * modes)

    def solution(self, flow: Flow) -> Tensor:
        """The tracer at ``time``, (*batch, points, points)."""
        v = self.velocity(flow.stream)
        first, second = self.waves
        square = first.square() + second.square()
        cut = self.points / 3
        kept = ((first.abs() < cut) & (second.abs() < cut)).double()
        fastest = max(float(part.abs().max()) for part in v)
        steps = max(1, math.ceil(self.time * fastest * cut / COURANT))
        step = self.time / steps
        half = torch.exp(-0.5 * self.diffusivity * step * square)

        def tendency(modes: Tensor) -> Tensor:
            field = self._field(modes)
            flux = [torch.fft.rfft2(part * field) for part in v]
            return -1j * kept * (first * flux[0] + second * flux[1])

        c = torch.fft.rfft2(flow.initial.double())
        for _ in range(steps):
            a = step * tendency(c)
            b = step * tendency(half * (c + a / 2))
            d = step * tendency(half * c + b / 2)
            e = step * tendency(half * (half * c + d))
            c = half * (half * (c + a / 6) + (b + d) / 3) + e / 6
        return self._field(c).to(self.dtype)

    def inputs(self, flow: Flow) -> Tensor:
        """Inputs of a network, (*batch, 3, points, points): the initial field and both components of the velocity."""
        return torch.stack([flow.initial, *(part.to(self.dtype) for part in self.velocity(flow.stream))], -3)

    def mass(self, flow: Flow) -> Tensor:
        """The mean of the initial field, which the flow conserves, (*batch,)."""
        return flow.initial.mean((-2, -1))

    def constraint(self, mass: Tensor) -> Conservation:
        """The mean of a flattened field is ``mass`` (*batch,); n = points * points."""
        weights = torch.full((self.points**2,), 1 / self.points**2, dtype=mass.dtype, device=mass.device)
        return Conservation(weights, mass)

    def _field(self, modes: Tensor) -> Tensor:
        return torch.fft.irfft2(modes, s=self.shape)
