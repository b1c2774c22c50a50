"""A trained DeepVAR as a GluonTS predictor that draws sample paths and is saved as plain files.

    deepvar.json (architecture, method, constraint) + constraint.npz + weights.pt (tensors only)

Reading these files never runs code.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gluonts.model.forecast import SampleForecast
from gluonts.model.predictor import Predictor
from gluonts.torch.model.predictor import PyTorchPredictor
from gluonts.transform import Identity

from probhard.constraints.base import Constraint
from probhard.errors import ParameterError, ShapeError
from probhard.forecasting.models.network import DeepVAR
from probhard.forecasting.models.storage import (
    constraint_from_record,
    constraint_record,
    read_arrays,
    read_record,
    read_weights,
)
from probhard.forecasting.models.training import DeepVARModule
from probhard.forecasting.models.windows import Series, Window
from probhard.method import Method, as_method

FORMAT, FORMAT_VERSION = "probhard-deepvar", 1


class DeepVARPredictor(PyTorchPredictor):
    """Draws sample paths of the horizon; with a projecting method they are feasible at every step.

    Args:
        module: Trained network with its constraint and method.
        num_parallel_samples: Default number of paths per entry.
        seed: Seed of the draws; every call of ``predict`` starts from it.
        device: As in GluonTS.
    """

    def __init__(
        self, module: DeepVARModule, num_parallel_samples: int = 200, seed: int = 0, device: str | torch.device = "auto"
    ) -> None:
        super().__init__(
            input_names=[],
            prediction_net=module,
            batch_size=1,
            prediction_length=module.network.layout.prediction_length,
            input_transform=Identity(),
            device=device,
        )
        self.num_parallel_samples, self.seed = num_parallel_samples, seed

    def predict(self, dataset: Iterable[Mapping[str, Any]], num_samples: int | None = None) -> Iterator[SampleForecast]:
        """Forecast the steps after the last row of each entry.

        Args:
            dataset: GluonTS entries with targets of shape (n, T).
            num_samples: Paths per entry S.

        Returns:
            Forecasts with samples (S, horizon, n) in float64.

        Raises:
            ShapeError: If an entry does not have n series.
        """
        module: DeepVARModule = self.prediction_net.eval()
        layout = module.network.layout
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for entry in dataset:
            series = Series.of(entry, layout, future=layout.prediction_length)
            if series.variables != module.network.variables:
                raise ShapeError(
                    f"An entry has {series.variables} series, the network {module.network.variables}.",
                    "It was trained on another hierarchy.",
                    "Pass entries with the same series, in the same order.",
                )
            window = Window(*(part.to(self.device) for part in series.last(layout)))
            samples = module(window, num_samples or self.num_parallel_samples, generator)
            length = len(series.target) - layout.past
            yield SampleForecast(samples.numpy(force=True), series.start + length, item_id=series.item_id)

    def extended(self, steps: int) -> DeepVARPredictor:
        """Return a predictor of ``steps`` steps with the same network: a rollout can have any length."""
        module: DeepVARModule = self.prediction_net
        network = copy.copy(module.network)  # a shallow copy: the weights are shared
        network.layout = replace(network.layout, prediction_length=steps)
        extended = DeepVARModule(network, module.constraint, module.method)
        return DeepVARPredictor(extended, self.num_parallel_samples, self.seed, self.device)

    def serialize(self, path: str | os.PathLike[str]) -> None:
        """Write the predictor to the folder ``path`` as JSON, arrays and weights, without pickled objects."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        module: DeepVARModule = self.prediction_net
        record, arrays = constraint_record(module.constraint)
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "network": module.network.record(),
            "method": module.method.record(),
            "constraint": record,
            "num_parallel_samples": self.num_parallel_samples,
            "seed": self.seed,
        }
        Predictor.serialize(self, folder)  # writes the file by which GluonTS finds this class
        (folder / "deepvar.json").write_text(json.dumps(content, indent=1))
        np.savez(folder / "constraint.npz", **arrays)
        torch.save(module.state_dict(), folder / "weights.pt")

    @classmethod
    def deserialize(
        cls,
        path: str | os.PathLike[str],
        device: str | torch.device = "auto",
        constraint: Constraint | None = None,
        method: str | Method | None = None,
    ) -> DeepVARPredictor:
        """Read a predictor from a folder; never runs code from its files.

        Args:
            path: Folder written by ``serialize``.
            device: As in GluonTS.
            constraint: Required if the saved one holds a function or a general set.
            method: Required if the saved one holds a metric module.

        Raises:
            ParameterError: If a file is missing or damaged, or a required argument is not passed.
        """
        folder = Path(path)
        content = read_record(folder / "deepvar.json", FORMAT, FORMAT_VERSION, "DeepVARPredictor.serialize")
        if constraint is None:
            arrays = read_arrays(folder / "constraint.npz")
            constraint = constraint_from_record(_stored(content, "constraint"), arrays)
        chosen = Method.from_record(_stored(content, "method")) if method is None else as_method(method)
        module = DeepVARModule(DeepVAR.from_record(content["network"]), constraint, chosen)
        module.load_state_dict(read_weights(folder / "weights.pt"))
        return cls(module, content["num_parallel_samples"], content["seed"], device)


def _stored(content: dict[str, Any], name: str) -> Any:
    if content[name] is None:
        raise ParameterError(
            f"The {name} of this predictor was not saved.",
            "It holds a function, a general set or a module; only plain values are stored.",
            f"Pass {name}=... as it was in training.",
        )
    return content[name]
