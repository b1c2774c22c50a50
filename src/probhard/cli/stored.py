"""Laws stored as arrays on a grid, projected some fields at a time.

The input is a law per cell, ``mean`` with ``stddev`` or ``variance``, or a normal band ``lower``, ``upper`` of
probability ``level``,

    stddev = (upper - lower) / (2 Phi^-1((1 + level) / 2)),

an empirical one, ``draws`` (S, *batch, *grid), or points, ``mean`` alone. Every draw is projected by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard.cli.certificate import TOLERANCE, Certificate
from probhard.constraints import Constraint
from probhard.errors import InfeasibleError, ParameterError, ShapeError
from probhard.io.fields import Cells
from probhard.io.spec import Data, constraint_from
from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale
from probhard.laws.family import NORMAL
from probhard.projection.layer import DPPL

BUDGET = 2_000_000  # numbers that are projected at a time
LEVEL = 0.9  # probability of the bands, unless the input has one


@dataclass(frozen=True, eq=False)
class Law:
    """What the input says of the fields (*batch, *grid): means, and standard deviations or draws if there are any."""

    mean: np.ndarray
    stddev: np.ndarray | None = None
    draws: np.ndarray | None = None  # (S, *batch, *grid)
    level: float = LEVEL

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Law:
        """From arrays by name: draws count first, then standard deviations or variances, then bands."""
        level, band = _level(arrays), "lower" in arrays and "upper" in arrays
        if "draws" in arrays:
            draws = arrays["draws"]
            if draws.ndim < 2 or not draws.size:
                raise ShapeError(
                    f"The draws have shape {draws.shape}.",
                    "Draws lead, at least one: (S, *batch, *grid).",
                    "Add a first dimension, or leave out the empty array.",
                )
            return cls(draws.mean(0), draws.std(0, ddof=1) if len(draws) > 1 else None, draws, level)
        if "mean" not in arrays and not band:
            raise ParameterError(
                f"The file has the arrays {', '.join(sorted(arrays)) or '(none)'}.",
                "Nothing among them says what to project.",
                "Save 'mean' (with 'stddev' or 'variance'), 'lower', 'upper' and 'level', or 'draws' with draws first.",
            )
        mean = arrays["mean"] if "mean" in arrays else (arrays["lower"] + arrays["upper"]) / 2
        if "stddev" in arrays:
            return cls(mean, arrays["stddev"], None, level)
        if "variance" in arrays:
            with np.errstate(invalid="ignore"):  # negative ones become NaN, which is refused
                return cls(mean, np.sqrt(arrays["variance"]), None, level)
        spread = (arrays["upper"] - arrays["lower"]) / (2 * _quantile(level)) if band else None
        return cls(mean, spread, None, level)

    @property
    def spread(self) -> np.ndarray:
        """Standard deviations, 0 where there is a single draw."""
        return np.zeros_like(self.mean) if self.stddev is None else np.broadcast_to(self.stddev, self.mean.shape)

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """The normal band of its level."""
        half = _quantile(self.level) * self.spread
        return self.mean - half, self.mean + half

    def check(self, cells: Cells) -> None:
        """Raise unless all cells of the domain have finite means and standard deviations of at least 0."""
        everything = np.arange(cells.fields)
        for name, array, low in (("mean", self.mean, -np.inf), ("standard deviation", self.stddev, 0.0)):
            if array is None:
                continue
            inside = cells.everywhere(f"The {name}", array, everything)
            bad = int((~np.isfinite(inside) | (inside < low)).sum())
            if bad:
                what = "NaN, infinite or negative" if low == 0 else "NaN or infinite"
                found = "the draws" if self.draws is not None else "the band or the variances"
                raise ParameterError(
                    f"The {name}{' of the draws' if self.draws is not None else ''} is {what} in {bad} of "
                    f"{inside.size} cells.",
                    "Nothing can be projected from there.",
                    f"Save an array 'mask' that is True for the cells of the domain, or mend {found}.",
                )


@dataclass(eq=False)
class Job:
    """One run over all fields, some at a time."""

    law: Law
    spec: Any
    data: Data
    layer: DPPL
    certificate: Certificate
    generator: torch.Generator
    worst: tuple[float, int] = (-1.0, 0)  # largest violation of a mean as it came, and its field
    results: dict[str, np.ndarray] = field(default_factory=dict)

    def run(self, draws: int, scratch: Path) -> dict[str, np.ndarray]:
        """The projected arrays by name; draws are kept in a file of the folder ``scratch``."""
        from tqdm import tqdm

        law, cells = self.law, self.data.cells
        count = 0 if law.stddev is None and law.draws is None else draws if law.draws is None else len(law.draws)
        self.results = {"mean": law.mean.copy()}
        if count:
            start = dict(zip(("stddev", "lower", "upper"), (law.spread, *law.band())))
            self.results |= {name: np.broadcast_to(array, law.mean.shape).copy() for name, array in start.items()}
            shape = (count, *law.mean.shape)
            self.results["draws"] = np.lib.format.open_memmap(scratch / "draws.npy", "w+", np.float64, shape)
            if cells.mask is not None:  # cells outside keep what they had
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

    def _groups(self, fields: np.ndarray) -> Iterator[Group]:
        """The fields with their constraint; those of which it is empty are told apart by halving, and flagged."""
        cells, stddev = self.data.cells, self.law.stddev
        loc = torch.from_numpy(cells.gather(self.law.mean, fields))  # (fields, n)
        spread = None if stddev is None else cells.everywhere("The standard deviation", stddev, fields)
        law = None if spread is None else LocationScale(loc, Diagonal(torch.from_numpy(spread).square()))
        try:
            constraint = constraint_from(self.spec, replace(self.data, fields=fields))
            nearest = self.layer.project(loc, constraint, law)
        except InfeasibleError as error:
            if len(fields) > 1:
                for half in np.array_split(fields, 2):
                    yield from self._groups(half)
                return
            for array in self.results.values():
                cells.scatter(array, fields, np.asarray(np.nan))
            failed = list(range(self.certificate.setting["draws"]))
            record = {"field": self.number(fields[0]), "mean": True, "draws": failed, "reason": str(error)}
            self.certificate.flag(1 + len(failed), **record)
        else:
            yield Group(fields, constraint, loc, law, nearest.value, nearest.stats.converged)

    def _project(self, group: Group, count: int) -> None:
        """Project one group and write it down."""
        certificate, fields = self.certificate, group.fields
        certificate.setting["algorithm"] = group.constraint.algorithm
        certificate.before.add(group.constraint, group.loc, _size(group.loc))
        distance, at = group.constraint.violation(group.loc).max(0)
        self.worst = max(self.worst, (float(distance), int(fields[at])))
        size, values = _size(group.loc), {"mean": group.nearest}
        known = group.reached & (group.constraint.relative_violation(group.nearest, size) <= TOLERANCE)
        passed = torch.ones(count, len(fields), dtype=torch.bool)
        if count:
            samples, passed = self._draws(group, count)
            values = self._moments(group, samples, passed) | {"draws": samples}
            # a mean of draws may leave a set that is not convex: there, the point nearest to the mean that came in
            own = group.constraint.relative_violation(values["mean"], size) <= TOLERANCE
            values["mean"], known = torch.where(own.unsqueeze(-1), values["mean"], group.nearest), own | known
        values["mean"] = torch.where(known.unsqueeze(-1), values["mean"], torch.nan)
        certificate.after.add(group.constraint, values["mean"], size)
        for name, value in values.items():
            self.data.cells.scatter(self.results[name], fields, value.numpy())
        for i in torch.nonzero(~(known & passed.all(0)))[:, 0].tolist():
            failed = torch.nonzero(~passed[:, i])[:, 0].tolist()
            reason = f"{len(failed)} of {count} draws{'' if known[i] else ' and the mean'} were not projected."
            points = len(failed) + int(not known[i])
            record = {"field": self.number(fields[i]), "mean": not bool(known[i]), "draws": failed, "reason": reason}
            certificate.flag(points, **record)

    def _draws(self, group: Group, count: int) -> tuple[Tensor, Tensor]:
        """Projected draws (S, fields, n), NaN where they failed, and whether they are feasible, (S, fields)."""
        found, passed = [], []
        constraint, cells = group.constraint, self.data.cells
        for part in torch.arange(count).split(max(1, BUDGET // group.loc.numel())):
            if self.law.draws is not None:
                z = torch.from_numpy(cells.gather(self.law.draws[part[0] : part[-1] + 1], group.fields))
            else:
                assert group.law is not None
                z = group.law.sample((len(part),), self.generator)
            solution, size = self.layer.project(z, constraint, group.law), _size(z)
            good = solution.stats.converged & (constraint.relative_violation(solution.value, size) <= TOLERANCE)
            value = torch.where(good.unsqueeze(-1), solution.value, torch.nan)
            self.certificate.before.add(constraint, z, size)
            self.certificate.after.add(constraint, value, size)
            found.append(value)
            passed.append(good)
        return torch.cat(found), torch.cat(passed)

    def _moments(self, group: Group, samples: Tensor, passed: Tensor) -> dict[str, Tensor]:
        """Mean, spread and band of every cell: in closed form where that is exact, else from the draws."""
        levels = [(1 - self.law.level) / 2, (1 + self.law.level) / 2]
        found = _summary(samples.numpy(), passed.numpy(), levels)
        if self.law.draws is None:
            projected: Any = self.layer(group.law, group.constraint)
            found |= {"mean": projected.mean, "stddev": projected.stddev}
            if projected.exact:
                bounds = (projected.marginals.icdf(torch.tensor(level, dtype=torch.float64)) for level in levels)
                found |= dict(zip(("lower", "upper"), bounds))
        return found

    def number(self, number: Any) -> list[int]:
        """A field's place in the batch and the axes that joined it."""
        return [int(i) for i in np.unravel_index(int(number), self.data.cells.lead)] if self.data.cells.lead else []


