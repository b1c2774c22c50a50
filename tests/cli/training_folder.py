"""Small samples of fields, settings to train on them, and a folder that ``train`` and ``predict`` run in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from scipy.integrate import trapezoid

from probhard.cli import main

CONFIG: dict[str, Any] = {
    "constraints": [{"conservation": {"mass": "amount"}}, "nonnegative"],
    "per": "time",
    "epochs": 3,
    "batch_size": 4,
    "lr": 0.01,
    "width": 4,
    "layers": 2,
    "modes": 3,
    "split": [0.5, 0.25, 0.25],
}
COMMON = ("time", "x")


def waves(count: int = 16, points: int = 8, times: int = 3) -> dict[str, Any]:
    """Squared waves that decay, with their exact trapezoid mass."""
    random, x, time = np.random.default_rng(0), np.linspace(0, 2, points), np.linspace(0, 1, times)
    rate = random.uniform(0.5, 2, size=(count, 1, 1))
    solutions = np.exp(-rate * time[:, None]) * np.square(np.sin(x + rate)) + 0.1
    return {
        "parameters": rate[:, 0, 0],
        "solutions": solutions,
        "amount": trapezoid(solutions, x),
        "time": time,
        "x": x,
    }


def some(arrays: dict[str, Any], numbers: np.ndarray, *left_out: str) -> dict[str, Any]:
    """Some of the samples."""
    kept = {name: array for name, array in arrays.items() if name not in left_out}
    return {name: array if name in COMMON else array[numbers] for name, array in kept.items()}


class Folder:
    """Runs the two commands in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def train(self, arrays: dict[str, Any], config: Any = CONFIG, run: str = "run") -> int:
        np.savez(self.path / "data.npz", **arrays)
        (self.path / "c.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        return self.begin("data.npz", run)

    def begin(self, data: str, run: str = "run") -> int:
        options = ["--config", str(self.path / "c.yaml"), "--output", str(self.path / run)]
        return main(["train", str(self.path / data), *options])

    def predict(
        self, arrays: dict[str, Any], *options: str, run: str = "run"
    ) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
        source, output = self.path / "new.npz", self.path / "out.npz"
        np.savez(source, **arrays)
        status = main(["predict", str(self.path / run), str(source), "--output", str(output), *options])
        if status == 2:
            return status, {}, {}
        with np.load(output) as arrays:
            return status, dict(arrays), json.loads(output.with_suffix(".json").read_text())

    def metrics(self, run: str = "run") -> dict[str, Any]:
        return json.loads((self.path / run / "metrics.json").read_text())

    def weights(self, run: str = "run") -> dict[str, torch.Tensor]:
        return torch.load(self.path / run / "model.pt", weights_only=True)["state"]
