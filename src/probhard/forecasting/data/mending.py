"""One rule for values that a history does not have, so that sums never fail for want of a row.

For a bottom series b with its first value at row f and its last one at row l, and a quiet time q:

    before f:          it does not exist yet: NaN, and 0 in sums;
    after l:           it has ended if l is q rows ago or more: 0 from then on, and its forecast is 0;
                       otherwise the rows are late: filled like a gap;
    a gap inside:      filled: the mean of the values a season before and after, else by the line between neighbours;
    a long gap inside, or many gaps (a quarter of the rows): absent rows mean that nothing happened: 0;
    one time of the season without any value, such as Sundays: closed, 0.

Filled values enter sums, but not scores. An aggregate is scored where filled values are at most a tenth of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

QUIET = 3  # fewest absent rows at the end of a series that has ended
QUIET_GAPS = 2  # the same, relative to its longest gap
QUIET_ZEROS = 6  # fewest zeros at the end of a series that are worth a remark
LONG_GAP = 3  # longest gap that is filled, in rows, if half a season is shorter
SPARSE = 0.25  # share of absent rows above which they mean 0
CYCLES = 3  # seasons without a value at the same time after which it counts as closed
SHARE = 0.1  # of an aggregate that may be filled where it is scored
SHOWN = 3  # series that a note names


@dataclass(frozen=True, eq=False)
class Mending:
    """What was done to a history of T rows, n nodes and m bottom series.

    Args:
        filled: Where values are not observed but filled, (T, n).
        first, last: Rows of the first and the last value of every bottom series, (m,).
        quiet: Absent rows after which a series has ended, (m,).
        zeros: Absent rows inside every series that count as 0, (m,).
    """

    filled: np.ndarray
    first: np.ndarray
    last: np.ndarray
    quiet: np.ndarray
    zeros: np.ndarray

    @property
    def ended(self) -> np.ndarray:
        """Which bottom series have ended, (m,)."""
        return len(self.filled) - 1 - self.last >= self.quiet

    @property
    def late(self) -> np.ndarray:
        """Which bottom series started after the first row, (m,)."""
        return (self.first > 0) & (self.first < len(self.filled))

    def window(self, start: int, stop: int) -> Mending:
        """Return the mending of the rows ``start:stop``."""
        last = np.minimum(self.last, stop - 1) - start
        return replace(self, filled=self.filled[start:stop], first=np.maximum(self.first - start, 0), last=last)

    def notes(self, names: Sequence[str], index: Any) -> list[str]:
        """Say what was done, a sentence for each kind.

        Args:
            names: Names of the m bottom series.
            index: The T periods.
        """
        bottom = self.filled[:, -len(names) :]
        late, ended, gaps, zeros = (_where(x) for x in (self.late, self.ended, bottom.any(0), self.zeros))
        notes = []
        if len(ended):
            listed = listing([f"{names[i]} after {index[self.last[i]]}" for i in ended])
            notes.append(f"{_series(ended)} ended, 0 from then on and in the forecast: {listed}.")
        if len(late):
            listed = listing([f"{names[i]} in {index[self.first[i]]}" for i in late])
            notes.append(f"{_series(late)} started late, 0 in sums before: {listed}.")
        if len(gaps):
            values = f"{int(bottom.sum()):,} missing value{'s' * int(bottom.sum() > 1)}"
            listed = listing([names[i] for i in gaps])
            notes.append(f"{values} of {_series(gaps)} filled for sums, not scored: {listed}.")
        if len(zeros):
            rows = f"{int(self.zeros.sum()):,} absent row{'s' * int(self.zeros.sum() > 1)}"
            listed = listing([names[i] for i in zeros])
            reason = "being many, in long gaps or at one time of every season"
            notes.append(f"{rows} of {_series(zeros)} count as 0, {reason}: {listed}.")
        return notes

    def record(self, names: Sequence[str], index: Any) -> dict[str, Any]:
        """Return what was done as plain values, for a certificate.

        Args:
            names: Names of the m bottom series.
            index: The T periods.
        """
        bottom = self.filled[:, -len(names) :]
        return {
            "ended": {names[i]: str(index[self.last[i]]) for i in _where(self.ended)},
            "started_late": {names[i]: str(index[self.first[i]]) for i in _where(self.late)},
            "filled": {names[i]: int(bottom[:, i].sum()) for i in _where(bottom.any(0))},
            "counted_as_zero": {names[i]: int(self.zeros[i]) for i in _where(self.zeros)},
        }


def mend(
    values: np.ndarray,  # (T, n)
    summation: sp.csr_array,  # (n, m)
    season: int,
    zeros: bool = True,
) -> tuple[np.ndarray, Mending]:
    """Fill a table by the rule of this module.

    Args:
        values: All nodes, aggregates first, NaN where missing; aggregates that are given are kept.
        summation: Summation matrix.
        season: Season length in rows.
        zeros: Whether absent rows in long or many gaps count as 0; otherwise they are filled too.

    Returns:
        The table, NaN only before a series or all parts of an aggregate start, and what was done.
    """
    aggregates = summation.shape[0] - summation.shape[1]
    rows, bottom = len(values), values[:, aggregates:].copy()
    seen = ~np.isnan(bottom)
    first, last = seen.argmax(0), rows - 1 - seen[::-1].argmax(0)
    quiet, zeroed = np.full(len(first), QUIET), np.zeros(len(first), dtype=np.int64)
    filled = np.zeros(bottom.shape, dtype=bool)
    silent = ~seen.any(1)  # stamps without any value: nobody reported
    for j in np.flatnonzero(~seen.all(0) & seen.any(0)):
        inside = slice(int(first[j]), int(last[j]) + 1)
        runs = _runs(~seen[inside, j])
        quiet[j] = max(QUIET, QUIET_GAPS * max((length for _, length in runs), default=0))
        absent = ~seen[:, j] & ~silent
        many = absent[inside].mean() > SPARSE
        closed = _closed(seen[inside, j], season) if zeros else np.zeros(inside.stop - inside.start, dtype=bool)
        bottom[inside, j] = np.where(closed, 0.0, bottom[inside, j])
        for start, length in runs if zeros else ():
            gap = slice(int(first[j]) + start, int(first[j]) + start + length)
            if many or length > max(LONG_GAP, season // 2):
                bottom[gap, j] = np.where(absent[gap], 0.0, bottom[gap, j])
        zeroed[j] = (~seen[inside, j] & ~np.isnan(bottom[inside, j])).sum()
        if rows - 1 - last[j] >= quiet[j] or (many and zeros):
            bottom[last[j] + 1 :, j] = 0.0
        missing = np.isnan(bottom[:, j])
        missing[: first[j]] = False
        filled[:, j] = missing
        bottom[missing, j] = _fill(bottom[first[j] :, j], season)[missing[first[j] :]]
    mending = Mending(np.zeros(values.shape, dtype=bool), first, last, quiet, zeroed)
    upper, exists = abs(summation[:aggregates]), ~np.isnan(bottom)
    known = np.nan_to_num(bottom)
    sums = np.where((upper @ exists.T).T > 0, (summation[:aggregates] @ known.T).T, np.nan)
    parts, size = (upper @ np.abs(known * filled).T).T, (upper @ np.abs(known).T).T
    mending.filled[:, aggregates:] = filled
    mending.filled[:, :aggregates] = (parts > SHARE * size) & np.isnan(values[:, :aggregates])
    given = values[:, :aggregates]
    return np.concatenate([np.where(np.isnan(given), sums, given), bottom], 1), mending


def zero_since(bottom: np.ndarray, season: int) -> dict[int, int]:
    """Find series that are observed as 0 from some row on: a season long, and twice as long as ever before.

    Args:
        bottom: Bottom series, (T, m).
        season: Season length in rows.

    Returns:
        First row of these zeros, by series. Nothing says that such a series has ended, so it is forecast as usual.
    """
    least, found = max(season, QUIET_ZEROS), {}
    for j in np.flatnonzero((bottom[-least:] == 0).all(0)):
        nonzero = np.flatnonzero(np.nan_to_num(bottom[:, j]))
        if not len(nonzero):
            continue
        first = int(nonzero[-1]) + 1
        before = max((length for _, length in _runs(bottom[:first, j] == 0)), default=0)
        if len(bottom) - first >= max(least, QUIET_GAPS * before + 1):
            found[int(j)] = first
    return found


def _runs(missing: np.ndarray) -> list[tuple[int, int]]:
    """Return start and length of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], missing.astype(np.int8), [0]])))
    return [(int(start), int(stop - start)) for start, stop in zip(edges[::2], edges[1::2])]


