"""Origins that all tables forecast from, and networks that are trained once, before the first of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.forecasting.rows import SAMPLES, SETTINGS
from probhard.forecasting.data.datasets import load
from probhard.forecasting.data.table import HierarchicalData
from probhard.method import Method

if TYPE_CHECKING:
    from probhard.forecasting.models.training import DeepVARModule


@dataclass(frozen=True)
class Origin:
    """A point in time that is forecast from: the rows before it, and the rows to forecast."""

    number: int
    known: HierarchicalData
    future: HierarchicalData


def origins(dataset: str, window: str, count: int | None = None) -> list[Origin]:
    """Return the origins of a window, the earliest first.

    Args:
        dataset: A name in ``DATASETS``.
        window: ``paper`` or ``rolling``.
        count: Of the rolling window; None for the setting of the data set.
    """
    data, setting = load(dataset), SETTINGS[dataset]
    numbers = [0] if window == "paper" else range((count or setting.origins) - 1, -1, -1)
    return [Origin(number, *data.train_test(origin=number, step=setting.step)) for number in numbers]


def trained(
    dataset: str, first: Origin, method: Method, seed: int, quick: bool, progress: bool, **options: Any
) -> DeepVARModule:
    """Train a DeepVAR network on the rows before an origin, with the settings of the data set.

    Args:
        dataset: A name in ``DATASETS``.
        first: The origin.
        method: How the constraint is applied.
        seed: Of weights and windows.
        quick: Train one epoch of two batches.
        progress: Show a bar.
        **options: Of the estimator, such as ``scaling`` and ``rank``; ``data`` replaces the entries to train on.
    """
    from probhard.forecasting.models.estimator import DeepVAREstimator
    from probhard.training import quiet_training

    setting = SETTINGS[dataset]
    entries = options.pop("data", None) or first.known.to_gluonts()
    own = {"freq": first.known.freq, "prediction_length": len(first.future.index)}
    own |= {"hierarchy": first.known.hierarchy, "context_length": setting.context}
    estimator = DeepVAREstimator(
        method=method,
        batch_size=setting.batch_size,
        lr=setting.lr,
        num_batches_per_epoch=2 if quick else 50,
        trainer_kwargs={
            "max_epochs": 1 if quick else setting.epochs,
            "enable_progress_bar": progress,
            "accelerator": "cpu",
        },
        seed=seed,
        **{**own, **options},
    )
    with quiet_training():
        module: DeepVARModule = estimator.train(entries).prediction_net
    return module


def rolled(module: DeepVARModule, method: Method, place: Origin, seed: int) -> np.ndarray:
    """Draw sample paths (S, H, n) at an origin by a network that was trained before it."""
    from probhard.forecasting.models.predictor import DeepVARPredictor
    from probhard.forecasting.models.training import DeepVARModule

    forecaster = DeepVARModule(module.network, place.known.hierarchy, method)
    (forecast,) = DeepVARPredictor(forecaster, SAMPLES, seed).predict(place.known.to_gluonts())
    return np.asarray(forecast.samples)
