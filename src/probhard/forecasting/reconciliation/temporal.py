"""Cross-temporal hierarchies: forecasts add up over places and over time, for the whole horizon.

``S`` sums over n places, m of them bottom places. H steps are summed over the H / p blocks of each period p:

    S_time = [blocks of the longest period; ...; I_H],      S_all = S_time (Kronecker) S,      u = S_all b,

where b (H m) holds the bottom places at every step, time-major. Rows are reordered so that the identity comes last.
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
from probhard.forecasting.data.table import node_names


def cross_temporal(hierarchy: Hierarchy, horizon: int, periods: Sequence[int] = (1, 3, 12)) -> CrossTemporal:
    """Build the hierarchy of places x time, with sums over consecutive blocks of each period.

    Args:
        hierarchy: Sums over n places.
        horizon: Number of steps H; blocks start at step 0.
        periods: Block lengths in steps, divisors of H, including 1.

    Raises:
        ParameterError: If the periods do not fit the horizon.
    """
    return CrossTemporal(hierarchy, horizon, periods)


class CrossTemporal(Hierarchy):
    """Places x time as one hierarchy of N variables: every place in every block of every period.

    Args:
        places: Sums over n places.
        horizon: Number of steps H.
        periods: Block lengths in steps, divisors of H, including 1.

    Raises:
        ParameterError: If the places are not a ``Hierarchy``, or the periods do not fit the horizon.
    """

    def __init__(self, places: Hierarchy, horizon: int, periods: Sequence[int]) -> None:
        if not isinstance(places, Hierarchy):
            raise ParameterError(
                f"The places are a {type(places).__name__}.",
                "Their sums are part of the constraint.",
                "Pass a Hierarchy(S).",
            )
        blocks_of = list(periods) if isinstance(periods, Iterable) else [periods]
        lengths = sorted({period for period in blocks_of if _whole(period)}, reverse=True)
        fits = _whole(horizon) and horizon > 0 and all(p > 0 and horizon % p == 0 for p in lengths)
        if not fits or 1 not in lengths or len(lengths) < 2 or not all(map(_whole, blocks_of)):
            raise ParameterError(
                f"A horizon of {horizon} steps cannot be summed in blocks of {blocks_of}.",
                "Blocks must fill the horizon, and they are sums of single steps.",
                f"Choose 1 and other divisors of {horizon}.",
            )
        self.places, self.horizon, self.periods = places, horizon, tuple(lengths)
        blocks = [sp.kron(sp.eye_array(horizon // p), np.ones((1, p)), format="csr") for p in lengths]
        time = sp.csr_array(sp.vstack(blocks))  # (K, H)
        cells = np.arange(time.shape[0] * places.variables).reshape(time.shape[0], places.variables)
        bottoms = cells[-horizon:, places.aggregates :].ravel()
        order = np.concatenate([np.setdiff1d(cells, bottoms), bottoms])
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        self.numbers = torch.from_numpy(number.reshape(cells.shape))  # (K, n), variable of each block and place
        self._order = torch.from_numpy(order)
        labels = node_names(places)
        stamps = [f"{p}:{block}" for p in lengths for block in range(horizon // p)]
        names = np.array([f"{node}@{stamp}" for stamp in stamps for node in labels], dtype=object)[order]
        super().__init__(sp.csr_array(sp.csr_array(sp.kron(time, places.summation, format="csr"))[order]), names)
        tags = {
            f"{level}@{p}": tuple(f"{node}@{p}:{block}" for block in range(horizon // p) for node in nodes)
            for p in lengths
            for level, nodes in (places.tags or {"all": labels}).items()
        }
        self._set(tags=tags)

    def variable(self, node: int | str, period: int = 1, block: int = 0) -> int:
        """Return the number of the variable of a place in a block of a period.

        Args:
            node: Number or name of the place.
            period: Block length in steps.
            block: Number of the block, from 0; negative numbers count from the end.

        Raises:
            ParameterError: If there is no such place, period or block.
        """
        rows = self._rows(period)
        if not -len(rows) <= block < len(rows):
            raise ParameterError(
                f"There is no block {block} of {period} steps.",
                f"The horizon of {self.horizon} steps has {len(rows)} of them.",
                "Count from 0.",
            )
        return int(self.numbers[rows[block], self.places.index(node)])

    def join(self, forecasts: Mapping[int, Any]) -> Tensor:
        """Join forecasts of every period to one event.

        Args:
            forecasts: By period, (*batch, H / period, n) each.

        Returns:
            The event, (*batch, N).

        Raises:
            ShapeError: If a period is missing or has another shape.
        """
        tables = [torch.as_tensor(self._checked(forecasts, period)) for period in self.periods]
        batch = torch.broadcast_shapes(*(table.shape[:-2] for table in tables))
        whole = torch.cat([table.expand(*batch, *table.shape[-2:]) for table in tables], -2)  # (*batch, K, n)
        return whole.flatten(-2).index_select(-1, self._order)

    def split(self, event: Tensor) -> dict[int, Tensor]:
        """Split an event (*batch, N) into forecasts by period, (*batch, H / period, n) each.

        Raises:
            ShapeError: If the event does not have N variables.
        """
        self.check_event(event, "The event")
        whole = event[..., self.numbers]  # (*batch, K, n)
        return {period: whole[..., list(self._rows(period)), :] for period in self.periods}

    def sums(self, forecasts: Any) -> dict[int, Tensor]:
        """Sum forecasts of single steps over time, not over places.

        Args:
            forecasts: Of single steps, (*batch, H, n).

        Returns:
            By period, (*batch, H / period, n) each.

        Raises:
            ShapeError: If the last dimensions are not (H, n).
        """
        steps = torch.as_tensor(self._checked({1: forecasts}, 1))
        return {p: steps.unflatten(-2, (self.horizon // p, p)).sum(-2) for p in self.periods}

    def _rows(self, period: int) -> range:
        """Return the rows of a period among all K blocks."""
        if period not in self.periods:
            raise ParameterError(
                f"There are no blocks of {period} steps.",
                "The hierarchy has the sums of its own periods only.",
                f"Choose one of {self.periods}.",
            )
        first = sum(self.horizon // p for p in self.periods if p > period)
        return range(first, first + self.horizon // period)

    def _checked(self, forecasts: Mapping[int, Any], period: int) -> Any:
        """Return the forecasts of a period; raise if they are missing or have another shape."""
        shape = self.horizon // period, self.places.variables
        if period not in forecasts or tuple(np.shape(forecasts[period])[-2:]) != shape:
            content = f"shape {tuple(np.shape(forecasts[period]))}" if period in forecasts else "nothing"
            raise ShapeError(
                f"There is {content} for blocks of {period} steps.",
                f"Blocks and places are the last dimensions, (..., {shape[0]}, {shape[1]}).",
                "Pass forecasts of every period, or sum those of single steps with sums().",
            )
        return forecasts[period]


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
