"""The result of a comparison: rows, a frame, a table as text, and a picture."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probhard._util.atomic import replacing
from probhard.errors import optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALLEST = 1e-16  # violation that a logarithmic axis shows for 0
FEASIBLE, OTHER = "#2a78d6", "#9aa5b1"
COLUMNS = {  # of the printed table
    "mse": "MSE",
    "crps": "CRPS",
    "energy_score": "energy score",
    "violation_mean": "of means",
    "violation_draws": "of draws",
    "train_seconds": "train s",
    "predict_seconds": "predict s",
}


@dataclass(frozen=True)
class Row:
    """One method with one seed.

    Args:
        method: Its name.
        seed: Seed of weights, data order and draws.
        reason: Why there are no figures; empty if there are.
        feasible: Whether every draw is feasible by design, and none was seen to violate the constraint.
        mse: Mean squared error of the mean.
        crps: CRPS of draws, unbiased; the absolute error for points.
        energy_score: Energy score of draws.
        violation_mean: Largest violation of a mean.
        violation_draws: Largest violation of a draw.
        violating: Share of draws that violate the constraint by more than 1e-6, relative.
        train_seconds: Processor time of training.
        predict_seconds: Processor time of means and draws of all test samples.
        epochs: Number of epochs trained.
    """

    method: str
    seed: int
    reason: str = ""
    feasible: bool = False
    mse: float = math.nan
    crps: float = math.nan
    energy_score: float = math.nan
    violation_mean: float = math.nan
    violation_draws: float = math.nan
    violating: float = math.nan
    train_seconds: float = math.nan
    predict_seconds: float = math.nan
    epochs: int = 0


@dataclass(frozen=True)
class Comparison:
    """Rows of a comparison.

    Args:
        rows: One for each method and seed.
    """

    rows: tuple[Row, ...]

    @property
    def measured(self) -> tuple[Row, ...]:
        """Rows with figures."""
        return tuple(row for row in self.rows if not row.reason)

    @property
    def skipped(self) -> dict[str, str]:
        """The reason of every method that has no figures."""
        return {row.method: row.reason for row in self.rows if row.reason}

    @property
    def frame(self) -> Any:
        """All rows as a pandas frame.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return optional("pandas", "frames", "Comparison.frame").DataFrame([asdict(row) for row in self.rows])

    def means(self) -> list[Row]:
        """One row for each method that was measured: means over seeds, and the largest violations."""
        found = []
        for name in dict.fromkeys(row.method for row in self.measured):
            rows = [row for row in self.measured if row.method == name]
            values = {field.name: [getattr(row, field.name) for row in rows] for field in fields(Row)}
            figures = {key: sum(values[key]) / len(rows) for key in (*COLUMNS, "violating")}
            figures |= {key: max(values[key]) for key in ("violation_mean", "violation_draws")}
            epochs = round(sum(values["epochs"]) / len(rows))
            found.append(Row(name, rows[0].seed, feasible=all(values["feasible"]), epochs=epochs, **figures))
        return found

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write all rows to a CSV file; returns its path."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        with replacing(Path(path)) as partial:
            partial.write_text(text.getvalue(), encoding="utf-8")
        return Path(path)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw CRPS, energy score, violation of draws and training time of every method.

        Args:
            path: File to write; None for none.

        Returns:
            The figure.
        """
        from matplotlib.figure import Figure

        rows = self.means()[::-1]
        panels = {
            "CRPS": [row.crps for row in rows],
            "energy score": [row.energy_score for row in rows],
            "largest violation of draws": [max(row.violation_draws, SMALLEST) for row in rows],
            "training, processor seconds": [row.train_seconds for row in rows],
        }
        figure = Figure(figsize=(11, 1.2 + 0.32 * max(4, len(rows))), dpi=110, layout="constrained")
        for place, (axes, (title, values)) in enumerate(zip(figure.subplots(1, 4), panels.items())):
            axes.barh(range(len(rows)), values, color=[FEASIBLE if row.feasible else OTHER for row in rows])
            axes.set_yticks(range(len(rows)), [row.method for row in rows] if place == 0 else [""] * len(rows))
            axes.set_title(title, fontsize=9)
            axes.tick_params(labelsize=8)
            if "violation" in title:
                axes.set_xscale("log")
                axes.set_xlim(left=SMALLEST)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        figure.suptitle("blue: every draw is feasible by design", fontsize=9)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        """A table of means over seeds, and the reasons of methods without figures."""
        width = max([len("method"), *(len(row.method) for row in self.rows)]) + 2
        lines = ["method".ljust(width) + "".join(f"{title:>13s}" for title in COLUMNS.values()) + "  feasible"]
        for row in self.means():
            cells = "".join(f"{getattr(row, key):13.4g}" for key in COLUMNS)
            lines.append(row.method.ljust(width) + cells + ("  yes" if row.feasible else "  no"))
        return "\n".join([*lines, *_reasons(self.skipped)])


def _reasons(skipped: dict[str, str]) -> Sequence[str]:
    return [f"{name}: {reason}" for name, reason in skipped.items()]
