"""``compare``: one constraint, one backbone, every method.

Every method trains its own copy of the backbone, with the same initial weights, data order and schedule. All rows are
measured alike on held-out samples:

    MSE of the mean,   CRPS and energy score of draws,   largest violations of means and draws,   processor seconds.

A method that does not apply to the constraint is a row with the reason.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from probhard import score as scores
from probhard._comparison.result import Comparison, Row
from probhard._training.data import TensorData
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError, ProbhardError, ShapeError
from probhard.laws.distribution import LocationScale
from probhard.method import METHODS, Method, as_method
from probhard.model import Batch, ConstrainedModel
from probhard.projection.projected import Projected
from probhard.training import Schedule, fit

__all__ = ["Comparison", "Plan", "Row", "compare", "compared"]

PARTS = ("train", "validation", "test")
SHARES = (0.6, 0.2)  # of samples for training and validation, if the data are one batch
BUDGET = 2_000_000  # numbers drawn at a time
VISIBLE = 1e-6  # relative violation from which a draw counts as violating
FEW = 8  # samples on which a method is tried before it is trained


@dataclass(frozen=True)
class Plan:
    """What is compared, and how.

    Args:
        methods: Methods by name.
        schedule: Epochs, batch size, learning rate.
        seeds: Seeds of weights, data order and draws.
        draws: Number of draws that are scored.
        progress: Show a progress bar.
    """

    methods: Mapping[str, Method]
    schedule: Schedule
    seeds: Sequence[int] = (0,)
    draws: int = 100
    progress: bool = True


def compare(
    model_factory: Callable[[], nn.Module],
    constraint: Callable[[Any], Constraint] | Constraint,
    data: Any,
    methods: Iterable[str] | Mapping[str, str | Method] | None = None,
    *,
    schedule: Schedule = Schedule(epochs=50),  # noqa: B008 - frozen
    seeds: Sequence[int] = (0,),
    draws: int = 100,
    progress: bool = True,
    plot: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Train and measure methods on the same data under the same constraint.

    Args:
        model_factory: Makes a backbone, called once for every row after the seed is set.
        constraint: As for ``ConstrainedModel``.
        data: A mapping with ``train``, ``validation`` and ``test``, each anything that ``Batch.of`` takes; or one such
            batch, which is split 60/20/20 at random.
        methods: Names in ``METHODS``, or methods by name; None for all.
        schedule: Epochs, batch size, learning rate.
        seeds: One row for each method and seed.
        draws: Number of draws that are scored.
        progress: Show a progress bar.
        plot: File for a picture; None for none.

    Returns:
        Rows and picture. ``.frame`` is a pandas frame, ``print`` shows a table.

    Raises:
        ParameterError: A method is not known, or the data are not those of a comparison.
        ShapeError: There are too few samples to split.
    """
    chosen = methods if isinstance(methods, Mapping) else {name: name for name in methods or METHODS}
    plan = Plan({name: as_method(method) for name, method in chosen.items()}, schedule, seeds, draws, progress)

    def build(method: Method, seed: int) -> ConstrainedModel:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return ConstrainedModel(model_factory(), constraint, method)

    result = compared(build, _parts(data), plan)
    if plot is not None:
        result.plot(plot)
    return result


def compared(build: Callable[[Method, int], ConstrainedModel], parts: Mapping[str, Batch], plan: Plan) -> Comparison:
    """Train and measure models.

    Args:
        build: Makes an untrained model of a method with a seed.
        parts: The batches ``train``, ``validation`` and ``test``.
        plan: Methods, schedule and seeds.
    """
    rows: list[Row] = []
    units = [(name, seed) for name in plan.methods for seed in plan.seeds]
    with tqdm(units, disable=not plan.progress, unit="row") as bar:
        for name, seed in bar:
            bar.set_postfix_str(name)
            known = next((row.reason for row in rows if row.method == name and row.reason), "")
            rows.append(Row(name, seed, known) if known else _row(name, seed, build, parts, plan))
    return Comparison(tuple(rows))


def _row(
    name: str, seed: int, build: Callable[[Method, int], ConstrainedModel], parts: Mapping[str, Batch], plan: Plan
) -> Row:
    """Train and measure one method; a row with the reason if that is not possible."""
    phase = "does not apply"
    try:
        model = build(plan.methods[name], seed)
        few = _some(parts["train"], list(range(min(FEW, parts["train"].size))))
        model.loss(few)
        with torch.no_grad():
            model(few)
        phase, start = "failed in training", time.process_time()
        with torch.random.fork_rng():
            done = fit(model, parts["train"], parts["validation"], plan.schedule, seed=seed, progress=False)
        spent, phase = time.process_time() - start, "failed on test samples"
        figures = measured(model, parts["test"], plan.draws, seed)
    except ProbhardError as error:
        return Row(name, seed, f"{phase}: {error.what} {error.why}")
    return replace(figures, method=name, train_seconds=spent, epochs=done.epochs)


