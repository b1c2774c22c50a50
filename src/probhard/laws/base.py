"""Abstract covariances and families, the two parts of a location-scale law ``Z = loc + R e``, ``cov = R R^T``.

A covariance C (n x n) is used only through its diagonal, the products ``C x`` and ``R e``, and the rescaling
``diag(s) C diag(s)``; it is never formed. Vectors lie along the last dimension, so leading sample and batch dimensions
broadcast as in torch.

A family is given by its unit law (location 0, scale 1), symmetric about 0. With ``e = loc - y``, ``z = e / scale``, F
the distribution function of the unit law and c(z) its CRPS at z,

    CRPS(y) = e (2 F(z) - 1) + scale h(z),      h(z) = c(z) - z c'(z),      c'(z) = 2 F(z) - 1,
    dCRPS/dloc = 2 F(z) - 1,                    dCRPS/dscale = h(z).

The slope ``2 F - 1`` and the spread ``h`` are bounded, so value and gradients are finite for every ``scale >= 0``. At
scale 0 the score is ``|y - loc|``. The CRPS is a loss, ``E|X - y| - E|X - X'| / 2``, the paper's with reversed sign.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Generator, Tensor

from probhard._util.tensors import broadcast
from probhard.laws._crps import location_scale_crps


@dataclass(frozen=True, eq=False)
class Covariance(ABC):
    """A batch of symmetric positive semi-definite n x n matrices, known by their products."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """``(*batch, n)``."""

    @property
    @abstractmethod
    def root_size(self) -> int:
        """Number of columns of the root R."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Diagonal, (*batch, n)."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Multiply vectors by the matrix.

        Args:
            x: (*samples, *batch, n).

        Returns:
            ``C x``, (*samples, *batch, n).
        """

    @abstractmethod
    def root(self, noise: Tensor) -> Tensor:
        """Correlate unit noise.

        Args:
            noise: e, (*samples, *batch, root_size).

        Returns:
            ``R e``, (*samples, *batch, n).
        """

    @abstractmethod
    def scaled(self, scale: Tensor) -> Self:
        """Rescale the variables.

        Args:
            scale: s, broadcasting with (*batch, n).

        Returns:
            ``diag(s) C diag(s)``.
        """

    @abstractmethod
    def to(self, *args: object, **kwargs: object) -> Self:
        """A copy on another device or in another dtype; arguments as of ``Tensor.to``."""

    @abstractmethod
    def validate(self) -> None:
        """Check the entries.

        Raises:
            ParameterError: If entries are NaN, infinite or negative where they must not be.
        """

    def quadratic(self, x: Tensor) -> Tensor:
        """``x^T C^-1 x``, by a Cholesky factor of the dense matrix.

        Args:
            x: (*samples, *batch, n).

        Returns:
            (*samples, *batch).
        """
        factor = torch.linalg.cholesky(self.dense())
        return torch.linalg.solve_triangular(factor, x.unsqueeze(-1), upper=False).square().sum((-2, -1))

    def log_determinant(self) -> Tensor:
        """``log det C``, (*batch,)."""
        return 2 * torch.linalg.cholesky(self.dense()).diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def matmul(self, rhs: Tensor) -> Tensor:
        """``C X`` as ``torch.matmul``, for X (*batch, n, k) or (n,); the result has the shape of X."""
        return self._columns(self.apply, rhs)

    def root_matrix(self) -> Tensor:
        """R itself, (*batch, n, root_size)."""
        eye = torch.eye(self.root_size, dtype=self.dtype, device=self.device)
        return self.root(eye.reshape(-1, *[1] * (len(self.shape) - 1), self.root_size)).movedim(0, -1)

    def root_matmul(self, rhs: Tensor) -> Tensor:
        """``R X`` as ``torch.matmul``, (*batch, n, k) or (n,), for X (*batch, root_size, k) or (root_size,)."""
        return self._columns(self.root, rhs)

    def dense(self) -> Tensor:
        """The full matrix, (*batch, n, n), for tests and small n."""
        identity = torch.eye(self.shape[-1], dtype=self.dtype, device=self.device)
        return self.apply(identity.reshape(-1, *[1] * (len(self.shape) - 1), self.shape[-1])).movedim(0, -1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the entries."""
        return self.diagonal().dtype

    @property
    def device(self) -> torch.device:
        """Device of the entries."""
        return self.diagonal().device

    def _columns(self, product: Callable[[Tensor], Tensor], rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return product(rhs)
        columns = rhs.movedim(-1, 0)  # (k, *batch, n)
        missing = max(0, len(self.shape) - (rhs.dim() - 1))
        return product(columns.reshape(columns.shape[0], *[1] * missing, *columns.shape[1:])).movedim(0, -1)


@dataclass(frozen=True)
class Family(ABC):
    """Unit law of a symmetric location-scale family.

    Args:
        exact: Whether an affine map of a multivariate member stays in the family. True for elliptical laws,
            whose coordinates share one mixing variable; False for products of independent coordinates.
    """

    exact: bool
    name: ClassVar[str]
    variance: ClassVar[float]

    @property
    def unit_variance(self) -> float | Tensor:
        """Variance of the unit law."""
        return self.variance

    @abstractmethod
    def cdf(self, z: Tensor) -> Tensor:
        """Distribution function F of the unit law, elementwise, of the shape of z."""

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the unit law's density, elementwise, of the shape of z."""

    @abstractmethod
    def icdf(self, p: Tensor) -> Tensor:
        """Quantile function of the unit law, elementwise, of the shape of p in [0, 1]."""

    @abstractmethod
    def crps_terms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Slope ``2 F(z) - 1`` and spread ``h(z)`` of the CRPS, each of the shape of z and finite at infinity."""

    def crps_spread(self, z: Tensor) -> Tensor:
        """``h(z) = c(z) - z c'(z)``, the derivative of the CRPS in the scale, of the shape of z."""
        return self.crps_terms(z)[1]

    def crps(
        self,
        loc: Tensor,  # (*batch, n)
        scale: Tensor,  # (*batch, n), >= 0
        y: Tensor,  # (*batch, n)
    ) -> Tensor:
        """Continuous ranked probability score of ``loc + scale * unit``.

        Args:
            loc: Locations, (*batch, n).
            scale: Scales, (*batch, n), >= 0.
            y: Targets, (*batch, n).

        Returns:
            The score, (*batch, n).
        """
        shapes = (loc.shape, scale.shape, y.shape, self._parameter_shape())
        if not (shapes[0] == shapes[1] == shapes[2]) or shapes[3]:
            shape = broadcast(*shapes)
            loc, scale, y = loc.expand(shape), scale.expand(shape), y.expand(shape)
        if not loc.dtype == scale.dtype == y.dtype:
            dtype = torch.promote_types(torch.promote_types(loc.dtype, scale.dtype), y.dtype)
            loc, scale, y = loc.to(dtype), scale.to(dtype), y.to(dtype)
        return location_scale_crps(self, loc, scale, y)

    def independent(self) -> Family:
        """The family with the same marginal law and independent coordinates."""
        return replace(self, exact=False)

    def sample(
        self,
        shape: Sequence[int],
        event_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Draw unit noise; elliptical laws draw one mixing variable per event.

        Args:
            shape: Leading dimensions: samples and batch.
            event_size: Number of coordinates of an event.
            dtype: Of the draws; torch's default for None.
            device: Of the draws; torch's default for None.
            generator: Source of random numbers; torch's global one for None.

        Returns:
            Noise, (*shape, event_size).
        """
        return self._draw(torch.empty((*shape, event_size), dtype=dtype, device=device), generator)

    @abstractmethod
    def _draw(self, noise: Tensor, generator: Generator | None) -> Tensor:
        """Fill ``noise`` with draws of the unit law."""

    def _mix(self, noise: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Normal noise times the root of a random variance: one per event, or one per coordinate."""
        size = (*noise.shape[:-1], 1) if self.exact else noise.shape
        return noise * draw(noise.new_empty(size)).sqrt()

    def _parameter_shape(self) -> Sequence[int]:
        return ()
