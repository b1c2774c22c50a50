"""A training step of DeepVAR on each of the five benchmark hierarchies, with the paper's batches, float32.

Overheads: projected laws, orthogonal and oblique, against no constraint. Peer: HierE2E, which projects 100 draws per
step and scores their quantiles; here its training step in this library, because its own code needs MXNet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
from experiments.forecasting.rows import DATASETS, SETTINGS

from benchmarks.timing import Comparison, Overhead, measured
from probhard.forecasting.data.datasets import load
from probhard.forecasting.models.estimator import DeepVAREstimator
from probhard.forecasting.models.training import DeepVARModule
from probhard.forecasting.models.windows import RandomWindows, Window, Windows
from probhard.method import METHODS

CLIP = 10.0  # of the gradient, as in training
GOALS = {"or": 1.15, "ob": 2.0}


def run(quick: bool = False) -> Iterator[Comparison | Overhead]:
    """Compare whole steps: forward, score, backward, clipping, Adam."""
    for dataset in DATASETS[:2] if quick else DATASETS:
        module, window = _setup(dataset)
        names = ("base", "probhard-or", "probhard-ob", "hier-e2e")
        alone, *projected, drawn = (_step(module, name, window) for name in names)
        base, *constrained = measured(alone, *projected)  # without the large one, which empties the caches
        for (short, goal), one in zip(GOALS.items(), constrained):
            yield Overhead(f"training step of DeepVAR, {dataset}, {short}", base.seconds, one.seconds, goal)
        case = f"training step of DeepVAR, {dataset}, or"
        theirs, ours = measured(drawn, projected[0])
        yield Comparison.of(case, "HierE2E, 100 draws", theirs, ours, goal=3)


def _setup(dataset: str) -> tuple[DeepVARModule, Window]:
    """An untrained network and a batch of windows."""
    data, setting = load(dataset), SETTINGS[dataset]
    known, future = data.train_test()
    estimator = DeepVAREstimator(
        known.freq,
        len(future.index),
        known.hierarchy,
        context_length=setting.context,
        batch_size=setting.batch_size,
        lr=setting.lr,
    )
    windows = Windows(known.to_gluonts(), estimator.layout)
    estimator._windows = windows
    torch.manual_seed(0)
    return estimator.create_lightning_module(), next(iter(RandomWindows(windows, setting.batch_size, 1, seed=0)))


def _step(module: DeepVARModule, name: str, window: Window) -> Callable[[], None]:
    network = deepcopy(module.network)
    trained = DeepVARModule(network, module.constraint, METHODS[name], lr=1e-5)
    optimiser = trained.configure_optimizers()

    def step() -> None:
        optimiser.zero_grad()
        trained.loss(window).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimiser.step()

    return step
