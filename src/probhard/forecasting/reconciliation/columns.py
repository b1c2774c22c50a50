"""Nixtla's names for the columns of forecasts.

A model ``M`` has the column ``M`` for its mean, ``M-median``, and ``M-lo-80``, ``M-hi-80`` for the quantiles of

    p = (1 - level / 100) / 2      and      1 - p.

``M-q0.1``, ``M-ql0.1``, ``M-p10``, and ``q0.1``, ``0.1`` or ``p10`` alone, are quantiles of a probability. "_" and "."
separate like "-", and ``lower``, ``upper`` mean ``lo``, ``hi``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from probhard.errors import ParameterError

INTERVAL = re.compile(r"(?P<model>.+)[-_.](?P<side>lo(?:w|wer)?|hi(?:gh)?|upper)[-_.]?(?P<level>\d+(?:\.\d+)?)")
QUANTILE = re.compile(r"(?:(?P<model>.+)[-_])?ql?_?(?P<probability>0?\.\d+)|(?P<bare>0?\.\d+)")
PERCENTILE = re.compile(r"(?:(?P<model>.+)[-_.])?(?:p_?(?P<p>\d{1,2}(?:\.\d+)?)|q_?(?P<q>\d{2}(?:\.\d+)?))")
UNCLEAR = re.compile(r"(?:.+[-_.])?(?:lo|hi|low|high|lower|upper|q\d)", re.IGNORECASE)  # no level
LONE = "mean"  # model of quantile columns without a model name


@dataclass
class Columns:
    """The columns of one model.

    Args:
        model: Name of the model.
        mean: Column of the mean, if there is one.
        quantiles: Probability of each quantile column.
    """

    model: str
    mean: str | None = None
    quantiles: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str]) -> list[Columns]:
        """Group the names of numeric columns by model.

        Raises:
            ParameterError: If a column is a quantile of an unknown probability.
        """
        models: dict[str, Columns] = {}
        for name in names:
            model, probability = _meaning(name)
            columns = models.setdefault(model, cls(model))
            if probability is None:
                columns.mean = name
            else:
                columns.quantiles[name] = probability
        return list(models.values())

    def add_levels(self, levels: Iterable[float]) -> None:
        """Add the intervals of ``levels`` in percent that are not there yet.

        Raises:
            ParameterError: If a level is not between 0 and 100.
        """
        for level in levels:
            for side in ("lo", "hi"):
                name = f"{self.model}-{side}-{level:g}"
                self.quantiles.setdefault(name, probabilities([level])[side == "hi"])


def _meaning(name: str) -> tuple[str, float | None]:
    """Return the model of a column and the probability of its quantile; None for a mean."""
    if interval := INTERVAL.fullmatch(name):
        return interval["model"], probabilities([float(interval["level"])])[interval["side"][0] in "hu"]
    if name.endswith("-median"):
        return name.removesuffix("-median"), 0.5
    if quantile := QUANTILE.fullmatch(name):
        return quantile["model"] or LONE, float(quantile["probability"] or quantile["bare"])
    if (percentile := PERCENTILE.fullmatch(name)) and float(percentile["p"] or percentile["q"]) > 0:
        return percentile["model"] or LONE, float(percentile["p"] or percentile["q"]) / 100
    if UNCLEAR.fullmatch(name):
        raise ParameterError(
            f"The column {name!r} is a quantile of an unknown probability.",
            "Quantiles are not reconciled like means, and the name does not say of which level it is.",
            "Rename it, such as NAME-lo-80 and NAME-hi-80, or NAME-q0.1; or pass --models.",
        )
    return name, None


def is_quantile(name: str) -> bool:
    """Return whether a column's name denotes a quantile, of a known or an unknown probability."""
    return any(pattern.fullmatch(name) for pattern in (INTERVAL, QUANTILE, PERCENTILE, UNCLEAR))


def probabilities(levels: Sequence[float]) -> list[float]:
    """Convert interval levels to the probabilities of their ends.

    Args:
        levels: In percent, L of them.

    Returns:
        2 L probabilities in ascending order.

    Raises:
        ParameterError: If a level is not a number between 0 and 100.
    """
    if not isinstance(levels, Iterable) or isinstance(levels, str):
        raise ParameterError(f"Got level={levels!r}.", "Levels are a sequence.", "Pass a list such as [80, 95].")
    invalid = [level for level in levels if isinstance(level, str) or not 0 < level < 100]
    if invalid:
        raise ParameterError(
            f"An interval has the level {invalid[0]}.",
            "A level is the interval's probability in percent.",
            "Use levels such as 80 and 95.",
        )
    lower = sorted((100 - level) / 200 for level in levels)
    return [*lower, *(1 - p for p in reversed(lower))]


def summary(draws: np.ndarray, model: str, level: Sequence[float]) -> dict[str, np.ndarray]:
    """Summarize draws by their mean and the ends of their intervals.

    Args:
        draws: Sample paths, (S, H, n).
        model: Name of the model, from which the columns are named.
        level: Levels of the intervals in percent.

    Returns:
        By column name, (H, n) each.

    Raises:
        ParameterError: If a level is not between 0 and 100.
    """
    columns = Columns(model)
    columns.add_levels(level)
    ends = np.quantile(draws, list(columns.quantiles.values()), axis=0) if columns.quantiles else ()
    return {model: draws.mean(0), **dict(zip(columns.quantiles, ends))}
