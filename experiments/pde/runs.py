"""The paper's tables of PDE surrogates: every method on every problem, trained and measured alike.

A job trains one network and measures all rows that can be made of it: the unconstrained network, for one, also serves
the methods that act at inference only. The figures are those of ``measures`` on 100 test fields.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.grid import Grid
from experiments.pde.measures import Rule, dataset, evaluate, predicted, profile
from experiments.records import Records
from probhard import score as scores
from probhard.constraints import Box, NonNegative, TotalVariationDiminishing, TotalVariationPenalty, per_slice
from probhard.constraints.base import Constraint
from probhard.errors import check_choices
from probhard.method import METHODS, PENALTIES, Method, Step
from probhard.model import Batch, ConstrainedModel
from probhard.pde.base import Problem
from probhard.pde.laws import known_values, porous_medium_law
from probhard.pde.operators import VarianceNO
from probhard.pde.problems import PROBLEMS, PorousMedium
from probhard.training import Schedule, fit

TRAINING_DRAWS = 8  # where there is no closed form to train on
VALIDATION_DRAWS = 20  # per field, where a choice is made
VARIATIONS = (0.01, 0.1, 1.0, 10.0)  # weights of the total variation penalty to choose from, per unit of log density
BRIEF, WARM = 0.1, 1 / 3  # warm-up: so that a Newton iteration converges; so that draws leave their common vertex
STEEP = 0.1  # the weight that the table of total variation chose
JUMPS = ("advection", "stefan")  # problems of the linear table whose fronts are jumps
KEYS = ("problem", "method", "score", "seed", "epochs")


def _law(problem: Problem, parameter: Tensor) -> Constraint:
    assert isinstance(problem, PorousMedium)
    return porous_medium_law(problem, parameter)


def _known(problem: Problem, parameter: Tensor) -> Constraint:
    assert isinstance(problem, PorousMedium)
    return known_values(problem, parameter)


def _variation(weight: float, problem: Problem, parameter: Tensor) -> Constraint:
    return per_slice(TotalVariationPenalty(weight) & Box(0.0, 1.0), problem.shape)


def _steep(mass: bool, problem: Problem, parameter: Tensor) -> Constraint:
    known = Box(*problem.bounds(parameter)) & TotalVariationPenalty(STEEP)
    return per_slice(problem.slice_interval(parameter) & known if mass else known, problem.shape)


RULES: dict[str, Rule] = {
    "mass": lambda problem, parameter: problem.constraint(parameter),
    "physics": lambda problem, parameter: problem.physics(parameter),
    "interval": lambda problem, parameter: problem.physics(parameter, "interval"),
    "jump": lambda problem, parameter: problem.physics(parameter, "jump"),
    "phases": lambda problem, parameter: problem.physics(parameter, "jump", phases=True),
    "steep": partial(_steep, False),
    "steep, interval": partial(_steep, True),
    "known": _known,
    "known, positive": lambda problem, parameter: _known(problem, parameter) & NonNegative(),
    "flux": _law,
    "flux, positive": lambda problem, parameter: _law(problem, parameter) & NonNegative(),
    **{f"variation {weight:g}": partial(_variation, weight) for weight in VARIATIONS},
    "diminishing": lambda problem, parameter: TotalVariationDiminishing(problem.shape) & Box(0.0, 1.0),
}


@dataclass(frozen=True)
class Row:
    """A row of a table: a method, and the name of the rule that it is to obey.

    Args:
        method: How it is trained and what is done at inference.
        rule: A name in ``RULES``; with choices its beginning.
        choices: Penalties of the method, or weights in the rule, to choose from on the validation data.
        after: The rule at inference, if it is another than in training.
        last: A rule on whose nearest fields mean and draws are put in the end.
        warm_up: Share of the epochs that are trained without the rule at first.
        problems: Those that it is for; none named means all.
    """

    method: Method
    rule: str = "mass"
    choices: Sequence[float] = ()
    after: str | None = None
    last: str | None = None
    warm_up: float = 0.0
    problems: Sequence[str] = ()

    def chosen(self) -> Iterator[tuple[float | None, Row]]:
        """Every choice and the row it gives, which has none left."""
        if not self.choices:
            yield None, self
        for value in self.choices:
            if self.method.penalty:
                yield value, Row(self.method.replace(penalty=value), self.rule)
            else:
                yield value, Row(self.method, f"{self.rule} {value:g}")

    def warmed(self, schedule: Schedule) -> Schedule:
        """The schedule with this row's warm-up, which is the schedule's own if that has one."""
        own = schedule.warm_up or round(self.warm_up * schedule.epochs)
        return replace(schedule, warm_up=own if self.warm_up else 0)

    def serves(self, problem: str) -> bool:
        """Whether it is for a problem."""
        return not self.problems or problem in self.problems

    @property
    def reuses_base(self) -> bool:
        """Whether training is that of the unconstrained network."""
        return self.method.training == Step() and not self.method.penalty

    @property
    def network(self) -> tuple[Any, ...]:
        """What the trained weights depend on: rows that are alike in it share a network."""
        if self.reuses_base:
            return ()
        return self.method.training, self.method.penalty, self.rule, self.choices, self.warm_up

    @property
    def exact(self) -> bool:
        """Whether the closed-form marginals are those of the draws."""
        return self.last is None and ((self.after or self.rule) == "mass" or self.method.inference == Step())


def _both(metric: str) -> Method:
    """Projected in training and at inference; failures are counted, not fatal."""
    return Method(Step(metric, on_failure="flag"), Step(metric, on_failure="flag"))


def _drawn(metric: str) -> Method:
    """The same where no moments have a closed form: a few projected draws give an unbiased CRPS to train on."""
    return Method(Step(metric, draws=TRAINING_DRAWS), Step(metric))


def _after(metric: str) -> Method:
    return Method(inference=Step(metric, on_failure="flag"))


@dataclass(frozen=True)
class Table:
    """Rows, what they are measured against, and the problems they are measured on."""

    name: str
    law: str  # the rule whose residuals are reported
    rows: Mapping[str, Row]
    order: Sequence[str]  # of training
    problems: Mapping[str, Callable[[], Problem]]
    profile: tuple[float, float] | None = None  # a parameter and a time, kept for the figure
    keys: tuple[str, ...] = KEYS
    scores: tuple[str, ...] = ("crps", "nll")
    draws: int = 100  # per test field
    quick: Schedule = field(default_factory=lambda: Schedule(2))  # of a rough run, on small data of these sizes
    few: Mapping[str, Any] = field(default_factory=lambda: {"sizes": (20, 10, 10)})


_JUMP = Row(_drawn("oblique"), "jump", warm_up=WARM, problems=JUMPS)
_PHASES = replace(_JUMP, after="phases", problems=("stefan",))
LINEAR = Table(
    "pde-linear",
    "mass",
    {
        **{name: Row(METHODS[name]) for name in ("base", "hardc", "probconserv", "probhard-inf")},
        "softc": Row(METHODS["softc"], choices=PENALTIES),
        **{name: Row(METHODS[name]) for name in ("probhard-ob", "probhard-or")},
        "probhard-physics": Row(_drawn("oblique"), "physics"),
        "probhard-physics-or": Row(_drawn("orthogonal"), "physics"),
        "probhard-physics-warm": Row(_drawn("oblique"), "physics", warm_up=WARM),
        "probhard-jump": Row(_drawn("oblique"), "jump", problems=JUMPS),
        "probhard-jump-warm": _JUMP,
        "probhard-jump-warm-law": replace(_JUMP, last="physics"),
        "probhard-phases": _PHASES,
        "probhard-phases-law": replace(_PHASES, last="physics"),
        "probhard-interval": Row(_drawn("oblique"), "interval", problems=JUMPS),
        "probhard-interval-tv": Row(_drawn("oblique"), "steep", after="steep, interval", problems=JUMPS),
        "probhard-physics-inf": Row(_after("oblique"), "physics"),
        "probhard-physics-inf-or": Row(_after("orthogonal"), "physics"),
    },
    (
        "base",
        "probhard-or",
        "probhard-ob",
        "probhard-physics-or",
        "probhard-physics",
        "hardc",
        "softc",
        "probhard-physics-warm",
        "probhard-jump-warm",
        "probhard-jump",
        "probhard-interval",
        "probhard-interval-tv",
    ),
    {name: PROBLEMS[name] for name in ("advection", "stefan", "pme", "heat")},
    (0.625, 0.505),  # of Stefan, the only one with this parameter
)
NONLINEAR = Table(
    "pde-nonlinear",
    "flux",
    {
        "base": Row(METHODS["base"]),
        "probconserv": Row(METHODS["probconserv"]),
        "probhard-inf": Row(_after("oblique"), "flux, positive"),
        "probhard-inf-or": Row(_after("orthogonal"), "flux, positive"),
        "probhard-ob": Row(_both("oblique"), "flux, positive", warm_up=BRIEF),
        "probhard-or": Row(_both("orthogonal"), "flux, positive", warm_up=BRIEF),
        # Which part earns the gain:
        "probhard-inf-known": Row(_after("orthogonal"), "known"),
        "probhard-inf-known-positive": Row(_after("orthogonal"), "known, positive"),
        "probhard-inf-flux": Row(_after("orthogonal"), "flux"),
        "probhard-or-known": Row(_both("orthogonal"), "known", warm_up=BRIEF),
        "probhard-or-known-positive": Row(_both("orthogonal"), "known, positive", warm_up=BRIEF),
        "probhard-or-flux": Row(_both("orthogonal"), "flux", warm_up=BRIEF),
    },
    ("base", "probhard-or", "probhard-ob", "probhard-or-known-positive", "probhard-or-known", "probhard-or-flux"),
    {f"pme-{low}-{low + 1}": partial(PorousMedium, float(low), float(low + 1)) for low in (2, 3, 4)},
    (3.88, 0.505),  # as in the paper's figure
    (*KEYS, "m_range"),
    draws=20,  # nonlinear projections of a 2,000-point field take tens of milliseconds each
    # slow to project on from a network that knows nothing: more steps, few of them constrained, few fields and draws
    quick=Schedule(200, lr=1e-2, warm_up=190),
    few={"sizes": (20, 4, 2), "draws": 2, "shape": (8, 40)},
)
TVD = Table(
    "tvd",
    "mass",
    {
        "base": Row(METHODS["base"]),
        "probconserv": Row(METHODS["probconserv"]),
        "probhard-tv": Row(_drawn("oblique"), "variation", VARIATIONS),
        "probhard-tvd": Row(_drawn("oblique"), "diminishing"),
        "probhard-tv-inf": Row(_after("oblique"), "variation", VARIATIONS),
        "probhard-tvd-inf": Row(_after("oblique"), "diminishing"),
    },
    ("base", "probhard-tv", "probhard-tvd"),
    {"advection": PROBLEMS["advection"]},
    (1.5, 0.152),  # by t = 0.505, which the paper names, this front has left the domain
    scores=("crps",),
)
TABLES = {table.name: table for table in (LINEAR, NONLINEAR, TVD)}


@dataclass(frozen=True)
class Job:
    """Train one network for a problem and measure every row that can be made of it.

    Args:
        table: A name in ``TABLES``.
        problem: One of the table's problems.
        trained: The row that is trained; others that share its network come with it.
        score: ``crps`` or ``nll``, of the training loss.
        seed: Of data, weights and draws.
        schedule: The same for all rows of a table.
        sizes: Fields for training, validation and test.
        network: Options of ``VarianceNO``.
        compiled: Compile the network first; pays from a few dozen epochs on.
        draws: Per test field, at most.
        shape: Time slices and points of the fields; None for the problem's own.
    """

    table: str
    problem: str
    trained: str
    score: str = "crps"
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)
    sizes: tuple[int, int, int] = (160, 40, 100)
    network: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = True
    draws: int = 100
    shape: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """A file name."""
        return f"{self.problem}-{self.trained}-{self.score}-{self.seed}-{self.schedule.epochs}"

    def expected(self) -> list[dict[str, Any]]:
        """The keys of the lines that this job gives."""
        table = TABLES[self.table]
        problem = self._problem()
        key: dict[str, Any] = {"problem": problem.name}
        if "m_range" in table.keys:
            key["m_range"] = [problem.lower, problem.upper]
        setting = {"score": self.score, "seed": self.seed, "epochs": self.schedule.epochs}
        network = table.rows[self.trained].network
        names = [name for name, row in table.rows.items() if row.network == network and row.serves(self.problem)]
        return [{**key, "method": name, **setting} for name in names]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Train, measure, and return one line per row."""
        table = TABLES[self.table]
        problem = self._problem()
        backbone, about = self._train(table, problem, folder, progress)
        exact = replace(problem, dtype=torch.float64)
        test = dataset(exact, exact.split(self.seed, *self.sizes).test)
        validation = dataset(exact, problem.split(self.seed, *self.sizes).validation.double())  # as in training
        backbone.double()
        lines = []
        for key in self.expected():
            row, kept = table.rows[key["method"]], dict(about)
            if row.choices and row.reuses_base:
                made = [(value, self._model(one, exact, backbone)) for value, one in row.chosen()]
                candidates = [(self._quality(model, validation, row.exact), value, model) for value, model in made]
                kept["validation_crps"], kept["choice"], model = min(candidates, key=lambda one: one[0])
            else:
                one = next(one for value, one in row.chosen() if value == about.get("choice"))
                model = self._model(one if one.after is None else replace(one, rule=one.after), exact, backbone)
            generator = torch.Generator().manual_seed(self.seed)
            last = None if row.last is None else RULES[row.last]
            figures = evaluate(model, exact, RULES[table.law], test, generator, min(self.draws, table.draws), last)
            figures["crps"] = figures["crps_marginals" if row.exact else "crps_draws"]
            line = {**key, **figures, **kept}
            if table.profile is not None and exact.lower <= table.profile[0] <= exact.upper:
                line["profile"] = profile(model, exact, *table.profile, self.draws, last)
            lines.append(line)
        return lines

    def _problem(self) -> Problem:
        problem = TABLES[self.table].problems[self.problem]()
        return problem if self.shape is None else replace(problem, slices=self.shape[0], points=self.shape[1])

    def _model(self, row: Row, problem: Problem, backbone: VarianceNO) -> ConstrainedModel:
        return ConstrainedModel(backbone, partial(RULES[row.rule], problem), row.method.replace(score=self.score))

    def _quality(self, model: ConstrainedModel, validation: Batch, exact: bool) -> float:
        """CRPS on the validation data, as the table has it: of the marginals, or of draws."""
        assert validation.target is not None
        with torch.no_grad():
            forecast = model.forecast(validation)
            if exact:
                return float(scores.crps(forecast, validation.target).mean())
            prediction = predicted(forecast, torch.Generator().manual_seed(self.seed), VALIDATION_DRAWS)
            return float(scores.crps_ensemble(prediction.draws, validation.target, estimator="fair").mean())

    def _train(self, table: Table, problem: Problem, folder: Path, progress: bool) -> tuple[VarianceNO, dict[str, Any]]:
        """The network of the best epoch and, where there is a choice, of the best one on the validation data."""
        train, validation, _ = (dataset(problem, part) for part in problem.split(self.seed, *self.sizes))
        candidates: list[tuple[float, VarianceNO, dict[str, Any]]] = []
        seconds = 0.0
        for value, row in table.rows[self.trained].chosen():
            torch.manual_seed(self.seed)
            backbone = VarianceNO(**self.network).to(problem.dtype)
            if self.compiled:
                backbone.compile()
            model = self._model(row, problem, backbone)
            where = folder / f"{value or 0:g}"
            done = fit(model, train, validation, self.schedule, seed=self.seed, directory=where, progress=progress)
            seconds += done.seconds
            quality = self._quality(model, validation, row.exact)
            about = {"best_epoch": done.best_epoch, "validation_crps": quality}
            candidates.append((quality, backbone, about if value is None else {**about, "choice": value}))
        _, backbone, about = min(candidates, key=lambda one: one[0])
        return backbone, {**about, "seconds": seconds}


def grid(
    table: str,
    path: str | os.PathLike[str],
    epochs: int = 150,
    seeds: Sequence[int] = (0,),
    problems: Sequence[str] = (),
    trained: Sequence[str] = (),
    objectives: Sequence[str] = ("crps", "nll"),
    quick: bool = False,
) -> Grid:
    """All jobs of a table, the most telling first; rows that are trained on draws have a CRPS only.

    Quick jobs train small networks on little data by a schedule of their own, whatever ``epochs`` says.
    """
    known = TABLES[table]
    check_choices("problem", problems, list(known.problems))
    check_choices("method", trained, known.order)  # the others come with these
    check_choices("score", objectives, ("crps", "nll"))
    schedule = known.quick if quick else Schedule(epochs)
    options = {"network": {"width": 8, "modes": (4, 4)}, "compiled": False, **known.few} if quick else {}
    jobs = [
        Job(table, problem, row, score, seed, known.rows[row].warmed(schedule), **options)
        for seed in seeds
        for score in known.scores
        for row in trained or known.order
        for problem in problems or known.problems
        if score in objectives and (score == "crps" or not known.rows[row].method.training.draws)
        if known.rows[row].serves(problem)
    ]
    return Grid(jobs, Records(path, known.keys))
