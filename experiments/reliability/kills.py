"""Kills: every command ended by SIGKILL, SIGTERM and SIGINT at random points, and run again.

After a kill, every file under its final name must be whole and every certificate must hold. After the second run, all
figures must be those of an undisturbed run, and no temporary file may be left. Every other trial starts over the
results of a run with another seed, whose certificate must not survive beside new files.

    python -m experiments.reliability.kills --count 50 --output results
"""

from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.reliability.commands import COMMANDS, Child, Command, prepare, run, timed, warm
from experiments.reliability.remains import broken_promises, figures, temporary
from experiments.reliability.verdict import conclude

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
STATUS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 143, "SIGINT": 130}


class Trial:
    """A place for the trials: inputs, and what an undisturbed run of every command gives.

    Args:
        folder: Folder of all files, which is filled.
        names: Commands.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.inputs = folder, folder / "inputs"
        prepare(self.inputs)
        warm(self.inputs, names)
        self.expected, self.seconds = dict[str, dict[str, Any]](), dict[str, float]()
        for name in names:
            output = self.fresh("undisturbed")
            status, self.seconds[name] = timed(COMMANDS[name].at(self.inputs, output), folder / "log")
            if status:
                raise RuntimeError(f"The undisturbed {name} ended with {status}: {(folder / 'log').read_text()}")
            self.expected[name] = figures(output)

    def fresh(self, name: str) -> Path:
        """Return an empty folder."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def kill(self, command: Command, name: str, share: float, over: bool) -> dict[str, Any]:
        """End a command after a share of its time, run it again, and compare.

        Args:
            command: The command.
            name: Name of the signal.
            share: Share of the undisturbed time.
            over: Start in a folder with the results of another seed.

        Returns:
            The result line without its key.
        """
        output = self.fresh("out")
        if over and not command.resumes:
            run(command.at(self.inputs, output, seed=1), log=self.folder / "log")
        arguments = command.at(self.inputs, output)
        child = Child.start(arguments, self.folder / "log")
        time.sleep(share * self.seconds[command.name])
        hit = not child.ended()
        child.send(SIGNALS[name])
        status, text = child.wait()
        hit = hit and status != 0
        wrong = broken_promises(output)
        again, _ = run(arguments, log=self.folder / "log")
        same = figures(output) == self.expected[command.name]
        return {
            "command": command.name,
            "signal": name,
            "share": share,
            "hit": hit,
            "status": status,
            "expected_status": status == STATUS[name] if hit else True,
            "traceback": "Traceback" in text,
            "wrong": wrong,
            "again": again,
            "same": same,
            "left": temporary(output),
        }


def trials(count: int, names: Sequence[str], folder: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Make ``count`` kills that hit a running command, over all commands and signals in turn.

    Args:
        count: Number of kills.
        names: Commands.
        folder: Folder for all files.
        seed: Seed of the points in time.

    Returns:
        One result line for each kill.
    """
    torch.set_num_threads(1)
    trial, random, lines = Trial(folder, names), np.random.default_rng(seed), list[dict[str, Any]]()
    number = 0
    while len(lines) < count and number < 4 * count:  # a kill that comes too late is made again
        command = COMMANDS[names[len(lines) % len(names)]]
        name = list(SIGNALS)[(len(lines) // len(names)) % len(SIGNALS)]
        print(f"{len(lines)}: {command.name}, {name}", flush=True)
        line = trial.kill(command, name, float(random.uniform(0, 0.95)), over=bool(random.uniform() < 0.5))
        number += 1
        if line["hit"] or not line["same"] or line["wrong"]:
            lines.append({"kind": "kill", "case": f"{len(lines)}", **line})
    return lines


def passed(line: dict[str, Any]) -> bool:
    """Return whether a kill left nothing half, stale, different or unexplained."""
    fine = line["same"] and line["again"] == 0 and not line["wrong"] and not line["left"] and not line["traceback"]
    return bool(fine and line["expected_status"])


def main() -> int:
    """Run the trials from the command line; the exit status is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = trials(given.count, given.commands.split(","), Path(folder), given.seed)
    return conclude(lines, passed, "kills", given.output)


if __name__ == "__main__":
    raise SystemExit(main())
