"""Models of other libraries as members: statsforecast models, GluonTS estimators, engines of Nixtla.

An engine (``StatsForecast``, ``MLForecast``, ``NeuralForecast``) is asked for its own ``cross_validation`` on past
windows. Members without one-step errors take their errors on the past windows, each relative to its deviation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from probhard.errors import ParameterError
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import Member
from probhard.forecasting.members.catalogue import NAMES, named_member
from probhard.forecasting.members.network import NetworkForecast
from probhard.forecasting.members.series import SeriesMember, SeriesModel


def member_of(model: Any, data: HierarchicalData, network: NetworkForecast | None = None) -> Member:
    """Make a member of a name or of a model of another library.

    Args:
        model: A name in ``catalogue``, a model of statsforecast, or a member.
        data: The history.
        network: Settings of ``deepvar``.

    Raises:
        ParameterError: If the name is unknown, or the object is of another kind.
    """
    if isinstance(model, str):
        return named_member(model, data, network)
    if hasattr(model, "forecast") and hasattr(model, "resume"):
        return model
    if type(model).__module__.startswith("statsforecast"):
        return SeriesMember(str(model), SeriesModel(partial(_again, model), data.season), vars(model), kept=False)
    raise ParameterError(
        f"models has a {type(model).__name__}.",
        "A member is a name, a model of statsforecast, or has forecast and resume.",
        f"Choose among {', '.join(NAMES)}, or pass a model such as statsforecast.models.AutoETS(season_length=12).",
    )


def _again(model: Any, season: int) -> Any:
    """An unfitted copy of a statsforecast model; it has a season length of its own."""
    del season
    return model.new()
