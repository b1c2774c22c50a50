"""Several processes: the same results as one, processes that die, and runs that are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecasting.helpers import KEYS, frame
from probhard.forecasting import from_frame
from probhard.forecasting.members import workers
from probhard.forecasting.members.catalogue import build, named_member
from probhard.forecasting.members.kept import kept_forecast
from probhard.forecasting.members.series import SeriesMember, SeriesModel, seasonal_naive

pytest.importorskip("statsforecast")


def dying(season: int) -> Any:
    """End the process, unless it is the one of the test."""
    if os.environ.get("PROBHARD_TEST_PARENT") != str(os.getpid()):
        os._exit(1)
    return build("SeasonalNaive", season)


def test_results_do_not_depend_on_the_number_of_processes() -> None:
    data = from_frame(frame(60), KEYS)
    member = named_member("ets", data)
    one, two = (member.forecast(data, 3, (54, 57), jobs) for jobs in (1, 2))
    assert one.notes == two.notes
    assert json.dumps(one.state) == json.dumps(two.state)  # NaN equals NaN as text
    for first, second in zip(one.bases, two.bases):
        for name in ("mean", "stddev", "fitted"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_a_process_that_dies_becomes_a_note_and_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBHARD_TEST_PARENT", str(os.getpid()))
    data = from_frame(frame(60), KEYS)
    member = SeriesMember("dying", SeriesModel(dying, 12), {})
    made = kept_forecast(member, data, 3, (57,), tmp_path / "fits", 2)
    assert not made.complete
    assert len(made.notes) == 1
    assert "7 series" in made.notes[0]
    assert "a process died" in made.notes[0]
    np.testing.assert_allclose(made.bases[-1].mean[:, 0], seasonal_naive(data.values[:, 0], 3, 12)[0])
    assert not (tmp_path / "fits").exists()


def test_processes_are_ended_when_a_run_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it\n"
        "import numpy as np\n"
        "from probhard.forecasting.members.workers import run_series\n"
        "class Slow:\n"
        "    def run(self, values, horizon, origins):\n"
        f"        pathlib.Path({str(tmp_path)!r}, f'worker-{{os.getpid()}}').touch()\n"
        "        time.sleep(300)\n"
        "if __name__ == '__main__':\n"
        "    run_series(Slow(), [np.zeros(3)] * 16, 1, (), 2)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True, start_new_session=True)
    started = time.monotonic()
    while len(list(tmp_path.glob("worker-*"))) < 2 and time.monotonic() - started < 200:
        time.sleep(0.2)
    children = [int(path.name.split("-")[1]) for path in tmp_path.glob("worker-*")]
    assert len(children) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=200)
    assert process.returncode != 0
    assert errors.count("KeyboardInterrupt") <= 1  # the parent's alone
    assert not any(_alive(child) for child in children)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_few_series_need_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ProcessPoolExecutor", None)
    data = from_frame(frame(60), KEYS)
    assert named_member("naive", data).forecast(data, 2, (), 16).complete
