"""New rows after a known history, as if both had been read at once.

Values that were filled are forgotten and filled again by the rule of ``data.mending``, which then sees both sides of a
gap. Series without new rows have absent rows: they have ended, or are late. Regressors are those of the known history;
new values take precedence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from probhard.errors import ParameterError
from probhard.forecasting.data.mending import Mending, mend
from probhard.forecasting.data.regressors import Regressors
from probhard.forecasting.data.table import HierarchicalData, summed

NOT_FITTED = "the saved model was fitted without it"


def joined(known: HierarchicalData, new: HierarchicalData, on_gap: str = "mend") -> HierarchicalData:
    """Put new rows after a history, or in place of its last ones.

    Args:
        known: The history.
        new: Rows of the same frequency that start after its first row.
        on_gap: As for ``from_frame``.

    Raises:
        ParameterError: If rows are missing between the two, or the new rows have other series.
    """
    kept = (new.index[0] - known.index[0]).n
    if kept > len(known.index):
        raise ParameterError(
            f"The new rows start at {new.index[0]}, the saved history ends at {known.index[-1]}.",
            "The rows between are not known.",
            f"Pass rows from {known.index[-1] + 1} on.",
        )
    bottoms = known.names[known.hierarchy.aggregates :]
    present = new.names[new.hierarchy.aggregates :]
    other = [name for name in present if name not in set(bottoms)]
    if other or (new.names != known.names and (len(present) == len(bottoms) or on_gap == "refuse")):
        raise ParameterError(
            f"The new rows have other series than the saved model ({other[0] if other else 'some are missing'!r}).",
            "They continue its history.",
            "Pass rows of its series, or fit again.",
        )
    column = {name: j for j, name in enumerate(bottoms)}
    later = np.full((len(new.index), len(bottoms)), 0.0 if on_gap == "zero" else np.nan)
    places = [column[name] for name in present]
    later[:, places] = _seen(new)
    bottom = np.concatenate([_seen(known)[:kept], later])
    if np.isnan(bottom).any():
        above = np.full((len(bottom), known.hierarchy.aggregates), np.nan)
        table, summation = np.concatenate([above, bottom], 1), known.hierarchy.summation
        values, mending = mend(table, summation, known.season, on_gap == "mend")
        counted = mending.zeros + (0 if known.mending is None else known.mending.zeros)
        if new.mending is not None:
            counted[places] += new.mending.zeros
        found: Mending | None = replace(mending, zeros=counted)
    else:
        values, found = summed(known.hierarchy, bottom), None
    return replace(
        known,
        values=values,
        index=known.index[:kept].append(new.index),
        name=new.name,
        mending=found,
        regressors=_regressors(known.regressors, new.regressors, kept),
    )


def _seen(data: HierarchicalData) -> np.ndarray:
    """The bottom series where they were observed, (T, m); NaN for filled rows and rows after the end of a series."""
    bottom = data.observed[:, data.hierarchy.aggregates :]
    if data.mending is None:
        return bottom
    return np.where(np.arange(len(bottom))[:, None] > data.mending.last, np.nan, bottom)


def _regressors(known: Regressors | None, new: Regressors | None, kept: int) -> Regressors | None:
    """The known regressors, (T + F, k), with the values of new rows where they are given."""
    if known is None or not known.names:
        unused = {} if new is None else {**new.unused, **dict.fromkeys(new.names, NOT_FITTED)}
        return Regressors((), np.empty((0 if new is None else kept + len(new.values), 0)), unused) if unused else None
    rows = max(len(known.values), 0 if new is None else kept + len(new.values))
    values = np.full((rows, len(known.names)), np.nan)
    values[: len(known.values)] = known.values
    unused = dict(known.unused)
    if new is not None:
        unused |= {**new.unused, **{name: NOT_FITTED for name in new.names if name not in known.names}}
        for i, name in enumerate(known.names):
            if name in new.names:
                given = new.values[:, new.names.index(name)]
                part = values[kept : kept + len(given), i]
                values[kept : kept + len(given), i] = np.where(np.isnan(given), part, given)
    return Regressors(known.names, values, unused)
