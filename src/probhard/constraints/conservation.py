"""Conservation of an integral: ``sum_i weights_i u_i = mass``, for one profile or for every time slice of a field.

With trapezoid weights it is the discrete integral of a conservation law (paper, section "Enforcing Conservation Laws
in PDEs"); the right-hand side comes from the caller. Fields flatten time-major, n = nt * nx.
"""

from __future__ import annotations

from typing import Any

import scipy.sparse as sp
import torch
from torch import Tensor

from probhard.constraints.base import Constraint
from probhard.constraints.linear import LinearEquality, remembered
from probhard.covariance import check_finite
from probhard.errors import ParameterError, ShapeError, checking
from probhard.structure.system import LinearSystem


def trapezoid_weights(grid: Tensor) -> Tensor:
    """Weights (n,) of the trapezoid rule on increasing grid points (n,)."""
    if grid.dim() != 1 or grid.shape[0] < 2:
        raise ShapeError(
            f"The grid has shape {tuple(grid.shape)}.",
            "The trapezoid rule needs one dimension with at least two points.",
            "For a product grid, multiply the weights of its axes.",
        )
    steps = grid.diff()
    if checking() and not bool((steps > 0).all()):
        raise ParameterError(
            "The grid points do not increase.",
            "The trapezoid rule would subtract parts of the integral.",
            "Sort the grid, and the field with it.",
        )
    half = steps / 2
    return torch.cat([half[:1], half[1:] + half[:-1], half[-1:]])


class Conservation(LinearEquality):
    """One row, ``weights . u = mass``.

    Args:
        weights: Quadrature weights, (n,); see ``trapezoid_weights``.
        mass: What the weighted sum must be, (*batch,).
    """

    def __init__(self, weights: Tensor, mass: Any) -> None:
        weights = torch.as_tensor(weights)
        if weights.dim() != 1:
            raise ShapeError(
                f"The weights have shape {tuple(weights.shape)}.",
                "A conservation row has one weight per variable.",
                "Pass one (n,) vector; use per_slice for the slices of a field.",
            )
        self.weights = weights
        right = torch.as_tensor(mass, dtype=None if isinstance(mass, Tensor) else weights.dtype)
        self._set(_blocks(weights, 1), right.unsqueeze(-1))

    @classmethod
    def trapezoid(cls, grid: Tensor, mass: Any) -> Conservation:
        """The integral over a grid by the trapezoid rule."""
        return cls(trapezoid_weights(grid), mass)


def _blocks(weights: Tensor, rows: int) -> LinearSystem:
    """One conservation row per block of variables, made ready once for each tensor of weights."""

    def build() -> LinearSystem:
        if checking():
            check_finite("The conservation weights", weights)
            if not bool((weights != 0).any()):
                raise ParameterError(
                    "All conservation weights are zero.", "The row says nothing.", "Check the grid spacing."
                )
        # a copy: what is remembered must not keep the caller's tensor alive
        return LinearSystem.blocks(weights if weights.requires_grad else weights.clone(), rows)

    return build() if weights.requires_grad else remembered(weights, rows, build)


def per_slice(constraint: Constraint, shape: tuple[int, int]) -> LinearEquality:
    """Lift a slice's constraint to a field of ``shape = (nt, nx)``, flattened time-major.

    The slice's data may differ in time: its second to last dimension is then nt, so a Conservation takes a mass of
    shape (*batch, nt).
    """
    slices, width = shape
    if not isinstance(constraint, LinearEquality):
        raise ParameterError(
            f"per_slice cannot lift a {type(constraint).__name__}.",
            "Only linear equalities are lifted.",
            "Build the field's constraint directly.",
        )
    if constraint.variables != width:
        raise ShapeError(
            f"per_slice got a constraint on {constraint.variables} variables and slices of {width}.",
            "The constraint speaks of one slice.",
            f"Use shape=(nt, {constraint.variables}), time first.",
        )
    b = constraint.b
    if b.dim() < 2:
        b = b.unsqueeze(-2)
    if b.shape[-2] not in (1, slices):
        raise ShapeError(
            f"The slice's data has {b.shape[-2]} entries in time, the field {slices} slices.",
            "There is one right-hand side per slice.",
            f"Give it the shape (*batch, {slices}).",
        )
    b = b.expand(*b.shape[:-2], slices, -1).flatten(-2)
    if isinstance(constraint, Conservation):
        return LinearEquality.from_system(_blocks(constraint.weights, slices), b)
    matrix, _, held = constraint.stackable()
    lifted = sp.csr_array(sp.kron(sp.eye_array(slices), matrix))
    everywhere = (held[None, :] + width * torch.arange(slices).numpy()[:, None]).ravel()
    return LinearEquality.from_system(LinearSystem.of(lifted, everywhere), b, constraint.rank)
