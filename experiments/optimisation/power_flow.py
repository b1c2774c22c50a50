"""AC power flow equations and line limits, with the formulas of their Jacobians.

    P_i = sum_k V_i V_k (G_ik cos(t_i - t_k) + B_ik sin(t_i - t_k)) = Pg_i - load_i,
    Q_i = sum_k V_i V_k (G_ik sin(t_i - t_k) - B_ik cos(t_i - t_k)) = Qg_i - reactive load_i,

for all buses i, and ``(P^2 + Q^2) / rate^2 <= 1`` for the flow into both ends of a line. Sums run over neighbours, so
the Jacobian has the pattern of the network, and its entries are the terms of the sums themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

import probhard as ph
from probhard.rows.base import Structure
from probhard.rows.pattern import Pattern


@dataclass(frozen=True)
class Flow:
    """The equations of a network; entries of the admittance, diagonal ones first."""

    row: Tensor  # (k,) buses i
    column: Tensor  # (k,) buses k
    conductance: Tensor  # (k,) G_ik
    susceptance: Tensor  # (k,) B_ik
    generator: Tensor  # (g,) buses of generators
    reference: int
    angle: float  # of the reference bus

    @classmethod
    def of(cls, admittance: Any, generator: np.ndarray, reference: int, angle: float) -> Flow:
        """The equations of a complex admittance matrix (b, b).

        Args:
            admittance: Sparse matrix.
            generator: Buses of generators, (g,).
            reference: The bus whose angle is known.
            angle: That angle.
        """
        matrix = sp.coo_array(admittance)
        off = matrix.row != matrix.col
        diagonal = sp.csr_array(admittance).diagonal()
        row = np.concatenate([np.arange(len(diagonal)), matrix.row[off]])
        column = np.concatenate([np.arange(len(diagonal)), matrix.col[off]])
        value = np.concatenate([diagonal, matrix.data[off]])
        row_index, column_index, buses = (torch.from_numpy(x.astype(np.int64)) for x in (row, column, generator))
        real, imaginary = (torch.from_numpy(np.ascontiguousarray(x)) for x in (value.real, value.imag))
        return cls(row_index, column_index, real, imaginary, buses, reference, angle)

    @cached_property
    def buses(self) -> int:
        return int(self.row.max()) + 1

    @property
    def variables(self) -> int:
        return 2 * len(self.generator) + 2 * self.buses - 1

    @cached_property
    def angle_place(self) -> np.ndarray:
        """The variable of each bus's angle, (b,); -1 for the reference."""
        place = np.full(self.buses, -1)
        place[np.arange(self.buses) != self.reference] = np.arange(self.buses - 1)
        place[place >= 0] += 2 * len(self.generator) + self.buses
        return place

    def split(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pg, Qg, V and all angles of points u (*batch, n)."""
        g, b = len(self.generator), self.buses
        active, reactive, size, angle = u.split((g, g, b, b - 1), -1)
        known = torch.full_like(size[..., :1], self.angle)
        angle = torch.cat([angle[..., : self.reference], known, angle[..., self.reference :]], -1)
        return active, reactive, size, angle

    def constraint(self, load: Tensor) -> ph.NonlinearEquality:
        """The equations for loads (*batch, 2 b)."""
        return ph.NonlinearEquality(self.residual, (load,), self.entries, self.pattern, self.linearised)

    def terms(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The terms of the sums P and Q over neighbours, (*batch, k)."""
        _, _, size, angle = self.split(u)
        difference = angle[..., self.row] - angle[..., self.column]
        product = size[..., self.row] * size[..., self.column]
        cosine, sine = product * torch.cos(difference), product * torch.sin(difference)
        g, b = self.conductance.to(u), self.susceptance.to(u)
        return g * cosine + b * sine, g * sine - b * cosine

    def residual(self, u: Tensor, load: Tensor) -> Tensor:
        """Flow plus load less generation, (*batch, 2 b)."""
        return self._balance(u, load, *self.terms(u))

    def _balance(self, u: Tensor, load: Tensor, active: Tensor, reactive: Tensor) -> Tensor:
        g = len(self.generator)
        terms = torch.cat([active, reactive, -u[..., : 2 * g]], -1)
        return load + terms @ self._sums.to(u)

    @cached_property
    def _sums(self) -> Tensor:
        """The matrix (2 k + 2 g, 2 b) that adds terms and generation up."""
        k, g, b = len(self.row), len(self.generator), self.buses
        matrix = torch.zeros(2 * k + 2 * g, 2 * b, dtype=torch.float64)
        rows = torch.cat([self.row, b + self.row, self.generator, b + self.generator])
        matrix[torch.arange(len(matrix)), rows] = 1.0
        return matrix

    @cached_property
    def _groups(self) -> tuple[Any, ...]:
        """Rows, columns and which terms are not on the reference's angle, of the blocks of the Jacobian."""
        g, b = len(self.generator), self.buses
        row, column = self.row.numpy(), self.column.numpy()
        angles = self.angle_place[column]
        known = np.flatnonzero(angles >= 0)
        unit = self.generator.numpy()
        rows = np.concatenate([row, row[known], unit, b + row, b + row[known], b + unit])
        columns = np.concatenate([2 * g + column, angles[known], np.arange(g)])
        columns = np.concatenate([columns, 2 * g + column, angles[known], g + np.arange(g)])
        return rows, columns, torch.from_numpy(known)

    @cached_property
    def pattern(self) -> Pattern:
        """Where the Jacobian may be non-zero."""
        rows, columns, _ = self._groups
        return Pattern(rows, columns, (2 * self.buses, self.variables))

    def entries(self, u: Tensor, load: Tensor) -> Tensor:
        """Entries (*batch, m) of the Jacobian on the pattern."""
        return self._entries(u, *self.terms(u))

    def linearised(self, u: Tensor, load: Tensor) -> tuple[Tensor, Structure]:
        """Residuals and the rows of their Jacobian."""
        active, reactive = self.terms(u)
        return self._balance(u, load, active, reactive), self.pattern.structure(self._entries(u, active, reactive))

    def _entries(self, u: Tensor, active: Tensor, reactive: Tensor) -> Tensor:
        """Off the diagonal a derivative is a term, with the magnitude divided out; on it, a sum of terms."""
        g, b = len(self.generator), self.buses
        known = self._groups[2]
        size = u[..., 2 * g : 2 * g + b]
        sums = self._sums[: len(self.row), :b].to(u)
        total, reactive_total = active @ sums, reactive @ sums

        def spread(on: Tensor, off: Tensor) -> Tensor:
            return torch.cat([on, off[..., b:]], -1)

        by_size = spread(total + active[..., :b], active) / size[..., self.column]
        by_angle = spread(reactive[..., :b] - reactive_total, reactive)[..., known]
        below_by_size = spread(reactive_total + reactive[..., :b], reactive) / size[..., self.column]
        below_by_angle = spread(total - active[..., :b], -active)[..., known]
        unit = -torch.ones_like(u[..., :g])
        return torch.cat([by_size, by_angle, unit, below_by_size, below_by_angle, unit], -1)


@dataclass(frozen=True)
class Lines:
    """Limits of the power that flows into both ends of lines."""

    flow: Flow
    own: Tensor  # (2 l,) bus of the end
    other: Tensor  # (2 l,) bus of the other end
    admittance: Tensor  # (4, 2 l): real and imaginary parts for the own voltage, then for the other
    rate: Tensor  # (2 l,)

    @classmethod
    def of(
        cls, flow: Flow, from_rows: Any, to_rows: Any, ends: np.ndarray, chosen: np.ndarray, rate: np.ndarray
    ) -> Lines:
        """Limits of some lines.

        Args:
            flow: The equations of the network.
            from_rows: Sparse rows (lines, b) that map voltages to currents into from-ends.
            to_rows: Into to-ends.
            ends: From- and to-buses of the chosen lines, (l, 2).
            chosen: Numbers of these lines, (l,).
            rate: Their limits, (l,).
        """
        one, two = sp.csr_array(from_rows).toarray()[chosen], sp.csr_array(to_rows).toarray()[chosen]
        own, other = np.concatenate([ends[:, 0], ends[:, 1]]), np.concatenate([ends[:, 1], ends[:, 0]])
        rows, count = np.concatenate([one, two]), np.arange(2 * len(ends))
        near, far = rows[count, own], rows[count, other]
        parts = np.stack([near.real, near.imag, far.real, far.imag])
        near_bus, far_bus = (torch.from_numpy(x.astype(np.int64)) for x in (own, other))
        return cls(flow, near_bus, far_bus, torch.from_numpy(parts), torch.from_numpy(np.concatenate([rate, rate])))

    def constraint(self) -> ph.NonlinearInequality:
        """The limits as a constraint."""
        return ph.NonlinearInequality(self.excess, (), convex=False, jacobian=self.jacobian)

    def _ends(self, u: Tensor) -> tuple[Tensor, ...]:
        """Voltages at both ends, and active and reactive flow as own and joint parts."""
        _, _, size, angle = self.flow.split(u)
        own, other = size[..., self.own], size[..., self.other]
        difference = angle[..., self.own] - angle[..., self.other]
        g, b, g_other, b_other = self.admittance.to(u)
        cosine, sine = own * other * torch.cos(difference), own * other * torch.sin(difference)
        joint = g_other * cosine + b_other * sine, g_other * sine - b_other * cosine
        return own, other, own.square() * g, -own.square() * b, *joint

    def excess(self, u: Tensor) -> Tensor:
        """``(P^2 + Q^2) / rate^2 - 1``, (*batch, 2 l)."""
        _, _, active, reactive, joint, reactive_joint = self._ends(u)
        power = (active + joint).square() + (reactive + reactive_joint).square()
        return power / self.rate.to(u).square() - 1

    def jacobian(self, u: Tensor) -> Tensor:
        """The derivative of ``excess``, (*batch, 2 l, n)."""
        own, other, active, reactive, joint, reactive_joint = self._ends(u)
        factor = 2 / self.rate.to(u).square()
        p, q = factor * (active + joint), factor * (reactive + reactive_joint)
        by_own = (p * (2 * active + joint) + q * (2 * reactive + reactive_joint)) / own
        by_other = (p * joint + q * reactive_joint) / other
        by_angle = q * joint - p * reactive_joint
        g = len(self.flow.generator)
        matrix = u.new_zeros(*u.shape[:-1], len(self.own), self.flow.variables + 1)  # the last: the reference's angle
        count = torch.arange(len(self.own))
        place = torch.from_numpy(self.flow.angle_place)
        matrix[..., count, 2 * g + self.own] = by_own
        matrix[..., count, 2 * g + self.other] = by_other
        matrix[..., count, place[self.own]] = by_angle
        matrix[..., count, place[self.other]] = -by_angle
        return matrix[..., :-1]
