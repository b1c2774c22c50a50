"""The speed suite: ``python -m benchmarks [suite ...] [--quick] [--render] [--output FOLDER]``, by default all."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import runner
from benchmarks.suites import SUITES


def main() -> None:
    """Run suites and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"some of {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="rough figures, to results/quick/speed")
    parser.add_argument("--render", action="store_true", help="only write the report of existing lines")
    parser.add_argument("--output", type=Path, help="folder of lines and report")
    given = parser.parse_args()
    folder = given.output or (runner.ROOT / "results" / "quick" / "speed" if given.quick else runner.FOLDER)
    for path in runner.render(folder) if given.render else runner.run(given.suites, folder, given.quick):
        print(f"Written: {path}")


if __name__ == "__main__":
    main()
