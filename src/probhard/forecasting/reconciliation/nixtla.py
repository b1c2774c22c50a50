"""Nixtla's conventions: the names of columns and nodes, and a reconciler for hierarchicalforecast.

A model ``M`` has the column ``M`` for its mean, ``M-median``, and ``M-lo-80``, ``M-hi-80`` for the quantiles of

    p = (1 - level / 100) / 2      and      1 - p;

``M-q0.1``, ``M-ql0.1``, ``M-p10``, and ``q0.1``, ``0.1`` or ``p10`` alone, are quantiles by their probability; "_" and
"." separate as "-" does, and ``lower``, ``upper`` are ``lo``, ``hi``. Ids join keys by "/". As tuples of keys, "" where
summed over, an aggregate is the sum of the bottom nodes that agree with it elsewhere.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.forecasting.data.frames import TOTAL, is_total
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import METRICS, Reconciled, Reconciliation

INTERVAL = re.compile(r"(?P<model>.+)[-_.](?P<side>lo(?:w|wer)?|hi(?:gh)?|upper)[-_.]?(?P<level>\d+(?:\.\d+)?)")
QUANTILE = re.compile(r"(?:(?P<model>.+)[-_])?ql?_?(?P<probability>0?\.\d+)|(?P<bare>0?\.\d+)")
PERCENTILE = re.compile(r"(?:(?P<model>.+)[-_.])?(?:p_?(?P<p>\d{1,2}(?:\.\d+)?)|q_?(?P<q>\d{2}(?:\.\d+)?))")
UNCLEAR = re.compile(r"(?:.+[-_.])?(?:lo|hi|low|high|lower|upper|q\d)", re.IGNORECASE)  # an end of which interval?
LONE = "mean"  # the model of quantiles without a name
OWN = "own forecast"  # instead of a value: a node that is not to be moved
FEW = 3  # nodes whose bounds or values a column's name spells out


@dataclass
class Columns:
    """The columns of one model: of its mean, if there is one, and of its quantiles with their probabilities."""

    model: str
    mean: str | None = None
    quantiles: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str]) -> list[Columns]:
        """The models that columns of numbers belong to."""
        found: dict[str, Columns] = {}
        for name in names:
            model, probability = _meaning(name)
            columns = found.setdefault(model, cls(model))
            if probability is None:
                columns.mean = name
            else:
                columns.quantiles[name] = probability
        return list(found.values())

    def add_levels(self, levels: Iterable[float]) -> None:
        """Add intervals of these levels in percent, where they are not there yet."""
        for level in levels:
            for side in ("lo", "hi"):
                name = f"{self.model}-{side}-{level:g}"
                self.quantiles.setdefault(name, probabilities([level])[side == "hi"])


def _meaning(name: str) -> tuple[str, float | None]:
    """The model of a column and the probability of its quantile, None for a mean."""
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
            "As the end of an interval it must not add up, and which interval it ends is not said.",
            "Rename it, such as NAME-lo-80 and NAME-hi-80, or NAME-q0.1; or name --models.",
        )
    return name, None


def is_quantile(name: str) -> bool:
    """Whether a column's name says that it holds a quantile, of a known or an unknown probability."""
    return any(pattern.fullmatch(name) for pattern in (INTERVAL, QUANTILE, PERCENTILE, UNCLEAR))


def tree(rows: Sequence[tuple[str, ...]]) -> tuple[sp.csr_array, list[tuple[str, ...]], bool]:
    """The summation matrix, its nodes, and whether all aggregates had to be made."""
    distinct = set(rows)
    bottoms = sorted(node for node in distinct if all(node))
    width = len(next(iter(distinct), ()))
    levels = {tuple(map(bool, node)) for node in distinct}
    made = levels == {(True,) * width}
    if made:
        first = 0 if width == 1 or len({node[0] for node in bottoms}) > 1 else 1
        levels = {tuple(i < depth for i in range(width)) for depth in range(first, width + 1)}
    nodes: list[tuple[str, ...]] = []
    blocks = []
    for level in sorted(levels, key=lambda level: (sum(level), [not kept for kept in level])):
        labels = [tuple(part if kept else "" for part, kept in zip(node, level)) for node in bottoms]
        row = {label: i for i, label in enumerate(sorted(set(labels)))}
        at = [row[label] for label in labels], np.arange(len(bottoms))
        blocks.append(sp.csr_array((np.ones(len(bottoms)), at), shape=(len(row), len(bottoms))))
        nodes += row
    if not bottoms or len(blocks) < 2:
        raise ParameterError(
            f"There are {len(bottoms)} bottom nodes and {len(nodes) - len(bottoms)} aggregates.",
            "Bottom nodes have all keys; an aggregate leaves some of them empty.",
            "Name the key columns with --keys, join ids by '/', or pass --summing.",
        )
    return sp.csr_array(sp.vstack(blocks)), nodes, made


