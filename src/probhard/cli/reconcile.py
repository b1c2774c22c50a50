"""``probhard reconcile``: anyone's forecasts in, coherent ones and a certificate out, no training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from probhard.cli.certificate import TOLERANCE, Certificate, check_path, conclude, sha256
from probhard.cli.frames import SUFFIXES, read, write
from probhard.cli.nodes import ID, STAMP, Table
from probhard.errors import ParameterError
from probhard.executors import executor
from probhard.forecasting.reconciliation.distributed import reconcile as distributed
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import CHUNK, Reconciled, Reconciliation
from probhard.forecasting.report.evaluation import incoherence

DRAWS = 1000  # behind quantiles, or as many as are written


def reconcile(
    forecasts: Annotated[
        Path, typer.Argument(help="A .csv or .parquet file: unique_id, ds, models; see docs/files.md.")
    ],
    keys: Annotated[
        str | None, typer.Option(help="Key columns, coarse to fine, empty for aggregates; else ids joined by '/'.")
    ] = None,
    summing: Annotated[Path | None, typer.Option(help="A .csv or .parquet file of S: unique_id, bottom ids.")] = None,
    nonnegative: Annotated[bool, typer.Option("--nonnegative", help="No value below 0.")] = False,
    upper: Annotated[str | None, typer.Option(help="A number, or a column of upper bounds.")] = None,
    fixed: Annotated[str | None, typer.Option(help="A column of values that nodes must have, else empty.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="oblique (the default where spreads are known), orthogonal or structural.")
    ] = None,
    level: Annotated[str | None, typer.Option(help="Intervals to add, in percent, such as 80,95.")] = None,
    models: Annotated[str | None, typer.Option(help="Models to reconcile; default: all columns of numbers.")] = None,
    output: Annotated[Path | None, typer.Option(help="Default: NAME-reconciled beside the input.")] = None,
    draws: Annotated[int | None, typer.Option(min=1, help="Draws to write, where the input has none.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    engine: Annotated[
        str | None,
        typer.Option("--executor", help="joblib, ray or dask: in pieces, by subtree or step; default: here."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Of the executor: processes of one thread each.")] = 2,
    address: Annotated[str | None, typer.Option(help="Of a running Ray or Dask cluster; default: one here.")] = None,
) -> None:
    """Make anyone's forecasts coherent, certified."""
    path = forecasts.with_name(f"{forecasts.stem}-reconciled{forecasts.suffix}") if output is None else output
    check_path(path, "--output", SUFFIXES, forecasts)
    key_columns = [] if keys is None else [key.strip() for key in keys.split(",")]
    frame = read(forecasts, [ID, STAMP, *key_columns])
    table = Table.of(frame, key_columns, None if summing is None else read(summing, [ID]))
    bound = None if upper is None else table.values(upper) if upper in frame.columns else _number(upper)
    known = None if fixed is None else table.values(fixed)
    rules = Reconciliation(table.hierarchy, metric, nonnegative, bound, known, "flag")
    settings = {"nonnegative": nonnegative, "upper": upper, "fixed": fixed, "seed": seed}
    size = {
        "aggregates_made": table.bottoms_only,
        "nodes": table.hierarchy.variables,
        "bottom_nodes": table.hierarchy.bottoms,
        "steps": len(table.stamps),
    }
    source = {"input": forecasts.name, "input_sha256": sha256(forecasts)}
    certificate = Certificate({**source, **settings, **size, "models": {}})
    results: dict[str, np.ndarray] = {}  # (S or 1, H, n) by column
    drawn: dict[str, np.ndarray] = {}
    count = max(draws or 0, DRAWS)
    with nullcontext() if engine is None else executor(engine, workers, address) as pool:
        chosen = table.models(models, (upper, fixed))
        certificate.setting["left_as_they_were"] = table.others(chosen)
        for columns in chosen:
            columns.add_levels([] if level is None else map(_number, level.split(",")))
            base = table.forecasts(columns)
            base = base.summed(table.hierarchy, count, seed) if table.bottoms_only else base
            found = rules(base, count, seed) if pool is None else distributed(rules, base, pool, None, count, seed)
            quantiles = found.quantiles(list(columns.quantiles.values())) if columns.quantiles else np.empty(0)
            certify(certificate, columns.model, table, base, found, quantiles)
            certificate.setting["models"][columns.model]["metric"] = rules.chosen(base)
            results |= {name: values[None] for name, values in zip(columns.quantiles, quantiles)}
            if columns.mean is not None:
                results[columns.mean] = found.mean[None] if table.draw is None or found.draws is None else found.draws
            if draws is not None and found.draws is not None and table.draw is None:
                drawn[columns.model] = found.draws[:draws]
    write(path, table.written(results))
    paths = f"Forecasts: {path}"
    if draws is not None and not drawn:
        paths += "\nNo draws: the forecasts are draws already, or means alone."
    if drawn:
        other = path.with_name(f"{path.stem}-draws{path.suffix}")
        write(other, table.long(drawn))
        paths += f"\nDraws: {other}"
    conclude(certificate, path, f"{summary(certificate)}\n{paths}")


