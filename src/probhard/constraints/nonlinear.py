"""Nonlinear equality constraints, ``h(u) = 0`` (paper, section "Nonlinear Equality Constraints")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError, ShapeError
from probhard.rows.base import Structure
from probhard.rows.dense import DenseRows
from probhard.rows.pattern import Pattern


class NonlinearEquality(Constraint):
    """``fn(u, *args) = 0`` for a smooth function.

    Args:
        fn: Maps u (*batch, n) and this batch's data to residuals (*batch, q). Elements of the batch must not mix.
        args: This batch's data. Tensors broadcast with (*batch, ...), their last dimension being their own.
        jacobian: Maps the same arguments to (*batch, q, n), to a ``Structure`` with faster products, or with a pattern
            to its entries (*batch, k); by torch.func if not given.
        pattern: Where the Jacobian may be non-zero: rows that touch few variables, blocks, bands.
        linearise: Maps the same arguments to the residuals and to the Jacobian as a ``Structure``, for less than both
            cost apart, in torch operations that can be differentiated.
    """

    def __init__(
        self,
        fn: Callable[..., Tensor],
        args: tuple[Any, ...] = (),
        jacobian: Callable[..., Tensor | Structure] | None = None,
        pattern: Pattern | None = None,
        linearise: Callable[..., tuple[Tensor, Structure]] | None = None,
    ) -> None:
        if not callable(fn):
            raise ParameterError(
                f"NonlinearEquality got {type(fn).__name__} as its function.",
                "It must map u (*batch, n) to residuals (*batch, q).",
                "Pass a function of torch tensors.",
            )
        self.fn, self.args, self.given_jacobian, self.pattern = fn, tuple(args), jacobian, pattern
        self.linearise = linearise

    @property
    def variables(self) -> int | None:
        """Unknown: any n that the function takes."""
        return None

    @property
    def algorithm(self) -> str:
        return "safeguarded SQP with the q x q Schur complement"

    def residual(self, u: Tensor) -> Tensor:
        found = self.fn(u, *self._args(u))
        if not isinstance(found, Tensor) or found.dim() < 1 or found.shape[:-1] != u.shape[:-1]:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ShapeError(
                f"The constraint function returned {shape} for points of shape {tuple(u.shape)}.",
                "It must return one residual per row and point, (*batch, q).",
                "Keep the leading dimensions; write a single residual as h.unsqueeze(-1).",
            )
        return found

    def linearised(self, u: Tensor) -> tuple[Tensor, Structure]:
        """``h(u)`` and ``rows(u)``."""
        if self.linearise is not None:
            return self.linearise(u, *self._args(u))
        h = self.residual(u)
        return h, self.jacobian_rows(u, h.shape[-1])

    def jacobian_rows(self, u: Tensor, count: int | None = None) -> Structure:
        """``dh/du`` at u as rows ready to be factored: of the declared pattern, or dense."""
        if self.linearise is not None:
            return self.linearise(u, *self._args(u))[1]
        if self.pattern is None and self.given_jacobian is not None:
            found = self.given_jacobian(u, *self._args(u))
            if isinstance(found, Structure):
                return found
        if self.pattern is None:
            return DenseRows(self.jacobian(u, count))
        return self.pattern.structure(self._entries(u))

    def jacobian(self, u: Tensor, count: int | None = None) -> Tensor:
        """``dh/du`` (*batch, q, n): the caller's, or min(q, n) vector products by torch.func.

        ``count`` is q where it is known, to save an evaluation.
        """
        if self.pattern is not None:
            return self.jacobian_rows(u).dense()
        rows, variables = self.residual(u).shape[-1] if count is None else count, u.shape[-1]
        if self.given_jacobian is not None:
            return self._given(u, (*u.shape[:-1], rows, variables))
        if rows <= variables:
            return self._pullbacks(u, torch.eye(rows, dtype=u.dtype, device=u.device)).movedim(0, -2)
        unit = torch.eye(variables, dtype=u.dtype, device=u.device)
        unit = unit.reshape(variables, *[1] * (u.dim() - 1), variables).expand(variables, *u.shape)
        return torch.func.vmap(lambda x: torch.func.jvp(self.residual, (u,), (x,))[1])(unit).movedim(0, -1)

    def _entries(self, u: Tensor) -> Tensor:
        """The Jacobian's entries (*batch, k) on the pattern: the caller's, or one vector product per colour."""
        assert self.pattern is not None
        if self.given_jacobian is not None:
            return self._given(u, (*u.shape[:-1], len(self.pattern.row)))
        return self.pattern.gathered(self._pullbacks(u, self.pattern.seeds(u)))

    def _given(self, u: Tensor, shape: tuple[int, ...]) -> Tensor:
        assert self.given_jacobian is not None
        found = self.given_jacobian(u, *self._args(u))
        found = found.dense() if isinstance(found, Structure) else found
        if tuple(found.shape) != shape:
            raise ShapeError(
                f"The caller's Jacobian has shape {tuple(found.shape)}.",
                f"For these points it is {shape}.",
                "Return one row per residual, or one value per entry of the pattern.",
            )
        return found

    def _pullbacks(self, u: Tensor, seeds: Tensor) -> Tensor:
        """``J^T s`` (k, *batch, n) for seeds (k, q), each used for all points."""
        pulled = torch.func.vjp(self.residual, u)
        value, pullback = pulled[0], pulled[1]
        seeds = seeds.reshape(len(seeds), *[1] * (value.dim() - 1), -1).expand(len(seeds), *value.shape)
        return torch.func.vmap(lambda cotangent: pullback(cotangent)[0])(seeds)

    def curvature(self, u: Tensor, multiplier: Tensor, x: Tensor) -> Tensor:
        """``sum_i multiplier_i hess(h_i) x``, one Hessian-vector product per point."""

        def slope(point: Tensor) -> Tensor:
            if self.linearise is not None:  # derivatives of a formula cost a fraction of derivatives of derivatives
                return self.jacobian_rows(point).transpose(multiplier)
            return torch.func.grad(lambda p: (multiplier * self.residual(p)).sum())(point)

        return torch.func.jvp(slope, (u.contiguous(),), (x.contiguous(),))[1]

    def scale(self, u: Tensor) -> Tensor:
        return self.jacobian_rows(u).magnitude(u.abs() + 1e-8)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        moved = tuple(a.to(*args, **kwargs) if isinstance(a, Tensor) else a for a in self.args)
        return self.with_args(moved)

    def select(self, points: Tensor, lead: torch.Size) -> NonlinearEquality | None:
        """The constraint of some of the points (k,), numbered over the flattened leading dimensions ``lead``.

        None where data does not broadcast as (*lead, own dimension), so that its points cannot be told apart.
        """
        picked = []
        for value in self.args:
            if isinstance(value, Tensor) and value.dim() > 1:
                fits = value.dim() <= len(lead) + 1
                if not fits or any(a not in (1, b) for a, b in zip(value.shape[-2::-1], lead[::-1])):
                    return None
                value = value.expand(*lead, value.shape[-1]).flatten(0, len(lead) - 1)[points]
            picked.append(value)
        return self.with_args(tuple(picked))

    def with_args(self, args: tuple[Any, ...]) -> Self:
        """The same function with other data."""
        return type(self)(self.fn, args, self.given_jacobian, self.pattern, self.linearise)

    def _args(self, u: Tensor) -> tuple[Any, ...]:
        """The data in the points' device and dtype."""
        return tuple(
            a.to(u.device, u.dtype if a.is_floating_point() else a.dtype) if isinstance(a, Tensor) else a
            for a in self.args
        )

    def __repr__(self) -> str:
        return f"NonlinearEquality({getattr(self.fn, '__name__', type(self.fn).__name__)})"


def check_start(constraint: NonlinearEquality, z: Tensor) -> None:
    """Raise where the constraint is not a number at the points to be projected."""
    if not checking():
        return
    bad = ~torch.isfinite(constraint.residual(z)).all(-1)
    if bool(bad.any()):
        raise ParameterError(
            f"The constraint function returned NaN or infinity for {int(bad.sum())} of {bad.numel()} points.",
            "A projection follows its values and derivatives.",
            "Make it finite for all points: guard logarithms, roots and powers of negative numbers.",
        )
