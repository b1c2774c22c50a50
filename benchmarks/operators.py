"""A training step of a neural operator on 20 fields of the paper's size, 20 x 100 points, float32.

Peers: neuraloperator's FNO of the same modes, width, layers and padding, as it comes and without the channel MLP and
positions that VarianceNO does not have either. Overheads: the same compiled VarianceNO without a projection, for the
linear laws and for the nonlinear one. The nonlinear law is measured where training spends its time, near the solution:
the network's law is scaled to a hundredth and added to the exact field, which stands for a trained network's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from experiments.pde.measures import dataset
from torch import Tensor, nn

import probhard as ph
from benchmarks.timing import Comparison, Overhead, measured
from probhard.method import METHODS, Method, Step
from probhard.model import Batch
from probhard.pde import PROBLEMS, Advection, PorousMedium, Problem, porous_medium_law
from probhard.pde.adapters import OperatorBackbone
from probhard.pde.operators import VarianceNO

FIELDS = 20
PADDING = 10  # points per axis: all on the right in VarianceNO, half of them on either side in the peer
NEAR = 0.01  # how near the law that stands for a trained network's is
UNPROJECTED = "Networks alone: neither projects."


class Trained(nn.Module):
    """Near the exact fields by construction, at the full cost of a network."""

    def __init__(self, network: nn.Module, exact: Tensor) -> None:
        super().__init__()
        self.network, self.exact = network, exact

    def forward(self, inputs: Tensor) -> ph.LocationScale:
        return self.network(inputs).affine(self.exact.new_tensor(NEAR), self.exact)


def run(quick: bool = False) -> Iterator[Comparison | Overhead]:
    """Compare whole training steps: forward, CRPS, backward, Adam."""
    torch.manual_seed(0)
    fields = 2 if quick else FIELDS
    network = VarianceNO(padding=PADDING)
    if not quick:
        network.compile()
    problem: Problem = Advection()
    batch = dataset(problem, problem.parameters(fields))
    padding = [PADDING / 2 / size for size in problem.shape]
    bare: dict[str, Any] = {"use_channel_mlp": False, "positional_embedding": None}
    peers = {
        "neuraloperator FNO": OperatorBackbone.fourier(domain_padding=padding),
        "neuraloperator FNO, bare": OperatorBackbone.fourier(domain_padding=padding, **bare),
    }

    def step_of(backbone: nn.Module) -> Callable[[], None]:
        return _step(ph.ConstrainedModel(backbone, problem.constraint, "base"), batch)

    eager, ours, *theirs = map(step_of, (VarianceNO(padding=PADDING), network, *peers.values()))
    slow, fast, *rivals = measured(eager, ours, *theirs)
    for name, one, goal in zip(peers, rivals, (2, None)):
        compiled = "training step of VarianceNO, compiled"
        yield Comparison.of(compiled, name, one, fast, explanation=UNPROJECTED, goal=goal)
        yield Comparison.of("training step of VarianceNO, eager", name, one, slow, explanation=UNPROJECTED)
    for name in ("heat", "pme", "stefan", "advection"):
        problem = PROBLEMS[name]()
        methods = {short: METHODS[f"probhard-{short}"] for short in ("ob", "or")}
        yield from _overheads(f"VarianceNO, {name}", problem, fields, network, problem.constraint, methods, 1.05)
    yield from _nonlinear(fields, network)


def _nonlinear(fields: int, network: nn.Module) -> Iterator[Overhead]:
    """The porous medium law, alone and with positivity, near the solution."""
    problem = PorousMedium()
    methods = {}
    for short, metric in (("ob", "oblique"), ("or", "orthogonal")):
        step = Step(metric, on_failure="flag")
        methods[short] = Method(step, step)

    def law(m: Tensor) -> ph.Constraint:
        return porous_medium_law(problem, m)

    def positive(m: Tensor) -> ph.Constraint:
        return law(m) & ph.NonNegative()

    for name, rule in (("flux law", law), ("flux law, u >= 0", positive)):
        yield from _overheads(f"VarianceNO, pme {name}", problem, fields, network, rule, methods, 1.5, near=True)


def _overheads(
    case: str,
    problem: Problem,
    fields: int,
    network: nn.Module,
    rule: Callable[[Tensor], ph.Constraint],
    methods: dict[str, Method],
    goal: float,
    near: bool = False,
) -> Iterator[Overhead]:
    """Steps of one network without a method and with each."""
    batch = dataset(problem, problem.parameters(fields))
    assert batch.target is not None
    backbone = Trained(network, batch.target) if near else network
    rows = {"base": METHODS["base"], **methods}
    base, *constrained = measured(*(_step(ph.ConstrainedModel(backbone, rule, one), batch) for one in rows.values()))
    for name, one in zip(methods, constrained):
        yield Overhead(f"training step of {case}, {name}", base.seconds, one.seconds, goal)


def _step(model: ph.ConstrainedModel, batch: Batch) -> Callable[[], None]:
    weights = list(model.parameters())
    fused = all(weight.is_floating_point() for weight in weights)  # complex ones cannot be
    optimiser = torch.optim.Adam(weights, lr=1e-4, weight_decay=1e-4, fused=fused)

    def step() -> None:
        optimiser.zero_grad()
        model.loss(batch).backward()
        optimiser.step()

    return step
