"""Location-scale distributions: ``Z = loc + R e`` with ``cov = R R^T`` and unit noise e of a family.

This is the law F(mu, Sigma) that the projection layer takes (paper, section "DPPL on the Distribution Parameters for
Location-Scale Distributions"). ``cov`` is the scale matrix. The variance is its diagonal times the variance of the
family's unit law. The event is the last dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard._util.tensors import broadcast, check_finite, checking, safe_sqrt
from probhard.errors import ParameterError, ShapeError
from probhard.laws.base import LinearMap
from probhard.laws.covariance import Covariance, Dense, Diagonal, LowRank
from probhard.laws.family import LAPLACE, NORMAL, UNIFORM, Family
from probhard.laws.marginals import Marginals
from probhard.laws.student_t import student_t

FIXED_DRAWS = 100  # draws of a law whose functionals have no closed form

__all__ = ["LocationScale", "Marginals", "as_location_scale", "marginals"]


class LocationScale(td.Distribution):
    """The law of ``loc + R e``: any member of a multivariate location-scale family.

    Args:
        loc: Location, (*batch, n).
        cov: Scale matrix R R^T: ``Diagonal``, ``LowRank``, ``Spectral``, ``HierarchyFactors``, ``Dense`` or
            ``ProjectedCovariance``.
        family: Law of the noise e.
        validate_args: Check values (NaN, infinite, negative variances) in eager mode.

    Raises:
        ShapeError: If the shapes of loc and cov do not fit.
        ParameterError: If cov or family is of another kind; if values are checked and one is NaN, infinite or a
            negative variance.
    """

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012
    support = td.constraints.real_vector
    has_rsample = True
    feasible = False  # draws of an unprojected law obey no constraint

    def __init__(self, loc: Tensor, cov: Covariance, family: Family = NORMAL, validate_args: bool = True) -> None:
        if not isinstance(cov, Covariance) or not isinstance(family, Family):
            raise ParameterError(
                f"LocationScale got a covariance of the type {type(cov).__name__} and a family of the type "
                f"{type(family).__name__}.",
                "They say how the variables spread and what their law is.",
                "Pass ph.Diagonal(variance), or another covariance, and a family such as ph.NORMAL.",
            )
        if loc.dim() == 0 or loc.shape[-1:] != cov.shape[-1:]:
            raise ShapeError(
                f"LocationScale got loc {tuple(loc.shape)} and a covariance of shape {tuple(cov.shape)}.",
                "Both must describe the same n variables in their last dimension.",
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
        """Check values once; a no-op while compiling, exporting or inside torch.func.

        Raises:
            ParameterError: If a value is NaN, infinite or a negative variance.
        """
        if self._valid or not checking():
            return
        check_finite("The location", self.loc)
        self.cov.validate()
        self._valid = True

    @property
    def exact(self) -> bool:
        """Whether an affine map of this law stays in its family; else only moments are matched."""
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
        """The marginal laws of the coordinates, batch (*batch, n)."""
        cov = self.cov if isinstance(self.cov, Diagonal) else Diagonal(self.cov.diagonal())
        return Marginals(self.loc, cov.stddev.expand(self.loc.shape), self.family)

    def functional(self, rows: LinearMap) -> Marginals:
        """The laws of linear functionals ``F Z``, each by itself; exact for elliptical families.

        Args:
            rows: F, (k, n), such as a ``SparseMap``.

        Returns:
            The laws, batch (*batch, k).
        """
        loc = rows.at(self.loc).apply(self.loc)
        return Marginals(loc, safe_sqrt(self.cov.functional_variance(rows)).expand(loc.shape), self.family)

    def fixed_draws(self, count: int = FIXED_DRAWS) -> Tensor:
        """Fixed antithetic draws with pathwise gradients: the second half mirrors the noise of the first.

        Args:
            count: Number of draws S; an odd one is rounded down.

        Returns:
            Draws, (S, *batch, n), with the same noise in every call.
        """
        generator = torch.Generator(self.loc.device).manual_seed(0)
        shape = (max(1, count // 2), *self.batch_shape)
        noise = self.family.sample(shape, self.cov.root_size, self.loc.dtype, self.loc.device, generator)
        moved = self.cov.root(noise)
        return torch.cat([self.loc + moved, self.loc - moved])

    def affine(self, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> LocationScale:
        """The law of ``scale * Z + shift``, elementwise; it maps normalised outputs back to target units.

        Args:
            scale: A number, or broadcasting with (*batch, n).
            shift: A number, or broadcasting with (*batch, n).

        Returns:
            The transformed law, of the same family.
        """
        factor = torch.as_tensor(scale, dtype=self.loc.dtype, device=self.loc.device)
        if factor.dim() == 0:
            factor = factor.expand(self.event_shape)
        return LocationScale(self.loc * factor + shift, self.cov.scaled(factor), self.family, validate_args=False)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Reparameterised draws, which carry gradients.

        Args:
            sample_shape: Leading dimensions of the draws.
            generator: Source of random numbers; torch's global one for None.

        Returns:
            Draws, (*sample_shape, *batch, n).
        """
        shape = (*Size(sample_shape), *self.batch_shape)
        noise = self.family.sample(shape, self.cov.root_size, self.loc.dtype, self.loc.device, generator)
        return self.loc + self.cov.root(noise)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws without gradient; arguments and shape as of ``rsample``."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def log_prob(self, value: Tensor) -> Tensor:
        """Joint log density of normal and Student-t laws and of independent products.

        Args:
            value: Points, (*batch, n).

        Returns:
            (*batch,).

        Raises:
            ParameterError: For correlated laws of the other families.
        """
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
            "It has no elementary form.",
            "Score the marginals with probhard.nll, or use the normal or Student-t family.",
        )

    def expand(self, batch_shape: Any, _instance: Any = None) -> LocationScale:
        """The same law with batch dimensions expanded to ``batch_shape``."""
        loc = self.loc.expand(*Size(batch_shape), *self.event_shape)
        return LocationScale(loc, self.cov, self.family, validate_args=False)


def as_location_scale(dist: Any, validate_args: bool = True) -> LocationScale:
    """Convert a distribution to a location-scale law over its last dimension.

    Args:
        dist: A LocationScale or Projected; torch's Normal, Independent, MultivariateNormal, LowRankMultivariateNormal,
            StudentT, Laplace or Uniform (the last three with independent coordinates); gpytorch's MultivariateNormal;
            or a (mean, stddev) pair, each (*batch, n).
        validate_args: Check values in eager mode.

    Raises:
        ParameterError: If the distribution is of another kind, or a value is not valid.
        ShapeError: If the event has more than one dimension.
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
        f"Cannot convert {type(dist).__name__} to a location-scale distribution.",
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
    """The marginal laws of the coordinates.

    Args:
        dist: Anything that ``as_location_scale`` takes, over n variables.

    Returns:
        The laws, batch (*batch, n); of a projected distribution, with its clipped or projected marginals.

    Raises:
        ParameterError: If the distribution is of another kind.
    """
    if hasattr(dist, "marginals"):
        return dist.marginals
    return as_location_scale(dist, validate_args=False).marginals
