"""The folder of a saved forecaster, plain files only.

    forecaster.json (settings, what was learned) + history.npz (values and hierarchy)
    + members/ (forecasts and parameters of each member) + predictor/ (the trained network, if there is one)

Reading these files never runs code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import narwhals as nw

from probhard._util.atomic import replacing_parts
from probhard.constraints import Hierarchy
from probhard.errors import ParameterError
from probhard.forecasting.data.stamps import Place
from probhard.forecasting.data.stored import extra_arrays, with_extras
from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.members.network import NetworkForecast
from probhard.forecasting.members.pooled import PooledForecast
from probhard.forecasting.members.stored import network_of, read_pool, write_pool
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.storage import constraint_from_record, constraint_record, read_arrays, read_record
from probhard.io.fields import write_npz

if TYPE_CHECKING:
    from probhard.forecasting.forecaster import HierarchicalForecaster

FORMAT, FORMAT_VERSION = "probhard-forecaster", 5
MAIN = "forecaster.json"  # a folder is complete when it has this file
PARTS = ("members", "predictor", "history.npz", MAIN)
SAVED = ("freq", "season", "horizon", "nonnegative", "upper", "changes", "calibrate", "epochs", "num_samples", "seed")
COLUMNS = {"id_col": "unique_id", "time_col": "ds", "target_col": "y"}


@dataclass(frozen=True, eq=False)
class SavedForecaster:
    """The content of the folder.

    Args:
        data: The fitted history.
        fit: The fitted members, or DeepVAR alone.
        keys: Key columns, if the hierarchy was built from them.
        method: Name of the network's method; None if it is not named, then the predictor holds it.
        options: Arguments of ``HierarchicalForecaster`` by name, without the law's family.
        reading: Options of ``from_frame``.
        like: One row of the fitted frame, whose library and stamp type forecasts have.
    """

    data: HierarchicalData
    fit: PooledForecast | NetworkForecast
    keys: Sequence[str] | Sequence[Sequence[str]] | None
    method: str | None
    options: Mapping[str, Any]
    reading: Mapping[str, Any]
    like: Any

    @classmethod
    def of(cls, forecaster: HierarchicalForecaster) -> SavedForecaster:
        """What a fitted forecaster writes.

        Raises:
            ParameterError: Before ``fit``.
        """
        data, fit = forecaster._fitted()
        network = {
            name: value for name, value in forecaster.network.items() if name != "family"
        }  # the predictor has it
        options = {**{name: getattr(forecaster, name) for name in SAVED}, **network}
        method = forecaster.method if isinstance(forecaster.method, str) else None
        return cls(data, fit, forecaster.keys, method, options, forecaster.reading, forecaster.like)

    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor that give the same forecaster, without the fit."""
        data, hierarchy, S = self.data, self.data.hierarchy, None
        if self.keys is None:
            frame = require("pandas", "HierarchicalForecaster").DataFrame
            S = frame(hierarchy.summation.toarray(), data.names, data.names[hierarchy.aggregates :])
        tags = None if self.keys or not hierarchy.tags else hierarchy.tags
        network, method = network_of(self.fit), self.method
        options = dict(self.options)
        if network is not None and network.predictor is not None:
            trained = network.predictor.prediction_net
            method = method or trained.method
            options["family"] = trained.network.family
        return {"keys": self.keys, "S": S, "tags": tags, "method": method, **options}

    def write(self, path: Path) -> None:
        """Write all files to the folder ``path``, which is created if need be; an earlier model stays until then."""
        with replacing_parts(path, PARTS) as new:
            self._write(new)

    def _write(self, path: Path) -> None:
        network = network_of(self.fit)
        if network is not None and network.predictor is not None:
            network.predictor.serialize(path / "predictor")
        data, (hierarchy, arrays) = self.data, constraint_record(self.data.hierarchy)
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "keys": self.keys,
            "method": self.method,
            "options": self.options,
            "network": None if network is None else network.learned,
            "pool": write_pool(self.fit, path / "members") if isinstance(self.fit, PooledForecast) else None,
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
        (path / MAIN).write_text(json.dumps(content, indent=1), encoding="utf-8")
        write_npz(path / "history.npz", {"values": data.values, **arrays, **extra_arrays(data)})

    @classmethod
    def read(cls, path: Path) -> SavedForecaster:
        """Read all files of the folder ``path``.

        Raises:
            ParameterError: If a file is missing or damaged, or of another format or version.
        """
        content = read_record(path / MAIN, FORMAT, FORMAT_VERSION, "HierarchicalForecaster.save")
        pandas = require("pandas", "HierarchicalForecaster")
        arrays = read_arrays(path / "history.npz")
        hierarchy, values = cast(Hierarchy, constraint_from_record(content["hierarchy"], arrays)), arrays["values"]
        about, reading = content["data"], content["reading"]
        index = pandas.period_range(about["start"], periods=len(values), freq=about["freq"])
        calendar = {"season": about["season"], "name": about["name"], "place": Place(**about["place"])}
        data = with_extras(HierarchicalData(values, index, hierarchy, **calendar), arrays)
        network = None
        if content["network"] is not None:
            network = NetworkForecast(predictor=DeepVARPredictor.deserialize(path / "predictor"), **content["network"])
        fit: Any = network
        if content["pool"] is not None:
            fit = read_pool(content["pool"], path / "members", data, network)
        method, options, like = content["method"], content["options"], _frame(content["like"], reading)
        return cls(data, fit, content["keys"], method, options, reading, like)


def check_same_series(data: HierarchicalData, before: HierarchicalData) -> None:
    """Raise unless a new history has the nodes, the sums and the frequency of the fitted one.

    Raises:
        ParameterError: If it has not.
    """
    same_sums = data.names == before.names and not (data.hierarchy.summation != before.hierarchy.summation).nnz
    if same_sums and data.freq == before.freq:
        return
    other = sorted(set(data.names) ^ set(before.names))
    nodes = f"other nodes ({other[0]!r})" if other else "other sums"
    difference = f"the frequency {data.freq}" if same_sums else nodes
    raise ParameterError(
        f"The new history has {difference}; the fitted one had {len(before.names)} nodes, {before.freq}.",
        "What was fitted belongs to its nodes and steps.",
        "Pass the same series at the same frequency, or call fit.",
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
