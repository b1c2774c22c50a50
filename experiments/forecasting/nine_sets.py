"""The nine data sets of the rolling table, and the origins at which they are forecast.

Five are the sets of the benchmark. Four are bottom series of public sources, with a total:
``$PROBHARD_DATA/series/<name>.csv``. Origins of the test are the last ones of a set. Recipes are developed on
origins before them, whose windows end before the first test window.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from probhard.errors import ParameterError
from probhard.forecasting.data.datasets import BENCHMARKS, load
from probhard.forecasting.data.frames import from_frame
from probhard.forecasting.data.table import HierarchicalData, require


@dataclass(frozen=True)
class RollingSet:
    """Origins of a data set.

    Args:
        horizon: Steps of a window.
        origins: Number of test origins.
        step: Rows between test origins; the horizon except for sets with few rows.
        development: Number of origins before them.
        refit: Whether every row of the table is fitted at every origin; otherwise before the first one only, and its
            parameters are carried forward.
        file, key: Of a set that is no benchmark: its file and the column of its bottom series.
    """

    horizon: int
    origins: int
    step: int
    development: int
    refit: bool = True
    file: str = ""
    key: str = ""


SETS = {
    "labour": RollingSet(8, 8, 8, 3),
    "tourism": RollingSet(8, 8, 1, 0),  # 36 rows: nothing is left before the test
    "tourism_large": RollingSet(12, 8, 12, 3, False),
    "traffic": RollingSet(1, 8, 1, 8, False),
    "wiki": RollingSet(1, 8, 1, 8, False),
    "swiss_stays": RollingSet(12, 8, 12, 4, True, "swiss_stays.csv", "canton"),
    "nsw_offences": RollingSet(12, 8, 12, 6, True, "nsw_offences.csv", "offence"),
    "aus_births": RollingSet(12, 8, 12, 6, True, "aus_births.csv", "state"),
    "ercot_hourly": RollingSet(24, 20, 24, 8, False, "ercot_hourly.csv.gz", "zone"),
}


def load_set(name: str) -> HierarchicalData:
    """Load one of ``SETS``.

    Raises:
        ParameterError: If its file is missing.
    """
    chosen = SETS[name]
    if name in BENCHMARKS:
        return load(name)
    path = Path(os.environ.get("PROBHARD_DATA", ".")) / "series" / chosen.file
    if not path.is_file():
        raise ParameterError(
            f"There is no file {path}.",
            "Its licence keeps it out of the package.",
            "Set PROBHARD_DATA to the folder of the data sets.",
        )
    frame = require("pandas", "The rolling table").read_csv(path, parse_dates=["ds"])
    return from_frame(frame, [chosen.key], horizon=chosen.horizon, name=name)


def splits(name: str, development: bool = False) -> list[tuple[int, HierarchicalData, HierarchicalData]]:
    """Return the origins of a set, the earliest first.

    Args:
        name: A name in ``SETS``.
        development: The origins before those of the test.

    Returns:
        Number of the origin, the rows known there, and the rows to forecast. Origin 0 is the last of the test.
    """
    chosen, data = SETS[name], load_set(name)
    if not development:
        numbers = range(chosen.origins - 1, -1, -1)
        return [(k, *data.train_test(chosen.horizon, k, chosen.step)) for k in numbers]
    before = data.train_test(chosen.horizon, chosen.origins - 1, chosen.step)[0]
    numbers = range(chosen.development - 1, -1, -1)
    return [(chosen.origins + k, *before.train_test(chosen.horizon, k)) for k in numbers]
