"""Saved folders: JSON, arrays and weights; constraints as plain arrays and names.

    hierarchy: S, held nodes, names, tags;      rows: A, b, held variables;      box: lower, upper.

Reading never runs code. Functions and general sets are not stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probhard.constraints.base import STORED, Constraint
from probhard.errors import ParameterError

Arrays = dict[str, Any]  # NumPy arrays by name


def read_record(file: Path, format: str, version: int, writer: str) -> dict[str, Any]:
    """Read a JSON file of a given format and version.

    Args:
        file: The file.
        format: Expected format mark.
        version: Expected version.
        writer: Function that writes such files, for the error text.

    Raises:
        ParameterError: If the file is missing or damaged, or has another format or version.
    """
    content = _read(file, lambda: json.loads(file.read_text(encoding="utf-8")), writer)
    if not isinstance(content, dict) or content.get("format") != format or content.get("version") != version:
        raise ParameterError(
            f"{file} does not hold {format} of format version {version}.",
            "It lacks the format mark, or another version of probhard wrote it.",
            f"Pass a folder written by {writer} of this version.",
        )
    return content


def read_arrays(file: Path) -> Arrays:
    """Read the arrays of an npz file, without pickled objects.

    Raises:
        ParameterError: If the file is missing or damaged, or holds objects.
    """

    def load() -> Arrays:
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)

    return _read(file, load)


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file of weights, without pickled objects.

    Raises:
        ParameterError: If the file is missing or damaged, or holds objects.
    """
    return _read(file, lambda: torch.load(file, map_location="cpu", weights_only=True))


def _read(file: Path, load: Callable[[], Any], writer: str = "the method that saved the others") -> Any:
    try:
        return load()
    except Exception as error:  # many types: no file, bad JSON, a broken archive, pickled objects
        raise ParameterError(
            f"{file} cannot be read ({type(error).__name__}).",
            "It is missing or damaged, or holds more than plain values.",
            f"Pass a complete folder written by {writer}.",
        ) from error


def constraint_record(constraint: Constraint) -> tuple[list[dict[str, Any]] | None, Arrays]:
    """Return the parts of a constraint as plain values, and their arrays.

    The values are None if a part is a function or a general set, which are not stored.
    """
    record: list[dict[str, Any]] = []
    arrays: Arrays = {}
    for number, part in enumerate(constraint.parts()):
        stored = part.stored()
        if stored is None:
            return None, {}
        record.append({"kind": part.stored_as, **stored[0]})
        arrays |= {f"{number}.{name}": value for name, value in stored[1].items()}
    return record, arrays


def constraint_from_record(record: list[dict[str, Any]], arrays: Mapping[str, np.ndarray]) -> Constraint:
    """Build a constraint from the values and arrays of ``constraint_record``.

    Raises:
        ParameterError: If a part or an array is missing or unknown.
    """
    try:
        parts = [_part(values, f"{number}.", arrays) for number, values in enumerate(record)]
        first, *others = parts
    except (KeyError, ValueError, TypeError) as error:
        raise ParameterError(
            f"The saved constraint cannot be read ({error}).",
            "A part or one of its arrays is missing or unknown.",
            "Pass constraint=... as it was in training.",
        ) from error
    for other in others:
        first = first & other
    return first


def _part(values: dict[str, Any], at: str, arrays: Mapping[str, np.ndarray]) -> Constraint:
    own = {name.removeprefix(at): value for name, value in arrays.items() if name.startswith(at)}
    return STORED[values["kind"]].restored(values, own)