def certify(
    certificate: Certificate, model: str, table: Table, base: Forecasts, found: Reconciled, quantiles: np.ndarray
) -> None:
    """Take all means and draws of a model into the certificate, and the range of its quantiles."""
    before = base.mean if base.mean is not None or found.before is None else found.before.mean(0)
    pairs = [(np.asarray(before)[None], found.mean[None])]  # (S, H, n) before and after
    if found.draws is not None and found.before is not None:
        parts = range(0, len(found.draws), max(1, CHUNK // found.mean.size))
        pairs += [(found.before[i : i + parts.step], found.draws[i : i + parts.step]) for i in parts]
    wrong = np.full(len(found.mean), sum(len(pair[0]) for pair in pairs))
    for steps, constraint in found.constraints:
        wrong[steps] = 0
        for pair in pairs:
            first, last = (torch.from_numpy(points[:, steps]) for points in pair)
            size = first.abs().amax(-1, keepdim=True)
            certificate.before.add(constraint, first, size)
            relative = certificate.after.add(constraint, last, size)
            wrong[steps] += (~(relative <= TOLERANCE)).sum(0).numpy()
    for step in np.flatnonzero(wrong):
        reason = found.reasons.get(int(step), "Its relative violation is too large.")
        certificate.flag(int(wrong[step]), field=f"{model} at {table.stamps[step]}", reason=reason)
    seen: dict[str, Any] = {"before": _gap(table, [pairs[0][0]]), "after": _gap(table, [pairs[0][1]])}
    if len(pairs) > 1:
        seen["draws"] = {name: _gap(table, [pair[i] for pair in pairs[1:]]) for i, name in enumerate(seen)}
    values = quantiles[~np.isnan(quantiles)]
    certificate.after.smallest = min(certificate.after.smallest, float(values.min(initial=np.inf)))
    certificate.after.largest = max(certificate.after.largest, float(values.max(initial=-np.inf)))
    draws = 0 if found.draws is None else len(found.draws)
    closed = quantiles.size > 0 and found.spread is not None
    certificate.setting["models"][model] = {"draws": draws, "quantiles_in_closed_form": closed, "incoherence": seen}


def _gap(table: Table, parts: Sequence[np.ndarray]) -> dict[str, float] | None:
    """How far points (..., n) are from adding up; None where none is feasible."""
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
    for model, found in setting["models"].items():
        gaps = {"means": found["incoherence"], "draws": found["incoherence"].get("draws")}
        for what, gap in gaps.items():
            if gap is not None:
                after = "nothing feasible" if gap["after"] is None else f"{gap['after']['largest']:.3g}"
                lines.append(
                    f"{model}: largest incoherence of {what} {gap['before']['largest']:.6g} before, {after} after."
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
