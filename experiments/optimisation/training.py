"""Networks whose outputs are projected, trained on the objective alone.

    min over the network  mean_x objective(projection(network(x), constraint(x))),

in float64, in one thread. No solutions are needed for training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

HIDDEN = 200
BATCH = 200  # instances of a training step


def network(inputs: int, outputs: int, seed: int = 0) -> nn.Sequential:
    """Two hidden layers of 200 units, in float64, as in DC3 without batch normalisation and dropout.

    Args:
        inputs: Size of a context.
        outputs: Number of variables.
        seed: Of the weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [
            nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
        ]  # fmt: skip
        return nn.Sequential(*layers).double()


@dataclass(frozen=True)
class Plan:
    """How long and how fast a network is trained."""

    epochs: int
    rate: float = 1e-3  # of Adam, falling to 0 along a cosine
    batch: int = BATCH
    seed: int = 0
    constant: bool = False  # whether the rate stays as it is


@dataclass(frozen=True)
class Trained:
    """What training cost."""

    seconds: float  # processor time of all steps
    steps: int
    curve: list[float]  # mean objective on validation instances after each epoch


def train(
    parameters: Iterable[nn.Parameter],
    loss: Callable[[Tensor], Tensor],
    count: int,
    plan: Plan,
    validate: Callable[[], float] | None = None,
) -> Trained:
    """Train on the objective.

    Args:
        parameters: Of the network.
        loss: Mean objective of the instances with some indices.
        count: Number of training instances.
        plan: Epochs and rates.
        validate: Mean objective on validation instances; None for no curve.
    """
    optimiser = torch.optim.Adam(parameters, plan.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, plan.epochs * -(-count // plan.batch))
    generator = torch.Generator().manual_seed(plan.seed)
    seconds, steps, curve = 0.0, 0, []
    for _ in tqdm(range(plan.epochs), unit="epoch", mininterval=20):
        for chosen in torch.randperm(count, generator=generator).split(plan.batch):
            start = time.process_time()
            optimiser.zero_grad()
            loss(chosen).backward()
            optimiser.step()
            if not plan.constant:
                schedule.step()
            seconds, steps = seconds + time.process_time() - start, steps + 1
        if validate is not None:
            curve.append(validate())
    return Trained(seconds, steps, curve)
