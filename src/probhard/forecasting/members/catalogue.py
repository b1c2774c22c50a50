"""Members by name, and the default ones for a history.

| name       | model of every series                                                                  |
|------------|----------------------------------------------------------------------------------------|
| ets        | AutoETS; MSTL with a trend by ETS where there are two seasons (hours, days of years)    |
| theta      | AutoTheta; CrostonSBA for series that are 0 in most rows                                |
| ces        | AutoCES                                                                                |
| arima      | AutoARIMA                                                                              |
| naive      | seasonal naive, with deviations                                                        |
| croston    | CrostonSBA                                                                             |
| mstl       | MSTL, also for one season                                                              |
| smoothing  | damped Holt-Winters of a fixed form, all series at once                                |
| bootstrap  | seasonal naive plus past changes over a season, drawn jointly                          |
| deepvar    | DeepVAR, trained end to end on all nodes; a default for long histories, on trial       |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from probhard.errors import check_choice
from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.members.base import LONG as LONG_FOR_NETWORKS
from probhard.forecasting.members.base import Member, past_origins
from probhard.forecasting.members.bootstrap import BootstrapMember
from probhard.forecasting.members.series import SeriesMember, SeriesModel
from probhard.forecasting.members.smoothing import SmoothingMember
from probhard.forecasting.models.defaults import default_horizon

if TYPE_CHECKING:
    from probhard.forecasting.members.network import NetworkForecast

LONG = 150  # rows above which AutoARIMA compares orders by conditional sums of squares, like R's auto.arima
SECOND_SEASON = {
    24: 168,
    48: 336,
    96: 672,
    7: 365,
}  # the longer season beside a short one: weeks of hours, years of days


def build(kind: str, season: int, **options: Any) -> Any:
    """Make an unfitted model of statsforecast."""
    models = require("statsforecast.models", "A member")
    if kind in ("CrostonSBA",):
        return models.CrostonSBA()
    if kind == "MSTL":
        return models.MSTL(season_length=options["seasons"], trend_forecaster=models.AutoETS(model="ZZN"))
    return getattr(models, kind)(season_length=season, **options)


def same_form(season: int, fitted: Any) -> Any:
    """An unfitted model that is restricted to the form of a fitted one, of AutoETS, AutoCES or AutoARIMA."""
    if type(fitted).__name__ == "AutoCES":
        return build("AutoCES", season, model=fitted.model_["seasontype"])
    if type(fitted).__name__ == "AutoARIMA":
        p, q, sp, sq, period, d, sd = fitted.model_["arma"]
        drift = any(name in fitted.model_["coef"] for name in ("drift", "intercept"))
        order = {"order": (p, d, q), "seasonal_order": (sp, sd, sq), "include_constant": drift}
        return build("ARIMA", period, **order)
    error, trend, seasonal, damped = fitted.model_["components"]
    return build("AutoETS", season, model=f"{error}{trend}{seasonal}", damped=damped != "N")


def seasons(data: HierarchicalData) -> list[int]:
    """Season lengths that the history shows at least three times (years of days: twice)."""
    second, rows = SECOND_SEASON.get(data.season), len(data.index)
    return [data.season] + ([second] if second and rows >= (2 if second == 365 else 3) * second else [])


SERIES: dict[str, Callable[[HierarchicalData], SeriesModel]] = {
    "ets": lambda data: SeriesModel(partial(build, "AutoETS"), data.season, same_form),
    "theta": lambda data: SeriesModel(
        partial(build, "AutoTheta"), data.season, intermittent=partial(build, "CrostonSBA")
    ),
    "ces": lambda data: SeriesModel(partial(build, "AutoCES"), data.season, same_form, forwards=False),  # diverges
    "arima": lambda data: SeriesModel(
        partial(build, "AutoARIMA", approximation=len(data.index) > LONG), data.season, same_form
    ),
    "naive": lambda data: SeriesModel(partial(build, "SeasonalNaive"), data.season),
    "croston": lambda data: SeriesModel(partial(build, "CrostonSBA"), data.season),
    "mstl": lambda data: SeriesModel(partial(build, "MSTL", seasons=seasons(data)), data.season),
}


JOINT = ("smoothing", "bootstrap", "deepvar")
NAMES = (*SERIES, *JOINT)
MANY = 5_000  # series above which all of them are fitted at once
WIDE = 1_000  # series above which no network is trained unasked


def named_member(
    name: str, data: HierarchicalData, network: NetworkForecast | None = None, trial: bool = False
) -> Member:
    """Return the member of a name, for a history.

    Args:
        name: One of ``NAMES``.
        data: The history.
        network: Settings of ``deepvar``.
        trial: Whether ``deepvar`` joins the pool only where past windows show that it helps.

    Raises:
        ParameterError: If there is no such member.
    """
    check_choice("model", name, NAMES)
    if name in SERIES:
        version = getattr(require("statsforecast", f"The member {name!r}"), "__version__", "")
        return SeriesMember(name, SERIES[name](data), {"statsforecast": version, "seasons": seasons(data)})
    if name == "smoothing":
        return SmoothingMember()
    if name == "bootstrap":
        return BootstrapMember()
    from probhard.forecasting.members.network import NetworkForecast, NetworkMember  # needs GluonTS

    return NetworkMember(network or NetworkForecast(), trial)


def default_models(data: HierarchicalData, fast: bool = False, horizon: int | None = None) -> list[str]:
    """Names of the members that a history gets by default.

    Args:
        data: The history.
        fast: Only one member.
        horizon: Number of steps; by default that of the history.
    """
    if len(data.names) > MANY:
        return ["smoothing"]
    if fast:
        return ["ets"]
    names = ["ets", "theta", "naive"] + (["mstl"] if len(seasons(data)) > 1 else [])
    first = past_origins(data, horizon or default_horizon(data))[:1]
    return names + (["deepvar"] if first and first[0] >= LONG_FOR_NETWORKS and len(data.names) <= WIDE else [])


def default_members(
    data: HierarchicalData, horizon: int, fast: bool = False, network: NetworkForecast | None = None
) -> list[Member]:
    """Members that a history gets by default; a network is on trial.

    Args:
        data: The history.
        horizon: Number of steps.
        fast: Only one member.
        network: Settings of ``deepvar``.
    """
    return [named_member(name, data, network, trial=True) for name in default_models(data, fast, horizon)]