@dataclass(frozen=True, eq=False)
class Group:
    """Fields and their constraint: means and law as they came, and the nearest feasible points."""

    fields: np.ndarray
    constraint: Constraint
    loc: Tensor  # (fields, n)
    law: LocationScale | None
    nearest: Tensor  # (fields, n)
    reached: Tensor  # (fields,), whether these were found


def _summary(samples: np.ndarray, passed: np.ndarray, levels: list[float]) -> dict[str, Tensor]:
    """Mean, standard deviation and band of the draws that passed, each (fields, n)."""
    if not passed.all():
        parts = [samples[passed[:, i]][:, i : i + 1] for i in range(samples.shape[1])]
        parts = [part if len(part) else np.full_like(samples[:1, :1], np.nan) for part in parts]
        each = [_summary(part, np.ones((len(part), 1), bool), levels) for part in parts]
        return {name: torch.cat([found[name] for found in each]) for name in each[0]}
    lower, upper = np.quantile(samples, levels, axis=0)
    spread = samples.std(0, ddof=1) if len(samples) > 1 else np.zeros_like(lower)
    found = {"mean": samples.mean(0), "stddev": spread, "lower": lower, "upper": upper}
    return {name: torch.from_numpy(array) for name, array in found.items()}


def _level(arrays: Mapping[str, np.ndarray]) -> float:
    """The probability of the bands."""
    if "level" not in arrays and not ("lower" in arrays and "upper" in arrays):
        return LEVEL
    level = arrays.get("level", np.empty(0))
    if level.size != 1 or not 0 < level.item() < 1:
        raise ParameterError(
            f"The level of the band is {level.tolist()}.",
            "The spread of a normal law follows from the probability of its band, one number between 0 and 1.",
            "Save it beside 'lower' and 'upper', such as level=0.9.",
        )
    return float(level.item())


def _quantile(level: float) -> float:
    """Half the width of a standard normal band of this probability."""
    return float(NORMAL.icdf(torch.tensor((1 + level) / 2, dtype=torch.float64)))


def _size(points: Tensor) -> Tensor:
    return points.abs().amax(-1, keepdim=True)
