"""A pool in a folder: one npz file for each member, and the numbers that were learned as plain values.

Members of named kinds are read back with their parameters. Other objects are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from probhard.errors import ParameterError
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import Member
from probhard.forecasting.members.bootstrap import BootstrapMember
from probhard.forecasting.members.kept import read_forecast, write_forecast
from probhard.forecasting.members.network import NetworkForecast, NetworkMember
from probhard.forecasting.members.pooled import PooledForecast
from probhard.forecasting.members.series import SeriesMember, SeriesModel
from probhard.forecasting.members.smoothing import SmoothingMember
from probhard.forecasting.members.tuning import TunedPool

KINDS = {SeriesMember: "series", SmoothingMember: "smoothing", BootstrapMember: "bootstrap", NetworkMember: "deepvar"}


def network_of(fit: PooledForecast | NetworkForecast) -> NetworkForecast | None:
    """The trained network of a fit, if it has one."""
    if isinstance(fit, NetworkForecast):
        return fit
    return next((one.state for one in fit.made if isinstance(one.state, NetworkForecast)), None)


def write_pool(pool: PooledForecast, folder: Path) -> dict[str, Any]:
    """Write the members' files; return the rest as plain values.

    Raises:
        ParameterError: If a member is an object that cannot be stored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    members = []
    for number, (member, made) in enumerate(zip(pool.members, pool.made)):
        kind = KINDS.get(type(member))
        if kind is None:
            raise ParameterError(
                f"The member {member.name!r} cannot be saved.",
                "Only members of statsforecast, DeepVAR and those of probhard are plain values.",
                "Keep the forecasts instead, or leave out the member.",
            )
        file = f"{number}.npz"
        write_forecast(folder / file, made)
        season, forwards = (
            (member.model.season, member.model.forwards) if isinstance(member, SeriesMember) else (1, True)
        )
        members.append({"name": member.name, "kind": kind, "file": file, "season": season, "forwards": forwards})
    return {"horizon": pool.horizon, "members": members, "learned": pool.tuned.record(), "notes": pool.notes}


def read_pool(
    content: Mapping[str, Any], folder: Path, data: HierarchicalData, network: NetworkForecast | None
) -> PooledForecast:
    """Read what ``write_pool`` wrote.

    Args:
        content: The plain values.
        folder: Of the members' files.
        data: The fitted history.
        network: The trained network, if a member needs it.

    Raises:
        ParameterError: If a file is missing or damaged.
    """
    members, made = [], []
    for record in content["members"]:
        members.append(_member(record, network))
        file = folder / record["file"]
        try:
            one = read_forecast(file, record["name"], data, ())
        except Exception as error:  # many types, as in models.storage
            raise ParameterError(
                f"{file} cannot be read ({type(error).__name__}).",
                "It is missing or damaged.",
                "Pass a complete folder written by HierarchicalForecaster.save.",
            ) from error
        made.append(one if record["kind"] != "deepvar" else replace(one, state=network))
    return PooledForecast(
        members, made, TunedPool.of(content["learned"]), content["horizon"], notes=list(content["notes"])
    )


def _member(record: Mapping[str, Any], network: NetworkForecast | None) -> Member:
    kind = record["kind"]
    if kind == "series":
        return SeriesMember(record["name"], SeriesModel(_unfitted, record["season"], forwards=record["forwards"]), {})
    if kind == "deepvar":
        return NetworkMember(network or NetworkForecast())
    return SmoothingMember() if kind == "smoothing" else BootstrapMember()


def _unfitted(season: int) -> Any:
    raise ParameterError(
        "A saved member is not fitted again.", "It forecasts with its parameters.", "Build a new forecaster and fit it."
    )
