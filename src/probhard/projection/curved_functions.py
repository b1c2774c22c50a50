"""All functions of a constraint as one equation in (u, s), with slacks s of the inequalities.

    h(u) = 0,     A u - b = 0,     g(u) + s = 0,   s >= 0.

An inactive inequality is switched off: its row becomes ``s = 0``, and its slack is computed from u. Where numbers are
very large or small, u, rows and slacks are in units of their own size: slacks and variables share one solver.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from probhard._util.numerics import floored
from probhard._util.tensors import broadcast
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.errors import ParameterError
from probhard.projection.parts import Parts
from probhard.rows.base import Structure
from probhard.solvers.quadratic import HELD

ORDINARY = 0.1, 10.0  # sizes of points that need no units of their own


@dataclass(frozen=True)
class Piece:
    """One function of u, without slacks.

    Args:
        function: The function.
        unequal: Whether it means ``g(u) <= 0``.
    """

    function: NonlinearEquality
    unequal: bool


class JointFunction:
    """The functions of all parts joined: equalities, linear rows, and inequalities with their slacks.

    Args:
        parts: The parts of the constraint.
        like: A tensor of the dtype and device to work in.
    """

    def __init__(self, parts: Parts, like: Tensor) -> None:
        self.parts, self.variables = parts, parts.variables
        self.system = None if parts.linear is None else parts.linear.system.at(like)
        self.pieces = self._pieces(like)
        self.batch_shape = _batch_shape(self.pieces)
        kinds = [piece.unequal for piece in self.pieces for _ in range(self._count(piece.function, like))]
        self.unequal = torch.tensor(kinds, dtype=torch.bool, device=like.device)  # (q,)
        self.inequalities = sum(kinds)
        self.unit, self.rows = 1.0, torch.ones(len(kinds), dtype=torch.float64, device=like.device)

    @torch.no_grad()
    def in_units(self, z: Tensor) -> Self:
        """The functions of ``u / unit`` with rows near 1, if points z (*lead, n) are very large or small."""
        largest = float(z.abs().nan_to_num(posinf=0.0).amax()) if z.numel() else 1.0
        if self.plain or largest == 0 or ORDINARY[0] <= largest <= ORDINARY[1]:
            return self
        scaled = copy.copy(self)
        scaled.unit = 2.0 ** round(math.log2(largest))
        point = torch.cat([z / scaled.unit, self.no_slack(z.shape[:-1])], -1)
        slope = scaled.equation().jacobian(point)[..., : self.variables]
        size = slope.abs().sum(-1).reshape(-1, slope.shape[-2]).amax(0)
        scaled.rows = torch.where(torch.isfinite(size) & (size > 0), torch.exp2(-size.log2().round()), 1.0)
        return scaled

    def _pieces(self, like: Tensor) -> list[Piece]:
        parts, pieces = self.parts, []
        if parts.nonlinear is not None:
            pieces.append(Piece(parts.nonlinear, False))
        if self.system is not None and self.system.core is not None:
            assert parts.linear is not None
            _, right = self.system.substitute(like.new_zeros(parts.variables), parts.linear.b.to(like))
            pieces.append(Piece(_rows_function(self.system.core, right), False))
        pieces += [Piece(part.function, True) for part in parts.curved]
        for part in parts.inequalities:
            dense = part.prepared.map.at(like).dense()
            pieces.append(Piece(_dense_function(dense, part.d.to(like)), True))
        for shape in parts.shapes:
            rows = torch.from_numpy(-shape.lifted(parts.variables).on_u.toarray()).to(like)
            pieces.append(Piece(_dense_function(rows, like.new_zeros(rows.shape[0])), True))
        return pieces

    def _count(self, function: NonlinearEquality, like: Tensor) -> int:
        point = like.new_zeros(*self.batch_shape, self.variables)
        return function.residual(point).shape[-1]

    @property
    def plain(self) -> bool:
        """Whether the constraint is one equality function and nothing else."""
        return len(self.pieces) == 1 and not self.inequalities

    @property
    def convex(self) -> bool:
        """Whether the set is convex, so that a nearest point is the only one."""
        return self.parts.nonlinear is None and all(part.convex for part in self.parts.curved)

    def equation(self, active: Tensor | None = None) -> NonlinearEquality:
        """``h(u) = 0`` and ``g(u) + s = 0``, with ``s = 0`` alone for inactive functions.

        Args:
            active: 1 for active inequalities, 0 for others, (*lead, inequalities); all active if None.

        Returns:
            The equation in (u, s); a plain constraint unchanged, with the structure of its rows.
        """
        if self.plain:
            return self.pieces[0].function  # never in other units
        args = [arg for piece in self.pieces for arg in piece.function.args]
        switch = torch.ones(self.inequalities, dtype=torch.float64) if active is None else active
        return NonlinearEquality(self._values, (*args, switch), self._jacobian)

    def _values(self, v: Tensor, *data: Any) -> Tensor:
        """The equation's left-hand side at v = (u, s); data are the arguments of all pieces and the switch."""
        u, s = self.unit * v[..., : self.variables], v[..., self.variables :]
        values, used, start = [], 0, 0
        for piece, args in self._with_data(data):
            value = piece.function.fn(u, *args)
            start, value = start + value.shape[-1], value * self.rows[start : start + value.shape[-1]].to(value)
            if piece.unequal:
                own = slice(used, used + value.shape[-1])
                value, used = value * data[-1][..., own] + s[..., own], used + value.shape[-1]
            values.append(value)
        return torch.cat(values, -1)

    def _jacobian(self, v: Tensor, *data: Any) -> Tensor:
        """The derivative of ``_values`` in v, (*lead, q, N)."""
        u, rows, used, start = self.unit * v[..., : self.variables], [], 0, 0
        for piece, args in self._with_data(data):
            block = piece.function.with_args(args).jacobian(u)
            count = block.shape[-2]
            units = self.unit * self.rows[start : start + count].to(block)
            start, block = start + count, block * units.unsqueeze(-1)
            slack = block.new_zeros(*block.shape[:-1], v.shape[-1] - self.variables)
            if piece.unequal:
                block = block * data[-1][..., used : used + count].unsqueeze(-1)
                slack[..., torch.arange(count), used + torch.arange(count)] = 1.0
                used += count
            rows.append(torch.cat([block, slack], -1))
        return torch.cat(rows, -2)

    def _with_data(self, data: tuple[Any, ...]) -> list[tuple[Piece, tuple[Any, ...]]]:
        """Each piece with its own share of the arguments."""
        pairs, start = [], 0
        for piece in self.pieces:
            end = start + len(piece.function.args)
            pairs.append((piece, data[start:end]))
            start = end
        return pairs

    def switched(self, equation: NonlinearEquality, active: Tensor) -> NonlinearEquality:
        """The same equation with other active inequalities (*lead, inequalities)."""
        if self.plain:
            return equation
        return equation.with_args((*equation.args[:-1], active))

    def active(self, side: Tensor) -> Tensor:
        """1 for inequalities whose slack is held at 0, else 0, (*lead, inequalities), from sides (*lead, N)."""
        return (side[..., self.variables :] != 0).to(torch.float64)

    def no_slack(self, lead: torch.Size) -> Tensor:
        """Slacks of 0, (*lead, inequalities)."""
        return torch.zeros(*lead, self.inequalities, dtype=torch.float64, device=self.unequal.device)

    def flat(self, lead: torch.Size) -> NonlinearEquality:
        """The equation of points whose leading dimensions are flattened to one.

        Raises:
            ParameterError: The data of the functions does not broadcast with ``lead``.
        """
        lead = lead or torch.Size((1,))
        equation = self.equation().select(torch.arange(math.prod(lead)), lead)
        if equation is None:
            raise ParameterError(
                f"The data of the functions does not broadcast with a batch of shape {tuple(lead)}.",
                "Each point is solved separately, with its own data.",
                "Give every tensor in args the shape (*batch, own dimension).",
            )
        return equation

    def slacks(self, equation: NonlinearEquality, v: Tensor) -> Tensor:
        """``-g(u)`` at v = (u, s), (L, inequalities)."""
        return -equation.residual(self._without_slack(v))[..., self.unequal]

    def magnitudes(self, equation: NonlinearEquality, v: Tensor) -> Tensor:
        """Size of the terms that cancel in ``g(u)``, (L, inequalities)."""
        return equation.scale(self._without_slack(v))[..., self.unequal]

    def _without_slack(self, v: Tensor) -> Tensor:
        return torch.cat([v[..., : self.variables], self.no_slack(v.shape[:-1])], -1)

    def pinned(self, z: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Points and bounds (*lead, n) with known values substituted as equal bounds."""
        if self.system is None or self.system.pins is None:
            return z, lower, upper
        assert self.parts.linear is not None
        index = self.system.pins.variable
        z, _ = self.system.substitute(z, self.parts.linear.b.to(z))
        lead = z.shape[:-1]
        known = z.index_select(-1, index)
        lower = lower.expand(*lead, -1).index_copy(-1, index, known)
        return z, lower, upper.expand(*lead, -1).index_copy(-1, index, known)


def _rows_function(core: Structure, right: Tensor) -> NonlinearEquality:
    """``A u - b`` of structured rows."""

    def jacobian(u: Tensor, b: Tensor) -> Tensor:
        dense = core.at(u).dense()
        return dense.expand(*u.shape[:-1], *dense.shape[-2:])

    return NonlinearEquality(lambda u, b: core.at(u).apply(u) - b, (right,), jacobian)


def _dense_function(rows: Tensor, right: Tensor) -> NonlinearEquality:
    """``C u - d`` of a matrix."""

    def jacobian(u: Tensor, d: Tensor) -> Tensor:
        return rows.to(u).expand(*u.shape[:-1], *rows.shape[-2:])

    return NonlinearEquality(lambda u, d: u @ rows.to(u).mT - d, (right,), jacobian)


def _batch_shape(pieces: list[Piece]) -> torch.Size:
    """The batch shape that the data of all functions broadcasts to."""
    args = [arg for piece in pieces for arg in piece.function.args]
    shapes = [arg.shape[:-1] for arg in args if isinstance(arg, Tensor) and arg.dim() > 1]
    return broadcast(*shapes) if shapes else torch.Size()


def natural_weight(function: JointFunction, weight: Tensor) -> Tensor:
    """Weights of variables, at least the floor, and of slacks, the largest of these.

    Args:
        function: The functions of the constraint.
        weight: Diagonal of W, (*lead, n).

    Returns:
        Weights, (*lead, N).
    """
    largest = weight.amax(-1, keepdim=True)
    slack = largest.expand(*weight.shape[:-1], function.inequalities)
    return torch.cat([floored(weight), slack], -1)


def masked_weight(function: JointFunction, weight: Tensor, side: Tensor) -> Tensor:
    """Weights of free variables and slacks, and tiny or zero ones of those that are held.

    Args:
        function: The functions of the constraint.
        weight: Diagonal of W, (*lead, n).
        side: Sides of variables and slacks, (*lead, N).

    Returns:
        Weights, (*lead, N).
    """
    natural = natural_weight(function, weight.detach())
    free = torch.cat([weight, natural[..., weight.shape[-1] :]], -1)
    return torch.where(side == 0, free, held_weight(natural, weight.shape[-1]))


def held_weight(natural: Tensor, n: int) -> Tensor:
    """Weights (*lead, N) of held variables, tiny, and of held slacks, 0 so that no violation is hidden.

    Args:
        natural: The result of ``natural_weight``, (*lead, N).
        n: Number of variables without slacks.
    """
    return torch.cat([HELD * natural[..., :n], torch.zeros_like(natural[..., n:])], -1)
