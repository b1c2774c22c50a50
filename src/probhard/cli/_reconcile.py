"""``probhard reconcile``: reads anyone's forecasts, writes coherent ones and a certificate; nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probhard.cli._certificate import TOLERANCE, Certificate
from probhard.cli._frames import SUFFIXES, read, write
from probhard.cli._nodes import ID, STAMP, Table
from probhard.cli._outputs import certificate_of, check_path, conclude, sha256
from probhard.errors import ParameterError
from probhard.executors import executor
from probhard.forecasting.reconciliation.distributed import reconcile as distributed
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import CHUNK, Reconciled, Reconciliation
from probhard.forecasting.report.evaluation import incoherence

DRAWS = 1000  # behind quantiles, or as many as are written


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
        check_path(path, "--output", SUFFIXES, source)
        old = certificate_of(path)
        keys = [] if self.keys is None else [key.strip() for key in self.keys.split(",")]
        frame = read(source, [ID, STAMP, *keys])
        table = Table.of(frame, keys, None if self.summing is None else read(self.summing, [ID]))
        rules = self._rules(table)
        certificate = self._certificate(table)
        results: dict[str, np.ndarray] = {}  # (S or 1, H, n) by column
        drawn: dict[str, np.ndarray] = {}
        count = max(self.draws or 0, DRAWS)
        with nullcontext() if self.engine is None else executor(self.engine, self.workers, self.address) as pool:
            chosen = table.models(self.models, (self.upper, self.fixed))
            certificate.setting["left_as_they_were"] = table.others(chosen)
            for columns in chosen:
                columns.add_levels([] if self.level is None else map(_number, self.level.split(",")))
                base = table.forecasts(columns)
                base = base.summed(table.hierarchy, count, self.seed) if table.bottoms_only else base
                if pool is None:
                    result = rules(base, count, self.seed)
                else:
                    result = distributed(rules, base, pool, None, count, self.seed)
                quantiles = result.quantiles(list(columns.quantiles.values())) if columns.quantiles else np.empty(0)
                certify(certificate, columns.model, table, base, result, quantiles)
                certificate.setting["models"][columns.model]["metric"] = rules.chosen(base)
                results |= {name: values[None] for name, values in zip(columns.quantiles, quantiles)}
                if columns.mean is not None:
                    as_draws = None if table.draw is None else result.draws
                    results[columns.mean] = result.mean[None] if as_draws is None else as_draws
                if self.draws is not None and result.draws is not None and table.draw is None:
                    drawn[columns.model] = result.draws[: self.draws]
        old.unlink(missing_ok=True)
        write(path, table.written(results))
        paths, files = f"Forecasts: {path}", list[Path]()
        if self.draws is not None and not drawn:
            paths += "\nNo draws: the forecasts are draws already, or means alone."
        if drawn:
            draws_path = path.with_name(f"{path.stem}-draws{path.suffix}")
            write(draws_path, table.long(drawn))
            files.append(draws_path)
            paths += f"\nDraws: {draws_path}"
        conclude(certificate, path, f"{summary(certificate)}\n{paths}", files)

    def _rules(self, table: Table) -> Reconciliation:
        """The constraints that forecasts must obey."""
        upper = self.upper
        bound = None if upper is None else table.values(upper) if upper in table.frame.columns else _number(upper)
        fixed = None if self.fixed is None else table.values(self.fixed)
        return Reconciliation(table.hierarchy, self.metric, self.nonnegative, bound, fixed, "flag")

    def _certificate(self, table: Table) -> Certificate:
        return Certificate(
            {
                "input": self.forecasts.name,
                "input_sha256": sha256(self.forecasts),
                "nonnegative": self.nonnegative,
                "upper": self.upper,
                "fixed": self.fixed,
                "seed": self.seed,
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
    if setting["left_as_they_were"]:
        lines.append(f"Left as they were: {', '.join(setting['left_as_they_were'])}.")
    return "\n".join([*lines, certificate.table()])


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
