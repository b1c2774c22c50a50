"""The rows of the table of hierarchical forecasts, its data sets, and the training settings of each."""

from __future__ import annotations

from dataclasses import dataclass

from probhard.forecasting.models import classical
from probhard.method import METHODS, Method, Step

DATASETS = ("labour", "tourism", "tourism_large", "traffic", "wiki")
SAMPLES = 400  # paths per forecast
KEYS = ("dataset", "method", "seed", "window", "origin")


@dataclass(frozen=True)
class Setting:
    """Training of DeepVAR on a data set, the same for all methods; the values are the reference code's."""

    epochs: int
    batch_size: int
    lr: float
    context: int
    origins: int = 8  # of the rolling evaluation
    step: int | None = None  # rows between origins; None is the horizon
    arima_origins: int = 8


SETTINGS = {
    "labour": Setting(5, 32, 1e-2, 24),
    "tourism": Setting(10, 32, 1e-2, 24, step=1),  # 36 rows in all
    "tourism_large": Setting(10, 4, 1e-3, 36, arima_origins=2),
    "traffic": Setting(10, 32, 1e-3, 40),
    "wiki": Setting(25, 32, 1e-3, 15),
}


def _nll(name: str) -> Method:
    return METHODS[name].replace(score="nll")


TRAINED: dict[str, dict[str, Method]] = {  # trained networks, and the rows that use each
    "base": {"base": METHODS["base"], "probconserv": METHODS["probconserv"]},
    "base-nll": {"base-nll": _nll("base"), "probconserv-nll": _nll("probconserv")},
    "base-centred": {"base-centred": METHODS["base"]},
    **{name: {name: METHODS[name]} for name in ("probhard-or", "probhard-ob", "hier-e2e", "hardc", "softc")},
}
SCALINGS = {"base-centred": "centre"}  # of series; "mean" for the others, as in the reference code
ROLLED = ("base", "probhard-or", "probhard-ob", "hier-e2e")
NAIVE = ("last-value", "seasonal-naive", "seasonal-bootstrap")
CLASSICAL = tuple(f"{model}-{row}" for model in classical.MODELS for row in classical.ROWS)
POOL, DEFAULT = "probhard-pool", "probhard-default"
POOLED: dict[str, tuple[Method, str]] = {  # networks of the pool: their method and the scaling of series
    "probhard-or": (METHODS["probhard-or"], "mean"),
    "probhard-or, centred": (METHODS["probhard-or"], "centre"),
    "base, projected": (Method(inference=Step("orthogonal")), "mean"),
}
POOLED_ROWS = ("bu-normal", "mint-normal")  # of ETS
POOL_WINDOWS, POOL_STEPS = 3, 8  # least windows and steps that fit the weights
TREELIKE = ("labour", "tourism", "traffic", "wiki")  # permbu needs a tree
