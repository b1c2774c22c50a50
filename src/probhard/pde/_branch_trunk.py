"""The network of the demonstration: (m, t, x) to a mean and a variance at every grid point.

With features of the parameter and of the grid point,

    (mean, raw variance) = sum_k branch_k(m) trunk_k(t, x)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale
from probhard.pde.base import Problem


class BranchTrunk(nn.Module):
    """A small operator network; its trunk runs once per batch, since all fields share one grid.

    Args:
        problem: Gives the range of the inputs and the dtype.
        width: Number of features.
    """

    center: Tensor
    spread: Tensor

    def __init__(self, problem: Problem, width: int) -> None:
        super().__init__()
        ends = problem.inputs(torch.tensor([problem.lower, problem.upper])).movedim(-3, 0).flatten(1)  # (3, ...)
        self.register_buffer("center", (ends.amax(1) + ends.amin(1)) / 2)
        self.register_buffer("spread", ((ends.amax(1) - ends.amin(1)) / 2).clamp(min=1e-6))
        self.branch = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, 2 * width))
        inner = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.trunk = nn.Sequential(nn.Linear(2, width), nn.ReLU(), *inner)
        self.to(problem.dtype)

    def forward(self, inputs: Tensor) -> LocationScale:
        """The law of the flattened fields, (batch, nt * nx), for inputs (batch, 3, nt, nx) on one grid."""
        parameter = (inputs[:, :1, 0, 0] - self.center[0]) / self.spread[0]  # (batch, 1)
        place = (inputs[0, 1:].flatten(1).mT - self.center[1:]) / self.spread[1:]  # (n, 2)
        weights = self.branch(parameter).unflatten(-1, (2, -1))  # (batch, 2, width)
        mean, raw = (weights @ self.trunk(place).mT / math.sqrt(weights.shape[-1])).unbind(1)
        # The initial standard deviation is 0.05. The floor keeps float32 metrics regular where variances vanish.
        return LocationScale(mean, Diagonal(nn.functional.softplus(raw - 6) + 1e-8))


def batch_of(problem: Problem, parameter: Tensor) -> dict[str, Tensor]:
    """A batch of exact fields.

    Args:
        problem: The problem.
        parameter: Parameters of the fields, (batch,).

    Returns:
        Inputs (batch, 3, nt, nx), targets (batch, nt * nx) and the parameters as context.
    """
    return {
        "inputs": problem.inputs(parameter),
        "target": problem.solution(parameter).flatten(1),
        "context": parameter,
    }
