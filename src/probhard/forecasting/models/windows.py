"""Windows of multivariate series as tensors in memory.

    rows of a window:   lags (longest lag) | context | horizon

Missing values and the padding before a short series are NaN; there is no other mask. A batch is one gather from the
stacked series, at rows drawn by a generator that is seeded per epoch.
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
    """A batch of windows: targets in data units, NaN where unknown, and the features of every predicted step."""

    target: Tensor  # (B, lags + context + horizon, n)
    features: Tensor  # (B, context + horizon, F)


@dataclass(frozen=True)
class Layout:
    """Shape of windows and the inputs that they hold.

    Args:
        freq: Frequency of the periods.
        prediction_length: Rows of the horizon.
        context_length: Rows of the context.
        lags_seq: Lags in rows.
        time_features: Names in ``CYCLES``.
        num_feat_dynamic_real: Rows of ``feat_dynamic_real``.
    """

    freq: str
    prediction_length: int
    context_length: int
    lags_seq: tuple[int, ...]
    time_features: tuple[str, ...] = ()
    num_feat_dynamic_real: int = 0

    @property
    def longest_lag(self) -> int:
        """Rows before the context, used by the lags only."""
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
    """One entry of a data set, with ``layout.past`` rows of padding before its targets and features."""

    target: Tensor  # (past + T, n)
    features: Tensor  # (past + T + future, F)
    start: pd.Period
    item_id: str | None

    @classmethod
    def of(cls, entry: Mapping[str, Any], layout: Layout, future: int = 0) -> Series:
        """Read a GluonTS entry.

        Args:
            entry: ``target`` (n, T), ``start``, and optionally ``observed_values`` and ``feat_dynamic_real``.
            layout: Shape of the windows.
            future: Steps after the last row that features must cover.

        Raises:
            ProbhardError: If a field is missing, has a wrong shape or frequency, or is infinite.
        """
        absent = [name for name in ("start", "target") if name not in entry]
        if absent:
            raise ParameterError(
                f"An entry of the data set has no {absent[0]!r}; it has {sorted(entry)}.",
                "An entry holds a table of all series, (n, T), and its first period.",
                "Pass GluonTS entries, such as those of HierarchicalData.to_gluonts().",
            )
        target = np.array(entry["target"], dtype=np.float64, ndmin=2)  # (n, T)
        if np.ndim(entry["target"]) != 2:
            raise ShapeError(
                f"The target has shape {np.shape(entry['target'])}.",
                "All series of a hierarchy form one target, (n, T).",
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
                    "They mark each value as observed or not.",
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
        """Return the window whose horizon follows the last row, as a batch of one; its horizon targets are NaN."""
        horizon = self.target.new_full((layout.prediction_length, self.variables), torch.nan)
        steps = layout.context_length + layout.prediction_length
        return Window(torch.cat([self.target[-layout.past :], horizon])[None], self.features[None, -steps:])


class Windows:
    """All windows of a data set that hold a whole horizon.

    Args:
        dataset: GluonTS entries with targets of shape (n, T).
        layout: Shape of the windows.

    Raises:
        ProbhardError: If there is no entry, entries differ in n, are too short, or are all NaN.
    """

    def __init__(self, dataset: Iterable[Mapping[str, Any]], layout: Layout) -> None:
        entries = [Series.of(entry, layout) for entry in dataset]
        sizes = sorted({entry.variables for entry in entries})
        if len(sizes) != 1:
            raise ShapeError(
                f"The entries of the data set have {sizes} series." if entries else "The data set has no entry.",
                "One network predicts all series, so every entry needs the same ones.",
                "Pass entries of one hierarchy.",
            )
        self.layout, self.variables = layout, sizes[0]
        self.target = torch.cat([entry.target for entry in entries])  # (total, n)
        self.features = torch.cat([entry.features for entry in entries])  # (total, F)
        offset, origins, last = 0, [], []
        for entry in entries:
            latest = len(entry.target) - layout.past - layout.prediction_length  # rows before the last horizon
            if latest > 0:
                # series shorter than a window give padded windows, with at least half of their rows as history
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
        """Return the mean absolute value of each series, (n,); the smallest positive one replaces zeros."""
        mean = self.target.double().abs().nanmean(0).nan_to_num(0.0)
        positive = mean[mean > 0]
        return torch.where(mean > 0, mean, positive.min() if len(positive) else 1.0).float()

    def at(self, origins: Tensor) -> Window:
        """Return the windows that begin at the rows ``origins``, (B,)."""
        layout = self.layout
        rows = origins[:, None] + torch.arange(layout.past + layout.prediction_length)  # (B, rows)
        return Window(self.target[rows], self.features[rows[:, layout.longest_lag :]])


class RandomWindows:
    """Batches of random windows; every iteration is an epoch with its own seed.

    Args:
        windows: All windows.
        batch_size: Windows per batch.
        batches: Batches per epoch.
        seed: Seed of all epochs.
    """

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
    """Return batches of the last whole window of every entry, ``batch_size`` windows each."""
    return [windows.at(origins) for origins in windows.latest.split(batch_size)]


def _period(start: Any, freq: str) -> pd.Period:
    """Return the first period of an entry; raise if its frequency differs."""
    if not isinstance(start, pd.Period):
        return pd.Period(start, freq=freq)
    if period_frequency(start.freqstr) != freq:
        raise ParameterError(
            f"An entry starts at {start} with the frequency {start.freqstr!r}; the estimator has {freq!r}.",
            "Lags and time features depend on the frequency.",
            f"Pass freq={start.freqstr!r}, or resample the data.",
        )
    return start


def _dynamic(entry: Mapping[str, Any], layout: Layout, length: int) -> np.ndarray:
    """Return the dynamic features after ``past`` rows of zeros, (past + length, count)."""
    count = layout.num_feat_dynamic_real
    if not count:
        return np.empty((layout.past + length, 0))
    features = np.asarray(entry.get("feat_dynamic_real", np.empty((0, 0))), dtype=np.float64)
    fits = features.ndim == 2 and features.shape[0] == count and features.shape[1] >= length
    if not fits or not np.isfinite(features).all():
        raise ShapeError(
            f"feat_dynamic_real has shape {features.shape}; {count} finite features over {length} steps are needed.",
            "Features must be known at every step, including the horizon of a forecast.",
            "Pass (num_feat_dynamic_real, T) to train, and T + prediction_length columns to predict.",
        )
    return np.pad(features[:, :length].T, ((layout.past, 0), (0, 0)))
