"""What a run leaves behind: its figures, temporary files, and certificates that do not hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probhard.cli import _outputs
from probhard.errors import ProbhardError

VOLATILE = (
    "seconds",
    "about",
    "versions",
    "files",
    "time",
    "input",
    "output",
    "model",
    "milliseconds",
    "their_milliseconds",
)
UNCOMPARED = ("checkpoints", "fits", ".work")  # folders of intermediate results
LEFT = (".partial", ".probhard-")  # parts of the names of temporary files


def figures(folder: Path) -> dict[str, Any]:
    """Return the content of all results of a folder, without what differs between equal runs.

    Raises:
        Exception: A file is not whole.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(part in f"{name}/" for part in UNCOMPARED):
            found[name] = _content(path)
    return found


def _content(path: Path) -> Any:
    if path.suffix == ".json":
        return _steady(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        lines = [_steady(json.loads(line)) for line in path.read_text().splitlines()]
        return {str([x for x in line.values() if isinstance(x, str)]): line for line in lines}  # the last of each key
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {
                name: _hash(np.ascontiguousarray(arrays[name]).tobytes()) for name in arrays if name not in VOLATILE
            }
    if path.suffix == ".pt":
        content = torch.load(path, weights_only=True)
        return {name: _hash(value.numpy().tobytes()) for name, value in content.get("state", content).items()}
    if path.suffix in (".md", ".html", ".png"):  # with times or random identifiers: whole, at least
        return path.stat().st_size > 0
    return _hash(path.read_bytes())


def _steady(value: Any) -> Any:
    """JSON values without times and paths."""
    if isinstance(value, Mapping):
        return {name: _steady(part) for name, part in value.items() if name not in VOLATILE}
    return [_steady(part) for part in value] if isinstance(value, list) else value


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def temporary(folder: Path) -> list[str]:
    """Names of temporary files that are left in a folder."""
    return [path.name for path in folder.rglob("*") if any(part in path.name for part in LEFT)]


def broken_promises(folder: Path) -> list[str]:
    """What is wrong in a folder after a run was ended: certificates that do not hold, and files that are not whole."""
    wrong = []
    for path in folder.rglob("*.json"):
        if "checked" in path.read_text(errors="replace"):
            try:
                _outputs.verify(path)
            except ProbhardError as error:
                wrong.append(str(error))
    try:
        for path in folder.rglob("*"):
            if path.is_file() and not any(part in path.name for part in LEFT):
                _content(path)
    except Exception as error:  # of any reader
        wrong.append(f"half a file: {error}")
    return wrong
