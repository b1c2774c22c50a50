"""The speed suite: records, explanations, rendering, and suites that fail or are not there."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch
from benchmarks.suites import SUITES
from benchmarks.timing import Comparison, Overhead, measured, worst
from experiments.records import Records

import probhard as ph
from benchmarks import report, runner, timing
from probhard.cli import main

FAST = Comparison("box, 4 x 5", "Slowpoke", 3.0, 0.006, 2e-3, 1e-16, 150, memory={"peer": 2_000_000, "ours": 1000})
SLOW = Comparison("row, 4 x 5", "Hare", 0.1, 0.4, 1e-9, 1e-16, 1.0, "It does less.", gradient=(0.15, 1e-9))
LAYER = Overhead("step of a network", 0.1, 0.13, 1.05)


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture
def single():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_slower_case_needs_an_explanation():
    with pytest.raises(ph.ParameterError, match=r"ratio 0\.50 and no explanation") as error:
        Comparison("case", "peer", 1.0, 2.0, 0.0, 0.0).record()
    assert error.value.fix
    assert Comparison("case", "peer", 1.0, 2.0, 0.0, 0.0, explanation="why").record()["explanation"] == "why"
    assert Comparison("case", "peer", 2.0, 1.0, 0.0, 0.0).record()["explanation"] == ""


@pytest.mark.parametrize(
    ("violation", "gradient", "said"),
    [
        (8e-3, None, "peer is wrong: it is off by 8.0e-03 (relative)."),
        (float("nan"), None, "peer is wrong: it is off by nan (relative)."),
        (1e-9, (0.15, 0.0), "peer is wrong: its gradient is off by 15 %."),
        (1e-9, (float("nan"), 0.0), "peer is wrong: its gradient is off by nan %."),
        (1e-9, (1e-4, 0.5), ""),
        (None, None, ""),
    ],
)
def test_a_wrong_peer_is_called_wrong(violation, gradient, said):
    record = Comparison("case", "peer", 2.0, 1.0, violation, 0.0, gradient=gradient).record()
    assert record["explanation"] == said
    assert record["wrong"] == bool(said)


def test_violations_are_relative_to_the_point():
    points = torch.tensor([[1.0, 200.0], [-0.5, 10.0]])
    assert worst(ph.NonNegative(), points) == pytest.approx(0.05)
    assert worst(ph.NonNegative(), torch.zeros(3, 2)) == 0.0


def test_measured_runs_in_turn_and_sees_time_memory_and_values(monkeypatch, single):
    monkeypatch.setenv("BENCH_SECONDS", "0.2")
    order: list[str] = []

    def large() -> str:
        order.append("large")
        busy(0.03)
        return "a" if torch.ones(4_000_000).sum() else ""

    def small() -> str:
        order.append("small")
        busy(0.005)
        return "b"

    big, little = measured(large, small)
    assert (big.value, little.value) == ("a", "b")
    assert 0.03 <= big.seconds < 0.3
    assert 0.005 <= little.seconds < big.seconds
    turns = [name for k, name in enumerate(order) if k == 0 or order[k - 1] != name]
    assert len(turns) >= 6
    assert set(order) == {"large", "small"}
    if big.memory is not None:
        assert big.memory > 20_000_000 > little.memory


def test_a_slow_peer_runs_once_and_its_rival_often(monkeypatch, single):
    monkeypatch.setenv("BENCH_SECONDS", "0.05")
    monkeypatch.setattr(timing, "SLOW", 0.02)
    counts = {"peer": 0, "ours": 0}

    def count(name: str, seconds: float) -> int:
        counts[name] += 1
        busy(seconds)
        return counts[name]

    peer, ours = measured(lambda: count("peer", 0.03), lambda: count("ours", 0.03 if not counts["ours"] else 0.001))
    assert (counts["peer"], peer.value) == (1, 1)
    assert peer.seconds >= 0.03 > ours.seconds
    assert ours.value == 2
    assert counts["ours"] > 3


def test_lines_become_a_page_and_a_picture(tmp_path):
    about = {"family": "moreau", "versions": {"torch": "2", "moreau": "0.4"}, "date": "2026-01-02", "load": 0.5}
    Records(tmp_path / "speed.jsonl", ("case", "peer")).append(
        {**SLOW.record(), **about, "ratio": 77.0},
        {**FAST.record(), **about},
        {**SLOW.record(), **about},
    )
    Records(tmp_path / "overhead.jsonl", ("case",)).append({**LAYER.record(), **about, "family": "operators"})
    ended = {"suite": "pinet", "status": "missing", "reason": "pinet-hcnn is not installed", "seconds": 1, "load": 0.5}
    Records(tmp_path / "suites.jsonl", ("suite",)).append(ended)
    written = runner.render(tmp_path)
    assert [path.name for path in written] == ["speed.md", "speed.png"]
    assert written[1].read_bytes()[:4] == b"\x89PNG"
    page = written[0].read_text()
    assert "1 of 3 goals are met. Wrong in at least one case: Hare, Slowpoke." in page
    assert "- Missed: row, 4 x 5 against Hare, ratio 0.25, goal 1." in page
    assert "- Missed: step of a network, factor 1.3, goal 1.05." in page
    assert "| box, 4 x 5 [2] | Slowpoke (wrong) | 3,000 | 6 | 500 | >= 150 | 2e-03 | 1e-16 | 2.0 | 0.0 |" in page
    assert "| row, 4 x 5 [1] | Hare (wrong) | 100 | 400 | **0.25** | >= 1 | 1e-09 | 1e-16 |  |  |" in page
    assert "[1] Hare is wrong: its gradient is off by 15 %. It does less." in page
    assert "| step of a network | 100 | 130 | **1.300** | <= 1.05 |" in page
    assert "| pinet | missing | 1 | pinet-hcnn is not installed |" in page
    assert page.index(SUITES["moreau"].title) < page.index(SUITES["operators"].title)
    assert "1 thread; torch 2, moreau 0.4; 2026-01-02; load of the machine 0.5 to 0.5" in page
    kept = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [(line["case"], line["ratio"]) for line in kept] == [("row, 4 x 5", 0.25), ("box, 4 x 5", 500)]


def test_nothing_is_rendered_from_nothing(tmp_path):
    assert [path.name for path in report.write(tmp_path, [], [], [])] == ["speed.md"]


def test_a_suite_that_fails_is_reported_and_the_rest_goes_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(runner, "LONGEST", 2)
    lines = tmp_path / "speed.jsonl"
    result = json.dumps({**FAST.record(), "family": "scores"})
    programs = {
        "qpth": "import sys; sys.exit('qpth is not installed: get it')",
        "moreau": "raise RuntimeError('the solver broke')",
        "pinet": "import time; time.sleep(30)",
        "scores": f"import sys; open(sys.argv[1], 'a').write({result!r} + '\\n')",
    }

    def command(name, folder, quick):
        assert not quick
        return [sys.executable, "-c", programs[name], str(folder / lines.name)]

    runner.run(list(programs), tmp_path, command=command)
    ends = {line["suite"]: line for line in map(json.loads, (tmp_path / "suites.jsonl").read_text().splitlines())}
    assert {name: (line["status"], line["reason"]) for name, line in ends.items()} == {
        "qpth": ("missing", "qpth is not installed: get it"),
        "moreau": ("failed", "RuntimeError: the solver broke"),
        "pinet": ("failed", "not done after 2 s"),
        "scores": ("done", ""),
    }
    page = (tmp_path / "speed.md").read_text()
    assert "Slowpoke" in page
    assert "| moreau | failed |" in page
    assert "the solver broke" in capfd.readouterr().err


def test_an_interrupt_keeps_what_is_there(tmp_path):
    lines = Records(tmp_path / "speed.jsonl", ("case", "peer"))

    def command(name, folder, quick):
        if name == "scores":
            raise KeyboardInterrupt
        lines.append(FAST.record())
        return [sys.executable, "-c", ""]

    with pytest.raises(KeyboardInterrupt):
        runner.run(["qpth", "scores"], tmp_path, command=command)
    assert len(lines.read()) == 1
    assert Records(tmp_path / "suites.jsonl", ("suite",)).read()[0]["suite"] == "qpth"


def test_the_command_names_its_suites(tmp_path, capsys, monkeypatch):
    assert main(["bench", "speed", "--problems", "unicycle", "--output", str(tmp_path)]) == 2
    assert "unicycle" in capsys.readouterr().err
    assert main(["bench", "speed", "--render", "--quick", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "quick" / "speed" / "speed.md").exists()
    monkeypatch.chdir(tmp_path)
    module = sys.modules["probhard.cli.bench"]  # the package has a function of that name
    monkeypatch.setattr(module, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "bench.py"))
    assert main(["bench", "speed"]) == 2
    message = capsys.readouterr().err
    assert "experiments/ beside the package" in message
    assert "checkout" in message


def test_a_suite_runs_in_its_process_and_writes_its_lines(tmp_path, capfd):
    runner.run(["conservation"], tmp_path, quick=True)
    speed, overhead = ([json.loads(x) for x in (tmp_path / f"{n}.jsonl").open()] for n in ("speed", "overhead"))
    assert [line["peer"] for line in speed] == ["dense n x n projector"]
    line = speed[0]
    assert line["ratio"] == pytest.approx(line["peer_seconds"] / line["our_seconds"], rel=1e-6)
    assert line["our_violation"] < 1e-5
    assert line["threads"] == 1
    assert {"torch", "numpy"} <= set(line["versions"])
    assert len(overhead) == 3
    assert all(line["factor"] == pytest.approx(line["our_seconds"] / line["base_seconds"]) for line in overhead)
    assert "dense n x n projector" in capfd.readouterr().out


def test_every_suite_is_a_module_or_is_said_to_be_missing(tmp_path):
    for name, suite in SUITES.items():
        path = runner.ROOT / "benchmarks" / f"{suite.module}.py"
        assert path.exists() or suite.reports, name
    assert runner.command("growth", tmp_path, False)[-1] == "benchmarks.growth"
    assert "growth" not in runner.chosen([], quick=True)
    assert set(runner.chosen([])) == set(SUITES)
