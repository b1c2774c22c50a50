"""Draws of a field before and after the projection, the first picture of the README.

Run it from the root of the repository: ``python docs/pictures/make_first_picture.py``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch

import probhard as ph

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BEFORE, AFTER, INK = "#c2571a", "#1f6f8b", "#333333"
TARGET = Path(__file__).with_name("first.png")


def predicted(grid: torch.Tensor) -> ph.LocationScale:
    """A made-up law, as of a network that knows no physics: a smeared front with smooth errors."""
    mean = 0.97 / (1 + torch.exp((grid - 0.52) / 0.055))
    distance = grid[:, None] - grid
    kernel = 0.085**2 * torch.exp(-((distance / 0.09) ** 2) / 2) + 1e-6 * torch.eye(len(grid))
    return ph.LocationScale(mean, ph.Dense(torch.linalg.cholesky(kernel)))


def main() -> None:
    """Draw, project, plot."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    grid = torch.linspace(0, 1, 80)
    mass = torch.tensor(0.5)
    constraint = ph.Conservation.trapezoid(grid, mass) & ph.Box(0.0, 1.0) & ph.Monotone("decreasing")
    before = predicted(grid).sample((200,))
    after = ph.DPPL("orthogonal").project_samples(before, constraint).value
    assert after.min() >= 0
    assert after.max() <= 1
    masses = [torch.trapezoid(draws, grid) for draws in (before, after)]
    assert (masses[1] - mass).abs().max() < 1e-12

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK})
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(10, 3.1), width_ratios=(1, 1, 0.62), layout="constrained"
    )
    for axes, draws, color, title in (
        (left, before, BEFORE, "predicted draws"),
        (middle, after, AFTER, "the same draws, projected"),
    ):
        axes.axhspan(-0.32, 0, color="#000000", alpha=0.05, linewidth=0)
        axes.axhspan(1, 1.32, color="#000000", alpha=0.05, linewidth=0)
        axes.plot(grid, draws[:25].T, color=color, linewidth=1, alpha=0.5)
        axes.set(title=title, xlabel="x", xlim=(0, 1), ylim=(-0.32, 1.32), yticks=(0, 0.5, 1))
    left.set_ylabel("concentration u")
    left.text(0.98, 1.16, "not possible", ha="right", va="center", fontsize=9)
    left.text(0.02, -0.16, "not possible", ha="left", va="center", fontsize=9)
    bins = torch.linspace(0.4, 0.6, 21).tolist()
    right.hist(masses[0], bins=bins, color=BEFORE, alpha=0.6, label="predicted")
    right.axvline(float(mass), color=AFTER, linewidth=2.5, label="projected")
    right.set(title="mass of 200 draws", xlim=(0.38, 0.62), ylim=(0, 38), xlabel="integral of u", yticks=())
    right.spines["left"].set_visible(False)
    right.legend(frameon=False, fontsize=9, loc="upper left", handlelength=1, borderaxespad=0)
    figure.savefig(TARGET, dpi=130)


if __name__ == "__main__":
    main()
