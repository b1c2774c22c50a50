"""HardNet's control problem: a vehicle drives to the origin, and barrier rows keep it out of two ellipses.

The state is x = (position p, angle, speed v, turning rate w) and the control u = (acceleration, its angular twin).
The policy adds y to a nominal control. With c a point ahead of the vehicle, o and r the centre and radii of an ellipse,

    e = |(c - o) / r|^2 - 1,     h = e' + KAPPA e,     h'(x, nominal + y) >= -ALPHA h

is one row ``G(x) y <= d(x)`` for each ellipse. Costs ``x' Q x + u' R u`` are integrated over one second. Initial states
are those of the published data: the same generator and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import probhard as ph
from experiments.optimisation.systems import published_network

COUNT, TRAINING, VALIDATION = 1000, 833, 83  # initial states; the others are test states
SECONDS, STEP = 1.0, 0.02
FAST = 100.0  # the steps are shorter where a control is larger
AHEAD, KAPPA, ALPHA = 0.1, 10.0, 20.0
CENTRES, RADII = ((-2.25, 0.5), (-0.8, 0.0)), ((0.5, 0.75), (0.5, 0.5))
LOWEST, HIGHEST = (-4.0, 0.0, -np.pi / 4, 0.0, 0.0), (-3.5, 0.5, -np.pi / 8, 0.0, 0.0)  # of initial states
STATE_COST, CONTROL_COST = (100.0, 100.0, 0.0, 0.1, 0.1), 0.1
INSIDE = 1e-3  # depth that counts as a collision
Policy = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Motion:
    """Where the point ahead of the vehicle is and how it moves, relative to each ellipse."""

    offset: Tensor  # c - o, (batch, 2 ellipses, 2)
    velocity: Tensor  # c', (batch, 1, 2)
    drift: Tensor  # c'' without control, (batch, 1, 2)
    gain: Tensor  # c'' = drift + gain u, (batch, 2, 2)
    squares: Tensor  # of the radii, (2 ellipses, 2)

    @property
    def outside(self) -> Tensor:
        """``e``: positive outside, (batch, 2)."""
        return (self.offset.square() / self.squares).sum(-1) - 1

    @property
    def rate(self) -> Tensor:
        """``e'``, (batch, 2)."""
        return 2 * (self.offset / self.squares * self.velocity).sum(-1)


def motion(x: Tensor) -> Motion:
    """The motion of states (batch, 5)."""
    position, (angle, v, w) = x[:, :2], x[:, 2:].unbind(-1)
    along = torch.stack([angle.cos(), angle.sin()], -1)
    across = torch.stack([-angle.sin(), angle.cos()], -1)
    v, w = v.unsqueeze(-1), w.unsqueeze(-1)
    ahead = position + AHEAD * along
    velocity = v * along + AHEAD * w * across
    drift = v * w * across - AHEAD * w.square() * along
    gain = torch.stack([along, AHEAD * across], -1)
    offset = ahead.unsqueeze(-2) - x.new_tensor(CENTRES)
    return Motion(offset, velocity.unsqueeze(-2), drift.unsqueeze(-2), gain, x.new_tensor(RADII).square())


def barrier(x: Tensor) -> Tensor:
    """``h`` of states (batch, 5), (batch, 2): it stays positive if the rows hold."""
    found = motion(x)
    return found.rate + KAPPA * found.outside


def nominal(x: Tensor) -> Tensor:
    """The nominal control (batch, 2) of states (batch, 5): it turns and drives to the origin, and sees no ellipse."""
    (p, q), (angle, v, w) = x[:, :2].unbind(-1), x[:, 2:].unbind(-1)
    distance = (p.square() + q.square()).sqrt()
    turning = 10 * (p * angle.sin() - q * angle.cos()) / (distance + 1e-5)
    speed = (-10 * distance * (p * angle.cos() + q * angle.sin())).clamp(-5, 5)
    return torch.stack([5 * (speed - v), 5 * (turning - w)], -1)


def rows(x: Tensor) -> ph.LinearInequality:
    """The barrier rows ``G y <= d`` on the addition y to the nominal control of states (batch, 5)."""
    found = motion(x)
    normal = 2 * found.offset / found.squares  # gradient of e in c, (batch, 2 ellipses, 2)
    lever = normal @ found.gain
    bend = 2 * (found.velocity.square() / found.squares).sum(-1) + (normal * found.drift).sum(-1)
    free = bend + KAPPA * found.rate + (lever @ nominal(x).unsqueeze(-1)).squeeze(-1)  # h' at y = 0
    return ph.LinearInequality(-lever, free + ALPHA * (found.rate + KAPPA * found.outside))


def derivative(x: Tensor, control: Tensor) -> Tensor:
    """``x'`` of states (batch, 5) under controls (batch, 2)."""
    angle, v, w = x[:, 2:].unbind(-1)
    return torch.cat([torch.stack([v * angle.cos(), v * angle.sin(), w], -1), control], -1)


def cost(x: Tensor, y: Tensor) -> Tensor:
    """The cost per second (batch,) of states (batch, 5) and additions (batch, 2)."""
    control = nominal(x) + y
    return (x.square() * x.new_tensor(STATE_COST)).sum(-1) + CONTROL_COST * control.square().sum(-1)


def initial_states() -> Tensor:
    """All initial states (1000, 5): uniform, drawn again until the barrier is positive."""
    random = np.random.RandomState(17)
    low, high = np.array(LOWEST), np.array(HIGHEST)

    def drawn(count: int) -> np.ndarray:
        share = random.rand(count, len(low))
        return share * low + (1 - share) * high

    x, bad = drawn(COUNT), np.arange(COUNT)
    while len(bad):
        bad = bad[(barrier(torch.from_numpy(x[bad])) < 0).any(-1).numpy()]
        x[bad] = drawn(len(bad))
    return torch.from_numpy(x)


def steps(policy: Policy, x: Tensor, most: int = 2000) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """States (batch, 5), additions (batch, 2) and lengths (batch,) of the Euler steps of one second.

    Steps end at multiples of ``STEP``, and are shorter where a control exceeds ``FAST``.

    Args:
        policy: Gives the additions.
        x: Initial states, (batch, 5).
        most: Number of steps after which a run is cut off.
    """
    left = x.new_full((len(x),), STEP)
    intervals = torch.full((len(x),), round(SECONDS / STEP))
    for _ in range(most):
        if not bool((intervals > 0).any()):
            return
        y = policy(x)
        control = nominal(x) + y
        with torch.no_grad():
            length = torch.minimum(STEP * FAST / control.abs().amax(-1).clamp(min=1e-9), left)
            left, length = left - length, torch.where(intervals > 0, length, 0.0)
            over = left <= 0
            intervals = torch.where(over, intervals - 1, intervals)
            left = torch.where(over, STEP, left)
        yield x, y, length
        x = x + length.unsqueeze(-1) * derivative(x, control)


class Encoded(nn.Module):
    """The published network on a state whose angle is given by cosine and sine."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.body = published_network(6, 2, seed, normalised=False)

    def forward(self, x: Tensor) -> Tensor:
        """Additions (batch, 2) for states (batch, 5)."""
        angle = x[:, 2:3]
        return self.body(torch.cat([x[:, :2], angle.cos(), angle.sin(), x[:, 3:]], -1))
