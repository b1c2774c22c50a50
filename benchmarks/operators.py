"""A training step of a neural operator on 20 fields of the paper's size, 20 x 100 points, float32, one thread.

Peers: neuraloperator's FNO of the same modes, width, layers and padding, as it comes and without the channel MLP and
positions that VarianceNO does not have either; VarianceNO without a projection (the ratio says what the layer costs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

import probhard as ph
from benchmarks.timing import Comparison, interleaved
from probhard.model import Batch
from probhard.pde import Advection
from probhard.pde.adapters import OperatorBackbone
from probhard.pde.operators import VarianceNO

FIELDS = 20
PADDING = 10  # points per axis: all on the right in VarianceNO, half of them on either side in the peer


def run() -> Iterator[Comparison]:
    """Compare whole training steps: forward, CRPS, backward, Adam."""
    torch.manual_seed(0)
    problem = Advection()
    parameters = problem.parameters(FIELDS)
    batch = Batch(problem.inputs(parameters), problem.solution(parameters).flatten(-2), None, parameters)

    def model(backbone: nn.Module, method: str = "base") -> ph.ConstrainedModel:
        return ph.ConstrainedModel(backbone, problem.constraint, method)

    def violation(trained: ph.ConstrainedModel) -> float:
        return float(problem.constraint(parameters).violation(trained.sample(batch, 10)).max())

    def compiled() -> VarianceNO:
        network = VarianceNO(padding=PADDING)
        network.compile()
        return network

    padding = [PADDING / 2 / size for size in problem.shape]
    bare = {"use_channel_mlp": False, "positional_embedding": None}
    peers = {
        "neuraloperator": OperatorBackbone.fourier(domain_padding=padding),
        "neuraloperator, bare": OperatorBackbone.fourier(domain_padding=padding, **bare),
    }
    models = {name: model(backbone) for name, backbone in peers.items()}
    models["eager"], models["compiled"] = model(VarianceNO(padding=PADDING)), model(compiled())
    models.update({method: model(compiled(), method) for method in ("probhard-ob", "probhard-or")})
    seconds = dict(zip(models, interleaved(*(_step(one, batch) for one in models.values()), repeats=15)))
    worst = {name: violation(one) for name, one in models.items()}

    def compared(case: str, ours: str, label: str, peer: str, goal: str = "") -> Comparison:
        return Comparison(case, label, seconds[peer], seconds[ours], worst[peer], worst[ours], goal)

    for peer, goal in zip(peers, (">= 2", "")):
        yield compared("training step of VarianceNO, compiled", "compiled", peer, peer, goal)
        yield compared("training step of VarianceNO, eager", "eager", peer, peer)
    for method in ("probhard-ob", "probhard-or"):
        yield compared(f"training step of VarianceNO, {method}", method, "no projection", "compiled", ">= 0.95")


def _step(model: ph.ConstrainedModel, batch: Batch) -> Callable[[], None]:
    weights = list(model.parameters())
    fused = all(weight.is_floating_point() for weight in weights)  # complex ones cannot be
    optimiser = torch.optim.Adam(weights, lr=1e-4, weight_decay=1e-4, fused=fused)

    def step() -> None:
        optimiser.zero_grad()
        model.loss(batch).backward()
        optimiser.step()

    return step
