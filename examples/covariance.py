"""A correlation matrix, estimated pair by pair: without a constraint it may have negative eigenvalues."""

import sys

import matplotlib.pyplot as plt
import torch

import probhard as ph

torch.manual_seed(2)
torch.set_default_dtype(torch.float64)
size, days = 6, 40

# Six series that share a factor. Each pair is seen on days of its own, so the estimates do not fit together.
loadings = torch.linspace(0.5, 0.95, size)
truth = torch.outer(loadings, loadings).fill_diagonal_(1.0)
series = torch.linalg.cholesky(truth) @ torch.randn(200, size, days)  # 200 histories
seen = torch.rand(200, size, days) < 0.4
weight = seen.to(series.dtype)
both = weight @ weight.mT
sums = (series * weight) @ (series * weight).mT / both.clamp(min=1)
scale = sums.diagonal(dim1=-2, dim2=-1).sqrt()
raw = sums / scale.unsqueeze(-1) / scale.unsqueeze(-2)

constraint = ph.Correlation(size)
after = ph.DPPL("orthogonal").project(ph.vectorise(raw), constraint).value
nearest = ph.matrix_of(after)

figure, axes = plt.subplots(1, 3, figsize=(8, 2.6), layout="constrained", width_ratios=[1, 1, 1.5])
worst = int(torch.linalg.eigvalsh(raw)[:, 0].argmin())
for axis, matrix, title in ((axes[0], raw[worst], "pair by pair"), (axes[1], nearest[worst], "projected")):
    axis.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r")
    axis.set(xticks=[], yticks=[], title=title)
for matrices, colour, label in ((raw, "tab:orange", "pair by pair"), (nearest, "tab:blue", "projected")):
    axes[2].hist(torch.linalg.eigvalsh(matrices)[:, 0], 40, range=(-1.2, 0.2), color=colour, label=label)
axes[2].axvline(0, color="k", linestyle=":")
axes[2].set(xlabel="smallest eigenvalue", ylabel="estimates", title="200 estimates")
axes[2].legend(frameon=False, fontsize=8)
figure.savefig(sys.argv[1], dpi=80)
