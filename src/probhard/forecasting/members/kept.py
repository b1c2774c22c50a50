"""Kept fits: forecasts of members in npz files, named by a hash of everything that they depend on.

A second run with other bounds, levels or draws reads them and takes seconds. Files hold arrays and JSON only.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from probhard._util.atomic import replacing
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import Member, MemberForecast
from probhard.forecasting.models.classical import BaseForecast

VERSION = 2  # of the files and of what members do
LARGE = 20_000_000  # numbers above which files are not compressed: that takes longer than a fit


class Networks(Protocol):
    """A member whose state is a trained network."""

    def write_state(self, folder: Path, state: Any) -> None:
        """Write a state to a folder of plain files."""

    def read_state(self, folder: Path) -> Any:
        """Read what ``write_state`` wrote."""


def fingerprint(member: Member, data: HierarchicalData, horizon: int, origins: Sequence[int]) -> str:
    """Hash what a member's forecasts depend on, as hexadecimal text."""
    digest = hashlib.sha256(np.ascontiguousarray(data.values).tobytes())
    summation = data.hierarchy.summation
    for array in (summation.indptr, summation.indices, summation.data):
        digest.update(np.ascontiguousarray(array).tobytes())
    known = data.known_ahead(horizon)
    for features in (known.features, known.future_features):
        digest.update(np.ascontiguousarray(features).tobytes())
    calendar = [str(data.index[0]), data.freq, data.season, list(data.values.shape)]
    about = [VERSION, member.name, member.settings, horizon, list(origins), calendar]
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def kept_forecast(
    member: Member, data: HierarchicalData, horizon: int, origins: Sequence[int], folder: Path | None, jobs: int = 1
) -> MemberForecast:
    """Read a member's forecasts, or make and keep them.

    Args:
        member: The member.
        data: The history.
        horizon: Number of steps.
        origins: Past origins.
        folder: Where fits are kept; None keeps none.
        jobs: Number of processes.
    """
    if folder is None or not member.kept:
        return member.forecast(data, horizon, origins, jobs)
    path = folder / f"{member.name}-{fingerprint(member, data, horizon, origins)}.npz"
    with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):  # absent or damaged: made again
        made = read_forecast(path, member.name, data, origins)
        return replace(made, state=member.read_state(path.with_suffix(""))) if _networks(member) else made
    made = member.forecast(data, horizon, origins, jobs)
    if made.complete:
        folder.mkdir(parents=True, exist_ok=True)
        if _networks(member):
            member.write_state(path.with_suffix(""), made.state)
        write_forecast(path, made)  # last: it marks a fit that is complete
    return made


def _networks(member: Any) -> TypeGuard[Networks]:
    """Whether the state of a member has files of its own."""
    return hasattr(member, "write_state")


def write_forecast(path: Path, made: MemberForecast) -> None:
    """Write a member's forecasts to an npz file."""
    about = json.dumps(
        {"notes": made.notes, "state": made.state if _plain(made.state) else None, "seconds": made.seconds}
    )
    arrays: dict[str, Any] = {"about": np.frombuffer(about.encode(), dtype=np.uint8)}
    for k, base in enumerate(made.bases):
        arrays |= {f"mean{k}": base.mean, f"stddev{k}": base.stddev}
        longest = next(j for j in reversed(range(len(made.bases))) if _starts(base.fitted, made.bases[j].fitted))
        first = _first_known(base.fitted)
        arrays[f"rows{k}"] = np.array([longest, first, len(base.fitted)])
        if longest == k:
            arrays[f"fitted{k}"] = base.fitted[first:]
    for k, draws in enumerate(made.draws or []):
        arrays[f"draws{k}"] = draws
    large = sum(array.size for array in arrays.values()) > LARGE
    with replacing(path) as partial, partial.open("wb") as file:
        (np.savez if large else np.savez_compressed)(file, **arrays)


def read_forecast(path: Path, name: str, data: HierarchicalData, origins: Sequence[int]) -> MemberForecast:
    """Read what ``write_forecast`` wrote, for the history and the origins that it was made with."""
    ends = [*origins, len(data.index)]
    with np.load(path, allow_pickle=False) as kept:
        about = json.loads(kept["about"].tobytes())
        fitted: dict[int, np.ndarray] = {}
        bases = []
        for k, end in enumerate(ends):
            longest, _, rows = kept[f"rows{k}"].tolist() if f"rows{k}" in kept else (k, 0, end)
            if longest not in fitted:
                known = kept[f"fitted{longest}"]
                before = np.full((len(data.index[: ends[longest]]) - len(known), known.shape[1]), np.nan)
                fitted[longest] = np.concatenate([before, known]) if len(before) else known
            inside = fitted[longest][:rows]
            bases.append(BaseForecast(data.window(0, end), kept[f"mean{k}"], kept[f"stddev{k}"], inside))
        draws = [kept[f"draws{k}"] for k in range(len(ends))] if "draws0" in kept else None
    return replace(MemberForecast(name, bases, draws, about["notes"], about["state"]), seconds=about["seconds"])


def _starts(part: np.ndarray, whole: np.ndarray) -> bool:
    """Whether an array is the first rows of another one, in the same memory."""
    same = part.__array_interface__["data"][0] == whole.__array_interface__["data"][0]
    return part is whole or (same and part.strides == whole.strides and len(part) <= len(whole))


def _first_known(fitted: np.ndarray) -> int:
    """Number of first rows that hold nothing."""
    return next((row for row, values in enumerate(fitted) if not np.isnan(values).all()), len(fitted))


def _plain(state: Any) -> bool:
    return state is None or isinstance(state, (list, dict))
