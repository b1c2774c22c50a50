"""Output channels of an operator as the law of a flattened field.

| law       | channels                                     | covariance                                              |
|-----------|----------------------------------------------|---------------------------------------------------------|
| diagonal  | mean, spread p                               | diag(softplus(p))                                       |
| low rank  | mean, p, shared spread q, weights g_1 .. g_r | diag(softplus(p)) + F F^T                               |
| spectral  | mean, p, q                                   | diag(softplus(p)) + diag(s) T^T diag(power) T diag(s)   |

    F_xj = sqrt(softplus(q_x) / r) (1 + g_xj) phi_j(x),        power(k) = (1 + sum_a (l_a k_a)^2)^-e

The phi_j are the r smoothest cosines of the grid but the constant. From the first step on, shared noise is smooth and
has a gradient also under a constraint that removes constants, and both spreads move over orders of magnitude. The
lengths l_a (in units of the axes) and the exponent e are learned; s makes softplus(q) the variance of the spectral
part. Correlated laws start with small spreads: with large ones the mean would learn slowly at first.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from probhard.errors import ParameterError, check_choice
from probhard.laws._transforms import BOUNDARIES
from probhard.laws.covariance import Diagonal, LowRank
from probhard.laws.distribution import LocationScale
from probhard.laws.spectral import Spectral

FLOOR = 1e-12  # added to variances: in float32 they would reach 0, and an oblique projection could not move
OWN, SHARED = -6.0, -4.0  # first outputs for both spreads of a correlated law, for fields of order 1
LENGTH, EXPONENT = 0.3, 2.0  # first lengths, as shares of the axes, and exponent of a power spectrum


class Head(nn.Module):
    """Maps output channels to a law; only spectral laws have parameters.

    Args:
        rank: Number of columns of the factor; 0 for independent points.
        covariance: ``"spectral"``, or None for the rank.
        boundary: Of the spectrum.
        axes: Number of axes of the grid.

    Raises:
        ParameterError: If the rank is negative or beside a spectrum, or a name is not known.
    """

    def __init__(
        self, rank: int = 0, covariance: str | None = None, boundary: str = "reflecting", axes: int = 2
    ) -> None:
        super().__init__()
        if covariance is not None:
            check_choice("covariance", covariance, ("spectral",))
        check_choice("boundary", boundary, BOUNDARIES)
        self.rank, self.spectral, self.boundary = rank, covariance == "spectral", boundary
        if rank < 0 or (rank and self.spectral):
            raise ParameterError(
                f"Got rank={rank} and covariance={covariance!r}.",
                "Points are correlated by a factor of some columns or by a spectrum.",
                "Pass a rank from 0 on, or covariance='spectral'.",
            )
        if self.spectral:
            self.log_length = nn.Parameter(torch.full((axes,), math.log(LENGTH)))
            self.log_exponent = nn.Parameter(torch.tensor(math.log(EXPONENT)))

    @property
    def channels(self) -> int:
        """Number of output channels that it takes."""
        return 3 + self.rank if self.rank or self.spectral else 2

    def moments(self, outputs: Tensor) -> Tensor:
        """Mean, own variance and shared part, as many channels as ``forward`` takes.

        Args:
            outputs: (batch, channels, *grid).

        Returns:
            (batch, 2, *grid) for a diagonal law; with a factor (batch, 2 + rank, *grid); with the shared variance of a
            spectral law (batch, 3, *grid).
        """
        mean, spread, *shared = outputs.split([1] * min(3, self.channels) + [self.rank] * bool(self.rank), 1)
        law = [mean, softplus(spread + OWN if shared else spread) + FLOOR]
        if shared:
            variance = softplus(shared[0] + SHARED) + FLOOR
            law.append(variance if self.spectral else factor_of(variance, shared[1]))
        return torch.cat(law, 1)

    def forward(self, moments: Tensor) -> LocationScale:
        """The law over flattened fields, batch (batch,), of ``moments`` (batch, parts, *grid)."""
        grid = tuple(moments.shape[2:])
        mean, own, *shared = moments.flatten(2).split([1, 1] + [moments.shape[1] - 2] * (moments.shape[1] > 2), 1)
        mean, own = mean.squeeze(1), own.squeeze(1)
        cov: Diagonal | LowRank | Spectral
        if not shared:
            cov = Diagonal(own)
        elif self.spectral:
            variance = own + shared[0].squeeze(1)
            share = shared[0].squeeze(1) / variance
            cov = Spectral.normalised(grid, self.power(grid), variance.sqrt(), share, self.boundary)
        else:
            cov = LowRank(shared[0].mT, own)
        return LocationScale(mean, cov, validate_args=False)

    def power(self, grid: tuple[int, ...]) -> Tensor:
        """The power of every wave number of a grid, (n,), up to a factor."""
        total = torch.ones((), dtype=self.log_length.dtype, device=self.log_length.device)
        for n, length in zip(grid, self.log_length.exp()):
            k = torch.arange(n, dtype=length.dtype, device=length.device)
            if self.boundary == "periodic":
                k = 2 * torch.minimum(k, n - k)  # as many half waves
            elif self.boundary == "zero":
                k = k + 1
            total = total.unsqueeze(-1) + (length * k).square()
        return total.flatten() ** -self.log_exponent.exp()


def factor_of(variance: Tensor, weights: Tensor) -> Tensor:
    """Columns of a factor, (batch, rank, *grid), of the variance (batch, 1, *grid) that they share, and weights."""
    rank = weights.shape[1]
    return (variance / rank).sqrt() * cosines(rank, weights) * (1 + weights)


def cosines(count: int, like: Tensor) -> Tensor:
    """The smoothest cosines of a grid without the constant, (count, *grid); their mean square is 1 at every point."""
    grid = like.shape[2:]
    side = 2 + math.ceil((count + 1) ** (1 / len(grid)))
    waves = sorted(itertools.product(range(side), repeat=len(grid)), key=lambda k: (sum(x * x for x in k), k))
    tables = []
    for n in grid:
        x = (torch.arange(n, dtype=torch.float64, device=like.device) + 0.5) * (math.pi / n)
        k = torch.arange(side, dtype=torch.float64, device=like.device)
        tables.append((x * k[:, None]).cos())  # (side, n)
    chosen = waves[1 : 1 + count]
    field = torch.ones((), dtype=torch.float64, device=like.device)
    for axis, table in enumerate(tables):
        rows = table[[wave[axis] for wave in chosen]]
        field = field.unsqueeze(-1) * rows.reshape(count, *[1] * axis, -1)
    return (field / field.square().mean(0).sqrt()).to(like.dtype)
