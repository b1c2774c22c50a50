"""Checks of a table of hierarchical series: its index, names, and sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, optional

LARGEST = 1e100  # its square can be summed
COHERENT = 1e-6  # relative difference between an aggregate and its sum up to which it counts as rounding


def check_index(index: Any) -> None:
    """Check that an index is a run of consecutive periods.

    Raises:
        ParameterError: If it is not.
    """
    pandas = optional("pandas", "forecast", "HierarchicalData")
    if not isinstance(index, pandas.PeriodIndex):
        raise ParameterError(
            f"The index is a {type(index).__name__}.",
            "Series need periods with a frequency.",
            "Pass a pandas.PeriodIndex, for instance stamps.to_period('M').",
        )
    if len(index) == 0 or not index.equals(pandas.period_range(index[0], periods=len(index))):
        raise ParameterError(
            "The index is empty." if len(index) == 0 else "The index is not a run of consecutive periods.",
            "Lags and seasons are counted in rows.",
            "Sort the rows and fill gaps with NaN; from_frame does both.",
        )


def check_names(names: tuple[str, ...], tags: Mapping[str, Sequence[str]]) -> None:
    """Check that names are distinct, and that tags list nothing else.

    Raises:
        ParameterError: If they are not.
    """
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ParameterError(
            f"The series name {repeated[0]!r} occurs more than once.",
            "Names identify the series.",
            "Rename one of them, for instance by adding its level.",
        )
    known = set(names)
    for level, nodes in tags.items():
        unknown = [node for node in nodes if node not in known]
        if unknown:
            raise ParameterError(
                f"The level {level!r} lists {unknown[0]!r}, which is not a series.",
                "Scores are reported by level.",
                "Use the names of the rows of S in the tags.",
            )


def check_sizes(values: np.ndarray, names: Sequence[str], index: Any) -> None:
    """Check that values (T, n) can be summed and squared; NaN can stand for missing ones.

    Raises:
        ParameterError: A value is infinite or astronomical.
    """
    wrong = np.abs(values) > LARGEST
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        value = values[row, column]
        raise ParameterError(
            f"Series {names[column]!r} is {'infinite' if np.isinf(value) else f'{value:.3g}'} at {index[row]}.",
            "It cannot be summed or scored.",
            "Replace it by a number, or by NaN if it was not observed; choose larger units if it is right.",
        )


def check_coherence(
    values: np.ndarray, bottom: np.ndarray, hierarchy: Hierarchy, names: Sequence[str], index: Any
) -> None:
    """Check that aggregates equal the sums of their bottom series.

    Args:
        values: All series, (T, n).
        bottom: Observed bottom series, (T, m); a sum with a missing term is not checked.
        hierarchy: The sums.
        names: Names of the n series.
        index: The T periods.

    Raises:
        ParameterError: If a sum is off by more than rounding.
    """
    aggregates = hierarchy.aggregates
    rows, observed = hierarchy.summation[:aggregates], values[:, :aggregates]
    gap = np.abs(observed - (rows @ bottom.T).T)
    scale = np.abs(observed) + (abs(rows) @ np.abs(bottom).T).T
    relative = np.nan_to_num(gap / np.maximum(scale, np.finfo(np.float64).tiny))  # missing terms: no check
    if relative.size and relative.max() > COHERENT:
        row, column = np.unravel_index(np.argmax(relative), relative.shape)
        wrong = int((relative > COHERENT).any(0).sum())
        raise ParameterError(
            f"Series {names[int(column)]!r} differs from the sum of its bottom series by {gap[row, column]:.4g} at "
            f"{index[row]}, {relative[row, column]:.1e} of its size; {wrong} of {aggregates} sums are off.",
            "Coherent forecasts cannot match a history that does not add up.",
            "Correct the history or the hierarchy, or pass coherence='aggregate' to rebuild the aggregates.",
        )
