"""Load: many reconciliations at once in one process pool, and training steps for a long time.

Every concurrent call must give the figures of a call on its own. The memory of a training process must not grow: it is
read after a tenth of the steps, when caches are filled, and at the end.

    python -m experiments.reliability.load --seconds 1800 --output results
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import probhard as ph
from experiments.reliability.remains import figures
from experiments.reliability.verdict import kept
from probhard.cli import main as command

CALLS, WORKERS, NODES, STEPS = 100, 20, 500, 6
GROWTH = 20.0  # megabytes of growth over a long run that count as noise
CELLS, BATCH, READ = 64, 16, 50  # size of a training step, and steps between two readings of the memory


def write_forecasts(folder: Path, nodes: int = NODES) -> None:
    """Write forecasts of a total, 9 groups and the other nodes as bottoms, and their summing matrix."""
    import pandas as pd

    random, groups = np.random.default_rng(0), 9
    bottoms = nodes - groups - 1
    member = np.arange(bottoms) % groups
    summing = np.vstack([np.ones((1, bottoms)), np.arange(groups)[:, None] == member, np.eye(bottoms)])
    names = ["Total", *(f"g{i}" for i in range(groups)), *(f"b{i}" for i in range(bottoms))]
    frame = pd.DataFrame(summing.astype(int), columns=names[1 + groups :])
    frame.insert(0, "unique_id", names)
    frame.to_csv(folder / "S.csv", index=False)
    mean = summing.sum(1) * random.uniform(8, 12, (STEPS, nodes))
    half = 0.2 * mean
    columns = {"ETS": mean, "ETS-lo-80": mean - half, "ETS-hi-80": mean + half}
    rows = {"unique_id": names * STEPS, "ds": np.repeat([f"2025-{i + 1:02d}-01" for i in range(STEPS)], nodes)}
    values = {name: array.ravel() for name, array in columns.items()}
    pd.DataFrame({**rows, **values}).to_csv(folder / "forecasts.csv", index=False)


def reconcile(task: tuple[str, int]) -> tuple[int, float]:
    """Reconcile into a folder of its own; exit status and CPU seconds."""
    torch.set_num_threads(1)
    folder, number = Path(task[0]), task[1]
    output = folder / str(number)
    output.mkdir()
    started = time.process_time()
    paths = [str(folder / "forecasts.csv"), "--summing", str(folder / "S.csv"), "--output", str(output / "out.csv")]
    status = command(["reconcile", *paths])
    return status, time.process_time() - started


def pool(calls: int = CALLS, workers: int = WORKERS, nodes: int = NODES) -> dict[str, Any]:
    """Make many calls at once in a pool of processes, and compare each with a call on its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_forecasts(folder, nodes)
        alone = reconcile((name, calls))[1]  # a call before, which also loads everything
        expected, started = figures(folder / str(calls)), time.perf_counter()
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as executor:
            results = list(executor.map(reconcile, [(name, i) for i in range(calls)]))
        seconds = time.perf_counter() - started
        different = sum(figures(folder / str(i)) != expected for i in range(calls))
    return {
        "calls": calls,
        "workers": workers,
        "nodes": nodes,
        "failed": sum(status != 0 for status, _ in results),
        "different": different,
        "alone_seconds": alone,
        "cpu_seconds": float(np.median([each for _, each in results])),
        "seconds": seconds,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


class Backbone(nn.Module):
    """Means and standard deviations of a field, from three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, 64), nn.GELU(), nn.Linear(64, 2 * CELLS))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and standard deviations, (batch, CELLS)."""
        mean, spread = self.network(inputs).chunk(2, -1)
        return mean, nn.functional.softplus(spread) + 1e-3


def training(seconds: float) -> dict[str, Any]:
    """Take training steps with new constraints each time, and watch the memory of the process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = torch.full((CELLS,), 1 / CELLS)
    constraints = (
        lambda mass: ph.Conservation(weights, mass),
        lambda mass: ph.Conservation(weights, mass) & ph.NonNegative(),
    )
    backbone = Backbone()
    models = [ph.ConstrainedModel(backbone, constraint, "probhard-ob") for constraint in constraints]
    optimizer = torch.optim.Adam(backbone.parameters(), 1e-3)
    started, count, readings = time.perf_counter(), 0, list[tuple[int, float]]()
    while time.perf_counter() - started < seconds or len(readings) < 20:
        inputs = torch.rand(BATCH, 3)
        target = inputs.sum(-1, keepdim=True) * torch.rand(BATCH, CELLS)
        loss = models[count % 2].loss({"inputs": inputs, "target": target, "context": target.mean(-1)})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count += 1
        if count % READ == 0:
            readings.append((count, _resident()))
    first, last = readings[len(readings) // 10][1], readings[-1][1]
    late = np.array(readings[len(readings) // 10 :])
    slope = float(np.polyfit(late[:, 0], late[:, 1], 1)[0])
    return {
        "seconds": time.perf_counter() - started,
        "steps": count,
        "first_megabytes": first,
        "last_megabytes": last,
        "growth_megabytes": last - first,
        "kilobytes_per_step": 1024 * slope,
    }


def _resident() -> float:
    """Megabytes of memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> int:
    """Run both from the command line; the exit status is 1 if a call failed or differed, or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--output", type=Path, default=Path("results"))
    given = parser.parse_args()
    records = kept(given.output)
    together = pool(given.calls) if given.calls else {"failed": 0, "different": 0}
    if given.calls:
        records.append({"kind": "pool", "case": f"{given.calls} calls", **together})
    steps = training(given.seconds) if given.seconds else {"growth_megabytes": 0.0}
    if given.seconds:
        records.append({"kind": "training", "case": "steps", **steps})
    print(together, steps, sep="\n")
    return int(bool(together["failed"] or together["different"] or steps["growth_megabytes"] > GROWTH))


if __name__ == "__main__":
    raise SystemExit(main())
