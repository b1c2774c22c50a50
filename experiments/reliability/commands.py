"""Small runs of every command, for trials that disturb them.

A child process is forked from one that has imported everything, so that a run takes about a second and a signal can hit
any part of its work.
"""

from __future__ import annotations

import csv
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probhard.cli import main
from probhard.io.fields import write_npz

TRAIN = """\
constraints: [conservation: {mass: amount}, nonnegative]
per: time
epochs: 4
batch_size: 4
width: 8
layers: 2
modes: 3
split: [0.5, 0.25, 0.25]
"""


@dataclass(frozen=True)
class Command:
    """A command and its small input.

    Args:
        name: Name of the command.
        arguments: Its arguments, of the folder of inputs and the folder of outputs.
        resumes: Whether a second run goes on with the first, so that settings must not change.
    """

    name: str
    arguments: Callable[[Path, Path], list[str]]
    resumes: bool = False

    def at(self, inputs: Path, output: Path, seed: int = 0) -> list[str]:
        """Return the arguments; another seed gives another result."""
        chosen = [] if self.resumes or self.name == "verify" else ["--seed", str(seed)]
        return [self.name, *self.arguments(inputs, output), *chosen]


def _fields(inputs: Path, output: Path) -> list[str]:
    base = [str(inputs / "fields.npz"), "--constraints", str(inputs / "fields.yaml"), "--draws", "200"]
    return [*base, "--output", str(output / "out.npz"), "--figure", str(output / "out.png")]


def _series(inputs: Path, output: Path) -> list[str]:
    base = [str(inputs / "forecasts.csv"), "--summing", str(inputs / "S.csv"), "--nonnegative", "--draws", "50"]
    return [*base, "--output", str(output / "out.csv")]


def _shop(inputs: Path, output: Path) -> list[str]:
    base = [str(inputs / "shop.csv"), "--keys", "state,region", "--horizon", "3", "--fast", "--no-backtest"]
    return [*base, "--draws", "10", "--output", str(output / "forecast")]


COMMANDS = {
    command.name: command
    for command in (
        Command("project", _fields),
        Command("reconcile", _series),
        Command("forecast", _shop),
        Command(
            "train",
            lambda a, b: [str(a / "waves.npz"), "--config", str(a / "train.yaml"), "--output", str(b / "run")],
            resumes=True,
        ),
        Command("predict", lambda a, b: [str(a / "run"), str(a / "new.npz"), "--output", str(b / "out.npz")]),
        Command("demo", lambda a, b: ["--quick", "--epochs", "2", "--output", str(b / "demo")]),
        Command(
            "bench",
            lambda a, b: ["alarms", "--quick", "--problems", "quaternion", "--output", str(b)],
            resumes=True,
        ),
        Command("verify", lambda a, b: [str(a / "checked" / "out.json")]),
    )
}


def prepare(inputs: Path) -> None:
    """Write the inputs of all commands, and make the run and the certificate that some of them read."""
    inputs.mkdir(parents=True, exist_ok=True)
    random, x, times = np.random.default_rng(0), np.linspace(0, 2, 12), np.linspace(0, 1, 3)
    mean = random.normal(1.0, 0.1, (60, 50))
    arrays = {"mean": mean, "stddev": np.full_like(mean, 0.1), "x": np.linspace(0, 1, 50), "total": np.array(1.0)}
    write_npz(inputs / "fields.npz", arrays)
    (inputs / "fields.yaml").write_text("constraints:\n  - conservation: {mass: total}\n  - nonnegative\n")
    rate = random.uniform(0.5, 2, size=(16, 1, 1))
    solutions = np.exp(-rate * times[:, None]) * np.square(np.sin(x + rate)) + 0.1
    common = {"time": times, "x": x}
    waves = {"parameters": rate[:, 0, 0], "amount": np.asarray(np.trapezoid(solutions, x))}
    write_npz(inputs / "waves.npz", {"solutions": solutions, **waves, **common})
    write_npz(inputs / "new.npz", {**{name: array[:4] for name, array in waves.items()}, **common})
    (inputs / "train.yaml").write_text(TRAIN)
    _write_series(inputs, random)
    _write_shop(inputs, random)
    for name, output in (("train", inputs), ("project", inputs / "checked")):
        output.mkdir(exist_ok=True)
        status, text = run(COMMANDS[name].at(inputs, output))
        if status:
            raise RuntimeError(f"The undisturbed {name} ended with {status}: {text}")


