"""Any convex set that cvxpy can describe: ``describe(u, *args)`` is a list of cvxpy constraints.

The description is compiled once for each number of variables and shapes of data. This batch's data are parameters, so
the constraints must follow cvxpy's DPP rules. Affine equalities without parameters become rows ``A u = b``. cvxpy
evaluates everything else point by point and without gradients: exact for any cone, but slow. Join functions that are
only defined for u >= 0, such as entropies, with ``NonNegative()``: a rounding error below 0 would leave their domain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from probhard._util.lru import Recent
from probhard._util.tensors import broadcast, check_finite, checking
from probhard.constraints._program_rows import ProgramRows, slope
from probhard.constraints._reals import reals
from probhard.constraints.base import Constraint, immutable
from probhard.errors import ParameterError, ShapeError, optional

Shapes = tuple[tuple[int, ...], ...]

_KNOWN: Recent[ProgramStructure] = Recent()  # by description


def cvx(name: str) -> Any:
    """Import a module that convex programs need.

    Raises:
        MissingExtraError: It is not installed.
    """
    return optional(name, "cvx", "ConvexProgram")


@immutable
class ConvexProgram(Constraint):
    """The points u that satisfy ``describe(u, *args)``, a list of convex cvxpy constraints.

    Args:
        describe: Maps a ``cvxpy.Variable`` (n,) and one ``cvxpy.Parameter`` per entry of ``args`` to constraints.
            Define it once: every new function object is compiled again.
        variables: Number of variables n.
        args: This batch's data, each (*batch, *own shape).
        parameters: Own shapes of ``args``, such as ``((), (3,))`` for a number and a vector of 3.

    Raises:
        ParameterError: The description is not convex (DCP), not DPP, or has variables of its own.
        ShapeError: The data does not fit ``parameters``, or does not broadcast.
    """

    role: ClassVar[str] = "convex_programs"
    args: tuple[Tensor, ...]
    compiled: ProgramStructure

    def __init__(
        self, describe: Callable[..., Any], variables: int, args: tuple[Any, ...] = (), parameters: Shapes = ()
    ) -> None:
        if not callable(describe):
            raise ParameterError(
                f"ConvexProgram got {type(describe).__name__} as its description.",
                "It must map a cvxpy variable to a list of constraints.",
                "Pass a function such as lambda u: [cvxpy.norm(u) <= 1].",
            )
        shapes = tuple(tuple(int(size) for size in shape) for shape in parameters)
        if len(args) != len(shapes):
            raise ShapeError(
                f"ConvexProgram got {len(args)} args and {len(shapes)} shapes of parameters.",
                "The own shape of each argument separates it from the batch dimensions.",
                "Pass parameters=((), (3,)) for a number and a vector of 3 per batch element.",
            )
        self._set(args=tuple(_data(value, shape, i) for i, (value, shape) in enumerate(zip(args, shapes))))
        try:
            broadcast((), *self._batches(shapes))
        except RuntimeError as error:
            raise ShapeError(
                f"The args have batch shapes {[tuple(batch) for batch in self._batches(shapes)]}.",
                "They belong to one batch, so their shapes must broadcast.",
                "Give them the same leading dimensions.",
            ) from error
        compiled = _structure(describe, int(variables), shapes)
        self._set(compiled=compiled)

    @property
    def variables(self) -> int:
        return self.compiled.variables

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of the data."""
        return broadcast((), *self._batches(self.compiled.shapes))

    @property
    def algorithm(self) -> str:
        return "a cone solver, refined by Newton's method"

    def residual(self, u: Tensor) -> Tensor:
        self.check_event(u, "The point")
        known, other = self.compiled.equations, self._evaluated(u, "residuals")
        rows, right = torch.from_numpy(known[0]).to(u), torch.from_numpy(known[1]).to(u)
        return self._both(u @ rows.mT - right, other)

    def scale(self, u: Tensor) -> Tensor:
        rows, right = (torch.from_numpy(np.abs(x)).to(u) for x in self.compiled.equations)
        return self._both(u.abs() @ rows.mT + right, self._evaluated(u, "scales"))

    def unit(self, u: Tensor) -> Tensor:
        rows = torch.from_numpy(np.abs(self.compiled.equations[0])).to(u)
        return self._both(rows.sum(-1), self._evaluated(u, "units"))

    def excess(self, u: Tensor) -> Tensor:
        self.check_event(u, "The point")
        return self._evaluated(u, "excesses")

    def excess_scale(self, u: Tensor) -> Tensor:
        return self._evaluated(u, "excess_scales")

    def excess_unit(self, u: Tensor) -> Tensor:
        return self._evaluated(u, "excess_units")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._copy(args=tuple(value.to(*args, **kwargs) for value in self.args))

    def __repr__(self) -> str:
        name = getattr(self.compiled.describe, "__name__", type(self.compiled.describe).__name__)
        return f"ConvexProgram({name}, variables={self.variables})"

    def _batches(self, shapes: Shapes) -> list[torch.Size]:
        return [value.shape[: value.dim() - len(shape)] for value, shape in zip(self.args, shapes)]

    @staticmethod
    def _both(known: Tensor, other: Tensor) -> Tensor:
        """Rows without parameters, then those with parameters (*lead, k)."""
        return torch.cat([known.expand(*other.shape[:-1], -1), other], -1)

    def _evaluated(self, u: Tensor, what: str) -> Tensor:
        """Values of cvxpy at each point, of a method of ``ProgramRows``; NaN at points that are not finite."""
        structure = self.compiled
        lead = broadcast(u.shape[:-1], self.batch_shape)
        rows = structure.inequalities if what.startswith("excess") else structure.moving
        if not rows.count:
            return u.new_zeros(*lead, 0)
        points = u.detach().cpu().double().expand(*lead, -1).reshape(-1, self.variables).numpy()
        data = [
            value.detach().cpu().double().expand((*lead, *shape)).reshape(-1, *shape).numpy()
            for value, shape in zip(self.args, structure.shapes)
        ]
        values = np.full((len(points), rows.count), np.nan)
        for i in np.flatnonzero(np.isfinite(points).all(-1)):
            structure.place(points[i], [x[i] for x in data])
            values[i] = getattr(rows, what.removeprefix("excess_"))()
        return torch.from_numpy(values).to(u).reshape(*lead, rows.count)