def split(ids: Sequence[str], keys: int) -> list[tuple[str, ...]]:
    """Ids such as 'Total', 'A', 'A/B' as tuples of equal length, "" for what is summed over."""
    parts = [tuple(name.split("/")) for name in ids]
    depth = max(map(len, parts), default=0)
    if keys and depth not in (keys, keys + 1):
        raise ParameterError(
            f"--keys names {keys} columns that the forecasts do not have, and the ids have up to {depth} parts.",
            "Nodes are read from key columns, or from ids joined by '/', one part for each key.",
            "Correct --keys, or pass --summing.",
        )
    if depth == 1 and not keys and not any(is_total(name) for name in ids):
        raise ParameterError(
            f"The ids {', '.join(map(repr, sorted(set(ids))[:3]))}, ... have one part each, and none is {TOTAL!r}.",
            "Which of them is the sum of the others, if any, is not known.",
            f"Call the sum {TOTAL!r}, join ids by '/', name key columns with --keys, or pass --summing.",
        )
    inner = {part[:i] for part in parts if len(part) == depth for i in range(1, depth)}
    total = {part for part in parts if len(part) == 1 and is_total(part[0])} - inner
    return [(() if part in total else part) + ("",) * (depth - len(part) * (part not in total)) for part in parts]


def probabilities(levels: Sequence[float]) -> list[float]:
    """The probabilities of the ends of intervals of these levels in percent, ascending."""
    if not isinstance(levels, Iterable) or isinstance(levels, str):
        raise ParameterError(f"Got level={levels!r}.", "There may be several levels.", "Pass a list such as [80, 95].")
    wrong = [level for level in levels if isinstance(level, str) or not 0 < level < 100]
    if wrong:
        raise ParameterError(
            f"An interval has the level {wrong[0]}.",
            "It is the probability in percent that the interval holds.",
            "Use levels such as 80 and 95.",
        )
    lower = sorted((100 - level) / 200 for level in levels)
    return [*lower, *(1 - p for p in reversed(lower))]


