"""qpth's batched interior point method; the variation penalty has no positive definite curvature and is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from qpth.qp import QPFunction
from torch import Tensor

from benchmarks.convex import Problem, Solved, backward, comparisons, program
from benchmarks.timing import Comparison


def build(problem: Problem, z: Tensor, slope: Tensor) -> Callable[[], Solved]:
    """The solver of a problem, forward and backward."""
    form = program(problem)
    curvature = torch.diag(torch.as_tensor(form.curvature))
    matrices = [torch.as_tensor(x) if x.size else torch.tensor([]) for x in (*form.unequal, *form.equal)]
    return lambda: backward(lambda x: QPFunction(verbose=-1)(curvature, -x, *matrices), z, slope)


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare on the three sets that it takes."""
    yield from comparisons("qpth", build, quick, skip=("TV penalty + box",))
