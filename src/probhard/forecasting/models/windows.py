"""Windows of multivariate series as tensors in memory.

    rows of a window:   lags (longest lag) | context | horizon

A missing value is NaN, and so is the padding in front of a short series; there is no other mask.
A batch is one gather from the stacked series; what is random about it comes from a generator seeded per epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from probhard.errors import ParameterError, ShapeError
from probhard.forecasting.data.seasons import cycle_features, period_frequency, stamps


class Window(NamedTuple):
    """A batch of windows: targets in data units, NaN where unknown, and what is known of every step to predict."""

    target: Tensor  # (B, lags + context + horizon, n)
    features: Tensor  # (B, context + horizon, F)


@dataclass(frozen=True)
class Layout:
    """What is read from a data set, and how windows are cut from it."""

    freq: str
    prediction_length: int
    context_length: int
    lags_seq: tuple[int, ...]
    time_features: tuple[str, ...] = ()
    num_feat_dynamic_real: int = 0

    @property
    def longest_lag(self) -> int:
        """Rows in front of the context that only lags look at."""
        return max(self.lags_seq)

    @property
    def past(self) -> int:
        """Rows of a window before its horizon."""
        return self.longest_lag + self.context_length

    @property
    def num_features(self) -> int:
        """Columns of ``Window.features``."""
        return 2 * len(self.time_features) + self.num_feat_dynamic_real


@dataclass(frozen=True)
class Series:
    """One entry of a data set: its targets after ``past`` rows of padding, and its features likewise."""

    target: Tensor  # (past + T, n)
    features: Tensor  # (past + T + future, F)
    start: pd.Period
    item_id: str | None

    @classmethod
    def of(cls, entry: Mapping[str, Any], layout: Layout, future: int = 0) -> Series:
        """Read a GluonTS entry: ``target`` (n, T), ``start``, and features over T + future steps if there are any."""
        absent = [name for name in ("start", "target") if name not in entry]
        if absent:
            raise ParameterError(
                f"An entry of the data set has no {absent[0]!r}; it has {sorted(entry)}.",
                "An entry is a table of all series, (n, T), and its first stamp.",
                "Pass entries as GluonTS has them, such as HierarchicalData.to_gluonts() makes.",
            )
        target = np.array(entry["target"], dtype=np.float64, ndmin=2)  # (n, T)
        if np.ndim(entry["target"]) != 2:
            raise ShapeError(
                f"The target has shape {np.shape(entry['target'])}.",
                "All series of a hierarchy are one target, (n, T).",
                "Group univariate entries with gluonts' MultivariateGrouper, or use HierarchicalTimeSeries.",
            )
        if np.isinf(target).any():
            raise ParameterError(
                f"The target has {int(np.isinf(target).sum())} infinite values.",
                "They would become the scale of their series.",
                "Mark missing values as NaN.",
            )
        if "observed_values" in entry:
            observed = np.asarray(entry["observed_values"], dtype=bool)
            if observed.shape != target.shape:
                raise ShapeError(
                    f"observed_values have shape {observed.shape}, the target {target.shape}.",
                    "Each value is observed or not.",
                    "Pass (n, T) for both.",
                )
            target = np.where(observed, target, np.nan)
        start = _period(entry["start"], layout.freq)
        length = layout.past + target.shape[1] + future
        cycles = cycle_features(layout.time_features, stamps(start, -layout.past, length))
        dynamic = _dynamic(entry, layout, target.shape[1] + future)
        padded = np.pad(target.T, ((layout.past, 0), (0, 0)), constant_values=np.nan)
        return cls(
            torch.tensor(padded, dtype=torch.float32),
            torch.tensor(np.concatenate([cycles, dynamic], -1), dtype=torch.float32),
            start,
            entry.get("item_id"),
        )

    @property
    def variables(self) -> int:
        """Number of series n."""
        return self.target.shape[1]

    def last(self, layout: Layout) -> Window:
        """The window whose horizon follows the last row, a batch of one; its targets there are NaN."""
        horizon = self.target.new_full((layout.prediction_length, self.variables), torch.nan)
        steps = layout.context_length + layout.prediction_length
        return Window(torch.cat([self.target[-layout.past :], horizon])[None], self.features[None, -steps:])


class Windows:
    """All windows of a data set that hold a whole horizon."""

    def __init__(self, dataset: Iterable[Mapping[str, Any]], layout: Layout) -> None:
        entries = [Series.of(entry, layout) for entry in dataset]
        sizes = sorted({entry.variables for entry in entries})
        if len(sizes) != 1:
            raise ShapeError(
                f"The entries of the data set have {sizes} series." if entries else "The data set has no entry.",
                "One network predicts all series of an entry.",
                "Pass entries of one hierarchy.",
            )
        self.layout, self.variables = layout, sizes[0]
        self.target = torch.cat([entry.target for entry in entries])  # (total, n)
        self.features = torch.cat([entry.features for entry in entries])  # (total, F)
        offset, origins, last = 0, [], []
        for entry in entries:
            latest = len(entry.target) - layout.past - layout.prediction_length  # rows before the last horizon
            if latest > 0:
                # a series shorter than a window gives padded ones, with at least half of what there is as history
                earliest = min(layout.past, (latest + 1) // 2)
                origins.append(offset + torch.arange(earliest, latest + 1))
                last.append(offset + latest)
            offset += len(entry.target)
        if not origins:
            longest = max(len(entry.target) - layout.past for entry in entries)
            raise ParameterError(
                f"The longest entry has {longest} rows and the horizon {layout.prediction_length}.",
                "A training window needs a whole horizon and at least one row before it.",
                "Pass longer series or a smaller prediction_length.",
            )
        self.origins, self.latest = torch.cat(origins), torch.tensor(last)
        if bool(torch.isnan(self.target).all()):
            raise ParameterError("All targets are NaN.", "There is nothing to learn from.", "Check the data set.")

    def typical(self) -> Tensor:
        """Mean absolute value of each series where it is observed, (n,); the smallest positive one for zeros."""
        mean = self.target.double().abs().nanmean(0).nan_to_num(0.0)
        positive = mean[mean > 0]
        return torch.where(mean > 0, mean, positive.min() if len(positive) else 1.0).float()

    def at(self, origins: Tensor) -> Window:
        """The windows that begin at these rows."""
        layout = self.layout
        rows = origins[:, None] + torch.arange(layout.past + layout.prediction_length)  # (B, rows)
        return Window(self.target[rows], self.features[rows[:, layout.longest_lag :]])


class RandomWindows:
    """An epoch of random batches; every epoch has a seed of its own."""

    def __init__(self, windows: Windows, batch_size: int, batches: int, seed: int) -> None:
        self.windows, self.batch_size, self.batches = windows, batch_size, batches
        self.seed, self.epoch = seed, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        self.epoch += 1
        count = len(self.windows.origins)
        for _ in range(self.batches):
            chosen = torch.randint(count, (self.batch_size,), generator=generator)
            yield self.windows.at(self.windows.origins[chosen])


def last_windows(windows: Windows, batch_size: int) -> list[Window]:
    """Batches of the last whole window of every entry."""
    return [windows.at(origins) for origins in windows.latest.split(batch_size)]


def _period(start: Any, freq: str) -> pd.Period:
    """The first stamp of an entry, checked against the frequency."""
    if not isinstance(start, pd.Period):
        return pd.Period(start, freq=freq)
    if period_frequency(start.freqstr) != freq:
        raise ParameterError(
            f"An entry starts at {start} with the frequency {start.freqstr!r}; the estimator has {freq!r}.",
            "Lags and time features belong to one frequency.",
            f"Pass freq={start.freqstr!r}, or resample the data.",
        )
    return start


def _dynamic(entry: Mapping[str, Any], layout: Layout, length: int) -> np.ndarray:
    """The entry's dynamic features after ``past`` rows of zeros, (past + length, count)."""
    count = layout.num_feat_dynamic_real
    if not count:
        return np.empty((layout.past + length, 0))
    given = np.asarray(entry.get("feat_dynamic_real", np.empty((0, 0))), dtype=np.float64)
    if given.ndim != 2 or given.shape[0] != count or given.shape[1] < length or not np.isfinite(given).all():
        raise ShapeError(
            f"feat_dynamic_real has shape {given.shape}; {count} finite features over {length} steps are needed.",
            "Features must be known at every step, and for forecasts over the horizon too.",
            "Pass (num_feat_dynamic_real, T), and T + prediction_length columns to predict.",
        )
    return np.pad(given[:, :length].T, ((layout.past, 0), (0, 0)))
