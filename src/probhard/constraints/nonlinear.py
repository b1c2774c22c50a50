"""Smooth constraints, ``h(u) = 0`` (paper, "Nonlinear Equality Constraints") and ``g(u) <= 0``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from probhard.constraints._start import check_start as check_start
from probhard.constraints._time import rows_in_time
from probhard.constraints.base import Constraint, immutable, joined
from probhard.errors import ParameterError, ShapeError
from probhard.rows.base import Structure
from probhard.rows.dense import DenseRows
from probhard.rows.pattern import Pattern


@immutable
class NonlinearEquality(Constraint):
    """``fn(u, *args) = 0`` for a smooth function.

    Args:
        fn: Maps u (*batch, n) and ``args`` to residuals (*batch, q), each batch element independently.
        args: This batch's data. Tensors have the shape (*batch, own dimension).
        jacobian: Maps the same arguments to (*batch, q, n), to a ``Structure``, or with a pattern to its entries
            (*batch, k); computed by torch.func if None.
        pattern: Where the Jacobian may be nonzero.
        linearise: Maps the same arguments to the residuals and the Jacobian as a ``Structure``, if that is cheaper
            than both apart; must be differentiable.

    Raises:
        ParameterError: ``fn`` is not callable, or ``args`` is no tuple.
    """

    role: ClassVar[str] = "nonlinear"
    fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    given_jacobian: Callable[..., Tensor | Structure] | None
    pattern: Pattern | None
    linearise: Callable[..., tuple[Tensor, Structure]] | None

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
        if not isinstance(args, tuple | list):
            raise ParameterError(
                f"NonlinearEquality got args of the type {type(args).__name__}.",
                "They are passed to the function one by one.",
                "Pass a tuple, such as args=(radius,).",
            )
        self._set(fn=fn, args=tuple(args), given_jacobian=jacobian, pattern=pattern, linearise=linearise)

    @property
    def variables(self) -> int | None:
        return None

    @property
    def algorithm(self) -> str:
        return "safeguarded SQP with the q x q Schur complement"

    def residual(self, u: Tensor) -> Tensor:
        residual = self.fn(u, *self._args(u))
        known = isinstance(residual, Tensor) and residual.is_floating_point() and residual.dim() > 0
        if not known or not residual.shape[-1] or residual.shape[:-1] != u.shape[:-1]:
            shape = (
                f"{residual.dtype} {tuple(residual.shape)}" if isinstance(residual, Tensor) else type(residual).__name__
            )
            raise ShapeError(
                f"The constraint function returned {shape} for points of shape {tuple(u.shape)}.",
                "It must return one real residual per row and point, (*batch, q), and at least one row.",
                "Keep the leading dimensions: index variables as u[..., i], sum over dim=-1, stack along dim=-1, and "
                "write a single residual as h.unsqueeze(-1).",
            )
        return residual

    def linearised(self, u: Tensor) -> tuple[Tensor, Structure]:
        """``h(u)`` (*batch, q) and the rows of ``dh/du`` at u (*batch, n)."""
        if self.linearise is not None:
            return self.linearise(u, *self._args(u))
        h = self.residual(u)
        return h, self.jacobian_rows(u, h.shape[-1])

    def jacobian_rows(self, u: Tensor, count: int | None = None) -> Structure:
        """``dh/du`` at u (*batch, n) as rows that can be factored: of the declared pattern, or dense.

        ``count`` is q if known, which saves an evaluation.
        """
        if self.linearise is not None:
            return self.linearise(u, *self._args(u))[1]
        if self.pattern is None and self.given_jacobian is not None:
            jacobian = self.given_jacobian(u, *self._args(u))
            if isinstance(jacobian, Structure):
                return jacobian
        if self.pattern is None:
            return DenseRows(self.jacobian(u, count))
        return self.pattern.structure(self._entries(u))

    def jacobian(self, u: Tensor, count: int | None = None) -> Tensor:
        """``dh/du`` (*batch, q, n) at u (*batch, n): the caller's, or min(q, n) vector products by torch.func.

        ``count`` is q if known, which saves an evaluation. Raises ShapeError if the caller's has another shape.
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
        """Entries (*batch, k) of the Jacobian on the pattern: the caller's, or one vector product per colour."""
        assert self.pattern is not None
        if self.given_jacobian is not None:
            return self._given(u, (*u.shape[:-1], len(self.pattern.row)))
        return self.pattern.gathered(self._pullbacks(u, self.pattern.seeds(u)))

    def _given(self, u: Tensor, shape: tuple[int, ...]) -> Tensor:
        assert self.given_jacobian is not None
        jacobian = self.given_jacobian(u, *self._args(u))
        jacobian = jacobian.dense() if isinstance(jacobian, Structure) else jacobian
        if tuple(jacobian.shape) != shape:
            raise ShapeError(
                f"The caller's Jacobian has shape {tuple(jacobian.shape)}.",
                f"For these points it must be {shape}.",
                "Return one row per residual, or one value per entry of the pattern.",
            )
        return jacobian

    def _pullbacks(self, u: Tensor, seeds: Tensor) -> Tensor:
        """``J^T s`` (k, *batch, n) for seeds (k, q) shared by all points."""
        pulled = torch.func.vjp(self.residual, u)
        value, pullback = pulled[0], pulled[1]
        seeds = seeds.reshape(len(seeds), *[1] * (value.dim() - 1), -1).expand(len(seeds), *value.shape)
        return torch.func.vmap(lambda cotangent: pullback(cotangent)[0])(seeds)

    def curvature(self, u: Tensor, multiplier: Tensor, x: Tensor) -> Tensor:
        """``sum_i multiplier_i hess(h_i) x`` (*batch, n) for u and x (*batch, n) and multipliers (*batch, q)."""

        def slope(point: Tensor) -> Tensor:
            if self.linearise is not None:  # cheaper than differentiating twice
                return self.jacobian_rows(point).transpose(multiplier)
            return torch.func.grad(lambda p: (multiplier * self.residual(p)).sum())(point)

        return torch.func.jvp(slope, (u.contiguous(),), (x.contiguous(),))[1]

    def scale(self, u: Tensor) -> Tensor:
        return self.jacobian_rows(u).magnitude(u.abs() + 1e-8)

    def unit(self, u: Tensor) -> Tensor:
        return self.jacobian_rows(u).magnitude(torch.ones_like(u))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        moved = tuple(a.to(*args, **kwargs) if isinstance(a, Tensor) else a for a in self.args)
        return self.with_args(moved)

    def data(self) -> tuple[Tensor, ...]:
        return tuple(x for x in self.args if isinstance(x, Tensor))

    def merged(self, other: Constraint) -> Constraint | None:
        """Both functions concatenated."""
        return _both(self, other) if isinstance(other, NonlinearEquality) else None

    def on_slices(self, slices: int, width: int) -> NonlinearEquality:
        """Data (*batch, nt or 1, k) is stored as (*batch, nt * k), since leading dimensions are batch."""
        sizes = [x.shape[-1] if isinstance(x, Tensor) and x.dim() > 1 else None for x in self.args]
        flat = tuple(x if size is None else rows_in_time(x, slices) for x, size in zip(self.args, sizes))

        def fn(u: Tensor, *args: Any) -> Tensor:
            own = (x if size is None else x.unflatten(-1, (slices, size)) for x, size in zip(args, sizes))
            return self.fn(u.unflatten(-1, (slices, width)), *own).flatten(-2)

        return NonlinearEquality(fn, flat)

    def select(self, points: Tensor, lead: torch.Size) -> NonlinearEquality | None:
        """Restrict the constraint to some points.

        Args:
            points: Indices (k,) over the flattened leading dimensions.
            lead: The leading dimensions.

        Returns:
            The constraint of k points; None if the data does not broadcast as (*lead, own dimension).
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
        """The data on the device and in the dtype of u."""
        return tuple(
            a.to(u.device, u.dtype if a.is_floating_point() else a.dtype) if isinstance(a, Tensor) else a
            for a in self.args
        )

    def __repr__(self) -> str:
        return f"NonlinearEquality({getattr(self.fn, '__name__', type(self.fn).__name__)})"


@immutable
class NonlinearInequality(Constraint):
    """``fn(u, *args) <= 0`` for a smooth function.

    Args:
        fn: Maps u (*batch, n) and ``args`` to (*batch, p), each batch element independently.
        args: This batch's data, as in ``NonlinearEquality``.
        convex: Whether every component is convex in u. If not, projections are local and ``Stats.local`` is True.
        jacobian: Maps the same arguments to (*batch, p, n); computed by torch.func if None.

    Raises:
        ParameterError: ``fn`` is not callable.
    """

    role: ClassVar[str] = "curved"
    function: NonlinearEquality
    convex: bool

    def __init__(
        self,
        fn: Callable[..., Tensor],
        args: tuple[Any, ...] = (),
        convex: bool = True,
        jacobian: Callable[..., Tensor] | None = None,
    ) -> None:
        self._set(function=NonlinearEquality(fn, args, jacobian), convex=convex)

    @property
    def variables(self) -> int | None:
        return None

    @property
    def algorithm(self) -> str:
        return "active sets over safeguarded SQP" + ("" if self.convex else ", local")

    def excess(self, u: Tensor) -> Tensor:
        return self.function.residual(u)

    def excess_scale(self, u: Tensor) -> Tensor:
        return self.function.scale(u)

    def excess_unit(self, u: Tensor) -> Tensor | float:
        return self.function.unit(u)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._copy(function=self.function.to(*args, **kwargs))

    def data(self) -> tuple[Tensor, ...]:
        return self.function.data()

    def on_slices(self, slices: int, width: int) -> Constraint:
        lifted = self.function.on_slices(slices, width)
        return NonlinearInequality(lifted.fn, lifted.args, self.convex)

    def __repr__(self) -> str:
        return f"NonlinearInequality({self.function!r}, convex={self.convex})"


def _both(first: NonlinearEquality, second: NonlinearEquality) -> NonlinearEquality:
    """Two functions concatenated, with the data of both."""
    split = len(first.args)

    def fn(u: Tensor, *args: Any) -> Tensor:
        return joined([first.fn(u, *args[:split]), second.fn(u, *args[split:])], u)

    jacobian = None
    if first.given_jacobian is not None and second.given_jacobian is not None:

        def jacobian(u: Tensor, *args: Any) -> Tensor:
            pieces = first.with_args(args[:split]).jacobian(u), second.with_args(args[split:]).jacobian(u)
            return torch.cat(pieces, -2)

    return NonlinearEquality(fn, (*first.args, *second.args), jacobian)