def _closed(seen: np.ndarray, season: int) -> np.ndarray:
    """Mark the times of the season at which a series (T,) has no value in at least CYCLES seasons."""
    time = np.arange(len(seen)) % season
    values, cycles = np.bincount(time, seen, season), np.bincount(time, minlength=season)
    return ((values == 0) & (cycles >= CYCLES))[time]


def _fill(series: np.ndarray, season: int) -> np.ndarray:
    """Fill the gaps of a series (T,) whose first value is known; after the last value, its last season is repeated."""
    rows, known = np.arange(len(series)), ~np.isnan(series)
    line = np.interp(rows, rows[known], series[known])
    if season > 1:
        shifted = np.full((2, len(series)), np.nan)
        shifted[0, season:], shifted[1, :-season] = series[:-season], series[season:]
        both = ~np.isnan(shifted).any(0)
        line = np.where(both, shifted.mean(0), line)
    filled = np.where(known, series, line)
    for row in range(int(rows[known][-1]) + 1, len(series)):
        filled[row] = filled[row - season] if row >= season else filled[row - 1]
    return filled


def _where(which: Any) -> list[int]:
    return [int(i) for i in np.flatnonzero(which)]


def _series(which: Sequence[int]) -> str:
    return "1 series" if len(which) == 1 else f"{len(which):,} series"


def listing(texts: Sequence[str]) -> str:
    """The first texts, and how many more there are."""
    more = f" and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
