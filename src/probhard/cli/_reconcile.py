"""``probhard reconcile``: reads anyone's forecasts, writes coherent ones and a certificate; nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probhard._util.atomic import check_space
from probhard._util.memory import check_memory
from probhard.cli._certificate import TOLERANCE, Certificate
from probhard.cli._forecast_data import TIMES
from probhard.cli._frames import SUFFIXES, read, write
from probhard.cli._nodes import CUTOFF, ID, Table
from probhard.cli._outputs import certificate_of, check_path, check_seed, conclude, sha256
from probhard.cli._past import Past
from probhard.errors import ParameterError
from probhard.executors import executor
from probhard.forecasting.data.keys import Keys
from probhard.forecasting.data.table import require
from probhard.forecasting.reconciliation.distributed import reconcile as distributed
from probhard.forecasting.reconciliation.explain import explain
from probhard.forecasting.reconciliation.family import middle
from probhard.forecasting.reconciliation.given import UNKNOWN_DEPENDENCE, Forecasts
from probhard.forecasting.reconciliation.joint_law import PathLaw
from probhard.forecasting.reconciliation.learned import PastForecast, learn_reconciliation
from probhard.forecasting.reconciliation.reconcile import CHUNK, Reconciled, Reconciliation
from probhard.forecasting.report.evaluation import incoherence

DRAWS = 1000  # behind quantiles, or as many as are written
WORKING = 6  # arrays of all draws that a reconciliation holds at a time
ROW, LINE = 120, 60  # bytes of a written draw, in memory and on disk


@dataclass(frozen=True)
class Request:
    """The command's arguments, with the meaning that its ``--help`` gives them."""

    forecasts: Path
    keys: str | None
    summing: Path | None
    nonnegative: bool
    upper: str | None
    fixed: str | None
    metric: str | None
    covariance: str | None
    history: Path | None
    past: Path | None
    explain: str | None
    level: str | None
    models: str | None
    output: Path | None
    draws: int | None
    seed: int
    engine: str | None
    workers: int
    address: str | None

    def run(self) -> None:
        """Reconcile all models, write the forecasts and the certificate, and print a summary.

        Raises:
            ProbhardError: Invalid files or options.
            typer.Exit: Some points are not feasible (status 3).
        """
        source = self.forecasts
        path = source.with_name(f"{source.stem}-reconciled{source.suffix}") if self.output is None else self.output
        check_path(path, "--output", SUFFIXES, [source, self.summing, *self._frames])
        old = certificate_of(path)
        check_seed(self.seed)
        spec = None if self.keys is None else Keys.of(self.keys)
        keys = () if spec is None else spec.columns
        summing = None if self.summing is None else read(self.summing, [ID])
        table = Table.of(read(source, [ID, *TIMES, *keys]), spec, summing)
        rules = self._rules(table)
        self._check_room(table, path)
        certificate = self._certificate(table)
        past = Past(*(None if name is None else read(name, [ID, *TIMES, CUTOFF, *keys]) for name in self._frames))
        results: dict[str, np.ndarray] = {}  # (S or 1, H, n) by column
        drawn: dict[str, np.ndarray] = {}
        explained: list[Any] = []
        with nullcontext() if self.engine is None else executor(self.engine, self.workers, self.address) as pool:
            chosen = table.models(self.models, (self.upper, self.fixed))
            past.check(chosen)
            certificate.setting["left_as_they_were"] = table.others(chosen)
            for columns in chosen:
                columns.add_levels([] if self.level is None else map(_number, self.level.split(",")))
                base, windows = past.of(table.forecasts(columns), table, columns, summing)
                own, scale = self._learned(rules, base, windows, table)
                base, result = self._reconciled(own, base.scaled(scale), table, pool)
                quantiles = result.quantiles(list(columns.quantiles.values())) if columns.quantiles else np.empty(0)
                certify(certificate, columns.model, table, base, result, quantiles)
                certificate.setting["models"][columns.model] |= _about(own, base, len(windows), scale)
                results |= {name: values[None] for name, values in zip(columns.quantiles, quantiles)}
                if columns.mean is not None:
                    as_draws = None if table.draw is None else result.draws
                    results[columns.mean] = result.mean[None] if as_draws is None else as_draws
                if self.draws is not None and result.draws is not None and table.draw is None:
                    drawn[columns.model] = result.draws[: self.draws]
                explained += self._explained(own, base, result, table, columns.model)
        old.unlink(missing_ok=True)
        write(path, table.written(results))
        paths, files = f"Forecasts: {path}", list[Path]()
        if self.draws is not None and not drawn:
            paths += "\nNo draws: the forecasts are draws already, or means alone."
        if drawn:
            files.append(_beside(path, "draws", table.long(drawn)))
            paths += f"\nDraws: {files[-1]}"
        if explained:
            frame = require("pandas", "probhard reconcile").concat(explained, ignore_index=True)
            files.append(_beside(path, "explained", frame))
            paths += f"\nWhat moved nodes: {files[-1]}"
        conclude(certificate, path, f"{summary(certificate)}\n{paths}", files)

    def _check_room(self, table: Table, path: Path) -> None:
        """Check that the draws of a model fit into memory, and those to write on the disk."""
        count = max(self.draws or 0, DRAWS) if table.draw is None else len(table.samples)
        values = len(table.stamps) * table.hierarchy.variables
        what, fix = f"{count} draws of {values} values", "Ask for fewer draws, or split the file by steps."
        written = (self.draws or 0) if table.draw is None else count
        check_memory(values * (8.0 * WORKING * count + ROW * written), what, fix)
        check_space(path.parent, LINE * values * (1 + written), what, fix)

    @property
    def _frames(self) -> tuple[Path | None, Path | None]:
        return self.history, self.past

    def _learned(
        self, rules: Reconciliation, base: Forecasts, windows: list[PastForecast], table: Table
    ) -> tuple[Reconciliation, float]:
        """Learn the metric and a factor of the deviations on past forecasts, unless a metric was asked for."""
        if not windows or self.metric is not None:
            return rules, 1.0
        prior = middle(0 if base.errors is None or base.error_correlation is None else len(base.errors))
        weights, scale = learn_reconciliation(windows, table.hierarchy, prior)
        return replace(rules, metric=weights), scale

    def _reconciled(
        self, rules: Reconciliation, base: Forecasts, table: Table, pool: Any
    ) -> tuple[Forecasts, Reconciled]:
        """Reconcile one model; returns its forecasts with their law, and the result."""
        count = max(self.draws or 0, DRAWS)
        if table.bottoms_only:
            known = "independent" if base.error_correlation is None else "errors"
            base = base.summed(table.hierarchy, count, self.seed, self.covariance or known)
        base = rules.dependent(base)
        if pool is None:
            return base, rules(base, count, self.seed)
        return base, distributed(rules, base, pool, None, count, self.seed)

    def _explained(
        self, rules: Reconciliation, base: Forecasts, result: Reconciled, table: Table, model: str
    ) -> list[Any]:
        """The pulls on the nodes that ``--explain`` names, a frame for each."""
        names = [] if self.explain is None else [name.strip() for name in self.explain.split(",")]
        mean = np.asarray(result.before).mean(0) if base.mean is None else base.mean
        spread = np.ones_like(mean) if base.spread is None else base.spread
        law = PathLaw(torch.from_numpy(mean), torch.from_numpy(spread), base.error_correlation)
        weights, stamps = rules.weights(base), np.asarray(table.stamps)
        found = [explain(law, weights, table.hierarchy, name, result.mean) for name in names]
        return [one.frame(stamps).assign(model=model) for one in found]

    def _rules(self, table: Table) -> Reconciliation:
        """The constraints that forecasts must obey."""
        upper = self.upper
        bound = None if upper is None else table.values(upper) if upper in table.frame.columns else _number(upper)
        fixed = None if self.fixed is None else table.values(self.fixed)
        return Reconciliation(table.hierarchy, self.metric, self.nonnegative, bound, fixed, "flag", self.covariance)

    def _certificate(self, table: Table) -> Certificate:
        return Certificate(
            {
                "input": self.forecasts.name,
                "input_sha256": sha256(self.forecasts),
                "nonnegative": self.nonnegative,
                "upper": self.upper,
                "fixed": self.fixed,
                "seed": self.seed,
                "history": None if self.history is None else self.history.name,
                "past": None if self.past is None else self.past.name,
                "aggregates_made": table.bottoms_only,
                "nodes": table.hierarchy.variables,
                "bottom_nodes": table.hierarchy.bottoms,
                "steps": len(table.stamps),
                "models": {},
            }
        )


