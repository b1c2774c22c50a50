"""Power flow: noisy measurements of four buses, moved to the nearest state that obeys the AC equations."""

import sys

import matplotlib.pyplot as plt
import torch

import probhard as ph

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
ends = torch.eye(4)[[0, 1, 2, 3, 0]] - torch.eye(4)[[1, 2, 3, 0, 2]]  # five lines between four buses
n, admittance = 4, ends.mT @ ends / (0.01 + 0.1j)


def injected(voltage: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Active and reactive power (*batch, 8) that the grid takes up at each bus."""
    phasor = torch.polar(voltage, angle)
    return torch.view_as_real(phasor * (phasor @ admittance).conj()).mT.flatten(-2)


def balance(u: torch.Tensor) -> torch.Tensor:
    """Injections of u = (P, Q, V, angle) minus those of its voltages, and the reference angle."""
    return torch.cat([u[..., : 2 * n] - injected(u[..., 2 * n : 3 * n], u[..., 3 * n :]), u[..., 3 * n, None]], -1)


state = torch.tensor([1.02, 1.0, 0.98, 1.01, 0.0, -0.05, -0.12, -0.04])
truth = torch.cat([injected(state[:n], state[n:]), state])
meters = torch.distributions.Normal(truth, torch.tensor([0.05, 0.05, 0.005, 0.02]).repeat_interleave(n))
before, constraint = meters.sample((200,)), ph.NonlinearEquality(balance)
after = ph.DPPL("oblique").project(before, constraint, dist=meters).value
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
for draws, colour, label in ((before, "tab:orange", "measured"), (after, "tab:blue", "projected")):
    axes[0].hist(balance(draws).abs().amax(-1).log10(), 30, color=colour, label=label)
    axes[1].scatter(draws[:, 3 * n + 2], draws[:, 2], s=5, color=colour, label=label)
axes[1].plot(truth[3 * n + 2], truth[2], "k+", markersize=12)
axes[0].set(xlabel="log10 of the largest mismatch", ylabel="draws", title="the equations hold")
axes[1].set(xlabel="angle of bus 3", ylabel="its power", title="and errors shrink (+: truth)")
axes[0].legend(frameon=False, loc="upper center")
figure.savefig(sys.argv[1], dpi=80)
