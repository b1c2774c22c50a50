"""Kept numbers of a pool: what was learned on past windows, in a JSON file named by a hash of all that it depends on.

Weights, scales and metrics follow from the members' forecasts, the history, its hierarchy and the recipe. Bounds,
levels and draws come later, so a second run with others learns nothing again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from probhard._util.atomic import write_text
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import MemberForecast
from probhard.forecasting.members.tuning import PoolRecipe, TunedPool, tune_pool

VERSION = 1  # of what tuning does


def kept_tuning(
    made: Sequence[MemberForecast],
    data: HierarchicalData,
    horizon: int,
    origins: Sequence[int],
    recipe: PoolRecipe,
    trial: Collection[str],
    folder: Path,
) -> TunedPool:
    """Read what ``tune_pool`` learned of the same forecasts, or learn and keep it."""
    path = folder / f"tuned-{_fingerprint(made, data, horizon, origins, recipe, trial)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # absent or damaged: learned again
        return TunedPool.of(json.loads(path.read_text("utf-8")))
    tuned = tune_pool(made, data, horizon, origins, recipe, trial)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(tuned.record()))
    return tuned


def _fingerprint(
    made: Sequence[MemberForecast],
    data: HierarchicalData,
    horizon: int,
    origins: Sequence[int],
    recipe: PoolRecipe,
    trial: Collection[str],
) -> str:
    """Hash everything that tuning depends on, as hexadecimal text."""
    values, arrays = data.hierarchy.stored()
    about = [VERSION, values, horizon, list(origins), asdict(recipe), sorted(trial), data.freq, data.season]
    digest = hashlib.sha256(json.dumps(about, default=str).encode())
    _add(digest, data.observed, *(arrays[name] for name in sorted(arrays)))
    for one in made:
        digest.update(one.name.encode())
        for base in one.bases:
            _add(digest, base.mean, base.stddev, base.fitted, base.data.observed)
        _add(digest, *(one.draws or ()))
    return digest.hexdigest()[:32]


def _add(digest: Any, *arrays: np.ndarray) -> None:
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
