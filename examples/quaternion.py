"""An attitude: the four numbers of a quaternion describe a rotation only if their squares add up to 1."""

import sys

import matplotlib.pyplot as plt
import torch

import probhard as ph

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# An estimate of the attitude: four numbers, their errors, and no knowledge of geometry.
estimate = torch.distributions.Normal(torch.tensor([0.80, 0.10, 0.15, 0.50]), torch.tensor([0.08, 0.08, 0.08, 0.15]))
constraint = ph.NonlinearEquality(lambda q: q.square().sum(-1, keepdim=True) - 1)
law = ph.DPPL("oblique")(estimate, constraint)  # every draw is the nearest rotation, uncertain numbers move most
before, after = estimate.sample((400,)), law.sample((400,))


def nose(q: torch.Tensor) -> torch.Tensor:
    """Where the rotation takes the x axis: stretched, unless the quaternion has length 1."""
    w, x, y, z = q.unbind(-1)
    return torch.stack([w * w + x * x - y * y - z * z, 2 * (x * y + w * z), 2 * (x * z - w * y)], -1)


figure, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
for draws, colour, label in ((before, "tab:orange", "estimated"), (after, "tab:blue", "projected")):
    axes[0].scatter(*nose(draws)[:, :2].mT, s=5, color=colour, label=label)
    axes[1].hist(nose(draws).norm(dim=-1), 50, range=(0.3, 2), color=colour, label=label)
angle = torch.linspace(-0.6, 2.4, 100)
axes[0].plot(angle.cos(), angle.sin(), "k:", linewidth=1)
axes[0].set(aspect="equal", xlabel="x", ylabel="y", title="the rotated x axis, from above")
axes[1].set(xlabel="its length", ylabel="draws", title="a rotation keeps it at 1", ylim=(0, 80))
axes[0].legend(frameon=False, fontsize=8)
figure.savefig(sys.argv[1], dpi=80)
