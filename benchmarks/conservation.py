"""One conservation row per slice of a (20, 20, 100) batch: projection + CRPS + backward, with and without it.

Peers: the same score without a projection (the ratio says what the layer costs), inside a training step of a small
convolutional network too, and the dense n x n form of the projection.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import probhard as ph
from benchmarks.timing import Comparison, interleaved


def dense_oblique(mean: Tensor, stddev: Tensor, weights: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The projection with its n x n projector, per slice."""
    variance = stddev.square()
    gain = variance * weights / (variance * weights.square()).sum(-1, keepdim=True)
    projector = torch.eye(len(weights), dtype=mean.dtype) - gain.unsqueeze(-1) * weights
    moved = (projector @ mean.unsqueeze(-1)).squeeze(-1) + gain * mass.unsqueeze(-1)
    found = (projector.square() @ variance.unsqueeze(-1)).squeeze(-1)
    return moved, found.clamp(min=1e-12).sqrt()


def run() -> Iterator[Comparison]:
    """Compare in float32, one thread."""
    torch.manual_seed(0)
    mean = torch.randn(20, 20, 100, requires_grad=True)
    stddev = (torch.rand(20, 20, 100) + 0.1).requires_grad_()
    target = torch.randn(20, 20, 100)
    weights, mass = ph.trapezoid_weights(torch.linspace(0, 1, 100)), torch.rand(20, 20)
    violation = float(ph.Conservation(weights, mass).violation(mean.detach()).max())

    def base() -> None:
        ph.crps((mean, stddev), target).sum().backward()

    def dense() -> None:
        ph.crps(dense_oblique(mean, stddev, weights, mass), target).sum().backward()

    for metric in ("orthogonal", "oblique"):
        layer = ph.DPPL(metric)

        def ours(layer: ph.DPPL = layer) -> None:
            ph.crps(layer((mean, stddev), ph.Conservation(weights, mass)), target).sum().backward()

        draws = layer((mean, stddev), ph.Conservation(weights, mass)).sample((10,))
        left = float(ph.Conservation(weights, mass).violation(draws).max())
        base_time, our_time, dense_time = interleaved(base, ours, dense, repeats=60)
        yield Comparison(f"score of 400 slices, {metric}", "no projection", base_time, our_time, violation, left)
        if metric == "oblique":
            dense_draw = dense_oblique(mean.detach(), stddev.detach(), weights, mass)[0]
            dense_left = float(ph.Conservation(weights, mass).violation(dense_draw).max())
            yield Comparison(
                f"score of 400 slices, {metric}", "dense n x n projector", dense_time, our_time, dense_left, left
            )
    yield from _training_step(weights, mass, target)


def _training_step(weights: Tensor, mass: Tensor, target: Tensor) -> Iterator[Comparison]:
    """The same inside a training step of a small convolutional network on 20 fields."""
    network = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.GELU(), nn.Conv2d(32, 32, 5, padding=2), nn.GELU(), nn.Conv2d(32, 2, 1)
    )
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-4)
    inputs = torch.randn(20, 3, 20, 100)
    layer = ph.DPPL("oblique")

    def step(project: bool) -> None:
        mean, raw = network(inputs).unbind(1)
        dist = (mean, nn.functional.softplus(raw) + 1e-3)
        predicted = layer(dist, ph.Conservation(weights, mass)) if project else dist
        loss = ph.crps(predicted, target).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    base_time, our_time = interleaved(lambda: step(False), lambda: step(True), repeats=15)
    constraint = ph.Conservation(weights, mass)
    with torch.no_grad():
        mean, raw = network(inputs).unbind(1)
        draws = layer((mean, nn.functional.softplus(raw) + 1e-3), constraint).sample((10,))
    missed, left = float(constraint.violation(mean).max()), float(constraint.violation(draws).max())
    yield Comparison("training step of a small network, oblique", "no projection", base_time, our_time, missed, left)