@torch.no_grad()
def measured(model: ConstrainedModel, test: Batch, draws: int, seed: int) -> Row:
    """Measure a trained model.

    Args:
        model: The model, in ``eval`` mode.
        test: Held-out samples.
        draws: Number of draws.
        seed: Of the draws.

    Returns:
        Figures of a row without a name.
    """
    generator = torch.Generator().manual_seed(seed)
    assert test.target is not None
    size = max(1, BUDGET // max(1, draws * test.target[0].numel()))
    totals: dict[str, list[Tensor]] = {}
    feasible, seconds, points = True, 0.0, False
    for first in range(0, test.size, size):
        batch = _some(test, list(range(first, min(first + size, test.size))))
        start = time.process_time()
        law = model(batch)
        points = isinstance(law, Tensor)
        mean = law if isinstance(law, Tensor) else law.mean
        sample = mean.unsqueeze(0) if isinstance(law, Tensor) else law.sample((draws,), generator)
        seconds += time.process_time() - start
        feasible = feasible and _promised(law)
        assert batch.target is not None
        target, constraint = batch.target.reshape(mean.shape), model.constraint(batch)
        seen = None if batch.mask is None else batch.mask.reshape(mean.shape)
        for key, values in _figures(mean, sample, target, constraint, seen).items():
            totals.setdefault(key, []).append(values.flatten())
    joined = {key: torch.cat(values).double() for key, values in totals.items()}
    figures: dict[str, Any] = {k: float(joined[k].mean()) for k in ("mse", "crps", "energy_score", "violating")}
    figures |= {key: float(joined[key].max()) for key in ("violation_mean", "violation_draws")}
    if points:  # a point has no draws
        figures |= {"violation_draws": math.nan, "violating": math.nan}
    kept = feasible and figures["violating"] == 0  # the promise of probconserv is that of the linear part alone
    return Row("", seed, feasible=kept, predict_seconds=seconds, **figures)


def _figures(
    mean: Tensor, sample: Tensor, target: Tensor, constraint: Constraint, seen: Tensor | None
) -> dict[str, Tensor]:
    """Figures of means (*batch, n) and draws (S, *batch, n): per observed value, sample or draw."""
    known = torch.ones_like(target, dtype=torch.bool) if seen is None else seen
    whole = known.all(-1)
    full = torch.where(known, target, mean)  # scores need numbers where nothing was observed
    error = mean - full
    many = len(sample) > 1  # else points: their scores are distances
    crps = scores.crps_ensemble(sample, full, estimator="fair") if many else error.abs()
    energy = scores.energy_score(sample, full) if many else error.norm(dim=-1)
    return {
        "mse": error.square()[known],
        "crps": crps[known],
        "energy_score": energy[whole],
        "violation_mean": constraint.violation(mean),
        "violation_draws": constraint.violation(sample),
        "violating": (constraint.relative_violation(sample) > VISIBLE).double(),
    }


def _promised(law: Projected | LocationScale | Tensor) -> bool:
    """Whether all draws of a law are feasible by design."""
    return not isinstance(law, Tensor) and bool(law.feasible)


def _parts(data: Any) -> dict[str, Batch]:
    """The batches of a comparison; one batch is split at random."""
    if isinstance(data, Mapping) and set(data) & set(PARTS):
        if set(data) != set(PARTS):
            raise ParameterError(
                f"compare() got data with the parts {sorted(data)}.",
                "Methods are trained, selected and measured on different samples.",
                "Pass a mapping with 'train', 'validation' and 'test', or one batch.",
            )
        return {name: _with_target(Batch.of(part)) for name, part in data.items()}
    whole = _with_target(Batch.of(data))
    first, second = (round(sum(SHARES[:k]) * whole.size) for k in (1, 2))
    if not 0 < first < second < whole.size:
        raise ShapeError(
            f"compare() got {whole.size} samples.",
            "They are split into training, validation and test.",
            "Pass at least 5 samples, or three batches by name.",
        )
    order = torch.randperm(whole.size, generator=torch.Generator().manual_seed(0)).tolist()
    return dict(zip(PARTS, (_some(whole, part) for part in (order[:first], order[first:second], order[second:]))))


def _with_target(batch: Batch) -> Batch:
    if batch.target is None:
        raise ParameterError(
            "compare() got data without targets.",
            "Accuracy and scores are measured against them.",
            "Pass (inputs, targets).",
        )
    return batch


def _some(batch: Batch, indices: list[int]) -> Batch:
    """Some samples of a batch."""
    return Batch(**TensorData(batch).__getitems__(indices))