class ProjectionReconciler:
    """A method for hierarchicalforecast's ``HierarchicalReconciliation``: every mean and every sample is feasible.

    Nodes are rows of ``S_df`` by number, labels if ``names`` are given, or whole levels by their name in ``tags``.

    Args:
        metric: ``"oblique"`` by the forecasts' own variances (needs ``level``), ``"orthogonal"``, ``"structural"``.
        nonnegative: No mean, quantile or sample is below 0.
        upper: A bound of all nodes, or bounds of some nodes: a number, or one for each step.
        fixed: Nodes with their values (a number, or one for each step), or ``"own forecast"``: not to be moved.
        names: Labels of the rows of ``S_df``.
        num_samples: Draws behind quantiles that have no closed form.
        seed: Of the draws; the seed of ``reconcile`` is added to it.
    """

    fitted = False
    is_sparse_method = True
    is_strictly_hierarchical = False
    insample = False
    sampler: ProjectionReconciler | None = None

    def __init__(
        self,
        metric: str = "oblique",
        nonnegative: bool = False,
        upper: float | Mapping[int | str, Any] | None = None,
        fixed: Mapping[int | str, Any] | None = None,
        names: Sequence[str] | None = None,
        num_samples: int = 200,
        seed: int = 0,
    ) -> None:
        check_choice("metric", metric, METRICS)
        self.metric, self.nonnegative, self.upper, self.fixed = metric, nonnegative, upper, fixed or {}
        self.names = None if names is None else [str(name) for name in names]
        self.num_samples, self.seed = num_samples, seed
        self._init_params: dict[str, Any] = {"metric": metric, "nonnegative": nonnegative}  # names the columns
        for name, values in (("upper", upper), ("fixed", fixed)):
            if isinstance(values, Mapping):
                _check_values(name, values)
            if values is not None and values != {}:
                self._init_params[name] = _label(values)
        if seed:
            self._init_params["seed"] = seed

    def fit_predict(
        self,
        S: Any,  # (n, m), scipy sparse or dense
        y_hat: np.ndarray,  # (n, H)
        sigmah: np.ndarray | None = None,  # (n, H)
        level: Sequence[float] | None = None,
        seed: int | None = None,
        tags: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Reconciled ``mean`` (n, H) and, with levels, ``quantiles`` (n, H, 2 levels) in ascending order."""
        if sigmah is None and (level is not None or self.metric == "oblique"):
            raise ParameterError(
                f"ProjectionReconciler(metric={self.metric!r}) got no standard deviations.",
                "hierarchicalforecast passes them on with level=... and intervals_method='normality' alone.",
                "Call reconcile with level=[80] and that method, or use metric='structural' without levels.",
            )
        shape = y_hat.shape[1], y_hat.shape[0]
        own = [node for node, value in self.fixed.items() if isinstance(value, str) and value == OWN]
        immutable = np.concatenate([np.empty(0, int), *(self._rows(node, tags, shape[1]) for node in own)])
        upper: Any = self.upper
        if isinstance(upper, Mapping):
            upper = self._spread(upper, tags, shape)
        given = {node: value for node, value in self.fixed.items() if node not in own}
        self._rules = Reconciliation(
            Hierarchy(S, names=self.names, immutable=immutable.tolist()),
            self.metric,
            self.nonnegative,
            upper,
            self._spread(given, tags, shape) if given else None,
        )
        self._base = Forecasts(y_hat.T, None if sigmah is None else sigmah.T)
        self._seed = self.seed + (seed or 0)
        found = self._reconciled(self.num_samples)
        self.fitted, self.sampler = True, None if sigmah is None else self
        result = {"mean": found.mean.T}
        if level is not None:
            result["quantiles"] = found.quantiles(probabilities(level)).transpose(2, 1, 0)
        return result

    __call__ = fit_predict

    def sample(self, num_samples: int) -> np.ndarray:
        """Draws of the law that was reconciled last, (n, H, num_samples), every one feasible."""
        draws = self._reconciled(num_samples).draws if self.fitted else None
        if draws is None:
            raise ParameterError(
                "There is no reconciled law to sample from.",
                "Samples need standard deviations.",
                "Call fit_predict with sigmah first.",
            )
        return draws.transpose(2, 1, 0)

    def _reconciled(self, samples: int) -> Reconciled:
        return self._rules(self._base, samples, self._seed)

    def _rows(self, node: int | str, tags: Mapping[str, np.ndarray] | None, count: int) -> np.ndarray:
        """The rows of S that a node or a level has."""
        if isinstance(node, str) and tags is not None and node in tags:
            return np.asarray(tags[node])
        if isinstance(node, str) and self.names is not None and node in self.names:
            return np.array([self.names.index(node)])
        if isinstance(node, str) or not -count <= node < count:
            raise ParameterError(
                f"There is no node or level {node!r} among {count} nodes.",
                "Bounds and fixed values belong to nodes.",
                "Name a level of tags, use the number of a row of S_df, or pass names=S_df['unique_id'].",
            )
        return np.array([node])

    def _spread(
        self, values: Mapping[int | str, Any], tags: Mapping[str, np.ndarray] | None, shape: tuple[int, int]
    ) -> np.ndarray:
        """Values of some nodes, NaN for the others, (H, n)."""
        table = np.full(shape, np.nan)
        for node, value in values.items():
            column = np.asarray(value, dtype=np.float64).reshape(-1, 1)
            if len(column) not in (1, shape[0]):
                raise ShapeError(
                    f"The node {node!r} was given {len(column)} values for {shape[0]} steps.",
                    "A bound or a fixed value holds at every step or at one.",
                    "Pass one number, or one for each step.",
                )
            table[:, self._rows(node, tags, shape[1])] = column
        return table


def _check_values(name: str, values: Mapping[int | str, Any]) -> None:
    """Raise unless all values are finite numbers, or of fixed nodes ``OWN``."""
    for node, value in values.items():
        if name == "fixed" and isinstance(value, str) and value == OWN:
            continue
        try:
            numbers = np.asarray(() if isinstance(value, str) else value, dtype=np.float64)
        except (TypeError, ValueError):
            numbers = np.empty(0)
        if not numbers.size or np.isnan(numbers).any():
            raise ParameterError(
                f"{name} of the node {node!r} is {value!r}.",
                "Bounds and fixed values are numbers; a fixed node may also keep its forecast.",
                f"Pass a number, one for each step, or, as a fixed value, {OWN!r}.",
            )


def _label(values: Any) -> str:
    """Bounds or fixed values as a part of a column's name: as they are where they are few, else by a checksum."""
    if not isinstance(values, Mapping):
        return str(values)
    text = ",".join(
        f"{node}:{value if np.ndim(value) == 0 else np.asarray(value).tolist()}" for node, value in values.items()
    )
    few = len(values) <= FEW and all(np.ndim(value) == 0 for value in values.values())
    return text if few else f"{len(values)}-nodes-{zlib.crc32(text.encode()):08x}"
