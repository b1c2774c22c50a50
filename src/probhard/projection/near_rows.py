"""Multipliers of the rows nearest to their sides, where each element has a weight of its own.

K among all rows of an element costs more than the rest of a projection, and near the set few rows are ever active. So
K is formed among the k rows that are violated most. The answer is then checked on all rows,

    l <= c - C (S C^T y) <= h,

and elements that fail this check are solved again with all rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from probhard._util.numerics import equal_bounds
from probhard.rows.reduction import Reduction
from probhard.solvers import pivoting
from probhard.solvers.pivoting import DualProblem, Sides

SPARE = 2  # rows that are not violated yet, for each element
FEW = 0.3  # largest share of the rows that this pays for


def near_rows(problem: DualProblem) -> Tensor | None:
    """Numbers (L, k) of the rows that are violated most, or None if they are many."""
    excess = torch.maximum(problem.value - problem.upper, problem.lower - problem.value)
    excess = torch.where(equal_bounds(problem.lower, problem.upper), torch.inf, excess)
    count = int((excess > 0).sum(-1).max()) + SPARE
    return excess.topk(count, -1).indices if count <= FEW * excess.shape[-1] else None


@torch.no_grad()
def solve(problem: DualProblem, reduction: Reduction, index: Tensor) -> tuple[Sides, Tensor]:
    """Solve with some rows of each element, then with all rows where others are violated or the method failed.

    Args:
        problem: The problems of L elements; its K is not used.
        reduction: The reductions of these elements, batch (L,).
        index: Numbers of the rows, (L, k).

    Returns:
        The sides, and the moves ``S C^T y``, (L, n).
    """
    owner = torch.arange(len(index), device=index.device)
    names = ("value", "lower", "upper", "size")
    chosen = {name: getattr(problem, name).gather(-1, index) for name in names}
    found = pivoting.solve(replace(problem, gram=reduction.among(index), owner=owner, **chosen))
    side, y = (torch.zeros_like(problem.value, dtype=x.dtype) for x in (found.side, found.multiplier))
    sides = replace(found, side=side.scatter(-1, index, found.side), multiplier=y.scatter(-1, index, found.multiplier))
    moves = reduction.push(sides.multiplier)
    left = (~pivoting.settled(problem, sides, problem.value - reduction.image(moves))).nonzero().squeeze(-1)
    if not len(left):
        return sides, moves
    own = replace(problem.select(left), gram=reduction.gram(left), owner=owner[: len(left)])
    again = pivoting.solve(own)
    again = replace(again, steps=again.steps + sides.steps.index_select(0, left))
    return sides.placed(left, again), moves.index_copy(0, left, reduction.select(left).push(again.multiplier))
