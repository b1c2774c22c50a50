"""Power networks in PYPOWER's format: admittances, bounds, costs, and their AC power flow as a constraint.

The variables are u = (Pg, Qg, V, t): active and reactive power of generators, magnitudes and angles of voltages, per
unit and in radians. The angle of the reference bus is known and left out. ``power_flow`` has the equations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probhard as ph
from experiments.optimisation.power_flow import Flow, Lines

CASES = ("case9", "case30", "case57")
NO_LIMIT = 9900.0  # MVA; the rate of a line that has none
# columns of buses, generators, branches and costs in the format of MATPOWER
TYPE, PD, QD, VM, VA, VMAX, VMIN = 1, 2, 3, 7, 8, 11, 12
GEN_BUS, PG, QG, QMAX, QMIN, STATUS, PMAX, PMIN = 0, 1, 2, 3, 4, 7, 8, 9
RATE, COST = 5, 4
REFERENCE = 3  # the type of a bus


def pypower_case(name: str) -> dict[str, Any]:
    """A case of PYPOWER.

    Args:
        name: One of ``CASES``.
    """
    import pypower.api

    case: dict[str, Any] = getattr(pypower.api, name)()
    tables = ("bus", "gen", "branch", "gencost")  # case9 has integers, which would cut its own results
    return {**case, **{table: case[table].astype(float) for table in tables}}


@dataclass(frozen=True)
class Network:
    """A power network, per unit of ``base`` MVA; all tensors are float64."""

    name: str
    base: float
    flow: Flow
    lines: Lines | None  # those with a limit in effect
    lower: Tensor  # (n,), -inf for angles
    upper: Tensor  # (n,)
    cost_terms: Tensor  # (g, 3): coefficients of Pg^2, Pg and 1, Pg in MW
    load: Tensor  # (2 b,): active and reactive load of the case
    guess: Tensor  # (n,): the point of the case

    @classmethod
    def of(cls, name: str, limits: bool = True) -> Network:
        """The network of a case.

        Args:
            name: One of ``CASES``.
            limits: Whether line limits count.
        """
        from pypower.makeYbus import makeYbus

        case = pypower_case(name)
        bus, gen, branch = case["bus"], case["gen"], case["branch"]
        assert (bus[:, 0] == np.arange(1, len(bus) + 1)).all()
        assert (gen[:, STATUS] > 0).all()
        bus[:, 0], gen[:, GEN_BUS], branch[:, :2] = bus[:, 0] - 1, gen[:, GEN_BUS] - 1, branch[:, :2] - 1
        base, buses = float(case["baseMVA"]), len(bus)
        reference = int(np.flatnonzero(bus[:, TYPE] == REFERENCE)[0])
        others = np.delete(np.arange(buses), reference)
        full, from_rows, to_rows = makeYbus(base, bus, branch)
        flow = Flow.of(full, gen[:, GEN_BUS].astype(int), reference, float(np.deg2rad(bus[reference, VA])))
        limited = np.flatnonzero((branch[:, RATE] > 0) & (branch[:, RATE] < NO_LIMIT)) if limits else np.empty(0, int)
        ends = branch[limited, :2].astype(int)
        lines = Lines.of(flow, from_rows, to_rows, ends, limited, branch[limited, RATE] / base) if limits else None
        free = np.full(buses - 1, np.inf)
        lower = np.concatenate([gen[:, PMIN] / base, gen[:, QMIN] / base, bus[:, VMIN], -free])
        upper = np.concatenate([gen[:, PMAX] / base, gen[:, QMAX] / base, bus[:, VMAX], free])
        point = [gen[:, PG] / base, gen[:, QG] / base, bus[:, VM], np.deg2rad(bus[others, VA])]
        load = np.concatenate([bus[:, PD], bus[:, QD]]) / base
        parts = (lower, upper, case["gencost"][:, COST : COST + 3], load, np.concatenate(point))
        return cls(
            name, base, flow, lines if len(limited) else None, *(torch.tensor(x, dtype=torch.float64) for x in parts)
        )

    @property
    def buses(self) -> int:
        return self.flow.buses

    @property
    def generators(self) -> int:
        return len(self.flow.generator)

    @property
    def variables(self) -> int:
        return len(self.lower)

    @cached_property
    def box(self) -> ph.Box:
        """Bounds of generators and voltages."""
        return ph.Box(self.lower, self.upper)

    def equations(self, load: Tensor) -> ph.NonlinearEquality:
        """The balances of all buses.

        Args:
            load: Active and reactive load, (*batch, 2 b), per unit.
        """
        return self.flow.constraint(load)

    def constraint(self, load: Tensor) -> ph.Constraint:
        """Equations, bounds and line limits.

        Args:
            load: As for ``equations``.
        """
        both = self.equations(load) & self.box
        return both if self.lines is None else both & self.lines.constraint()

    def cost(self, u: Tensor) -> Tensor:
        """Cost of the generation, (*batch,), of points u (*batch, n)."""
        power = self.base * u[..., : self.generators]
        square, linear, constant = self.cost_terms.to(u).unbind(-1)
        return (square * power.square() + linear * power + constant).sum(-1)

    def excess(self, u: Tensor) -> Tensor:
        """Squared excess over bounds and limits, (*batch,), of points u (*batch, n)."""
        over = (u - self.upper).clamp(min=0).square() + (self.lower - u).clamp(min=0).square()
        lines = u.new_zeros(()) if self.lines is None else self.lines.excess(u).clamp(min=0).square().sum(-1)
        return over.sum(-1) + lines

    def point(self, solution: np.ndarray) -> Tensor:
        """PYPOWER's solution (*batch, 2 g + 2 b) in MW, MVAr and radians as variables (*batch, n)."""
        g, b = self.generators, self.buses
        angle = self.flow.reference + 2 * g + b
        scaled = np.concatenate([solution[..., : 2 * g] / self.base, solution[..., 2 * g :]], -1)
        return torch.from_numpy(np.delete(scaled, angle, axis=-1))
