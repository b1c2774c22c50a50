"""Constraints with points near and far, on which a solver should raise no false alarm.

| case            | constraint                                                        | points about                 |
|-----------------|-------------------------------------------------------------------|------------------------------|
| power flow      | 18 balances of 9 buses, ``theta_1 = 0``                           | a flat start                 |
| links & limits  | 4 links of length 1 in the plane, bounds, joints bent by 70 deg   | the straight arm             |
| sphere & bounds | ``|u| = 1``, ``u >= 0`` in 5 dimensions                           | 0.3 for every variable       |
| quaternion      | ``|u| = 1`` in 4 dimensions                                       | the identity                 |
| SO(3) by six    | ``R^T R = I``, upper triangle                                     | the identity                 |
| SO(3) by nine   | ``R^T R = I``, all entries: three rows repeat others              | the identity                 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import probhard as ph
from probhard.constraints.base import Constraint

BUSES, LINKS = 9, 4
LINES = (*((i, (i + 1) % BUSES) for i in range(BUSES)), (0, 4), (2, 6))  # a ring with two chords
BEND = math.radians(70)  # largest angle between links


@dataclass(frozen=True)
class Case:
    """A constraint, and a law of points to project on it.

    Args:
        name: Name of the case.
        constraint: What to project on.
        center: Mean of the points, (n,).
        near: Standard deviation of near points.
        far: Standard deviation of far points.
    """

    name: str
    constraint: Constraint
    center: Tensor
    near: float
    far: float

    def points(self, count: int, spread: float, seed: int = 0) -> Tensor:
        """Points to project, (count, n), in float64."""
        source = torch.Generator().manual_seed(seed)
        noise = torch.randn(count, len(self.center), generator=source, dtype=torch.float64)
        return self.center + spread * noise


def cases() -> list[Case]:
    """All cases of the table."""
    eye = torch.eye(3, dtype=torch.float64).flatten()
    unit = torch.eye(4, dtype=torch.float64)[0]
    arm = torch.stack([torch.arange(1.0, LINKS + 1), torch.zeros(LINKS)], -1).flatten().double()
    return [
        Case("power flow", power_flow(), flat_start(), 0.05, 0.3),
        Case("links & limits", links_and_limits(), arm, 0.1, 1.0),
        Case(
            "sphere & bounds", ph.NonlinearEquality(sphere) & ph.NonNegative(), torch.full_like(arm[:5], 0.3), 0.3, 2.0
        ),
        Case("quaternion", ph.NonlinearEquality(sphere), unit, 0.1, 2.0),
        Case("SO(3) by six", ph.NonlinearEquality(rotation_six), eye, 0.1, 1.0),
        Case("SO(3) by nine", ph.NonlinearEquality(rotation_nine), eye, 0.1, 1.0),
    ]


def sphere(u: Tensor) -> Tensor:
    """``|u|^2 - 1``, (*batch, 1)."""
    return u.square().sum(-1, keepdim=True) - 1


def rotation_nine(u: Tensor) -> Tensor:
    """All entries of ``R^T R - I``, (*batch, 9)."""
    matrix = u.unflatten(-1, (3, 3))
    return (matrix.mT @ matrix - torch.eye(3).to(u)).flatten(-2)


def rotation_six(u: Tensor) -> Tensor:
    """The upper triangle of ``R^T R - I``, (*batch, 6)."""
    return rotation_nine(u)[..., [0, 1, 2, 4, 5, 8]]


def links_and_limits() -> Constraint:
    """An arm of ``LINKS`` links of length 1 from the origin: bounds of all joints, and limits of all bends."""
    lengths, bends = ph.NonlinearEquality(link_lengths), ph.NonlinearInequality(link_bends, convex=False)
    return lengths & bends & ph.Box(-2.0, LINKS - 0.5)


def link_lengths(u: Tensor) -> Tensor:
    """Squared lengths of the links less 1, (*batch, LINKS), of joints (x, y) in order."""
    return _links(u).square().sum(-1) - 1


def link_bends(u: Tensor) -> Tensor:
    """``cos BEND`` less the cosine of the angle between links of length 1, (*batch, LINKS - 1)."""
    links = _links(u)
    return math.cos(BEND) - (links[..., 1:, :] * links[..., :-1, :]).sum(-1)


def _links(u: Tensor) -> Tensor:
    joints = u.unflatten(-1, (LINKS, 2))
    return joints - torch.cat([torch.zeros_like(joints[..., :1, :]), joints[..., :-1, :]], -2)


def admittance() -> Tensor:
    """The bus admittance matrix, (9, 9) complex: line impedances from .01 + .1j to .01 + .2j."""
    matrix = torch.zeros(BUSES, BUSES, dtype=torch.complex128)
    for (i, j), reactance in zip(LINES, torch.linspace(0.1, 0.2, len(LINES)).tolist()):
        value = 1 / complex(0.01, reactance)
        matrix[i, i] += value
        matrix[j, j] += value
        matrix[i, j] -= value
        matrix[j, i] -= value
    return matrix


def loads() -> Tensor:
    """Active and reactive loads of all buses, (18,)."""
    source = torch.Generator().manual_seed(0)
    active = 0.3 + 0.4 * torch.rand(BUSES, generator=source, dtype=torch.float64)
    return torch.cat([active, 0.1 + 0.1 * torch.rand(BUSES, generator=source, dtype=torch.float64)])


def power_flow(load: Tensor | None = None) -> ph.NonlinearEquality:
    """Balances of active and reactive power and ``theta_1 = 0`` in u = (P, Q, V, theta), 36 variables.

    Args:
        load: Loads (*batch, 18); those of ``loads`` if None.
    """
    matrix = admittance()
    real, imaginary = matrix.real.clone(), matrix.imag.clone()

    def balances(u: Tensor, load: Tensor) -> Tensor:
        made, voltage, angle = u[..., : 2 * BUSES], u[..., 2 * BUSES : 3 * BUSES], u[..., 3 * BUSES :]
        between = angle.unsqueeze(-1) - angle.unsqueeze(-2)
        cosine, sine, g, b = between.cos(), between.sin(), real.to(u), imaginary.to(u)
        active = voltage * ((g * cosine + b * sine) @ voltage.unsqueeze(-1)).squeeze(-1)
        reactive = voltage * ((g * sine - b * cosine) @ voltage.unsqueeze(-1)).squeeze(-1)
        return torch.cat([made - load - torch.cat([active, reactive], -1), angle[..., :1]], -1)

    return ph.NonlinearEquality(balances, (loads() if load is None else load,))


def flat_start() -> Tensor:
    """Loads met where they are, voltages of 1 and angles of 0, (36,)."""
    return torch.cat([loads(), torch.ones(BUSES, dtype=torch.float64), torch.zeros(BUSES, dtype=torch.float64)])
