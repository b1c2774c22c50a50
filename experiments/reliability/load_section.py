"""The section on kills, disks and load of the page of reliability: ``section(folder)`` is its Markdown.

The lines are those of ``kills``, ``disks`` and ``load``, in ``reliability-load.jsonl``. Parts without lines stay out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import templates
from experiments.reliability import disks, kills
from experiments.reliability.verdict import kept

PAGE = Path(__file__).parent / "pages" / "load.md"
Lines = list[dict[str, Any]]


def section(folder: Path) -> str:
    """The section as Markdown, "" without lines.

    Args:
        folder: Folder of the result lines.
    """
    lines = kept(folder).read()
    if not lines:
        return ""
    parts = {kind: [line for line in lines if line["kind"] == kind] for kind in ("kill", "disk", "pool", "training")}
    return templates.fill(
        PAGE,
        {
            "against": _against(parts["kill"], parts["disk"]),
            "kills": len(parts["kill"]),
            "kill_table": _kills(parts["kill"]),
            "disk_table": _disks(parts["disk"]),
            "pool": "\n".join(map(_pool, parts["pool"])),
            "training": "\n".join(map(_training, parts["training"])),
        },
    )


def _against(killed: Lines, disturbed: Lines) -> str:
    failed = [f"{line['command']} by {line['signal']}" for line in killed if not kills.passed(line)]
    failed += [line["case"] for line in disturbed if not disks.passed(line)]
    return f"{len(failed)} trials failed: {'; '.join(failed)}." if failed else ""


def _kills(lines: Lines) -> str:
    rows = []
    for name in dict.fromkeys(line["command"] for line in lines):
        mine = [line for line in lines if line["command"] == name]
        counts = [
            len(mine),
            sum(line["same"] for line in mine),
            sum(bool(line["wrong"]) for line in mine),
            sum(bool(line["left"]) for line in mine),
            sum(line["traceback"] for line in mine),
            sum(not line["expected_status"] for line in mine),
        ]
        rows.append([f"`{name}`", *map(str, counts)])
    names = ["command", "kills", "same", "half or stale files", "temporary files left", "tracebacks", "other statuses"]
    return templates.table(names, rows) if rows else ""


def _disks(lines: Lines) -> str:
    rows = []
    for line in lines:
        told = "a message" if line["message"] and not line["traceback"] else "none"
        lost = "nothing" if line["kept"] and not line["wrong"] else "files"
        again = "same" if line["same"] and not line["left"] else "differs"
        rows.append([f"`{line['command']}`", line["disk"], str(line["status"]), told, lost, again])
    names = ["command", "disk", "exit status", "told", "lost", "second run, good disk"]
    return templates.table(names, rows) if rows else ""


def _pool(line: dict[str, Any]) -> str:
    return (
        f"{line['calls']} calls of `reconcile` with {line['nodes']} nodes in one pool of {line['workers']} processes: "
        f"{line['failed']} failed, {line['different']} differed from one on its own, {line['seconds']:.0f} s in all. "
        f"A call took {line['cpu_seconds']:.2f} s of CPU time (median; {line['alone_seconds']:.2f} s on its own and "
        f"first) and at most {line['peak_megabytes']:.0f} MB."
    )


def _training(line: dict[str, Any]) -> str:
    first, last, slope = (line[name] for name in ("first_megabytes", "last_megabytes", "kilobytes_per_step"))
    return (
        f"{line['steps']:,} training steps in {line['seconds'] / 60:.0f} minutes, each with new constraints: the "
        f"process took {first:.1f} MB after a tenth of the steps and {last:.1f} MB at the end ({last - first:+.1f} MB; "
        f"a line through all readings has {slope:+.3f} kB a step)."
    )