class ProgramStructure:
    """A compiled description: its constraints by kind, and the rows of equalities without parameters.

    Args:
        describe: The description of a ``ConvexProgram``.
        variables: Number of variables n.
        shapes: Own shapes of the parameters.

    Raises:
        ParameterError: The description is not convex (DCP), not DPP, or has variables of its own.
    """

    def __init__(self, describe: Callable[..., Any], variables: int, shapes: Shapes) -> None:
        cp = cvx("cvxpy")
        self.describe, self.variables, self.shapes = describe, variables, shapes
        self._u = cp.Variable(variables)
        self._parameters = [cp.Parameter(shape) for shape in shapes]
        described = self.constraints(self._u, self._parameters)
        kinds = cp.constraints.Equality, cp.constraints.Zero
        equal = [c for c in described if isinstance(c, kinds)]
        self.inequalities = ProgramRows([c for c in described if not isinstance(c, kinds)], self._u)
        self.moving = ProgramRows([c for c in equal if c.parameters()], self._u)
        self._u.value = np.zeros(variables)
        fixed = [c.expr for c in equal if not c.parameters()]
        matrices = [np.zeros((0, variables)), *(slope(expression, self._u) for expression in fixed)]
        offsets = [np.zeros(0), *(-np.ravel(expression.value, order="F") for expression in fixed)]
        self.equations = np.concatenate(matrices), np.concatenate(offsets)  # A (q, n) and b (q,)

    def constraints(self, u: Any, parameters: list[Any]) -> list[Any]:
        """Call the description and check its constraints.

        Args:
            u: A ``cvxpy.Variable`` (n,).
            parameters: One ``cvxpy.Parameter`` per argument.

        Returns:
            cvxpy constraints.

        Raises:
            ParameterError: They are not convex (DCP), not DPP, or have variables of their own.
        """
        cp = cvx("cvxpy")
        described = self.describe(u, *parameters)
        described = list(described) if isinstance(described, list | tuple) else [described]
        wrong = next((c for c in described if not isinstance(c, cp.constraints.constraint.Constraint)), None)
        if wrong is not None:
            raise ParameterError(
                f"describe returned a {type(wrong).__name__} among its constraints.",
                "It must return a list of cvxpy constraints.",
                "Write them with ==, <=, >=, >> between expressions of u, or as cvxpy.SOC and others.",
            )
        if any(v.id != u.id for c in described for v in c.variables()):
            raise ParameterError(
                "describe created variables of its own.",
                "Feasibility is checked at u, where their values are unknown.",
                "Write the set with cvxpy's atoms, such as norm, norm1, max and sum_squares.",
            )
        for rule, name in ((lambda c: c.is_dcp(), "convex (DCP)"), (lambda c: c.is_dcp(dpp=True), "DPP")):
            bad = next((c for c in described if not rule(c)), None)
            if bad is not None:
                raise ParameterError(
                    f"The constraint {bad} is not {name} by cvxpy's rules.",
                    "The set must be convex, and its constraints affine in the parameters.",
                    "Rewrite it with cvxpy's atoms; pass products of data as one argument.",
                )
        return described

    @property
    def plain(self) -> bool:
        """Whether all constraints are inequalities between expressions."""
        return not (self.moving.count or len(self.equations[1])) and self.inequalities.plain

    def smooth(self, u: np.ndarray, data: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Values (k,) and slopes (k, n) of inequalities at a point (n,); NaN where cvxpy has no slope."""
        self.place(u, data)
        return self.inequalities.smooth()

    def place(self, u: np.ndarray, data: list[np.ndarray]) -> None:
        """Set the point (n,) and the parameters at which rows are evaluated."""
        self._u.value = u
        for parameter, value in zip(self._parameters, data):
            parameter.value = value


def _structure(describe: Callable[..., Any], variables: int, shapes: Shapes) -> ProgramStructure:
    """The compiled description, from an LRU cache."""
    return _KNOWN.get((describe, variables, shapes), lambda: ProgramStructure(describe, variables, shapes))


def _data(value: Any, shape: tuple[int, ...], index: int) -> Tensor:
    data = reals(f"Argument {index} of the program", value)
    if data.shape[max(0, data.dim() - len(shape)) :] != shape:
        raise ShapeError(
            f"Argument {index} of the program has shape {tuple(data.shape)}, its parameter {shape}.",
            "Batch dimensions lead, (*batch, *own shape).",
            "Correct parameters, or reshape the data.",
        )
    if checking():
        check_finite(f"Argument {index} of the program", data)
    return data
