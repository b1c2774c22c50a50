"""Checks of a constraint function at the points to project.

The function must be finite there, and must treat each batch element independently: the residual of a point stays the
same if all other points are replaced by it. A function written for one point, such as ``u[0] * u[1] - 1`` or
``u / u.norm()``, fails this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.errors import ParameterError, ShapeError

if TYPE_CHECKING:
    from probhard.constraints.nonlinear import NonlinearEquality

CHECKED = "points are independent"  # key in the plans of a constraint
BATCHED = (
    "Index variables as u[..., i], reduce over dim=-1 and stack along dim=-1; or wrap a function of one point in "
    "torch.func.vmap."
)


def check_start(constraint: NonlinearEquality, z: Tensor) -> None:
    """Check a constraint at the points z (*batch, n) to project; eager mode only.

    Raises:
        ParameterError: It fails or is not finite at some of them, or mixes them.
        ShapeError: Its values have another shape than (*batch, q).
    """
    if not checking():
        return
    with torch.no_grad():
        residual = _evaluated(constraint, z)
        bad = ~torch.isfinite(residual).all(-1)
        if bool(bad.any()):
            raise ParameterError(
                f"The constraint function returned NaN or infinity for {int(bad.sum())} of {bad.numel()} points.",
                "The solver needs its values and derivatives there.",
                "Make it finite for all points: guard logarithms, roots and powers of negative numbers.",
            )
        if z.dim() > 1 and z.numel() and CHECKED not in constraint.plans:
            _check_independent(constraint, z, residual)
            constraint.plans[CHECKED] = True


def _evaluated(constraint: NonlinearEquality, z: Tensor) -> Tensor:
    """The residual at z (*batch, n), with an explanation if the function cannot take a batch."""
    try:
        return constraint.residual(z)
    except ShapeError:
        raise
    except (IndexError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ParameterError(
            f"The constraint function failed for points of shape {tuple(z.shape)}, with {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200].rstrip('.')}.",
            "It must map u (*batch, n) to residuals (*batch, q), for any batch dimensions.",
            BATCHED,
        ) from error


def _check_independent(constraint: NonlinearEquality, z: Tensor, residual: Tensor) -> None:
    """Raise unless the residual (*batch, q) of the last point is the same among copies of it."""
    point, own = z.flatten(0, -2)[-1], residual.flatten(0, -2)[-1]
    single = z.shape[:-1].numel() == 1  # two copies of one point serve as a batch
    try:
        copies = constraint.residual(point.expand(*z.shape[:-2], 2, -1) if single else point.expand_as(z))
        gap = (copies.flatten(0, -2)[-1] - own).abs().amax()
    except ShapeError:
        gap = own.new_tensor(torch.inf)
    except (IndexError, RuntimeError):
        if not single:
            raise
        return
    limit = torch.finfo(z.dtype).eps ** 0.5
    if gap <= limit * residual.abs().amax():
        return
    try:  # differences in rounding, where large terms cancel
        if gap <= limit * constraint.scale(z).flatten(0, -2)[-1].amax():
            return
    except (ShapeError, IndexError, RuntimeError):  # its Jacobian cannot be one of independent points
        pass
    raise ParameterError(
        f"The constraint function mixes the {z.shape[:-1].numel()} points of a batch: the value at a point changes "
        "with the other points.",
        "It must map u (*batch, n) to residuals (*batch, q), each point on its own.",
        BATCHED,
    )
