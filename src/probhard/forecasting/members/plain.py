"""Fitted models of statsforecast as plain values, without pickle.

A model is its class's name and its attributes; arrays and tuples are marked. What only describes the past (residuals,
states) is left out: a fitted model is applied to a series again by its parameters. Reading looks up classes of
``statsforecast.models`` only, and runs none of their code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from probhard.errors import ParameterError
from probhard.forecasting.data.table import require

PAST = ("residuals", "actual_residuals", "fitted", "states", "seas_forecast")  # long, and not needed


def to_plain(value: Any) -> Any:
    """Convert a fitted model, or a part of it, to values that JSON can hold; other objects become None."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"array": value.tolist()}
    if isinstance(value, dict):
        return {"dict": {str(k): to_plain(None if k in PAST else v) for k, v in value.items()}}
    if isinstance(value, tuple) and type(value) is tuple:
        return {"tuple": [to_plain(v) for v in value]}
    if isinstance(value, list):
        return [to_plain(v) for v in value]
    if type(value).__module__ == "statsforecast.models":
        return {"model": type(value).__name__, "fields": {k: to_plain(v) for k, v in vars(value).items()}}
    return None


def from_plain(value: Any) -> Any:
    """Build what ``to_plain`` has converted.

    Raises:
        ParameterError: If it names a class that statsforecast does not have.
    """
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.asarray(value["array"])
    if "tuple" in value:
        return tuple(from_plain(v) for v in value["tuple"])
    if "dict" in value:
        return {k: from_plain(v) for k, v in value["dict"].items()}
    models = require("statsforecast.models", "A saved member")
    name = value.get("model")
    kind = getattr(models, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or kind.__module__ != models.__name__:
        raise ParameterError(
            f"The saved member has a model {name!r}.",
            "statsforecast has no such class.",
            "Install the version of statsforecast that it was saved with, or fit again.",
        )
    model: Any = object.__new__(kind)
    model.__dict__.update({k: from_plain(v) for k, v in value["fields"].items()})
    return model
