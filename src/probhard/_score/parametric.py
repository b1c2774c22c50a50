"""Scores of parametric forecasts: of their variables, or of linear functionals of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch import distributions as td

from probhard._score.checks import check_mask, check_target, masked, observed
from probhard._score.functional_crps import functional_crps
from probhard._score.skewed import skewed_crps
from probhard.errors import ParameterError
from probhard.laws.distribution import Marginals, marginals


def crps(dist: Any, y: Tensor, mask: Tensor | None = None, functionals: Any = None) -> Tensor:
    """Continuous ranked probability score, with finite gradients at any scale >= 0.

    Scores of variables are closed form. Scores of linear functionals ``F u`` are closed form for elliptical laws
    (normal, multivariate Student-t and Laplace), also after affine equalities. Otherwise they come from fixed
    antithetic draws of the law; ``functional_rule`` says which.

    Args:
        dist: A forecast over n variables; or torch's Gamma or Beta, for evaluation of variables only.
        y: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool. A functional counts if all its variables do.
        functionals: F, a matrix (k, n), dense or sparse, or a family such as ``BlockMeans``. None scores variables.

    Returns:
        The score, (*batch, n), or (*batch, k) of functionals.

    Raises:
        ParameterError: Also if a Gamma or Beta law requires a gradient, or functionals meet a law without covariance.
    """
    if functionals is not None:
        return functional_crps(dist, y, functionals, mask)
    base = dist.base_dist if isinstance(dist, td.Independent) else dist
    if isinstance(base, td.Gamma | td.Beta):
        check_target(base.batch_shape, y)
        return masked(skewed_crps(base, observed(y, mask, 0.5)), mask)
    laws = marginals_for(dist, y)
    return masked(laws.crps(observed(y, mask, laws.loc.detach())), mask)


def nll(dist: Any, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Negative log density of the marginals; 0 for ``degenerate`` coordinates.

    At a bound of a censored law it is the negative log of the point mass.

    Args:
        dist: A forecast over n variables.
        y: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        The score, (*batch, n).
    """
    check_mask(mask)
    return marginals_for(dist, y).nll(y, mask)


def degenerate(dist: Any) -> Tensor:
    """Whether coordinates of a forecast are point masses, (*batch, n) bool; they have no density, so ``nll`` is 0."""
    return marginals(dist).degenerate


def mse(dist: Any, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Squared error of the mean.

    Args:
        dist: A forecast over n variables.
        y: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        The score, (*batch, n).

    Raises:
        ParameterError: Also if ``dist`` is a tensor.
    """
    if isinstance(dist, Tensor):
        raise ParameterError(
            f"mse got a tensor of shape {tuple(dist.shape)}.",
            "It could hold means or draws.",
            "Pass a distribution or (mean, stddev); the error of a point forecast is (point - y).square().",
        )
    mean = dist.mean if hasattr(dist, "mean") else marginals_for(dist, y).mean
    check_target(mean.shape, y)
    return masked((observed(y, mask, mean.detach()) - mean).square(), mask)


def marginals_for(dist: Any, y: Tensor) -> Marginals:
    """The marginal laws of a forecast, checked against targets y (*batch, n)."""
    laws = marginals(dist)
    check_target(laws.batch_shape, y)
    return laws
