"""Result lines: one JSON object per finished unit of work, appended by any number of processes.

A unit whose lines are in the file is done. A unit in progress is claimed by a file lock, which the system releases when
its process ends, for whatever reason. A run can thus be stopped and resumed at any time, and several runs can share one
file. Locks lie in the folder ``*.work`` beside the file, never among the results.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from probhard._util.atomic import replacing
from probhard.errors import ParameterError

POLL = 0.01  # seconds between two attempts to take the lock of the file


class Records:
    """A file of result lines.

    Args:
        path: The file, ``*.jsonl``. Its folder is made when the first line is written.
        keys: Fields that identify a result. A later line replaces an earlier one with the same key.
    """

    def __init__(self, path: str | os.PathLike[str], keys: Sequence[str]) -> None:
        self.path, self.keys = Path(path), tuple(keys)

    def read(self) -> list[dict[str, Any]]:
        """Return the last line of each key, in the order of the file.

        Raises:
            ParameterError: If a line is not a JSON object with the key fields.
        """
        return list(self._by_key().values())

    def has(self, *records: Mapping[str, Any]) -> bool:
        """Return whether the file has a result for the key of every record."""
        return self.count([records]) == 1

    def count(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> int:
        """Return how many groups have a result for the key of every record in them."""
        lines = self._by_key()
        return sum(all(self.key(record) in lines for record in group) for group in groups)

    def key(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the key of a record, each field as it is written to the file."""
        return tuple(json.dumps(_plain(record[name])) for name in self.keys)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append results in one write; safe with other writers, and if this process is killed."""
        text = "".join(json.dumps(_plain(record)) + "\n" for record in records).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(), open(self.path, "ab+", buffering=0) as file:
            file.seek(0)
            *_, tail = file.read().split(b"\n")
            if self._is_result(tail):
                text = b"\n" + text
            else:  # nothing, or the beginning of a line whose writer died
                file.truncate(file.tell() - len(tail))
            file.write(text)
            os.fsync(file.fileno())

    def compact(self) -> list[dict[str, Any]]:
        """Remove superseded lines from the file; returns the lines that are left.

        Raises:
            ParameterError: If a line is not a JSON object with the key fields.
        """
        lines, count = self.read(), self.path.read_bytes().count(b"\n") if self.path.exists() else 0
        if count == len(lines):  # nothing to remove, so that reading takes no lock
            return lines
        with self._locked():
            lines = self.read()
            with replacing(self.path) as partial:
                partial.write_text("".join(json.dumps(line) + "\n" for line in lines), newline="\n")
        return lines

    @contextmanager
    def claim(self, unit: str) -> Iterator[bool]:
        """Try to claim a unit of work; yields True in one process at a time, False in the others."""
        folder = self._work / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / unit, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def folder(self, unit: str) -> Path:
        """Return the folder of a unit's checkpoints, which are not part of the results."""
        return self._work / unit

    @property
    def _work(self) -> Path:
        return self.path.with_suffix(".work")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers of the file out."""
        self._work.mkdir(parents=True, exist_ok=True)
        with FileLock(self._work / "lines.lock").acquire(poll_interval=POLL):
            yield

    def _by_key(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """The last line of each key."""
        records: dict[tuple[str, ...], dict[str, Any]] = {}
        *lines, tail = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        if self._is_result(tail):  # else its writer died, or has not finished it
            lines.append(tail)
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                records[self.key(record)] = record
            except (ValueError, KeyError, TypeError) as error:
                if not line.strip():
                    continue
                raise ParameterError(
                    f"Line {number} of {self.path} is not a result ({error}).",
                    f"Every line is a JSON object with the fields {', '.join(self.keys)}.",
                    "Remove or repair that line.",
                ) from error
        return records

    def _is_result(self, line: bytes) -> bool:
        try:
            return bool(self.key(json.loads(line)))
        except (ValueError, KeyError, TypeError):
            return False


def _plain(value: Any) -> Any:
    """JSON values: floats with 9 digits, None for NaN and infinities, lists for tensors and arrays."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value
