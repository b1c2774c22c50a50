"""The projection of stored fields, in chunks: each draw on its own, and the moments of every cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard._util.atomic import check_space, reserved_map
from probhard._util.memory import check_memory
from probhard.cli._certificate import TOLERANCE, Certificate
from probhard.cli._stored import StoredLaw
from probhard.constraints import Constraint
from probhard.errors import InfeasibleError
from probhard.io.spec import Data, constraint_from
from probhard.laws.distribution import LocationScale
from probhard.projection.layer import DPPL

BUDGET = 2_000_000  # numbers that are projected at a time
WORKING = 12  # arrays of the size of a chunk that a projection holds at a time
SUMMARY = ("mean", "stddev", "lower", "upper")


@dataclass(eq=False)
class FieldProjection:
    """The projection of all fields of a file, in chunks.

    Args:
        law: The fields' law before projection.
        spec: Constraints as plain values.
        data: Cells of the fields, and the arrays that the constraints name.
        layer: Projection layer; it must flag failures, not raise.
        certificate: Takes in every point before and after.
        generator: Random numbers of the draws.
    """

    law: StoredLaw
    spec: Any
    data: Data
    layer: DPPL
    certificate: Certificate
    generator: torch.Generator
    worst: tuple[float, int] = field(default=(-1.0, 0), init=False)  # largest violation of an input mean, its field
    results: dict[str, np.ndarray] = field(default_factory=dict, init=False)

    def run(self, draws: int, folder: Path) -> dict[str, np.ndarray]:
        """Project all fields.

        Args:
            draws: Draws of each field, where the law has none of its own.
            folder: Folder of the output, on whose disk draws are kept until they are written.

        Returns:
            Arrays by name; points that could not be made feasible are NaN.

        Raises:
            ParameterError: There is too little memory, or too little space for the output.
        """
        from tqdm import tqdm

        law, cells = self.law, self.data.cells
        count = 0 if law.stddev is None and law.draws is None else draws if law.draws is None else len(law.draws)
        self._check_room(count, folder)
        self.results = {"mean": law.mean.copy()}
        if count:
            start = dict(zip(("stddev", "lower", "upper"), (law.spread, *law.band())))
            self.results |= {name: np.broadcast_to(array, law.mean.shape).copy() for name, array in start.items()}
            shape = (count, *law.mean.shape)
            self.results["draws"] = reserved_map(folder, shape)
            if cells.mask is not None:  # cells outside keep their values
                self.results["draws"][...] = law.mean if law.draws is None else law.draws
        size = max(1, BUDGET // (cells.variables * max(count, self.layer.draws)))
        self.certificate.setting["draws"] = count
        with tqdm(total=cells.fields, unit="field", disable=None) as bar:
            for first in range(0, cells.fields, size):
                chunk = np.arange(first, min(first + size, cells.fields))
                for group in self._groups(chunk):
                    self._project(group, count)
                bar.update(len(chunk))
        extra = {"level": np.asarray(law.level)} if count else {}
        return {**self.results, **extra}

    def _check_room(self, count: int, folder: Path) -> None:
        """Check memory and disk: a chunk at a time in memory, draws on disk twice, as map and in the output."""
        size, taken = self.law.mean.size, sum(array.size for array in self.data.arrays.values())
        fix = "Ask for fewer draws, or split the file."
        chunk = max(BUDGET, self.data.cells.variables * max(2, self.layer.draws))
        check_memory(8.0 * (WORKING * chunk + 4 * size), f"Fields of {self.data.cells.variables} cells", fix)
        check_space(folder, 8.0 * ((2 * count + 4) * size + taken), f"{count} draws of {size} values", fix)

    def _groups(self, fields: np.ndarray) -> Iterator[FieldGroup]:
        """Fields with their constraint; bisection finds fields whose constraint is infeasible, and flags them."""
        cells = self.data.cells
        loc = torch.from_numpy(cells.gather(self.law.mean, fields))  # (fields, n)
        base = self.law.base(cells, fields)
        try:
            constraint = constraint_from(self.spec, replace(self.data, fields=fields))
            nearest = self.layer.project(loc, constraint, base)
        except InfeasibleError as error:
            if len(fields) > 1:
                for half in np.array_split(fields, 2):
                    yield from self._groups(half)
                return
            for array in self.results.values():
                cells.scatter(array, fields, np.asarray(np.nan))
            failed = list(range(self.certificate.setting["draws"]))
            record = {"field": self.field_index(fields[0]), "mean": True, "draws": failed, "reason": str(error)}
            self.certificate.flag(1 + len(failed), **record)
        else:
            law = self.law.calibrated(base)
            yield FieldGroup(fields, constraint, loc, law, base, nearest.value, nearest.stats.converged)

    def _project(self, group: FieldGroup, count: int) -> None:
        """Project one group into the results and the certificate."""
        certificate, fields = self.certificate, group.fields
        certificate.setting["algorithm"] = group.constraint.algorithm
        certificate.before.add(group.constraint, group.loc, _size(group.loc))
        distance, at = group.constraint.violation(group.loc).max(0)
        self.worst = max(self.worst, (float(distance), int(fields[at])))
        size, values = _size(group.loc), {"mean": group.nearest}
        feasible = group.converged & (group.constraint.relative_violation(group.nearest, size) <= TOLERANCE)
        passed = torch.ones(count, len(fields), dtype=torch.bool)
        if count:
            passed = self._draws(group, count)
            values = self._moments(group, passed)
            # the mean of draws may leave a nonconvex set: then take the point nearest to the input's mean
            inside = group.constraint.relative_violation(values["mean"], size) <= TOLERANCE
            values["mean"] = torch.where(inside.unsqueeze(-1), values["mean"], group.nearest)
            feasible = inside | feasible
        values["mean"] = torch.where(feasible.unsqueeze(-1), values["mean"], torch.nan)
        certificate.after.add(group.constraint, values["mean"], size)
        if group.law is not None:
            certificate.moved.add(group.loc, group.nearest, group.law.stddev)
        for name, value in values.items():
            self.data.cells.scatter(self.results[name], fields, value.numpy())
        for i in torch.nonzero(~(feasible & passed.all(0)))[:, 0].tolist():
            failed, lost = torch.nonzero(~passed[:, i])[:, 0].tolist(), not bool(feasible[i])
            reason = f"{len(failed)} of {count} draws{' and the mean' if lost else ''} were not projected."
            record = {"field": self.field_index(fields[i]), "mean": lost, "draws": failed, "reason": reason}
            certificate.flag(len(failed) + int(lost), **record)

    def _draws(self, group: FieldGroup, count: int) -> Tensor:
        """Write projected draws to the results, NaN where infeasible; whether they are feasible, (S, fields)."""
        passed = []
        constraint, cells = group.constraint, self.data.cells
        for part in torch.arange(count).split(max(1, BUDGET // group.loc.numel())):
            if self.law.draws is not None:
                z = torch.from_numpy(cells.gather(self.law.draws[part[0] : part[-1] + 1], group.fields))
            else:
                assert group.law is not None
                z = group.law.sample((len(part),), self.generator)
            solution, size = self.layer.project(z, constraint, group.base), _size(z)
            feasible = solution.stats.converged & (constraint.relative_violation(solution.value, size) <= TOLERANCE)
            value = torch.where(feasible.unsqueeze(-1), solution.value, torch.nan)
            self.certificate.before.add(constraint, z, size)
            self.certificate.after.add(constraint, value, size)
            cells.scatter(self.results["draws"][part[0] : part[-1] + 1], group.fields, value.numpy())
            passed.append(feasible)
        return torch.cat(passed)

    def _moments(self, group: FieldGroup, passed: Tensor) -> dict[str, Tensor]:
        """Mean, spread and band of every cell: in closed form where it is exact, otherwise from the draws."""
        levels = [(1 - self.law.level) / 2, (1 + self.law.level) / 2]
        cells, width = self.data.cells, max(1, BUDGET // passed.numel())
        blocks = []
        for first in range(0, cells.variables, width):  # all draws of some cells at a time
            columns = slice(first, first + width)
            samples = cells.gather(self.results["draws"], group.fields, columns)
            blocks.append(_summary(samples, passed.numpy(), levels))
        moments = {name: torch.cat([block[name] for block in blocks], -1) for name in SUMMARY}
        if self.law.draws is None:
            projected: Any = self.layer(group.law, group.constraint, metric_from=group.base)
            moments |= {"mean": projected.mean, "stddev": projected.stddev}
            if projected.exact:
                bounds = (projected.marginals.icdf(torch.tensor(level, dtype=torch.float64)) for level in levels)
                moments |= dict(zip(("lower", "upper"), bounds))
        return moments

    def field_index(self, number: Any) -> list[int]:
        """Index of a field along the batch and the axes of ``per``."""
        return [int(i) for i in np.unravel_index(int(number), self.data.cells.lead)] if self.data.cells.lead else []


@dataclass(frozen=True, eq=False)
class FieldGroup:
    """Fields that share a constraint: means, laws of draws and of the metric, and the nearest feasible points."""

    fields: np.ndarray
    constraint: Constraint
    loc: Tensor  # (fields, n)
    law: LocationScale | None
    base: LocationScale | None
    nearest: Tensor  # (fields, n)
    converged: Tensor  # (fields,), whether these were reached


def _summary(samples: np.ndarray, passed: np.ndarray, levels: list[float]) -> dict[str, Tensor]:
    """Mean, standard deviation and band of the draws that passed, each (fields, n)."""
    if not passed.all():
        parts = [samples[passed[:, i]][:, i : i + 1] for i in range(samples.shape[1])]
        parts = [part if len(part) else np.full_like(samples[:1, :1], np.nan) for part in parts]
        each = [_summary(part, np.ones((len(part), 1), bool), levels) for part in parts]
        return {name: torch.cat([summary[name] for summary in each]) for name in SUMMARY}
    lower, upper = np.quantile(samples, levels, axis=0)
    spread = samples.std(0, ddof=1) if len(samples) > 1 else np.zeros_like(lower)
    return {name: torch.from_numpy(array) for name, array in zip(SUMMARY, (samples.mean(0), spread, lower, upper))}


def _size(points: Tensor) -> Tensor:
    return points.abs().amax(-1, keepdim=True)
