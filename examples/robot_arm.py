"""A robot arm: tracked joints move about, but links have fixed lengths and the elbows only bend so far."""

import sys

import matplotlib.pyplot as plt
import torch

import probhard as ph

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
lengths = torch.tensor([1.0, 0.8, 0.6])
pose = torch.tensor([0.45, 0.89, 1.22, 1.13, 1.71, 0.79])  # x and y of three joints


def links(u: torch.Tensor) -> torch.Tensor:
    """The three links (*batch, 3, 2) of joints at u (*batch, 6); the base is at the origin."""
    joints = u.unflatten(-1, (3, 2))
    return torch.cat([joints[..., :1, :], joints.diff(dim=-2)], -2)


def bend(u: torch.Tensor) -> torch.Tensor:
    """Positive where an elbow bends by more than 70 degrees."""
    link = links(u) / lengths.unsqueeze(-1)
    return 0.342 - (link[..., 1:, :] * link[..., :-1, :]).sum(-1)


rigid = ph.NonlinearEquality(lambda u: links(u).square().sum(-1) - lengths.square())
constraint = rigid & ph.NonlinearInequality(bend, convex=False)
tracked = torch.distributions.Normal(pose, torch.full((6,), 0.15))
before = tracked.sample((40,))
after = ph.DPPL("orthogonal").project(before, constraint).value
figure, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained", sharex=True, sharey=True)
for axis, draws, label in ((axes[0], before, "tracked"), (axes[1], after, "projected")):
    error = (links(draws).norm(dim=-1) - lengths).abs().max()
    for arm in torch.cat([torch.zeros(len(draws), 1, 2), draws.unflatten(-1, (3, 2))], -2):
        axis.plot(*arm.mT, "o-", color="tab:blue" if draws is after else "tab:orange", alpha=0.25, markersize=3)
    axis.set(aspect="equal", title=f"{label}: lengths off by {error:.0e}")
figure.savefig(sys.argv[1], dpi=80)
