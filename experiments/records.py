"""Results as lines: one JSON object per finished unit of work, appended by any number of processes.

The lines are the memory of a long run. A unit whose line is there is done; a unit that some process works on is claimed
by a lock that the system releases when that process ends, however it ends. So a run can be stopped at any time and
started again, and several may share one file.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probhard.errors import ParameterError


class Records:
    """A file of result lines.

    Args:
        path: The file, ``*.jsonl``; its folder is made when the first line is written.
        keys: Fields that tell one result from another.
    """

    def __init__(self, path: str | os.PathLike[str], keys: Sequence[str]) -> None:
        self.path, self.keys = Path(path), tuple(keys)

    def read(self) -> list[dict[str, Any]]:
        """All lines, the last one of each key, in the order of the file."""
        return list(self._found().values())

    def has(self, *records: Mapping[str, Any]) -> bool:
        """Whether results with the keys of all these records are there."""
        return self.count([records]) == 1

    def count(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> int:
        """How many of these groups of records have results with the keys of all their records."""
        there = self._found()
        return sum(all(self.key(record) in there for record in group) for group in groups)

    def key(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """What tells this result from the others."""
        return tuple(json.dumps(_plain(record[name])) for name in self.keys)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Write results in one piece, safe against other writers and against being stopped."""
        text = "".join(json.dumps(_plain(record)) + "\n" for record in records).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            *_, tail = file.read().split(b"\n")
            if self._is_result(tail):
                text = b"\n" + text
            else:  # nothing, or the beginning of a line whose writer died
                file.truncate(file.tell() - len(tail))
            file.write(text)
            os.fsync(file.fileno())

    def _found(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """The last line of each key."""
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        *lines, tail = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        if self._is_result(tail):  # else its writer died, or is at it
            lines.append(tail)
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                found[self.key(record)] = record
            except (ValueError, KeyError, TypeError) as error:
                if not line.strip():
                    continue
                raise ParameterError(
                    f"Line {number} of {self.path} is not a result ({error}).",
                    f"Every line is a JSON object with the fields {', '.join(self.keys)}.",
                    "Remove or repair that line.",
                ) from error
        return found

    def _is_result(self, line: bytes) -> bool:
        try:
            return bool(self.key(json.loads(line)))
        except (ValueError, KeyError, TypeError):
            return False

    @contextmanager
    def claim(self, unit: str) -> Iterator[bool]:
        """Try to take a unit of work: True in one process at a time, False in the others."""
        folder = self.path.with_suffix(".work") / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / unit, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def folder(self, unit: str) -> Path:
        """Where a unit keeps its checkpoints while it is at work; not part of the results."""
        return self.path.with_suffix(".work") / unit


def _plain(value: Any) -> Any:
    """Plain values: numbers with 9 digits, None for what is not finite, tensors and arrays as lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value
