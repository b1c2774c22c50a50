"""The projected distribution: moments for training without sampling, and feasible draws."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import checking, no_autocast, safe_sqrt
from probhard.constraints.base import Constraint
from probhard.constraints.equality import LinearEquality
from probhard.laws.base import LinearMap
from probhard.laws.covariance import Covariance
from probhard.laws.distribution import LocationScale, Marginals
from probhard.projection.base import Projector, Solution, Stats
from probhard.projection.means import feasible_mean, moments_of, replaced
from probhard.projection.policy import Policy, blanked, failure
from probhard.tangent import Differential, ProjectedCovariance

RESAMPLES = 20  # rounds of redrawing before giving up


class Projected(td.Distribution):
    """A distribution whose mean and draws are feasible, as returned by ``DPPL``.

    Args:
        base: The law before the projection, over (*batch, n).
        constraint: The constraint.
        policy: Treatment of failures.
        projector: Projects points on the constraint.
        mean: Projected location (*batch, n); None if marginals are in closed form.
        tangent: The tangent there, computed on demand if None.
        scale: Marginal scales (*batch, n); from fixed draws if None.
        solution: The projection of the location, computed on demand if None.
        closed: The rule of marginals in closed form, ``"censored"`` or ``"mean-field"``; None for other rules.
        center: Means of the marginals (*batch, n) if these need not be feasible together; ``mean`` is their projection.
        failed: Where the projection of the location failed and moments are NaN, (*batch,); None for nowhere.
    """

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012
    has_rsample = True

    def __init__(
        self,
        base: LocationScale,
        constraint: Constraint,
        policy: Policy,
        projector: Projector,
        mean: Tensor | None = None,
        tangent: Differential | None = None,
        scale: Tensor | None = None,
        solution: Solution | None = None,
        closed: str | None = None,
        center: Tensor | None = None,
        failed: Tensor | None = None,
    ) -> None:
        self.base, self.constraint, self.policy, self.projector = base, constraint, policy, projector
        self._drawn = scale is None and closed is None
        if failed is not None and not self._drawn:  # moments from fixed draws do not need the location
            mean = None if mean is None else blanked(mean, failed)
            scale, center = (None if x is None else blanked(x, failed) for x in (scale, center))
        self._tangent, self._point, self._scale, self._solution = tangent, mean, scale, solution
        self._closed, self._center, self._failed, self._redrawn = closed, center, failed, 0
        self._clipped: Marginals | None = None
        self._inner: Tensor | None = None
        self._draws: Tensor | None = None
        shape = projector.projected_shape(base) if mean is None else mean.shape
        super().__init__(shape[:-1], shape[-1:], validate_args=False)

    @property
    def _laws(self) -> Marginals | None:
        """The clipped marginals, computed on demand: draws do not need them."""
        if self._closed is not None and self._clipped is None:
            with no_autocast(self.base.loc):
                if self._closed == "mean-field":
                    rule = next(rule for rule in self.projector.mean_field if rule.fits(self.base))
                    self._clipped = rule.laws(self.base)
                else:
                    self._clipped = self.projector.censored(self.base)
        return self._clipped

    @property
    def family(self) -> Any:
        """The family of the base law."""
        return self.base.family

    @property
    def exact(self) -> bool:
        """Whether the marginals are exact, not only their first two moments."""
        if self._laws is not None:
            return self._closed == "censored" and not self.projector.has_equalities
        linear = isinstance(self.constraint, LinearEquality)
        return self.base.exact and linear and self._center is None and not self._drawn

    @property
    def feasible(self) -> bool:
        """Whether the mean is feasible to the tolerance of draws: always without ``iterations`` and flagged failures.

        Of a correction, also whether every draw is feasible by design.
        """
        if not self.projector.guaranteed:
            return False
        if not self.policy.approximate and self.policy.on_failure != "flag":
            return True
        if not checking():  # a graph cannot tell
            return not self.policy.approximate
        mean = self.mean.detach()
        size = torch.maximum(mean.abs(), self.base.loc.detach().abs()).amax(-1, keepdim=True)
        return bool((self.constraint.relative_violation(mean, size) <= TOLERANCE[mean.dtype]).all())

    @property
    def mean(self) -> Tensor:
        """Projected mean, (*batch, n), feasible."""
        if self._laws is not None:
            if self._point is None:
                self._point = self._censored_mean(self._laws)
            return self._point
        if self._means is None:
            return cast(Tensor, self._point)
        if self._inner is None:
            self._inner = feasible_mean(self._means, self.base.loc, self.constraint, self.projector, self.policy)
        return self._inner

    def _censored_mean(self, laws: Marginals) -> Tensor:
        """The mean of the clipped marginals, projected if the set has more than bounds."""
        if self._closed == "censored" and not self.projector.has_equalities:
            return laws.mean
        with no_autocast(laws.mean):
            solution = self.policy.solved(self.projector, laws.mean)
        lost = ~solution.stats.converged
        if self.policy.approximate or not checking() or not bool(lost.any()):
            return solution.value
        return blanked(solution.value, lost)

    @property
    def tangent(self) -> Differential:
        """The tangent at the projected location."""
        if self._tangent is None:
            self._tangent = self._located.tangent
        return self._tangent

    @property
    def scale(self) -> Tensor:
        """Marginal scales (*batch, n); exactly 0 where the constraint fixes a variable."""
        if self._scale is None and self._laws is not None:
            self._scale = safe_sqrt(self._laws.variance / self.family.unit_variance)
        elif self._scale is None:
            self._fixed_moments()
        return cast(Tensor, self._scale).expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        """Projected marginal variances, (*batch, n)."""
        return self.scale.square() * self.family.unit_variance

    @property
    def cov(self) -> Covariance:
        """The projected scale matrix, singular and never formed as a matrix."""
        return ProjectedCovariance(self.tangent, self.base.cov)

    @property
    def marginals(self) -> Marginals:
        """The laws of single variables; on a curved set their means are not feasible together, as ``mean`` is."""
        if self._laws is not None:
            return self._laws
        return Marginals(self.mean if self._means is None else self._means, self.scale, self.family)

    def functional(self, rows: LinearMap) -> Marginals:
        """The laws of linear functionals ``F u``; exact if ``exact``, after inequalities of first order."""
        return self.as_location_scale().functional(rows)

    @property
    def stats(self) -> Stats:
        """Status of the projection of the location, and the number of draws that were redrawn so far."""
        return self.policy.counted(self._located.stats, self._redrawn)

    @property
    def usable(self) -> Tensor | None:
        """Where the marginals have moments, (*batch,) bool; None for everywhere. Losses leave out the others."""
        if self._failed is None or self._closed is not None:
            return None
        return torch.isfinite(self.marginals.mean).all(-1) if self._drawn else ~self._failed

    @property
    def _located(self) -> Solution:
        """The projection of the location."""
        if self._solution is None:
            self._solution = self.projector.solve(self.base.loc)
        return self._solution

    def as_location_scale(self) -> LocationScale:
        """The projected law as a LocationScale with singular covariance."""
        return LocationScale(self.mean, self.cov, self.family, validate_args=False)

    def draw(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Solution:
        """Projected draws (*sample_shape, *batch, n) with their status; never raises for failures."""
        z = self.base.rsample(sample_shape, generator)
        with no_autocast(z):
            return self.projector.solve(z)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Feasible draws with gradients.

        Args:
            sample_shape: Leading dimensions.
            generator: Source of randomness.

        Returns:
            Draws (*sample_shape, *batch, n); failed ones are NaN with ``on_failure="flag"``.

        Raises:
            ProbhardError: Draws failed and ``on_failure`` is ``"raise"``; or too many did, or redrawing did not help.
        """
        z = self.base.rsample(sample_shape, generator)
        with no_autocast(z):
            solution = self.projector.solve(z)
        if not checking() or self.policy.as_is or bool(solution.stats.converged.all()):
            if checking() and self.policy.on_failure == "retry":
                self.policy.failures.add(solution.stats.converged.numel(), 0)
            return solution.value
        return self._handle(z, solution, Size(sample_shape), generator)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Feasible draws without gradients; see ``rsample``."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Projected:
        """The same law with batch dimensions broadcast to ``batch_shape``."""
        base = self.base.expand(batch_shape)
        if self._closed is not None:
            return Projected(base, self.constraint, self.policy, self.projector, closed=self._closed)
        mean = cast(Tensor, self._point).expand(*Size(batch_shape), *self.event_shape)
        center = None if self._center is None else self._center.expand(mean.shape)
        parts = (self.policy, self.projector, mean, self.tangent, self._scale, self._solution)
        failed = None if self._failed is None else self._failed.expand(batch_shape)
        return Projected(base, self.constraint, *parts, center=center, failed=failed)

    @property
    def _means(self) -> Tensor | None:
        """The means of the marginals; None if they are ``mean``."""
        if self._drawn and self._center is None:
            self._fixed_moments()
        return self._center

    def _fixed_moments(self) -> None:
        """Find mean and scale of the fixed draws."""
        draws = self.fixed_draws()
        self._center, self._scale = moments_of(draws, self.family.unit_variance)

    def fixed_draws(self) -> Tensor:
        """Fixed antithetic draws, (S, *batch, n), projected, with pathwise gradients; NaN where that failed."""
        if self._draws is None:
            with no_autocast(self.base.loc):
                z = self.base.fixed_draws(self.policy.draws)
                solution = self.projector.solve(z)
            stats = solution.stats
            if self._failed is not None:  # these elements are counted already
                stats = replace(stats, converged=stats.converged | self._failed)
            failed = self.policy.check(stats, self.projector, z)
            lost = ~solution.stats.converged & (not self.policy.approximate)
            self._draws = blanked(solution.value, lost)
            if failed is not None:
                self._draws = replaced(self._draws, lost)
                self.policy.failures.masked -= int(failed.sum())  # they are draws, not means
                self._count_redrawn(int(failed.sum()))
        return self._draws

    def _count_redrawn(self, number: int) -> None:
        """Count draws that were drawn again."""
        self._redrawn += number
        self.policy.failures.redrawn += number

    def _handle(self, z: Tensor, solution: Solution, shape: Size, generator: torch.Generator | None) -> Tensor:
        """Treat failed draws according to ``on_failure``."""
        value, bad = solution.value, ~solution.stats.converged
        many = self.policy.on_failure == "retry" and self.policy.failures.add(bad.numel(), int(bad.sum()))
        if self.policy.redraws and not many:
            for _ in range(RESAMPLES):
                self._count_redrawn(int(bad.sum()))
                again = self.draw(shape, generator)
                value = torch.where(bad.unsqueeze(-1), again.value, value)
                bad = bad & ~again.stats.converged
                if not bool(bad.any()):
                    return value
        message = failure(replace(solution.stats, converged=~bad), "draws")
        if self.policy.on_failure == "flag":
            warnings.warn(f"{message} They are NaN.", RuntimeWarning, stacklevel=3)
            return torch.where(bad.unsqueeze(-1), torch.nan, value)
        raise self.policy.error(replace(solution.stats, converged=~bad), self.projector, z, "draws")
