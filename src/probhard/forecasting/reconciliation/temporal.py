"""Cross-temporal coherence: sums over places and over time hold at once, for the whole horizon.

With ``S`` of n places, m of them bottom ones, and H steps summed over blocks of each period p (H / p blocks),

    S_time = [blocks of the longest period; ...; I_H],      S_all = S_time (Kronecker) S,      u = S_all b,

b (H m) the bottom places at every step, time-major. Rows are put in order so that the identity comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError


def cross_temporal(hierarchy: Hierarchy, horizon: int, periods: Sequence[int] = (1, 3, 12)) -> CrossTemporal:
    """The hierarchy of places x time over a horizon, with sums over blocks of each period; blocks begin at step 0."""
    return CrossTemporal(hierarchy, horizon, periods)


class CrossTemporal(Hierarchy):
    """Places x time as one hierarchy; an event holds every place at every block of every period.

    Args:
        places: The sums over places, n nodes.
        horizon: Number of steps H.
        periods: Lengths of blocks in steps, each a divisor of H, 1 among them.
    """

    def __init__(self, places: Hierarchy, horizon: int, periods: Sequence[int]) -> None:
        if not isinstance(places, Hierarchy):
            raise ParameterError(
                f"The places are a {type(places).__name__}.", "Their sums are to hold too.", "Pass a Hierarchy(S)."
            )
        given = list(periods) if isinstance(periods, Iterable) else [periods]
        lengths = sorted({period for period in given if _whole(period)}, reverse=True)
        fits = _whole(horizon) and horizon > 0 and all(p > 0 and horizon % p == 0 for p in lengths)
        if not fits or 1 not in lengths or len(lengths) < 2 or not all(map(_whole, given)):
            raise ParameterError(
                f"A horizon of {horizon} steps was to be summed in blocks of {given}.",
                "Blocks must fill the horizon, and single steps are what is summed.",
                f"Choose 1 and other divisors of {horizon}.",
            )
        self.places, self.horizon, self.periods = places, horizon, tuple(lengths)
        blocks = [sp.kron(sp.eye_array(horizon // p), np.ones((1, p)), format="csr") for p in lengths]
        time = sp.csr_array(sp.vstack(blocks))  # (K, H)
        every = np.arange(time.shape[0] * places.variables).reshape(time.shape[0], places.variables)
        last = every[-horizon:, places.aggregates :].ravel()
        order = np.concatenate([np.setdiff1d(every, last), last])
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        self.numbers = torch.from_numpy(number.reshape(every.shape))  # (K, n), the variable of each place and block
        self._order = torch.from_numpy(order)
        label = places.names or tuple(map(str, range(places.variables)))
        stamps = [f"{p}:{block}" for p in lengths for block in range(horizon // p)]
        names = np.array([f"{node}@{stamp}" for stamp in stamps for node in label], dtype=object)[order]
        super().__init__(sp.csr_array(sp.csr_array(sp.kron(time, places.summation, format="csr"))[order]), names)
        tags = {
            f"{level}@{p}": tuple(f"{node}@{p}:{block}" for block in range(horizon // p) for node in nodes)
            for p in lengths
            for level, nodes in (places.tags or {"all": label}).items()
        }
        self._set(tags=tags)

    def variable(self, node: int | str, period: int = 1, block: int = 0) -> int:
        """The number of the variable that is a place in a block of a period."""
        rows = self._rows(period)
        if not -len(rows) <= block < len(rows):
            raise ParameterError(
                f"There is no block {block} of {period} steps.",
                f"The horizon of {self.horizon} steps has {len(rows)} of them.",
                "Count from 0.",
            )
        return int(self.numbers[rows[block], self.places.index(node)])

    def join(self, forecasts: Mapping[int, Any]) -> Tensor:
        """The event (..., N) of forecasts of every period, each (..., H / period, n)."""
        parts = [torch.as_tensor(self._given(forecasts, period)) for period in self.periods]
        lead = torch.broadcast_shapes(*(part.shape[:-2] for part in parts))
        whole = torch.cat([part.expand(*lead, *part.shape[-2:]) for part in parts], -2)  # (..., K, n)
        return whole.flatten(-2).index_select(-1, self._order)

    def split(self, event: Tensor) -> dict[int, Tensor]:
        """The forecasts of every period, each (..., H / period, n), from an event (..., N)."""
        self.check_event(event, "The event")
        whole = event[..., self.numbers]  # (..., K, n)
        return {period: whole[..., list(self._rows(period)), :] for period in self.periods}

    def sums(self, forecasts: Any) -> dict[int, Tensor]:
        """Forecasts of every period from those of single steps (..., H, n), summed over time and not over places."""
        steps = torch.as_tensor(self._given({1: forecasts}, 1))
        return {p: steps.unflatten(-2, (self.horizon // p, p)).sum(-2) for p in self.periods}

    def _rows(self, period: int) -> range:
        """The rows of a period among all blocks."""
        if period not in self.periods:
            raise ParameterError(
                f"There are no blocks of {period} steps.",
                "The hierarchy sums over its own periods alone.",
                f"Choose one of {self.periods}.",
            )
        first = sum(self.horizon // p for p in self.periods if p > period)
        return range(first, first + self.horizon // period)

    def _given(self, forecasts: Mapping[int, Any], period: int) -> Any:
        shape = self.horizon // period, self.places.variables
        if period not in forecasts or tuple(np.shape(forecasts[period])[-2:]) != shape:
            found = f"shape {tuple(np.shape(forecasts[period]))}" if period in forecasts else "nothing"
            raise ShapeError(
                f"There is {found} for blocks of {period} steps.",
                f"Blocks and places are the last dimensions, (..., {shape[0]}, {shape[1]}).",
                "Give forecasts of every period, or sum those of single steps with sums().",
            )
        return forecasts[period]


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
