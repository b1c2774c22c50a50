"""Location-scale distributions: ``Z = loc + R e`` with ``cov = R R^T`` and unit noise e of a family.

This is the law F(mu, Sigma) that the projection layer takes (paper, section "DPPL on the Distribution
Parameters for Location-Scale Distributions"). ``cov`` is the scale matrix; the variance is its diagonal times
the variance of the family's unit law. The event is the last dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard._util.tensors import broadcast, checking
from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import Covariance, Dense, Diagonal, LowRank, check_finite
from probhard.laws.family import LAPLACE, NORMAL, UNIFORM, Family, student_t


class Marginals(td.Distribution):
    """The one-dimensional laws of the coordinates; a scale of 0 is a point mass."""

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, family: Family = NORMAL) -> None:
        self.loc, self.scale, self.family = loc, scale, family
        super().__init__(broadcast(loc.shape, scale.shape), validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean, (*batch, n)."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Variance, (*batch, n)."""
        return self.scale.square() * self.family.unit_variance

    def crps(self, y: Tensor) -> Tensor:
        """Closed-form continuous ranked probability score, (*batch, n)."""
        return self.family.crps(self.loc, self.scale, y)

    def nll(self, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Negative log density, (*batch, n); 0 where the law is degenerate or the target masked, NaN included."""
        skip = self.degenerate if mask is None else self.degenerate | ~mask
        scale = torch.where(skip, 1.0, self.scale)
        z = torch.where(skip, 0.0, y - self.loc) / scale
        return torch.where(skip, 0.0, scale.log() - self.family.log_density(z))

    @property
    def degenerate(self) -> Tensor:
        """Where the law is a point mass, (*batch, n) bool."""
        return self.scale == 0

    def standardised(self, y: Tensor) -> Tensor:
        """``(y - loc) / scale``, with 0 for 0/0."""
        distance = y - self.loc
        return torch.where((self.scale == 0) & (distance == 0), 0.0, distance / self.scale)

    def cdf(self, value: Tensor) -> Tensor:
        """Distribution function."""
        return self.family.cdf(self.standardised(value))

    def pit(self, y: Tensor) -> Tensor:
        """Probability integral transform: ``cdf``, with a point mass counted half."""
        return self.cdf(y)

    def icdf(self, value: Tensor) -> Tensor:
        """Quantile function."""
        return torch.where(self.scale == 0, self.loc, self.loc + self.scale * self.family.icdf(value))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density; infinite where the scale is 0."""
        return self.family.log_density(self.standardised(value)) - self.scale.log()

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of each coordinate."""
        shape = (*Size(sample_shape), *self.batch_shape)
        noise = self.family.independent().sample(shape[:-1], shape[-1], self.loc.dtype, self.loc.device, generator)
        return self.loc + self.scale * noise


class LocationScale(td.Distribution):
    """``loc + R e``: any member of a multivariate location-scale family.

    Args:
        loc: Location, (*batch, n).
        cov: Scale matrix: ``Diagonal``, ``LowRank``, ``Dense`` or a projected one.
        family: Law of the noise; ``NORMAL`` unless told.
        validate_args: Check values (NaN, infinite, negative variances) in eager mode.
    """

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012
    support = td.constraints.real_vector
    has_rsample = True
    feasible = False  # nothing is promised about a draw of a plain location-scale law

    def __init__(self, loc: Tensor, cov: Covariance, family: Family = NORMAL, validate_args: bool = True) -> None:
        if loc.dim() == 0 or loc.shape[-1] != cov.shape[-1]:
            raise ShapeError(
                f"LocationScale got loc {tuple(loc.shape)} and a covariance over {cov.shape[-1]} variables.",
                "Both describe one event of n variables in their last dimension.",
                "Check the size of the network's mean and variance heads.",
            )
        try:
            shape = broadcast(loc.shape, cov.shape)
        except RuntimeError as error:
            raise ShapeError(
                f"LocationScale got loc {tuple(loc.shape)} and a covariance of shape {tuple(cov.shape)}.",
                "Their batch dimensions do not broadcast.",
                "Give both the same leading dimensions.",
            ) from error
        self.loc, self.cov, self.family = loc.expand(shape), cov, family
        super().__init__(shape[:-1], shape[-1:], validate_args=False)
        self._valid = False
        if validate_args:
            self.validate()

    def validate(self) -> None:
        """Check values once; a no-op while compiling, exporting or inside torch.func."""
        if self._valid or not checking():
            return
        check_finite("The location", self.loc)
        self.cov.validate()
        self._valid = True

    @property
    def exact(self) -> bool:
        """Whether an affine map of this law stays in its family exactly (else it is moment-matched)."""
        return self.family.exact

    @property
    def mean(self) -> Tensor:
        """Mean, (*batch, n)."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Marginal variances, (*batch, n)."""
        return (self.cov.diagonal() * self.family.unit_variance).expand(self.loc.shape)

    @property
    def marginals(self) -> Marginals:
        """The coordinates' own laws."""
        cov = self.cov if isinstance(self.cov, Diagonal) else Diagonal(self.cov.diagonal())
        return Marginals(self.loc, cov.stddev.expand(self.loc.shape), self.family)

    def affine(self, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> LocationScale:
        """The law of ``scale * Z + shift``, elementwise; maps normalised outputs back to target units."""
        factor = torch.as_tensor(scale, dtype=self.loc.dtype, device=self.loc.device)
        if factor.dim() == 0:
            factor = factor.expand(self.event_shape)
        return LocationScale(self.loc * factor + shift, self.cov.scaled(factor), self.family, validate_args=False)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Reparameterised draws, (*sample_shape, *batch, n)."""
        shape = (*Size(sample_shape), *self.batch_shape)
        noise = self.family.sample(shape, self.cov.root_size, self.loc.dtype, self.loc.device, generator)
        return self.loc + self.cov.root(noise)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws without gradient, (*sample_shape, *batch, n)."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def log_prob(self, value: Tensor) -> Tensor:
        """Joint log density (*batch,) of normal and Student-t laws and of independent products."""
        distance, n = value - self.loc, self.event_shape[-1]
        if isinstance(self.cov, Diagonal) and (not self.exact or self.family == NORMAL):
            return self.marginals.log_prob(value).sum(-1)
        if self.family == NORMAL:
            constant = n * math.log(2 * math.pi)
            return -0.5 * (self.cov.quadratic(distance) + self.cov.log_determinant() + constant)
        if self.family.name == "student-t" and self.exact:
            df = torch.as_tensor(self.family.df, dtype=value.dtype, device=value.device)  # type: ignore[attr-defined]
            df = df.squeeze(-1) if df.dim() else df  # one per event
            gamma = torch.lgamma((df + n) / 2) - torch.lgamma(df / 2) - n / 2 * (df * math.pi).log()
            tail = (df + n) / 2 * torch.log1p(self.cov.quadratic(distance) / df)
            return gamma - 0.5 * self.cov.log_determinant() - tail
        raise ParameterError(
            f"The joint density of a correlated {self.family.name} law is not available.",
            "It has no elementary form here.",
            "Score the marginals with probhard.nll, or use the normal or Student-t family.",
        )

    def expand(self, batch_shape: Any, _instance: Any = None) -> LocationScale:
        """The same law with broadcast batch dimensions."""
        loc = self.loc.expand(*Size(batch_shape), *self.event_shape)
        return LocationScale(loc, self.cov, self.family, validate_args=False)


def as_location_scale(
    dist: Any,  # a distribution or a (mean, stddev) pair
    validate_args: bool = True,
) -> LocationScale:
    """Read a distribution as a location-scale law over its last dimension.

    Takes LocationScale, a projected distribution, torch's Normal, Independent, MultivariateNormal,
    LowRankMultivariateNormal, StudentT, Laplace and Uniform, gpytorch's MultivariateNormal, and a (mean, stddev)
    pair. Torch's StudentT, Laplace and Uniform are independent products, so their ``.exact`` is False.
    """
    if isinstance(dist, LocationScale):
        return dist
    if hasattr(dist, "as_location_scale"):
        return dist.as_location_scale()
    if isinstance(dist, tuple | list) and len(dist) == 2 and all(isinstance(part, Tensor) for part in dist):
        return LocationScale(dist[0], Diagonal.from_stddev(dist[1]), NORMAL, validate_args)
    if isinstance(dist, td.Independent):
        return _independent(dist, validate_args)
    if isinstance(dist, td.LowRankMultivariateNormal):
        return LocationScale(dist.loc, LowRank(dist.cov_factor, dist.cov_diag), NORMAL, validate_args)
    if isinstance(dist, td.MultivariateNormal):
        if len(dist.event_shape) != 1:
            raise ShapeError(
                f"Got a multivariate normal with event shape {tuple(dist.event_shape)}.",
                "A projection acts on one event dimension, the last.",
                "Flatten the event, for instance with one task per batch element.",
            )
        return LocationScale(dist.loc, Dense(dist.scale_tril), NORMAL, validate_args)
    if isinstance(dist, td.Normal):
        return LocationScale(dist.loc, Diagonal.from_stddev(dist.scale), NORMAL, validate_args)
    if isinstance(dist, td.StudentT):
        return LocationScale(dist.loc, Diagonal.from_stddev(dist.scale), _student_t(dist.df), validate_args)
    if isinstance(dist, td.Laplace):
        return LocationScale(dist.loc, Diagonal.from_stddev(dist.scale), LAPLACE.independent(), validate_args)
    if isinstance(dist, td.Uniform):
        half = (dist.high - dist.low) / 2
        return LocationScale((dist.high + dist.low) / 2, Diagonal.from_stddev(half), UNIFORM, validate_args)
    raise ParameterError(
        f"Cannot read {type(dist).__name__} as a location-scale distribution.",
        "The projection needs a location and a scale.",
        "Pass a torch Normal, MultivariateNormal, StudentT or Laplace, a (mean, stddev) pair, or a LocationScale; "
        "for any other law draw samples and use DPPL.project_samples.",
    )


def _independent(dist: td.Independent, validate_args: bool) -> LocationScale:
    if dist.reinterpreted_batch_ndims != 1:
        raise ShapeError(
            f"Got Independent over {dist.reinterpreted_batch_ndims} dimensions.",
            "A projection acts on one event dimension, the last.",
            "Flatten the event and use Independent(..., 1); fields flatten time-major.",
        )
    return as_location_scale(dist.base_dist, validate_args)


def _student_t(df: Tensor) -> Family:
    if not df.requires_grad and checking() and bool((df == df.flatten()[0]).all()):
        return student_t(float(df.flatten()[0])).independent()
    return student_t(df).independent()


def marginals(dist: Any) -> Marginals:
    """The coordinates' own laws of anything that ``as_location_scale`` takes, or of a projected distribution."""
    if hasattr(dist, "marginals"):
        return dist.marginals
    return as_location_scale(dist, validate_args=False).marginals
