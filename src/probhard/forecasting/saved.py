"""The folder of a saved forecaster, plain files only.

    forecaster.json (settings) + history.npz (values and hierarchy) + predictor/ (the trained network)

Reading these files never runs code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import narwhals as nw
import numpy as np

from probhard.constraints import Hierarchy
from probhard.forecasting.data.stamps import Place
from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.storage import constraint_from_record, constraint_record, read_arrays, read_record

FORMAT, FORMAT_VERSION = "probhard-forecaster", 4
COLUMNS = {"id_col": "unique_id", "time_col": "ds", "target_col": "y"}


@dataclass(frozen=True, eq=False)
class SavedForecaster:
    """The content of the folder.

    Args:
        data, predictor: The fitted history and the trained network.
        keys: Key columns, if the hierarchy was built from them.
        method: Name of the method; None if it is not named, then the predictor holds it.
        options: Arguments of ``HierarchicalForecaster`` by name, without the law's family.
        spread_factor, learns_changes: Results of the fit.
        reading: Options of ``from_frame``.
        like: One row of the fitted frame, whose library and stamp type forecasts have.
    """

    data: HierarchicalData
    predictor: DeepVARPredictor
    keys: Sequence[str] | Sequence[Sequence[str]] | None
    method: str | None
    options: Mapping[str, Any]
    spread_factor: float
    learns_changes: bool
    reading: Mapping[str, Any]
    like: Any

    def write(self, path: Path) -> None:
        """Write all files to the folder ``path``, which is created if need be."""
        self.predictor.serialize(path / "predictor")
        data, (hierarchy, arrays) = self.data, constraint_record(self.data.hierarchy)
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "keys": self.keys,
            "method": self.method,
            "options": self.options,
            "spread_factor": self.spread_factor,
            "learns_changes": self.learns_changes,
            "reading": self.reading,
            "like": _frame_record(self.like, self.reading),
            "hierarchy": hierarchy,
            "data": {
                "start": str(data.index[0]),
                "freq": data.freq,
                "season": data.season,
                "name": data.name,
                "place": asdict(data.place),
            },
        }
        (path / "forecaster.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        np.savez(path / "history.npz", values=data.values, **arrays)

    @classmethod
    def read(cls, path: Path) -> SavedForecaster:
        """Read all files of the folder ``path``.

        Raises:
            ParameterError: If a file is missing or damaged, or of another format or version.
        """
        content = read_record(path / "forecaster.json", FORMAT, FORMAT_VERSION, "HierarchicalForecaster.save")
        pandas = require("pandas", "HierarchicalForecaster")
        predictor = DeepVARPredictor.deserialize(path / "predictor")
        arrays = read_arrays(path / "history.npz")
        hierarchy, values = cast(Hierarchy, constraint_from_record(content["hierarchy"], arrays)), arrays["values"]
        about, reading = content["data"], content["reading"]
        index = pandas.period_range(about["start"], periods=len(values), freq=about["freq"])
        calendar = {"season": about["season"], "name": about["name"], "place": Place(**about["place"])}
        return cls(
            HierarchicalData(values, index, hierarchy, **calendar),
            predictor,
            content["keys"],
            content["method"],
            content["options"],
            content["spread_factor"],
            content["learns_changes"],
            reading,
            _frame(content["like"], reading),
        )


def _frame_record(like: Any, reading: Mapping[str, Any]) -> list[str] | None:
    """Record a frame's library and the type and value of its first stamp, for ``_frame``."""
    if like is None:
        return None
    table = nw.from_native(like, eager_only=True)
    column = table.get_column(reading.get("time_col", COLUMNS["time_col"]))
    types = {nw.Date: "date", nw.Datetime: "datetime", nw.String: "text"}
    stamp_type = next((text for dtype, text in types.items() if column.dtype == dtype), "other")
    return [nw.get_native_namespace(table).__name__, stamp_type, str(column.to_list()[0])]


def _frame(record: Sequence[str] | None, reading: Mapping[str, Any]) -> Any:
    """Build a frame of one row with the recorded library and stamp."""
    if record is None:
        return None
    library, stamp_type, text = record
    stamp: Any = text
    if stamp_type in ("date", "datetime"):
        stamp = require("pandas", "HierarchicalForecaster").Timestamp(text).tz_localize(None).to_pydatetime()
        stamp = stamp.date() if stamp_type == "date" else stamp
    content = {} if stamp_type == "other" else {reading.get("time_col", COLUMNS["time_col"]): [stamp]}
    return require(library, "HierarchicalForecaster").DataFrame(content)
