"""A small table of sales, and runs of ``probhard forecast`` on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from probhard.cli import main

TINY = "{num_batches_per_epoch: 2, batch_size: 4, hidden_size: 4, context_length: 6, num_samples: 40, calibrate: false}"
KEYS = ["--keys", "state,region", "--horizon", "6", "--epochs", "1", "--windows", "1"]
Run = Callable[..., tuple[int, Path]]


def table(rows: int = 48, low: float = 20.0) -> pd.DataFrame:
    random = np.random.default_rng(5)
    stamps = pd.date_range("2018-01-01", periods=rows, freq="MS").strftime("%Y-%m-%d")
    parts = []
    for i, (state, region) in enumerate([("A", "x"), ("A", "y"), ("B", "x"), ("B", "z")]):
        season = np.sin(2 * np.pi * np.arange(rows) / 12 + i)
        y = ((low + 30.0 * i) * (1.2 + season) + random.uniform(0, 5, rows)).round(3)
        parts.append(pd.DataFrame({"state": state, "region": region, "date": stamps, "sales": y}))
    return pd.concat(parts, ignore_index=True)


def runner(folder: Path) -> Run:
    """The command, run in the current folder on a table with tiny settings: status and the folder of its files."""

    def command(frame: pd.DataFrame, *options: str, config: str = TINY) -> tuple[int, Path]:
        frame.to_csv("shop.csv", index=False)
        Path("run.yaml").write_text(config)
        return main(["forecast", "shop.csv", "--config", "run.yaml", *options]), folder / "shop-forecast"

    return command