def warm(inputs: Path, names: Sequence[str]) -> None:
    """Run commands in this process once, so that children find everything imported and compiled."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder, (inputs / "log").open("w") as log, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with redirect_stdout(log), redirect_stderr(log):
                status = main(COMMANDS[name].at(inputs, Path(folder)))
        if status:
            raise RuntimeError(f"The undisturbed {name} ended with {status}: {(inputs / 'log').read_text()}")


def _write_series(inputs: Path, random: np.random.Generator) -> None:
    """Forecasts of 4 regions of 10 shops each over 6 months."""
    groups = np.kron(np.eye(4), np.ones(10))
    summing = np.vstack([np.ones((1, 40)), groups, np.eye(40)])
    names = ["Total", *(f"region{i}" for i in range(4)), *(f"shop{i}" for i in range(40))]
    rows: list[list[Any]] = [["unique_id", *names[5:]]]
    rows += [[name, *map(int, row)] for name, row in zip(names, summing)]
    _write_csv(inputs / "S.csv", rows)
    content: list[list[Any]] = [["unique_id", "ds", "ETS", "ETS-lo-80", "ETS-hi-80"]]
    for month in range(1, 7):
        for name, level in zip(names, summing.sum(1)):
            value = float(level * random.uniform(8, 12))
            content.append([name, f"2025-{month:02d}-01", value, 0.8 * value, 1.2 * value])
    _write_csv(inputs / "forecasts.csv", content)


def _write_shop(inputs: Path, random: np.random.Generator) -> None:
    """Monthly sales of four shops in two states."""
    rows: list[list[Any]] = [["state", "region", "date", "sales"]]
    for i, (state, region) in enumerate([("A", "x"), ("A", "y"), ("B", "x"), ("B", "z")]):
        for month in range(36):
            sales = (20 + 30 * i) * (1.2 + np.sin(2 * np.pi * month / 12 + i)) + random.uniform(0, 5)
            rows.append([state, region, f"{2018 + month // 12}-{month % 12 + 1:02d}-01", round(float(sales), 3)])
    _write_csv(inputs / "shop.csv", rows)


def _write_csv(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@dataclass
class Child:
    """A command in a process of its own."""

    process: int
    log: Path

    @classmethod
    def start(cls, arguments: Sequence[str], log: Path, first: Callable[[], None] | None = None) -> Child:
        """Fork and run a command; ``first`` runs in the child before it."""
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        process = os.fork()
        if process:
            os.close(writing)
            os.read(reading, 1)  # until the command begins
            os.close(reading)
            return cls(process, log)
        status = 1
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            warnings.simplefilter("ignore")
            if first is not None:
                first()
            os.write(writing, b"1")
            status = main(arguments)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process, number)

    def wait(self) -> tuple[int, str]:
        """Wait for the end; the exit status (negative for a signal) and the output."""
        _, state = os.waitpid(self.process, 0)
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return os.waitstatus_to_exitcode(state), text

    def ended(self) -> bool:
        """Return whether the process has ended, without taking its status."""
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def run(arguments: Sequence[str], first: Callable[[], None] | None = None, log: Path | None = None) -> tuple[int, str]:
    """Run a command to its end in a child process; exit status and output."""
    return Child.start(arguments, log or Path(f"/tmp/probhard-trial-{os.getpid()}.log"), first).wait()


def timed(arguments: Sequence[str], log: Path) -> tuple[int, float]:
    """Run a command to its end; exit status and seconds."""
    started = time.perf_counter()
    status, _ = run(arguments, log=log)
    return status, time.perf_counter() - started
