"""Options of ``probhard forecast``: from the command line, and from a YAML file.

The file may hold every option by its name (with "_"), and options of ``from_frame`` (freq, season, on_gap, coherence),
of ``HierarchicalForecaster`` (upper, num_samples, changes, calibrate) and of ``DeepVAREstimator``.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probhard.cli._frames import SUFFIXES
from probhard.errors import ParameterError, check_choice
from probhard.forecasting.data.keys import Keys
from probhard.forecasting.members.catalogue import NAMES
from probhard.io.settings import Reader, at_least, listed, number, setting, switch, whole, within, word
from probhard.io.spec import read_spec
from probhard.laws.family import NORMAL, Family
from probhard.laws.student_t import student_t
from probhard.method import METHODS

DEFAULTS: dict[str, Any] = {
    "keys": [],
    "horizon": None,
    "nonnegative": False,
    "level": [80.0, 95.0],
    "models": None,
    "fast": False,
    "jobs": 1,
    "model": None,
    "method": None,
    "output": None,
    "draws": None,
    "format": "csv",
    "seed": 0,
    "epochs": None,
    "time_column": None,
    "target_column": None,
    "upper": None,
    "fixed": None,
    "immutable": [],
    "regressors": [],
    "future": None,
    "country_holidays": None,
    "windows": 3,
    "backtest": True,
    "num_samples": 1000,
    "changes": None,
    "calibrate": True,
}
READING = ("freq", "season", "on_gap", "coherence")  # options of from_frame
FORECASTER = (  # options of HierarchicalForecaster
    "models",
    "fast",
    "jobs",
    "method",
    "nonnegative",
    "upper",
    "horizon",
    "changes",
    "calibrate",
    "epochs",
    "num_samples",
    "seed",
)
SET_BY_THE_RUN = (  # parameters of DeepVAREstimator that are no options
    "freq",
    "prediction_length",
    "hierarchy",
    "constraint",
    "num_parallel_samples",
    "trainer_kwargs",
)


@dataclass(frozen=True)
class ForecastOptions:
    """Checked options of a run.

    Args:
        run: Options of the run by name, all of ``DEFAULTS``.
        reading: Options of ``from_frame``.
        network: Options of ``DeepVAREstimator``.
    """

    run: dict[str, Any]
    reading: dict[str, Any]
    network: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any], configured: Mapping[str, Any]) -> ForecastOptions:
        """Check and convert options.

        Args:
            given: Options of the command line, which take precedence.
            configured: Options of the YAML file.

        Raises:
            ParameterError: An option is unknown or has a value of another kind.
        """
        network = _network_options()
        unknown = [option for option in configured if option not in (*DEFAULTS, *READING, *network)]
        if unknown:
            raise ParameterError(
                f"The configuration has an option {unknown[0]!r}.",
                "It would have no effect.",
                f"Choose among {', '.join((*DEFAULTS, *READING, *network))}.",
            )
        chosen = {name: value for name, value in {**configured, **given}.items() if value is not None}
        options = {**DEFAULTS, **{name: setting(name, value, READERS) for name, value in chosen.items()}}
        if options["method"] is not None:
            check_choice("method", options["method"], tuple(METHODS))
        for model in options["models"] or ():
            check_choice("model", model, NAMES)
        check_choice("format", options["format"], tuple(suffix[1:] for suffix in SUFFIXES))
        run, reading, of_network = (
            {name: value for name, value in options.items() if name in names} for names in (DEFAULTS, READING, network)
        )
        return cls(run, reading, of_network)


def _network_options() -> list[str]:
    """Names of the network's options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GluonTS recommends faster readers of JSON
        from probhard.forecasting.models.estimator import DeepVAREstimator

    return sorted(set(inspect.signature(DeepVAREstimator).parameters) - set(SET_BY_THE_RUN) - set(DEFAULTS))


def read_configuration(path: Path | None) -> dict[str, Any]:
    """The options of a YAML file by name; none without a file.

    Raises:
        ParameterError: The file cannot be read, or holds something else than options.
    """
    content = {} if path is None else read_spec(path, "configuration", "epochs: 20")
    if not isinstance(content, dict):
        raise ParameterError(f"{path} holds no options.", "It is a mapping of names to values.", "Write 'epochs: 20'.")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _keys(value: Any) -> Any:
    """Check keys, and return them as they were given: text, names, or Nixtla's levels."""
    Keys.of(value)
    return value


def _bounds(value: Any) -> float | str | dict[str, float]:
    if isinstance(value, str) and value.endswith(SUFFIXES):
        return value
    return {str(node): number(x) for node, x in value.items()} if isinstance(value, Mapping) else number(value)


def _family(name: Any) -> Family:
    match = re.fullmatch(r"student_t\((\d+(?:\.\d*)?)\)", word(name).replace(" ", ""))
    if not match and name != NORMAL.name:
        raise ValueError
    return student_t(float(match[1])) if match else NORMAL


def _words(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value or []
    return [str(part).strip() for part in parts]


def _numbers(value: Any) -> list[float]:
    parts: Sequence[Any] = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        return [float(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"--level {value} is not a list of numbers.", "Intervals have levels in percent.", "Pass 80,95."
        ) from error


READERS: dict[str, Reader] = {
    **dict.fromkeys(("horizon", "epochs", "season", "num_layers", "hidden_size", "batch_size"), at_least(1)),
    **dict.fromkeys(("context_length", "num_batches_per_epoch"), at_least(1)),
    **dict.fromkeys(("draws", "num_samples"), at_least(2)),
    "jobs": at_least(1),
    "models": (_words, "names of members"),
    "model": (str, "a folder"),
    **dict.fromkeys(("seed", "rank", "num_feat_dynamic_real"), at_least(0)),
    "lr": (within(0, math.inf, inside=False), "a positive number"),
    "weight_decay": (within(0, math.inf), "a number, not negative"),
    "dropout_rate": (within(0, 1), "a number from 0 to below 1"),
    **dict.fromkeys(("nonnegative", "changes", "calibrate", "fast"), (switch, "true or false")),
    **dict.fromkeys(("method", "format", "time_column", "target_column", "freq", "on_gap"), (word, "a name")),
    "output": (str, "a folder"),
    "coherence": (word, "a name"),
    "functionals": (word, "levels"),
    "upper": (_bounds, "a number, numbers by the names of nodes, or a file"),
    "lags_seq": (listed(whole), "whole numbers"),
    "time_features": (listed(word), "names"),
    "scaling": (lambda x: x if isinstance(x, bool) else word(x), "mean, centre or none"),
    "family": (_family, "normal, or student_t(5) with its degrees of freedom"),
    "keys": (_keys, "names of columns, or levels"),
    **dict.fromkeys(("regressors", "immutable"), (_words, "names")),
    **dict.fromkeys(("future", "fixed"), (str, "a file")),
    "country_holidays": (word, "a country, such as CH"),
    "windows": at_least(1),
    "backtest": (switch, "true or false"),
    "level": (_numbers, "numbers, in percent"),
}
