"""A portfolio: shares add up to 1, none is negative, and at most 30 % of the money may be moved in one day."""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

import probhard as ph

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
today = torch.tensor([0.30, 0.25, 0.15, 0.12, 0.10, 0.08, 0.0, 0.0])
names = ["A", "B", "C", "D", "E", "F", "G", "H"]

# What a model wants to hold tomorrow, and how sure it is. It knows neither budget nor broker.
wanted = torch.distributions.Normal(today + 0.13 * torch.randn(8), torch.linspace(0.02, 0.08, 8))

constraint = ph.Simplex() & ph.L1Ball(radius=0.3, center=today)
before = wanted.sample((500,))
after = ph.DPPL("orthogonal").project(before, constraint).value


def turnover(shares: torch.Tensor) -> torch.Tensor:
    """What is bought and sold, as a share of the portfolio."""
    return (shares - today).abs().sum(-1)


figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained", width_ratios=[2, 1])
place = np.arange(8)
for shift, draws, colour, label in ((-0.2, before, "tab:orange", "wanted"), (0.2, after, "tab:blue", "projected")):
    axes[0].bar(place + shift, draws.mean(0), 0.38, yerr=draws.std(0), color=colour, label=label)
    axes[1].hist(turnover(draws), 40, range=(0, 1.5), color=colour, alpha=0.8, label=label)
axes[0].plot(place, today, "k_", markersize=18, label="today")
axes[0].set(xticks=place, xticklabels=names, ylabel="share", title="shares, with standard deviations")
axes[1].axvline(0.3, color="k", linestyle=":")
axes[1].set(xlabel="turnover", ylabel="draws", title="at most 0.3")
axes[0].legend(frameon=False)
figure.savefig(sys.argv[1], dpi=80)
