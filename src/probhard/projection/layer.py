"""The differentiable probabilistic projection layer, DPPL (paper, section of that name).

    u*(z) = argmin_{u feasible} |u - z|_Q^2,     Y ~ F(u*(mu), P Sigma P^T),     P = du*/dz at mu.

The layer maps a distribution and a constraint to the projected distribution. Its mean and variance serve training
without sampling. Every draw is projected and therefore feasible. The moments are computed in one of these ways:

| ``covariance``   | moments                                                              | ``"auto"`` takes it for |
|------------------|----------------------------------------------------------------------|-------------------------|
| ``delta``        | from the tangent at the mean                                         | equalities              |
| ``second-order`` | from the tangent and the curvature at the mean                       | never                   |
| ``censored``     | of the law projected on the equalities, clipped at the bounds        | bounds alone, many rows |
| ``mean-field``   | of every row in the mean field of the others                         | linear rows, turnover   |
| ``monte-carlo``  | of fixed antithetic draws                                            | other inequalities      |
| ``keep``         | projected mean, unchanged covariance; draws are not feasible         | never                   |
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from probhard._util.tensors import broadcast_batch, check_finite, checking, no_autocast
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale, as_location_scale
from probhard.metric import Metric, as_metric
from probhard.projection.base import Options, Projector, Solution
from probhard.projection.dispatch import projector_of
from probhard.projection.eager import breaks_graph, check_vmap, outside
from probhard.projection.frozen import FrozenIterations, FrozenProjection, frozen
from probhard.projection.policy import FAILURES, FEWER_RESTARTS, RESTARTS, Failures, Policy, blanked
from probhard.projection.projected import Projected
from probhard.projection.second_order import second_order

COVARIANCES = ("auto", "delta", "second-order", "censored", "mean-field", "monte-carlo", "keep")
CURVATURES = ("gauss-newton", "exact")
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class DPPL(nn.Module):
    """Projects distributions, points and samples on constraints.

    Args:
        metric: ``"oblique"``, ``"orthogonal"`` or a ``Metric``, fixed or learned.
        covariance: ``"auto"``, ``"delta"``, ``"second-order"``, ``"censored"``, ``"mean-field"``, ``"monte-carlo"`` or
            ``"keep"``.
        curvature: Of derivatives through nonlinear equalities: ``"gauss-newton"`` (the paper's) or ``"exact"``.
        on_failure: For points whose projection fails: ``"retry"``, ``"raise"``, ``"flag"`` or ``"resample"``; see
            ``projection.policy``.
        validate_args: Check values (NaN, negative variances, feasibility) in eager mode.
        solver: ``"dense"`` ignores the structure of linear rows; ``"newton"`` uses exact Hessians in every step of a
            nonlinear projection, which the default (None) only does for slow points.
        draws: Number of fixed draws of ``"monte-carlo"``.
        iterations: Number of branch-free iterations for polyhedral sets, to compile and export; None for exact
            methods. Results are approximate: ``.feasible`` and ``stats`` say how far.

    Attributes:
        failures: Counts of ``"retry"``: draws that were redrawn, means that were masked, share of recent failures.
        as_is: Whether points are returned as they are, feasible or not; see ``corrections``.

    Raises:
        ParameterError: A choice is unknown, or there are fewer than two draws or one iteration.
    """

    as_is = False

    def __init__(
        self,
        metric: str | Metric = "oblique",
        covariance: str = "auto",
        curvature: str = "gauss-newton",
        on_failure: str = "retry",
        validate_args: bool = True,
        solver: str | None = None,
        draws: int = 100,
        iterations: int | None = None,
    ) -> None:
        super().__init__()
        check_choice("covariance", covariance, COVARIANCES)
        check_choice("curvature", curvature, CURVATURES)
        check_choice("on_failure", on_failure, FAILURES)
        if solver is not None:
            check_choice("solver", solver, ("dense", "newton"))
        if draws < 2:
            raise ParameterError(
                f"DPPL got draws={draws}.", "Moments come from pairs of fixed draws.", "Pass at least 2; 100 is usual."
            )
        if iterations is not None and iterations < 1:
            raise ParameterError(
                f"DPPL got iterations={iterations}.",
                "They are the steps towards the nearest point.",
                "Pass 50 or more, or None for the exact layer.",
            )
        self.metric = as_metric(metric)
        self.iterations = iterations
        self.covariance, self.curvature, self.on_failure = covariance, curvature, on_failure
        self.validate_args, self.solver, self.draws = validate_args, solver, draws
        self.failures = Failures()

    def extra_repr(self) -> str:
        """The options that ``repr`` shows."""
        return f"covariance={self.covariance!r}, on_failure={self.on_failure!r}"

    def forward(self, dist: Any, constraint: Constraint, metric_from: Any | None = None) -> Projected | LocationScale:
        """Project a distribution.

        Args:
            dist: A ``LocationScale``, a torch distribution or a ``Projected``, over (*batch, n).
            constraint: What to project on.
            metric_from: Distribution whose covariance the metric uses, if it uses one; ``dist`` itself for None. A
                calibrated law keeps the metric of the uncalibrated one, and with it the projected mean.

        Returns:
            The projected law; with ``covariance="keep"`` a ``LocationScale``, whose draws are not feasible.

        Raises:
            ParameterError: Values are invalid, or no method handles the constraint.
            ShapeError: Distribution and constraint do not fit.
            InfeasibleError, ConvergenceError: The mean has no projection and ``on_failure`` is not ``"flag"``; with
                ``"retry"``, that of too many means.
        """
        if self.iterations is None and breaks_graph(constraint):
            return cast(Projected, outside(self.forward, dist, constraint, metric_from))
        base = _full_precision(as_location_scale(dist, validate_args=False))
        if self.validate_args:
            base.validate()
        with no_autocast(base.loc):
            own = metric_from is None or self.metric.fixed
            cov = base.cov if own else as_location_scale(metric_from, validate_args=False).cov.to(base.loc.dtype)
            projector = self._projector(base.loc, cov, constraint, self.metric.oblique and own)
            kind = self._kind(projector, constraint, base)
            if kind in ("censored", "mean-field"):
                return Projected(base, constraint, self._policy, projector, closed=kind)
            if kind == "second-order":
                return second_order(base, constraint, self._policy, projector)
            if kind in ("keep", "monte-carlo"):
                solution: Solution | None = projector.solve(base.loc)
                assert solution is not None
                mean, scale, tangent = solution.value, None, solution.tangent
            else:
                solution, mean, scale, tangent = projector.moments(base.loc, base.cov)
        failed = None if solution is None else self._policy.check(solution.stats, projector, base.loc)
        if kind == "keep":
            return LocationScale(blanked(mean, failed), base.cov, base.family, validate_args=False)
        return Projected(base, constraint, self._policy, projector, mean, tangent, scale, solution, failed=failed)

    def _kind(self, projector: Projector, constraint: Constraint, base: LocationScale) -> str:
        """How the moments are computed."""
        rule = next((rule for rule in projector.mean_field if rule.fits(base)), None)
        if self.covariance == "auto":
            # instead of draws only: clipped marginals are faster. Not in a traced graph, where its steps are unrolled
            drawn = projector.moments_from == "monte-carlo" and checking()
            suits = drawn and rule is not None and rule.cheap
            return "mean-field" if suits else projector.moments_from
        if self.covariance == "mean-field" and rule is None:
            raise ParameterError(
                f"covariance='mean-field' got the constraint {constraint!r} and a {base.family.name} law.",
                "It needs shared linear rows or bounds that interact and one family of finite variance, or an L1 ball "
                "with bounds and at most one row, and independent normal variables.",
                "Use covariance='auto', which takes another rule here.",
            )
        if self.covariance == "censored" and projector.moments_from != "censored":
            raise ParameterError(
                f"covariance='censored' got the constraint {constraint!r}.",
                "Marginals are clipped in closed form only if bounds are the only inequalities.",
                "Use covariance='auto', which uses fixed draws here.",
            )
        return self.covariance

    def project(self, z: Tensor, constraint: Constraint, dist: Any = None, start: Tensor | None = None) -> Solution:
        """Project points.

        Args:
            z: Points, (*samples, *batch, n).
            constraint: What to project on.
            dist: Distribution whose covariance the oblique metric uses.
            start: Initial guess for nonlinear constraints, (*samples, *batch, n).

        Raises:
            ShapeError, ParameterError, InfeasibleError, ConvergenceError: As for distributions.
        """
        if self.iterations is None and breaks_graph(constraint):
            return cast(Solution, outside(self.project, z, constraint, dist, start))
        z = _at_least_single(z)
        if self.validate_args and checking():
            check_finite("The point", z)
        cov = None if dist is None else as_location_scale(dist, validate_args=False).cov
        with no_autocast(z):
            return self._policy.solved(self._projector(z, cov, constraint), z, start)

    def project_samples(self, samples: Tensor, constraint: Constraint) -> Solution:
        """Project samples. The oblique metric uses their variances.

        Args:
            samples: (S, *batch, n).
            constraint: What to project on.

        Raises:
            ShapeError: There is no sample dimension, or a single sample under a metric that needs variances.
            ParameterError, InfeasibleError, ConvergenceError: As for distributions.
        """
        if self.iterations is None and breaks_graph(constraint):
            return cast(Solution, outside(self.project_samples, samples, constraint))
        samples = _at_least_single(samples)
        if samples.dim() < 2 or (samples.shape[0] < 2 and not self.metric.fixed):
            raise ShapeError(
                f"The samples have shape {tuple(samples.shape)}.",
                "Their shape is (S, *batch, n), and the oblique metric needs at least two samples for a variance.",
                "Stack the members of the ensemble along a new first dimension.",
            )
        if self.validate_args and checking():
            check_finite("The sample", samples)
        with no_autocast(samples):
            cov = None if self.metric.fixed else Diagonal(samples.var(0))
            return self._policy.solved(self._projector(samples, cov, constraint), samples)

    def freeze(
        self, constraint: Constraint, dtype: torch.dtype | None = None, variables: int | None = None
    ) -> FrozenProjection | FrozenIterations:
        """The projection on one set under a fixed metric as a module of buffers and products, for export.

        Args:
            constraint: A ``LinearEquality``; with ``iterations``, any polyhedral set.
            dtype: Of the buffers and of the points; torch's default dtype if None, as for the layers of a model.
            variables: Their number n, for sets that fit any number.

        Returns:
            A module that maps points (*batch, n) to their projections; with inequalities also to their residuals.

        Raises:
            ParameterError: The metric is not fixed, the constraint is not of these kinds, or n is not known.
        """
        made = frozen(constraint, self.metric, variables, self.iterations)
        return made.to(dtype or torch.get_default_dtype())

    def _projector(
        self, z: Tensor, cov: Covariance | None, constraint: Constraint, oblique: bool | None = None
    ) -> Projector:
        """The projector for this constraint and metric, and points like z; ``oblique`` if W is their covariance."""
        if self.iterations is None:
            check_vmap(constraint, z)
        if cov is not None:
            _check_cov(z, cov)
        weight = cov if self.metric.oblique and cov is not None else self.metric.weight(z, cov)
        broadcast_batch(z.shape[:-1], weight.shape[:-1], "the distribution", "the metric")
        options = Options(
            oblique=self.metric.oblique and cov is not None if oblique is None else oblique,
            exact=self.curvature == "exact",
            dense=self.solver == "dense",
            hessian=self.solver == "newton",
            validate=self.validate_args,
            iterations=self.iterations,
            restarts=RESTARTS.get(self.on_failure, FEWER_RESTARTS),
        )
        return projector_of(constraint, z, weight, options)

    @property
    def _policy(self) -> Policy:
        return Policy(
            self.on_failure, self.validate_args, self.draws, self.failures, approximate=self.iterations is not None
        )


def _check_cov(z: Tensor, cov: Covariance) -> None:
    if cov.shape[-1] != z.shape[-1]:
        raise ShapeError(
            f"The points have {z.shape[-1]} variables, the distribution of the metric {cov.shape[-1]}.",
            "The oblique metric weighs each variable by its own variance.",
            "Pass the distribution of the points.",
        )
    broadcast_batch(z.shape[:-1], cov.shape[:-1], "the points", "the distribution")


def _at_least_single(x: Tensor) -> Tensor:
    """Convert half precision to float32: it is too coarse for constraints."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or not x.dim():
        found = f"{x.layout} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(
            f"The points are {found}.", "They are a dense tensor (*batch, n).", "Convert them with torch.as_tensor."
        )
    if x.dtype not in PRECISIONS:
        raise ParameterError(
            f"The points have the dtype {x.dtype}.",
            "Projected values are real numbers of single or double precision.",
            "Pass x.float() or x.double().",
        )
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _full_precision(base: LocationScale) -> LocationScale:
    loc = _at_least_single(base.loc)
    return base if loc is base.loc else LocationScale(loc, base.cov.to(torch.float32), base.family, validate_args=False)