def certify(
    certificate: Certificate, model: str, table: Table, base: Forecasts, result: Reconciled, quantiles: np.ndarray
) -> None:
    """Add all means and draws of a model to the certificate, and the range of its quantiles."""
    before = base.mean if base.mean is not None or result.before is None else result.before.mean(0)
    pairs = [(np.asarray(before)[None], result.mean[None])]  # (S, H, n) before and after
    if base.spread is not None:
        certificate.moved.add(*(torch.from_numpy(np.asarray(x)) for x in (before, result.mean, base.spread)))
    if result.draws is not None and result.before is not None:
        starts = range(0, len(result.draws), max(1, CHUNK // result.mean.size))
        pairs += [(result.before[i : i + starts.step], result.draws[i : i + starts.step]) for i in starts]
    wrong = np.full(len(result.mean), sum(len(pair[0]) for pair in pairs))
    for steps, constraint in result.constraints:
        wrong[steps] = 0
        for pair in pairs:
            first, last = (torch.from_numpy(points[:, steps]) for points in pair)
            size = first.abs().amax(-1, keepdim=True)
            certificate.before.add(constraint, first, size)
            relative = certificate.after.add(constraint, last, size)
            wrong[steps] += (~(relative <= TOLERANCE)).sum(0).numpy()
    for step in np.flatnonzero(wrong):
        reason = result.reasons.get(int(step), "Its relative violation is too large.")
        certificate.flag(int(wrong[step]), field=f"{model} at {table.stamps[step]}", reason=reason)
    gaps: dict[str, Any] = {"before": _gap(table, [pairs[0][0]]), "after": _gap(table, [pairs[0][1]])}
    if len(pairs) > 1:
        gaps["draws"] = {name: _gap(table, [pair[i] for pair in pairs[1:]]) for i, name in enumerate(gaps)}
    values = quantiles[~np.isnan(quantiles)]
    certificate.after.smallest = min(certificate.after.smallest, float(values.min(initial=np.inf)))
    certificate.after.largest = max(certificate.after.largest, float(values.max(initial=-np.inf)))
    draws = 0 if result.draws is None else len(result.draws)
    closed = quantiles.size > 0 and result.spread is not None
    certificate.setting["models"][model] = {"draws": draws, "quantiles_in_closed_form": closed, "incoherence": gaps}


def _about(rules: Reconciliation, base: Forecasts, windows: int, scale: float) -> dict[str, Any]:
    """The metric and the joint law of a model, for the certificate."""
    law = base.covariance or (None if base.certain else "draws")
    record: dict[str, Any] = {"metric": rules.chosen(base), "metric_numbers": asdict(rules.weights(base))}
    record |= {"past_windows": windows, "spread_factor": scale, "covariance": law}
    if base.summing and law == "independent":
        record["warning"] = UNKNOWN_DEPENDENCE
    return record


def _beside(path: Path, word: str, frame: Any) -> Path:
    """Write a frame beside the forecasts; returns its path."""
    written = path.with_name(f"{path.stem}-{word}{path.suffix}")
    write(written, frame)
    return written


def _gap(table: Table, parts: Sequence[np.ndarray]) -> dict[str, float] | None:
    """Incoherence of points (..., n); None where none is feasible."""
    points = np.concatenate([part.reshape(-1, table.hierarchy.variables) for part in parts])
    points = points[~np.isnan(points).any(1)]
    return vars(incoherence(points, table.hierarchy)) if len(points) else None


def summary(certificate: Certificate) -> str:
    """The certificate as text, after a line for each model."""
    setting, lines = certificate.setting, []
    made = " (made as their sums)" if setting["aggregates_made"] else ""
    lines.append(
        f"{setting['bottom_nodes']} bottom nodes, {setting['nodes'] - setting['bottom_nodes']} aggregates{made}."
    )
    for model, record in setting["models"].items():
        gaps = {"means": record["incoherence"], "draws": record["incoherence"].get("draws")}
        for kind, gap in gaps.items():
            if gap is not None:
                after = "nothing feasible" if gap["after"] is None else f"{gap['after']['largest']:.3g}"
                lines.append(
                    f"{model}: largest incoherence of {kind} {gap['before']['largest']:.6g} before, {after} after."
                )
        lines.append(f"{model}: {_law(record)}")
    if setting["left_as_they_were"]:
        lines.append(f"Left as they were: {', '.join(setting['left_as_they_were'])}.")
    return "\n".join([*lines, certificate.table()])


def _law(record: dict[str, Any]) -> str:
    """Metric and law of a model in a sentence, with its warning."""
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in record["metric_numbers"].items())
    learned = ""
    if record["metric"] == "learned":
        learned = f" on {record['past_windows']} past windows, deviations times {record['spread_factor']:.3g}"
    law = "none" if record["covariance"] is None else record["covariance"]
    warning = f"\nWarning: {record['warning']}" if "warning" in record else ""
    return f"metric {record['metric']}{learned} ({numbers}), joint law {law}.{warning}"


def _number(text: str) -> float:
    try:
        value = float(text)
        if isnan(value):
            raise ValueError
        return value
    except ValueError as error:
        raise ParameterError(
            f"{text!r} is not a number, nor a column of the forecasts.",
            "Levels and bounds are numbers; bounds may be columns.",
            "Correct the option.",
        ) from error
