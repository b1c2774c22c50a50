"""CRPS of linear functionals ``f . u`` of a joint law.

An elliptical law after affine constraints is again elliptical, and so is every functional of it:

    f . u ~ family(f . mean, sqrt(f^T C f)),      CRPS in closed form.

For any other law the score is that of S fixed draws ``u_s``, of which the second half mirrors the noise of the first.
Draws s and t are independent unless t is the mirror image s' of s, so that without these pairs it is unbiased:

    CRPS(f . y) = 1/S sum_s |f . (u_s - y)| - 1/(2 S (S - 2)) sum_{s, t not in {s, s'}} |f . (u_s - u_t)|.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probhard._score.checks import check_mask, check_target, masked, observed
from probhard._score.functionals import Functionals, as_map, functional_mask
from probhard._util.tensors import no_autocast
from probhard.errors import ParameterError
from probhard.laws.distribution import LocationScale, as_location_scale
from probhard.laws.marginals import CensoredMarginals, Marginals
from probhard.rows.maps import SparseMap

CLOSED, DRAWS = "closed form", "draws"


def functional_crps(
    dist: Any,
    y: Tensor,  # (*batch, n)
    functionals: Any,
    mask: Tensor | None = None,  # (*batch, n) bool
) -> Tensor:
    """CRPS of functionals; see ``crps``.

    Args:
        dist: A joint law over n variables.
        y: Targets, (*batch, n).
        functionals: A matrix (k, n) or a family.
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        The score, (*batch, k); 0 for functionals of unobserved variables.
    """
    if is_mixture(dist):
        return _mixture_crps(dist, y, functionals, mask)
    law = joint_law(dist)
    check_target((*law.batch_shape, *law.event_shape), y)
    check_mask(mask)
    rows = as_map(functionals, y.shape[-1])
    with no_autocast(law.mean):
        target = observed(y, mask, law.mean.detach())
        rows = rows.at(target)
        if functional_rule(law) == CLOSED:
            error = rows.apply(target - law.mean)  # differences, which do not cancel far from 0
            score = law.family.crps(torch.zeros_like(error), _scales(law, functionals, rows), error)
        else:
            score = antithetic_crps(rows.apply(law.fixed_draws() - target))
        return masked(score, functional_mask(rows, mask))


def _mixture_crps(dist: Any, y: Tensor, functionals: Any, mask: Tensor | None) -> Tensor:
    """The same of a mixture: every functional of it is a mixture of functionals of its members."""
    check_target((*dist.batch_shape, *dist.event_shape), y)
    check_mask(mask)
    if functional_rule(dist) != CLOSED:
        raise ParameterError(
            "Functionals of a mixture were asked for whose members are clipped, curved or not elliptical.",
            "The score is closed where every functional of a member is, and draws of a mixture are not fixed.",
            "Score draws by crps_ensemble(..., functionals=...), or train with Step(draws=...).",
        )
    rows = as_map(functionals, y.shape[-1])
    with no_autocast(dist.mean):
        target = observed(y, mask, dist.mean.detach())
        rows = rows.at(target)
        score = dist.functional(rows).crps(rows.apply(target))
        return masked(score, functional_mask(rows, mask))


def is_mixture(dist: Any) -> bool:
    """Whether a forecast is a mixture of joint laws."""
    return hasattr(dist, "members") and hasattr(dist, "shares")


def _scales(law: Any, functionals: Any, rows: SparseMap) -> Tensor:
    """The scales of functionals, (*batch, k); those of variables are known already."""
    chosen = functionals.variables_of(law) if isinstance(functionals, Functionals) else None
    if chosen is None:
        return law.functional(rows).scale
    return law.marginals.scale.index_select(-1, chosen.to(law.mean.device))


def functional_rule(dist: Any) -> str:
    """How ``crps(dist, y, functionals=...)`` scores functionals of a law.

    Args:
        dist: A joint law over n variables.

    Returns:
        ``"closed form"`` for elliptical laws, also after affine equalities. ``"draws"`` for products of other margins,
        and after inequalities or nonlinear constraints: CRPS of fixed antithetic draws, whose number is that of the
        projection layer, else 100.

    Raises:
        ParameterError: If the law has no covariance.
    """
    if is_mixture(dist):
        rules = {functional_rule(member) for member in dist.members}
        return CLOSED if rules == {CLOSED} else DRAWS
    law = joint_law(dist)
    return CLOSED if law.exact and not isinstance(law.marginals, CensoredMarginals) else DRAWS


def joint_law(dist: Any) -> Any:
    """The forecast as a law with a covariance: a LocationScale or a projected distribution.

    Raises:
        ParameterError: If there is none.
    """
    if isinstance(dist, Marginals):
        raise ParameterError(
            f"Functionals of {type(dist).__name__} were asked for.",
            "The spread of a sum depends on correlations, and marginals have none.",
            "Pass the joint law: a LocationScale, or the projected distribution itself instead of its .marginals.",
        )
    if isinstance(dist, LocationScale) or hasattr(dist, "fixed_draws"):
        return dist
    return as_location_scale(dist, validate_args=False)


def antithetic_crps(errors: Tensor) -> Tensor:
    """Unbiased CRPS of antithetic draws.

    Args:
        errors: Draws less targets, (S, *batch, k); draw s + S / 2 is the mirror image of draw s.

    Returns:
        The score, (*batch, k).
    """
    size = errors.shape[0]
    order = errors.sort(dim=0).values
    rank = torch.arange(1 - size, size, 2, dtype=errors.dtype, device=errors.device)
    between = 2 * (rank.reshape(-1, *[1] * (errors.dim() - 1)) * order).sum(0)  # over all pairs
    pairs = size * (size - 1)
    if size > 2:
        mirrored = errors[: size // 2] - errors[size // 2 :]
        between, pairs = between - 2 * mirrored.abs().sum(0), size * (size - 2)
    return errors.abs().mean(0) - between / (2 * pairs)
