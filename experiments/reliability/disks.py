"""Disks: every command on a full disk, in a read-only folder, and with a limit on the size of files.

Each must end with a message and status 2, without a traceback. Results of an earlier run are kept or are replaced as a
whole: no certificate may stand beside files that it was not made for. A run in a good folder must give the figures of
an undisturbed run afterwards.

    python -m experiments.reliability.disks --output results
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from experiments.reliability.commands import COMMANDS, Command, prepare, run, warm
from experiments.reliability.remains import broken_promises, figures, temporary
from experiments.reliability.verdict import conclude

SIZE, FREE, LIMIT = 40_000_000, 12_000, 3_000  # bytes of the disk, those left, and of the largest file
KINDS = ("full disk", "read-only", "largest file")
REFUSED = 2


def can_mount() -> bool:
    """Return whether this process may mount a small disk."""
    if os.geteuid() or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder)) as mounted:
        return mounted


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a disk of a few megabytes; yields whether that worked."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def limit_files() -> None:
    """Let no file of this process grow beyond the limit; writes beyond it fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))


def disturbed(command: Command, kind: str, inputs: Path, output: Path, log: Path) -> dict[str, Any]:
    """Run a command with a disturbed disk, over the results of an earlier run.

    Args:
        command: The command.
        kind: One of ``KINDS``.
        inputs: Folder of the inputs.
        output: Folder of the outputs, on a small disk unless ``kind`` is the largest file.
        log: File for the command's output.
    """
    if not command.resumes:
        run(command.at(inputs, output, seed=1), log=log)
    before, arguments = figures(output), command.at(inputs, output)
    if kind == "largest file":
        status, text = run(arguments, limit_files, log)
    elif kind == "full disk":
        filler = output / "filler"
        with filler.open("wb") as file:
            file.write(b"0" * max(0, shutil.disk_usage(output).free - FREE))
        status, text = run(arguments, log=log)
        filler.unlink()
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(output)], check=True)
        status, text = run(arguments, log=log)
        subprocess.run(["mount", "-o", "remount,rw", str(output)], check=True)
    after, wrong = figures(output), broken_promises(output)
    kept = kind != "read-only" or after == before
    return {"status": status, "message": _message(text), "traceback": "Traceback" in text, "wrong": wrong, "kept": kept}


def trials(names: Sequence[str], kinds: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Disturb the disk of every command; one result line each.

    Args:
        names: Commands; ``verify`` writes nothing and is left out.
        kinds: Some of ``KINDS``.
        folder: Folder for all files.
    """
    torch.set_num_threads(1)
    inputs, log, lines = folder / "inputs", folder / "log", list[dict[str, Any]]()
    prepare(inputs)
    warm(inputs, [name for name in names if name != "verify"])
    for name in names:
        command, good = COMMANDS[name], folder / "good"
        if name == "verify":
            continue
        good.mkdir()
        run(command.at(inputs, good), log=log)
        for kind in kinds:
            output = folder / "out"
            output.mkdir()
            if kind == "largest file":
                line = disturbed(command, kind, inputs, output, log) | _recovery(command, inputs, output, good, log)
            else:
                with small_disk(output):
                    line = disturbed(command, kind, inputs, output, log)
                    line |= _recovery(command, inputs, output, good, log)
            shutil.rmtree(output)
            lines.append({"kind": "disk", "case": f"{name}, {kind}", "command": name, "disk": kind, **line})
        shutil.rmtree(good)
    return lines


def _recovery(command: Command, inputs: Path, output: Path, good: Path, log: Path) -> dict[str, Any]:
    """Run the command again with a good disk, and compare with an undisturbed run."""
    again, _ = run(command.at(inputs, output), log=log)
    return {"again": again, "same": figures(output) == figures(good), "left": temporary(output)}


def passed(line: dict[str, Any]) -> bool:
    """Return whether a trial ended with a message, lost nothing and could be repeated."""
    fine = line["status"] == REFUSED and line["message"] and not line["traceback"] and not line["wrong"]
    return bool(fine and line["kept"] and line["same"] and line["again"] == 0 and not line["left"])


def _message(text: str) -> str:
    return next((part for part in reversed(text.splitlines()) if part.startswith("probhard: ")), "")[:200]


def main() -> int:
    """Run the trials from the command line; the exit status is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--output", type=Path, default=Path("results"))
    given = parser.parse_args()
    kinds = KINDS if can_mount() else KINDS[-1:]
    with tempfile.TemporaryDirectory() as folder:
        lines = trials(given.commands.split(","), kinds, Path(folder))
    return conclude(lines, passed, "disturbed disks", given.output)


if __name__ == "__main__":
    raise SystemExit(main())
