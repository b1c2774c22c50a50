"""Second-order cones, ``|B u + c|_2 <= a . u + d``: norms that a linear function bounds."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from probhard._util.tensors import broadcast, check_finite, checking, matvec
from probhard.constraints._reals import reals
from probhard.constraints.base import immutable
from probhard.constraints.cones import Cone
from probhard.constraints.shapes import Term
from probhard.errors import ParameterError, ShapeError, optional


@immutable
class SecondOrderCone(Cone):
    """``|B u + c|_2 <= a . u + d``; without arguments the standard cone ``|u[1:]| <= u[0]``.

    Args:
        B: Rows, (*batch, k, n).
        c: (*batch, k); 0 if None.
        a: (*batch, n); 0 if None.
        d: A number or (*batch,); 0 if None.

    Raises:
        ShapeError: The data do not fit.
        ParameterError: The data are not finite, or B is missing.
    """

    kind: ClassVar[str] = "second-order"
    B: Tensor | None
    c: Tensor
    a: Tensor
    d: Tensor

    def __init__(self, B: Any = None, c: Any = None, a: Any = None, d: Any = None) -> None:
        if B is None:
            if not (c is None and a is None and d is None):
                raise ParameterError(
                    "SecondOrderCone got data and no B.",
                    "Without B it is the standard cone, which has no data.",
                    "Pass B, such as torch.eye(n) for |u + c| <= a . u + d.",
                )
            none = torch.zeros(())
            self._set(B=None, c=none, a=none, d=none)
            return
        rows = reals("B of the cone", B)
        if rows.dim() < 2 or not rows.shape[-2]:
            raise ShapeError(
                f"B of the cone has shape {tuple(rows.shape)}.",
                "It has one row per entry of the norm and one column per variable.",
                "Pass (*batch, k, n) with k of at least 1.",
            )
        count, n = rows.shape[-2:]
        fields = {"B": rows, "d": rows.new_zeros(()) if d is None else reals("d of the cone", d)}
        for name, value, size in (("c", c, count), ("a", a, n)):
            vector = rows.new_zeros(size) if value is None else reals(f"{name} of the cone", value)
            if vector.dim() < 1 or vector.shape[-1] != size:
                raise ShapeError(
                    f"{name} of the cone has shape {tuple(vector.shape)}, B {tuple(rows.shape)}.",
                    f"Its last dimension must have {size} entries.",
                    "Pass one entry of c per row of B, and one of a per column.",
                )
            fields[name] = vector
        if checking():
            for name, value in fields.items():
                check_finite(f"{name} of the cone", value)
        self._set(**fields)

    @property
    def variables(self) -> int | None:
        return None if self.B is None else self.B.shape[-1]

    @property
    def algorithm(self) -> str:
        return "closed form; under other metrics augmented Lagrangians" if self.standard else "augmented Lagrangians"

    @property
    def standard(self) -> bool:
        return self.B is None

    def data(self) -> tuple[Tensor, ...]:
        return () if self.B is None else (self.B.flatten(-2), self.c, self.a, self.d.unsqueeze(-1))

    def excess(self, u: Tensor) -> Tensor:
        inner, bound = self._sides(u)
        return (inner.norm(dim=-1) - bound).unsqueeze(-1)

    def excess_scale(self, u: Tensor) -> Tensor:
        if self.B is None:
            return u.norm(dim=-1, keepdim=True)
        B, c, a, d = self._data(u)
        size = matvec(B.abs(), u.abs()).norm(dim=-1) + c.norm(dim=-1)
        return (size + (a * u).abs().sum(-1) + d.abs()).unsqueeze(-1)

    def affine(self, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if self.B is None:
            self._check(n)
            return torch.eye(n).to(like), like.new_zeros(n)
        B, c, a, d = self._data(like)
        rows = broadcast(B.shape[:-2], a.shape[:-1])
        right = broadcast(c.shape[:-1], d.shape)
        M = torch.cat([a.unsqueeze(-2).expand(*rows, 1, n), B.expand(*rows, *B.shape[-2:])], -2)
        return M, torch.cat([d.unsqueeze(-1).expand(*right, 1), c.expand(*right, c.shape[-1])], -1)

    def term(self, n: int, like: Tensor) -> Term:
        cp = optional("cvxpy", "cvx", "ConvexProgram")
        M, m = self.affine(n, like)
        shapes = (tuple(M.shape[-2:]), tuple(m.shape[-1:]))
        return Term(
            ("second-order", *shapes),
            lambda u, rows, side: [cp.SOC((rows @ u + side)[0], (rows @ u + side)[1:])],
            (M, m),
            shapes,
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        if self.B is None:
            return self
        moved = {name: getattr(self, name).to(*args, **kwargs) for name in ("B", "c", "a", "d")}
        return self._copy(**moved)

    def _data(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert self.B is not None
        return self.B.to(like), self.c.to(like), self.a.to(like), self.d.to(like)

    def _sides(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """``B u + c`` (*batch, k) and ``a . u + d`` (*batch,)."""
        if self.B is None:
            self._check(u.shape[-1] if u.dim() else 0)
            return u[..., 1:], u[..., 0]
        self.check_event(u, "The point")
        B, c, a, d = self._data(u)
        return matvec(B, u) + c, (a * u).sum(-1) + d

    def _check(self, n: int) -> None:
        if n < 2:
            raise ShapeError(
                f"The standard second-order cone got {n} variables.",
                "It bounds the norm of all variables after the first by the first.",
                "Pass at least 2 variables, or NonNegative() for one.",
            )

    def __repr__(self) -> str:
        return "SecondOrderCone()" if self.B is None else f"SecondOrderCone(B of shape {tuple(self.B.shape)})"
