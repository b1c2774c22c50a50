"""All parts of a constraint as one affine map into a product of cones, ``M u + m in K``.

| part                | rows of M u + m             | cone         |
|---------------------|-----------------------------|--------------|
| linear equalities   | ``A u - b``                 | {0}          |
| bounds              | ``u - lower``, ``upper - u``| non-negative |
| inequalities        | ``d - G u``                 | non-negative |
| shapes of rows      | ``B u``                     | non-negative |
| balls               | ``(radius, u - center)``    | second order |
| cones               | their own                   | their own    |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.tensors import broadcast
from probhard.constraints.ball import Ball
from probhard.errors import ParameterError
from probhard.projection.parts import Parts
from probhard.solvers.symmetric_cones import Block, Cones


@dataclass(frozen=True)
class ConeRows:
    """The map into the cones.

    Args:
        cones: K.
        M: (*batch, k, n).
        m: (*batch, k).
    """

    cones: Cones
    M: Tensor
    m: Tensor


def cone_rows(parts: Parts, like: Tensor) -> ConeRows:
    """The map of all parts.

    Args:
        parts: Parts with at least one cone.
        like: A tensor of the dtype and device to work in.

    Raises:
        ParameterError: A part is curved and not a cone, or holds variables.
    """
    n = parts.variables
    pieces: list[tuple[str, Tensor, Tensor]] = []
    _check(parts)
    if parts.linear is not None:
        system, linear = parts.linear.system, parts.linear.to(like)
        kept = slice(None) if system.redundancy is None else torch.from_numpy(system.redundancy.others)
        pieces.append(("zero", linear.A[..., kept, :], -linear.b[..., kept]))
    if parts.box is not None:
        for sign, bound in zip((1.0, -1.0), parts.bounds(like)):
            pieces.append(_finite(sign * torch.eye(n).to(like), -sign * bound))
    for part in parts.inequalities:
        pieces.append(_finite(-part.prepared.map.at(like).dense(), part.d.to(like)))
    for shape in parts.shapes:
        rows = torch.from_numpy(shape.lifted(n).on_u.toarray()).to(like)
        pieces.append(("non-negative", rows, like.new_zeros(rows.shape[0])))
    for ball in parts.curved:
        assert isinstance(ball, Ball)
        offset = ball.offset(like.new_zeros(n))
        radius = ball.radius.to(like).unsqueeze(-1)
        lead = broadcast(offset.shape[:-1], radius.shape[:-1])
        rows = torch.cat([like.new_zeros(1, n), torch.eye(n).to(like)])
        pieces.append(("second-order", rows, torch.cat([radius.expand(*lead, 1), offset.expand(*lead, n)], -1)))
    pieces += [(cone.kind, *cone.affine(n, like)) for cone in parts.cones]
    pieces = [piece for piece in pieces if piece[1].shape[-2]]
    blocks = tuple(Block(kind, rows.shape[-2]) for kind, rows, _ in pieces)
    whole = broadcast(*(rows.shape[:-2] for _, rows, _ in pieces))
    right = broadcast(*(side.shape[:-1] for _, _, side in pieces))
    M = torch.cat([rows.expand(*whole, *rows.shape[-2:]) for _, rows, _ in pieces], -2)
    m = torch.cat([side.expand(*right, side.shape[-1]) for _, _, side in pieces], -1)
    return ConeRows(Cones(blocks), M, m)


def _finite(rows: Tensor, side: Tensor) -> tuple[str, Tensor, Tensor]:
    """Rows ``rows u + side >= 0``; those without a bound in all elements are left out, in some become ``1 >= 0``."""
    finite = torch.isfinite(side)
    some = finite.reshape(-1, finite.shape[-1]).any(0)
    rows, side, finite = rows[..., some, :], side[..., some], finite[..., some]
    if not bool(finite.all()):
        rows, side = torch.where(finite.unsqueeze(-1), rows, 0.0), torch.where(finite, side, 1.0)
    return "non-negative", rows, side


def _check(parts: Parts) -> None:
    others = parts.nonlinear is not None or not all(isinstance(part, Ball) for part in parts.curved)
    if others or parts.diminishing is not None or not all(shape.only_rows for shape in parts.shapes):
        raise ParameterError(
            f"The constraint {parts.constraint!r} joins a cone with functions, total variation or an L1 ball.",
            "Cones are solved together with rows, bounds, balls, and monotone or convex profiles.",
            "Leave one out, or describe the set as a ConvexProgram.",
        )
    if parts.linear is not None and parts.linear.system.held is not None:
        raise ParameterError(
            f"The constraint {parts.constraint!r} joins a cone with variables that may not move.",
            "No solver for cones holds variables.",
            "Leave out immutable=, or fix their values.",
        )
