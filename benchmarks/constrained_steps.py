"""A training step of a small network with general inequalities, against the same step without a projection.

Batches of 64, float64, forward, CRPS, backward and Adam; a network of two hidden layers of 128. The network is near its
targets by construction, where training spends its time. ``"auto"`` has the default rule for moments.

| problem   | set                                                                   | variables |
|-----------|-----------------------------------------------------------------------|-----------|
| portfolio | shares whose turnover is at most 0.4                                  | 30        |
| DC-OPF    | balance, 20 line limits in both directions, bounds of the generators  | 40        |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import probhard as ph
from benchmarks.timing import Overhead, measured

BATCH, INPUTS, WIDTH = 64, 20, 128
NEAR = 0.02  # sd of the laws, and how far their means are from the targets
GOALS = {"portfolio": 10.0, "DC-OPF": 30.0}


class Network(nn.Module):
    """Means near the targets and positive sds, at the full cost of a network."""

    def __init__(self, targets: Tensor, scale: float) -> None:
        super().__init__()
        n, self.targets, self.scale = targets.shape[-1], targets, scale
        sizes = (INPUTS, WIDTH, WIDTH, 2 * n)
        pairs = itertools.pairwise(sizes)
        layers = [part for a, b in pairs for part in (nn.Linear(a, b, dtype=torch.float64), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.layers(x).chunk(2, -1)
        return self.targets + self.scale * mean, self.scale * nn.functional.softplus(raw)


def portfolio() -> tuple[ph.Constraint, Tensor, float]:
    """The set, targets (64, 30) in it, and the spread."""
    held = torch.full((30,), 1 / 30, dtype=torch.float64)
    constraint = ph.Simplex() & ph.L1Ball(0.4, center=held)
    moved = held + NEAR * torch.randn(BATCH, 30, dtype=torch.float64)
    return constraint, ph.DPPL("orthogonal").project(moved, constraint).value, NEAR


def power() -> tuple[ph.Constraint, Tensor, float]:
    """The set, targets (64, 40) in it, and the spread."""
    shares = torch.randn(20, 40, dtype=torch.float64) / 40**0.5
    middle = torch.full((40,), 0.5, dtype=torch.float64)
    flow = shares @ middle
    limits = ph.LinearInequality(torch.cat([shares, -shares]), torch.cat([flow, -flow]) + 0.1)
    balance = ph.LinearEquality(torch.ones(1, 40, dtype=torch.float64), middle.sum()[None])
    constraint = balance & limits & ph.Box(0.0, 1.0)
    moved = middle + 0.2 * torch.randn(BATCH, 40, dtype=torch.float64)
    return constraint, ph.DPPL("orthogonal").project(moved, constraint).value, 5 * NEAR


CASES: dict[str, Callable[[], tuple[ph.Constraint, Tensor, float]]] = {"portfolio": portfolio, "DC-OPF": power}
RULES = ("delta", "mean-field", "monte-carlo")
DEFAULT = "mean-field"  # what "auto" takes


def run(quick: bool = False) -> Iterator[Overhead]:
    """Compare whole training steps."""
    for name, made in CASES.items():
        torch.manual_seed(0)
        constraint, targets, spread = made()
        x = torch.randn(BATCH, INPUTS, dtype=torch.float64)
        kinds = RULES[:-1] if quick else RULES
        steps = [_step(x, targets, spread, None)]
        pairs = [(metric, rule) for metric in ("oblique", "orthogonal") for rule in kinds]
        steps += [_step(x, targets, spread, ph.DPPL(*pair), constraint) for pair in pairs]
        base, *ours = measured(*steps)
        for (metric, rule), own in zip(pairs, ours):
            note = 'The rule of "auto".' if rule == DEFAULT else ""
            case = f"training step, {name}, {metric}, {rule}"
            yield Overhead(case, base.seconds, own.seconds, GOALS[name], note)


def _step(
    x: Tensor, targets: Tensor, spread: float, layer: ph.DPPL | None, constraint: ph.Constraint | None = None
) -> Callable[[], None]:
    torch.manual_seed(1)
    network = Network(targets, spread)
    optimizer = torch.optim.Adam(network.parameters(), 1e-6)

    def step() -> None:
        optimizer.zero_grad()
        law = network(x)
        projected = law if layer is None or constraint is None else layer(law, constraint)
        ph.crps(projected, targets).mean().backward()
        optimizer.step()

    return step
