"""Named data sets: one embedded, and the five of the hierarchical forecasting benchmark.

The five come from the repository of Rangapuram et al. (ICML 2021) at one commit. They are read from
``$PROBHARD_DATA/hierarchical/<name>/`` if that variable is set, and otherwise downloaded once into a cache. Every file
is verified by its checksum.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probhard.errors import ParameterError, check_choice
from probhard.forecasting.data.table import HierarchicalData, require

SOURCE = (
    "https://raw.githubusercontent.com/rshyamsundar/gluonts-hierarchical-ICML-2021/"
    "a822a9d7c571e20ef2e1d554e6a678c2404ee2b3/experiments/data/"
)
EMBEDDED = Path(__file__).parent / "embedded" / "us-employment.csv"
EMBEDDED_CHECKSUM = "0ad789186e92ad0954c1a2ba3dc9bc8e1749864e06cfab8ea9738cb5046906b0"
EMPLOYMENT: dict[str, dict[str, tuple[str, ...]]] = {  # level: {aggregate: its children}
    "total": {"nonfarm": ("private", "government")},
    "ownership": {"private": ("goods_producing", "private_service_providing")},
    "domain": {
        "goods_producing": ("mining_and_logging", "construction", "manufacturing"),
        "private_service_providing": (
            "trade_transportation_utilities",
            "information",
            "financial_activities",
            "professional_and_business_services",
            "education_and_health_services",
            "leisure_and_hospitality",
            "other_services",
        ),
    },
    "group": {
        "manufacturing": ("durable_goods", "nondurable_goods"),
        "trade_transportation_utilities": (
            "wholesale_trade",
            "retail_trade",
            "transportation_and_warehousing",
            "utilities",
        ),
    },
}


@dataclass(frozen=True)
class Source:
    """Where a benchmark data set comes from, its checksums and calendar, and the sizes of its levels."""

    folder: str
    data: str  # sha256 of data.csv
    summation: str  # sha256 of agg_mat.csv
    horizon: int
    freq: str
    season: int
    levels: tuple[tuple[str, int], ...]  # name and number of series, top first


BENCHMARKS = {
    "labour": Source(
        "labour",
        "f53a66d035cc95d2d5ab16932d12d8b45799705e0a9332ae3fa0f9fdf166e18e",
        "689801cff86adb61fef0578a06757106b712ec8c0991051c8335ac0dba5eba29",
        8,
        "M",
        12,
        (("total", 1), ("state", 8), ("state/sex", 16), ("state/sex/status", 32)),
    ),
    "tourism": Source(
        "tourismsmall",
        "5492570ed99b64df9d530d025f4ced913f54cdc43e489544b8878c6502b23845",
        "c05bffef110d550133a11459fb64b8d4bc390d43409c6e799468de32fdbc77c1",
        8,
        "Q",
        4,
        (("total", 1), ("purpose", 4), ("purpose/state", 28), ("purpose/state/city", 56)),
    ),
    "tourism_large": Source(
        "tourismlarge",
        "2c38bd1625889f4414079296507c54762122b0b4c86c0ecc0fe6f84f6f6ead0e",
        "7f8a911922fb9d19a470b7c89769ec30bba686685f2899d62db413be86ad586f",
        12,
        "M",
        12,
        (
            ("total", 1),
            ("state", 7),
            ("zone", 27),
            ("region", 76),
            ("purpose", 4),
            ("state/purpose", 28),
            ("zone/purpose", 108),
            ("region/purpose", 304),
        ),
    ),
    "traffic": Source(
        "traffic",
        "3af82e94effc62e33b96e9d3a8dc8754c455fc6f18fd56a9c30ee98cffb61023",
        "eeca8c5c7436264e51d0339666f380665395e804b17f43466e51c64b58fdbe9f",
        1,
        "D",
        7,
        (("total", 1), ("half", 2), ("quarter", 4), ("lane", 200)),
    ),
    "wiki": Source(
        "wiki2",
        "157f97d1f9041c99266a5deff3a2f2789e80f8b157fd947cfa7782c4b990c393",
        "41174075d1feb6bb4aec8dd477b926f7c86d0956ab24738011ee11f2e4a1b257",
        1,
        "D",
        7,
        (("total", 1), ("language", 6), ("access", 18), ("agent", 24), ("page", 150)),
    ),
}
ALIASES = {"employment": "us-employment"}
NAMES = ("us-employment", *BENCHMARKS)


def load(name: str = "us-employment") -> HierarchicalData:
    """Load a data set by name.

    Args:
        name: ``"us-employment"``, which is embedded, or a key of ``BENCHMARKS``.

    Returns:
        The history with its hierarchy, usual horizon and season.

    Raises:
        ParameterError: If the name is unknown, or a file is missing, changed or cannot be downloaded.
        MissingExtraError: If pandas, or pooch for a download, is not installed.
    """
    name = ALIASES.get(name, name)
    check_choice("name", name, NAMES)
    return _employment() if name == "us-employment" else _benchmark(name, BENCHMARKS[name])


def _employment() -> HierarchicalData:
    frame = _table(_verified(EMBEDDED, EMBEDDED_CHECKSUM))
    bottoms = [str(column) for column in frame.columns]
    children = {node: parts for level in EMPLOYMENT.values() for node, parts in level.items()}

    def row(node: str) -> np.ndarray:
        if node in children:
            return np.sum([row(child) for child in children[node]], axis=0)
        return np.eye(len(bottoms))[bottoms.index(node)]

    tags = {level: list(nodes) for level, nodes in EMPLOYMENT.items()} | {"industry": bottoms}
    names = [node for nodes in tags.values() for node in nodes]
    return HierarchicalData.from_matrix(
        frame.to_numpy(),
        np.stack([row(node) for node in names]),
        frame.index.to_period("M"),
        names,
        tags,
        horizon=12,
        season=12,
        name="us-employment",
    )


def _benchmark(name: str, source: Source) -> HierarchicalData:
    frame = _table(_find(name, source, "data.csv", source.data))
    summation = _table(_find(name, source, "agg_mat.csv", source.summation), dates=False)
    names = [str(column) for column in frame.columns]
    ends = np.cumsum([size for _, size in source.levels])
    tags = {level: names[end - size : end] for (level, size), end in zip(source.levels, ends)}
    return HierarchicalData.from_matrix(
        frame.to_numpy(),
        summation.to_numpy(),
        frame.index.to_period(source.freq),
        names,
        tags,
        horizon=source.horizon,
        season=source.season,
        name=name,
    )


def _table(path: Path, dates: bool = True) -> Any:
    pandas = require("pandas", "load")
    return pandas.read_csv(path, index_col=0, parse_dates=dates, encoding="utf-8", float_precision="round_trip")


def _find(name: str, source: Source, file: str, checksum: str) -> Path:
    """Return the file in ``$PROBHARD_DATA`` or in the cache; download it if it is in neither."""
    if folder := os.environ.get("PROBHARD_DATA"):
        return _verified(Path(folder) / "hierarchical" / name / file, checksum)
    pooch = require("pooch", "Downloading a data set")
    try:
        return Path(
            pooch.retrieve(
                f"{SOURCE}{source.folder}/{file}",
                known_hash=f"sha256:{checksum}",
                fname=file,
                path=pooch.os_cache("probhard") / "hierarchical" / name,
            )
        )
    except (OSError, ValueError) as error:  # no network, or a wrong checksum
        raise ParameterError(
            f"The data set {name!r} could not be downloaded: {error}.",
            "Its licence keeps it out of the package.",
            f"Put {file} into the folder $PROBHARD_DATA/hierarchical/{name}/, or use load('us-employment').",
        ) from error


def _verified(path: Path, checksum: str) -> Path:
    if not path.is_file():
        raise ParameterError(
            f"There is no file {path}.",
            "PROBHARD_DATA names the folder of the data sets.",
            "Put the file there, or unset PROBHARD_DATA to download it.",
        )
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if actual != checksum:
        raise ParameterError(
            f"{path} has the sha256 {actual}, not {checksum}.",
            "Scores would not be comparable with published ones.",
            "Restore the original file, or read your own with from_frame.",
        )
    return path
