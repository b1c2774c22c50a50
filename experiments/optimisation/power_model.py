"""A network that dispatches generators: loads in, a point of the power network out, projected on its constraint.

    u(load) = projection of  network(load)  on the power flow equations, bounds and line limits.

The network's own points lie within the bounds. It is first trained on the cost and the squared residuals of its own
points, which needs no projection, then on the cost of points projected on the equations, with a penalty on what these
exceed bounds and limits by. There the solver starts at the last point of each instance. Predictions are projected on
the whole constraint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import probhard as ph
from experiments.optimisation.power_case import Network
from experiments.optimisation.training import network
from probhard.projection.base import Solution

PENALTY = 100.0  # weight of squared residuals and excesses in training
ANGLE = 0.1  # radians of one unit of the network's output
EDGE = 0.05  # distance of the first guess to a bound, relative to their distance
UNIT_COST = 1e4  # DC3 divides costs by the square of the generators' 100 MVA


class Dispatcher(nn.Module):
    """The network and its layer.

    Args:
        power: The power network.
        loads: Loads (k, 2 b) whose mean and spread scale the inputs.
        seed: Of the weights.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, power: Network, loads: Tensor, seed: int = 0) -> None:
        super().__init__()
        self.power = power
        self.net = network(2 * power.buses, power.variables, seed)
        self.layer = ph.DPPL("orthogonal", on_failure="flag")
        self.register_buffer("mean", loads.mean(0))
        self.register_buffer("spread", loads.std(0).clamp(min=1e-3))

    def raw(self, loads: Tensor) -> Tensor:
        """The network's points before the projection, (*batch, n), within their bounds."""
        power, output = self.power, self.net((loads - self.mean) / self.spread)
        lower, upper, guess = power.lower, power.upper, power.guess
        bounded = torch.isfinite(upper)
        width = torch.where(bounded, upper - lower, 1.0)
        share = torch.where(bounded, ((guess - lower) / width).clamp(EDGE, 1 - EDGE), 0.5)
        inside = lower + width * torch.sigmoid(output + torch.logit(share))
        return torch.where(bounded, inside, guess + ANGLE * output)

    def soft_loss(self, loads: Tensor) -> Tensor:
        """Mean cost and weighted squared residuals of the network's own points."""
        u = self.raw(loads)
        residual = self.power.equations(loads).residual(u).square().sum(-1)
        return (self.power.cost(u) / UNIT_COST + PENALTY * (residual + self.power.excess(u))).mean()

    def forward(self, loads: Tensor, start: Tensor | None = None) -> Solution:
        """Project the network's points.

        Args:
            loads: (*batch, 2 b), per unit.
            start: Where the solver begins, (*batch, n).
        """
        return self.layer.project(self.raw(loads), self.power.constraint(loads), start=start)


@dataclass
class Instances:
    """Loads of the second phase and what the solver did on them."""

    loads: Tensor  # (k, 2 b)
    last: Tensor  # (k, n): the last projected point of each, where the solver starts
    projections: int = 0
    failures: int = 0

    def loss(self, model: Dispatcher, chosen: Tensor) -> Tensor:
        """Mean cost and excess of points projected on the equations; failed ones are masked and counted."""
        power, loads = model.power, self.loads[chosen]
        raw = model.raw(loads)
        solution = model.layer.project(raw, power.equations(loads), start=self.last[chosen])
        good = solution.stats.converged
        self.projections, self.failures = self.projections + len(good), self.failures + int((~good).sum())
        self.last[chosen[good]] = solution.value.detach()[good]
        u = solution.value[good]
        way = (u - raw[good]).square().sum(-1)  # near points are quick to project
        return (power.cost(u) / UNIT_COST + PENALTY * power.excess(u) + way).mean()
