"""The size of a network and of its windows, checked before anything is built.

Windows have batch x (lags + context + horizon) x n numbers, and inputs and states of all layers. An LSTM layer has
4 hidden (inputs + hidden) weights, with gradients and two moments of Adam.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from probhard._util.memory import check_memory
from probhard.errors import ParameterError
from probhard.forecasting.models.windows import Layout

COPIES = 4  # of weights: values, gradients, two moments; of activations: values, gates, gradients
BYTES = 4  # float32


def check_size(
    entries: Iterable[Mapping[str, Any]], layout: Layout, batch: int, options: Mapping[str, Any], given: bool
) -> None:
    """Check that lags reach into the history, and that windows and weights fit into memory.

    Args:
        entries: GluonTS entries with targets of shape (n, T).
        layout: Shape of the windows.
        batch: Windows per batch.
        options: Options of the network: ``num_layers``, ``hidden_size`` and ``rank``.
        given: Whether the lags were asked for.

    Raises:
        ParameterError: A lag is longer than every history, or there is too little memory.
    """
    shapes = [shape for entry in entries if len(shape := np.shape(entry.get("target", ()))) == 2]
    if not shapes:
        return  # refused where entries are read
    n, rows = shapes[0][0], max(shape[1] for shape in shapes)
    if given and layout.longest_lag >= rows:
        raise ParameterError(
            f"lags_seq has the lag {layout.longest_lag}, and the longest history {rows} rows.",
            "The network would never see a value that far back.",
            f"Pass lags below {rows}.",
        )
    steps = layout.context_length + layout.prediction_length
    hidden, layers = options["hidden_size"], options["num_layers"]
    inputs, outputs = n * (len(layout.lags_seq) + 1) + layout.num_features, n * (2 + options["rank"])
    padded = sum(layout.past + shape[1] for shape in shapes) * (n + layout.num_features)
    weights = 4 * hidden * (inputs + hidden) + (layers - 1) * 8 * hidden**2 + hidden * outputs
    activations = batch * (steps * (inputs + 4 * hidden * layers + outputs) + (layout.longest_lag + steps) * n)
    check_memory(
        BYTES * (padded + COPIES * float(weights + activations)),
        f"A network of {layers} layers of {hidden} units on batches of {batch} windows of {layout.past} rows",
        "Lower batch_size, context_length, lags_seq, rank, hidden_size or num_layers.",
    )
