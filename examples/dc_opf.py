"""Optimal power flow, DC model: a network learns to dispatch five generators. Flows and limits hold in each output."""

import sys

import matplotlib.pyplot as plt
import torch

import probhard as ph

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
buses, lines = 5, torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 0], [0, 2], [1, 3]])
cost, most, limit = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([3.0, 2.0, 2.0, 2.0, 2.0]), 0.7
# Flows are linear in injections: susceptances, then the pseudo-inverse of the grid's Laplacian.
ends = torch.eye(buses)[lines[:, 0]] - torch.eye(buses)[lines[:, 1]]
flows = 10 * ends @ torch.linalg.pinv(ends.mT @ (10 * ends))


def feasible(load: torch.Tensor) -> ph.Constraint:
    """Generation equals load, no line is overloaded, no generator exceeds its range."""
    shift = load @ flows.mT
    rows = ph.LinearInequality(torch.cat([flows, -flows]), torch.cat([limit + shift, limit - shift], -1))
    return ph.Conservation(torch.ones(buses), load.sum(-1)) & rows & ph.Box(0.0, most)


network = torch.nn.Sequential(torch.nn.Linear(buses, 16), torch.nn.Tanh(), torch.nn.Linear(16, buses))
layer, optimizer = ph.DPPL("orthogonal"), torch.optim.Adam(network.parameters(), 0.02)
load = 0.4 + torch.rand(64, buses)
for _ in range(150):
    optimizer.zero_grad()
    (layer.project(network(load), feasible(load)).value @ cost).mean().backward()
    optimizer.step()
before, constraint = network(load).detach(), feasible(load)
after = layer.project(before, constraint).value
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained", sharey=True)
for axis, dispatch, label in ((axes[0], before, "network"), (axes[1], after, "projected")):
    axis.boxplot(((dispatch - load) @ flows.mT / limit).mT.tolist(), sym=".")
    axis.hlines([-1, 1], 0.5, 7.5, colors="k", linestyles=":")
    axis.set(title=label, xlabel="line", ylabel="flow / limit")
figure.savefig(sys.argv[1], dpi=80)
