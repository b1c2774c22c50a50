"""Base forecasts of a small hierarchy as frames, and runs of ``probhard reconcile`` on them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from probhard.cli import _frames as frames
from probhard.cli import main

pd = pytest.importorskip("pandas")
RANDOM = np.random.default_rng(5)
NODES = [("", ""), ("NSW", ""), ("VIC", ""), ("NSW", "NA"), ("NSW", "Sydney"), ("VIC", "East"), ("VIC", "West")]
S = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], *np.eye(4)])
ROWS = np.hstack([np.eye(3), -S[:3]])
STAMPS = ["2025-01-01", "2025-02-01", "2025-03-01"]
MEAN, SPREAD = RANDOM.uniform(0, 4, (3, 7)), RANDOM.uniform(0.5, 2, (3, 7))  # (H, n)
Run = Any  # runs the command on a frame: status, output frame, certificate


def runner(folder: Path) -> Run:
    """The command, with its files in a folder."""

    def command(frame: Any, *options: str, suffix: str = ".csv") -> tuple[int, Any, dict[str, Any]]:
        source, output = folder / f"in{suffix}", folder / f"out{suffix}"
        frames.write(source, frame)
        status = main(["reconcile", str(source), "--output", str(output), *options])
        if status == 2:
            return status, None, {}
        assert not list(folder.glob("*.partial"))
        certificate = json.loads(output.with_suffix(".json").read_text())
        assert certificate["input_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
        return status, frames.read(output, ["unique_id", "ds", "state", "region"]), certificate

    return command


def long(columns: dict[str, np.ndarray], nodes: slice = slice(None), shuffle: bool = True) -> Any:
    """Columns (H, n) as a frame with the keys state and region."""
    chosen = NODES[nodes]
    rows = [(*node, stamp) for stamp in STAMPS for node in chosen]
    frame = pd.DataFrame(rows, columns=["state", "region", "ds"])
    frame = frame.assign(**{name: values[:, nodes].ravel() for name, values in columns.items()})
    return frame.sample(frac=1, random_state=2) if shuffle else frame


def normal(name: str = "ETS", level: float = 80, spread: np.ndarray = SPREAD) -> dict[str, np.ndarray]:
    half = scipy.stats.norm.ppf(0.5 + level / 200) * spread
    return {name: MEAN, f"{name}-lo-{level:g}": MEAN - half, f"{name}-hi-{level:g}": MEAN + half}


def cube(frame: Any, column: str) -> np.ndarray:
    """A column as (draws, H, n)."""
    node = {node: i for i, node in enumerate(NODES)}
    order = frame.assign(
        place=[node[pair] for pair in zip(frame["state"], frame["region"])],
        draw=frame.get("draw", frame.get("sample", 0)),
    ).sort_values(["draw", "ds", "place"])
    return order[column].to_numpy().reshape(-1, len(STAMPS), len(NODES))
