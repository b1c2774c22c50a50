"""One conservation row per slice of a (20, 20, 100) batch: projection + CRPS + backward, with and without it.

Peers: the dense n x n form of the projection. Overheads: the same score without a projection, alone and inside a
training step of a small convolutional network.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

import probhard as ph
from benchmarks.timing import Comparison, Overhead, measured, worst

EAGER = (
    "In a profile the fused projection, forward and backward, is about a third of what is added; the rest is spread "
    "over the Python calls that read, check and wrap a law, which do not shrink with a batch this small."
)


def dense_oblique(mean: Tensor, stddev: Tensor, weights: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The projection with its n x n projector, per slice."""
    variance = stddev.square()
    gain = variance * weights / (variance * weights.square()).sum(-1, keepdim=True)
    projector = torch.eye(len(weights), dtype=mean.dtype) - gain.unsqueeze(-1) * weights
    moved = (projector @ mean.unsqueeze(-1)).squeeze(-1) + gain * mass.unsqueeze(-1)
    left = (projector.square() @ variance.unsqueeze(-1)).squeeze(-1)
    return moved, left.clamp(min=1e-12).sqrt()


def run(quick: bool = False) -> Iterator[Comparison | Overhead]:
    """Compare in float32."""
    torch.manual_seed(0)
    shape = (2 if quick else 20, 20, 100)
    mean = torch.randn(shape, requires_grad=True)
    stddev = (torch.rand(shape) + 0.1).requires_grad_()
    target = torch.randn(shape)
    weights, mass = ph.trapezoid_weights(torch.linspace(0, 1, 100)), torch.rand(shape[:-1])
    case = f"score of {mass.numel()} slices"
    constraint = ph.Conservation(weights, mass)

    def base() -> None:
        ph.crps((mean, stddev), target).sum().backward()

    def dense() -> Tensor:
        law = dense_oblique(mean, stddev, weights, mass)
        ph.crps(law, target).sum().backward()
        return law[0].detach()

    def ours(layer: ph.DPPL) -> Tensor:
        law = layer((mean, stddev), ph.Conservation(weights, mass))
        ph.crps(law, target).sum().backward()
        return law.mean.detach()

    for metric in ("oblique", "orthogonal"):
        layer = ph.DPPL(metric)
        alone, full, projected = measured(base, dense, partial(ours, layer))
        if metric == "oblique":
            judge = partial(worst, constraint)
            yield Comparison.of(f"{case}, oblique", "dense n x n projector", full, projected, judge)
        yield Overhead(f"{case}, {metric}", alone.seconds, projected.seconds, 1.1, EAGER)
    yield _training_step(constraint, target)


def _training_step(constraint: ph.Constraint, target: Tensor) -> Overhead:
    """The same inside a training step of a small convolutional network on 20 fields."""
    network = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.GELU(), nn.Conv2d(32, 32, 5, padding=2), nn.GELU(), nn.Conv2d(32, 2, 1)
    )
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-4)
    inputs = torch.randn(len(target), 3, 20, 100)
    layer = ph.DPPL("oblique")

    def step(project: bool) -> None:
        mean, raw = network(inputs).unbind(1)
        dist = (mean, nn.functional.softplus(raw) + 1e-3)
        loss = ph.crps(layer(dist, constraint) if project else dist, target).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    base, ours = measured(lambda: step(False), lambda: step(True))
    return Overhead("training step of a small network, oblique", base.seconds, ours.seconds, 1.1)
