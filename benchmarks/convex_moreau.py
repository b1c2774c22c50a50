"""moreau's batched solver for torch, called directly: ``A x + s = b``, s in zeros and non-negative numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import moreau
import numpy as np
import scipy.sparse as sp
import torch
from moreau.torch import Solver
from torch import Tensor

from benchmarks.convex import POINTS, Problem, Solved, backward, comparisons, program
from benchmarks.timing import Comparison


def build(problem: Problem, z: Tensor, slope: Tensor) -> Callable[[], Solved]:
    """The solver of a problem for a batch of this size, forward and backward."""
    form = program(problem)
    curvature = sp.csr_array(sp.diags_array(form.curvature))  # structural zeros are kept
    rows = sp.csr_array(np.vstack([form.equal[0], form.unequal[0]]))
    pattern = [torch.as_tensor(x.astype(np.int64)) for m in (curvature, rows) for x in (m.indptr, m.indices)]
    solver = Solver(
        len(form.curvature),
        rows.shape[0],
        *pattern,
        moreau.Cones(num_zero_cones=len(form.equal[1]), num_nonneg_cones=len(form.unequal[1])),
        moreau.Settings(device="cpu", batch_size=len(z), enable_grad=True),
    )
    right = torch.as_tensor(np.concatenate([form.equal[1], form.unequal[1]]))
    rest = torch.as_tensor(form.rest).expand(len(z), -1)
    values = [torch.as_tensor(m.data).expand(len(z), -1) for m in (curvature, rows)]

    def solve(x: Tensor) -> Tensor:
        return solver.solve(*values, torch.cat([-x, rest], -1), right.expand(len(z), -1)).x[:, :POINTS]

    return lambda: backward(solve, z, slope)


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare on all sets."""
    yield from comparisons("moreau", build, quick)
