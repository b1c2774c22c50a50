"""Quantiles that do not cross: nine outputs of one network, projected on increasing profiles."""

import sys

import matplotlib.pyplot as plt
import torch

import probhard as ph

torch.manual_seed(0)
levels = torch.linspace(0.1, 0.9, 9)
x = torch.rand(60, 1)
y = torch.sin(6 * x) + (0.1 + 0.6 * x) * torch.randn(60, 1)

# A network from x to nine quantiles of y, trained with the pinball loss. Nothing tells it their order.
network = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 9))
optimizer = torch.optim.Adam(network.parameters(), 0.03)
for _ in range(300):
    gap = y - network(x)
    optimizer.zero_grad()
    torch.maximum(levels * gap, (levels - 1) * gap).mean().backward()
    optimizer.step()

grid = torch.linspace(-0.3, 1.3, 200).unsqueeze(-1)
before = network(grid).detach()
constraint = ph.Monotone("increasing")
after = ph.DPPL("orthogonal").project(before, constraint).value

figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained", sharey=True)
for axis, curves, colour, label in (
    (axes[0], before, "tab:orange", "network"),
    (axes[1], after, "tab:blue", "projected"),
):
    crossing = int((curves.diff(dim=-1) < 0).any(-1).sum())
    axis.plot(grid, curves, color=colour, linewidth=1)
    axis.scatter(x, y, s=4, color="0.5")
    axis.set(xlabel="x", title=f"{label}: crossings at {crossing} of {len(grid)} points")
figure.savefig(sys.argv[1], dpi=80)
