"""Projections as modules of buffers and matrix products, for ONNX and other exports.

| module             | set                      | result                                                        |
|--------------------|--------------------------|---------------------------------------------------------------|
| FrozenProjection   | shared linear equalities | exact: one product                                            |
| FrozenIterations   | shared polyhedral sets   | a fixed number of products and clips, with their residual     |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from probhard.constraints.base import Constraint
from probhard.constraints.equality import LinearEquality
from probhard.errors import ParameterError
from probhard.metric import Metric
from probhard.projection.base import Options
from probhard.projection.iterated import IteratedProjector, iterated
from probhard.projection.linear import LinearProjector
from probhard.projection.parts import parts_of
from probhard.solvers.splitting import L1Block, SplitProblem, iterate
from probhard.tangent.linear import unmoved


class FrozenProjection(nn.Module):
    """``u = P z + c``, one matrix product, for ONNX and other exports.

    Args:
        matrix: P, (n, n).
        offset: c, (*batch, n).
    """

    matrix: Tensor
    offset: Tensor

    def __init__(self, matrix: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.register_buffer("offset", offset)

    def forward(self, z: Tensor) -> Tensor:
        """Project points z (*batch, n)."""
        check_dtype(z, self.matrix)
        return z @ self.matrix.mT + self.offset

    def variance(self, variance: Tensor) -> Tensor:
        """Projected marginal variances from those of independent variables, both (*batch, n)."""
        return variance @ self.matrix.square().mT


class FrozenIterations(nn.Module):
    """The iterations of ``solvers.splitting`` under one weight, without the faces after them.

    Args:
        projector: The projector, whose rows and weight have no batch dimensions.

    Raises:
        ParameterError: They have.
    """

    projection: Tensor
    offset: Tensor
    equal: Tensor
    right: Tensor
    gain: Tensor
    rows: Tensor
    columns: Tensor
    relaxation: Tensor
    lower: Tensor
    upper: Tensor
    size: Tensor

    def __init__(self, projector: IteratedProjector) -> None:
        super().__init__()
        reduction, rows = projector.reduction, projector.rows
        problem = reduction.problem(torch.zeros_like(reduction.scale))
        shapes = [x.shape[:-1] for x in (problem.lower, problem.upper, rows.right, *(b.center for b in problem.blocks))]
        shapes += [reduction.gram.shape[:-2], rows.equal.shape[:-2], *(block.radius.shape for block in problem.blocks)]
        if any(shapes):
            raise ParameterError(
                f"freeze() got {projector.parts.constraint!r}, whose data have batch dimensions.",
                "An exported projection has one set for all inputs.",
                "Freeze one set, or export the layer with torch.export, where the set may depend on the batch.",
            )
        self.iterations = projector.iterations
        eye = torch.eye(rows.unequal.shape[-1]).to(rows.unequal)
        gain = eye[:, :0] if reduction.gain is None else reduction.lift(torch.eye(len(rows.equal)).to(eye)).mT
        buffers = {
            "projection": reduction.project(eye),  # z P^T
            "offset": reduction.nearest(torch.zeros_like(eye[0]), rows.right),
            "equal": rows.equal,
            "right": rows.right,
            "gain": gain,
            "rows": reduction.matrix,
            "columns": reduction.columns,
            "relaxation": projector.relaxation,
            "lower": problem.lower,
            "upper": problem.upper,
            "size": 1 / reduction.scale,
        }
        self.places = [(block.start, block.stop) for block in problem.blocks]
        for number, block in enumerate(problem.blocks):
            buffers |= {f"center{number}": block.center, f"radius{number}": block.radius}
        for name, value in buffers.items():
            self.register_buffer(name, value.detach().clone().contiguous())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Project points z (*batch, n).

        Returns:
            The points (*batch, n), and their largest violation (*batch,).
        """
        check_dtype(z, self.rows)
        base = z @ self.projection + self.offset
        blocks = tuple(
            L1Block(start, stop, self.get_buffer(f"center{i}"), self.get_buffer(f"radius{i}"))
            for i, (start, stop) in enumerate(self.places)
        )
        problem = SplitProblem(self.relaxation, base @ self.rows.mT, self.lower, self.upper, blocks)
        y = iterate(problem, self.relaxation, self.iterations)
        u = base - y @ self.columns.mT
        u = u - (u @ self.equal.mT - self.right) @ self.gain.mT
        return u, self._residual(u, problem)

    def _residual(self, u: Tensor, problem: SplitProblem) -> Tensor:
        """Largest violation of the rows as they were given."""
        t = u @ self.rows.mT
        parts = [torch.maximum(t - self.upper, self.lower - t).clamp(min=0) * self.size]
        for block in problem.blocks:
            over = (t[..., block.start : block.stop] - block.center).abs().sum(-1) - block.radius
            parts.append(over.clamp(min=0).unsqueeze(-1) * self.size[block.start])
        if len(self.equal):
            parts.append((u @ self.equal.mT - self.right).abs())
        return torch.cat(parts, -1).amax(-1)


def frozen(
    constraint: Constraint, metric: Metric, variables: int | None, iterations: int | None
) -> FrozenProjection | FrozenIterations:
    """The projection on one set under a fixed metric, in float64.

    Args:
        constraint: A ``LinearEquality``, or any polyhedral set if there are ``iterations``.
        metric: The metric.
        variables: Their number n; None for that of the constraint.
        iterations: Number of iterations for sets with inequalities.

    Raises:
        ParameterError: The metric is not fixed, n is not known, the data have batch dimensions, or a part is not
            polyhedral.
    """
    if not metric.fixed or not (isinstance(constraint, LinearEquality) or iterations):
        raise ParameterError(
            f"freeze() got the metric {type(metric).__name__} and a {type(constraint).__name__}.",
            "Only a fixed metric has the same matrices for all inputs, and inequalities need iterations.",
            "Use metric='orthogonal', a DiagonalMetric, LowRankMetric or DenseMetric, and DPPL(iterations=K).",
        )
    n = constraint.variables if variables is None else variables
    if n is None:
        raise ParameterError(
            f"freeze() got {constraint!r}, which fits any number of variables.",
            "Buffers have a fixed size.",
            "Pass variables=n.",
        )
    zero, options = torch.zeros(n, dtype=torch.float64), Options(iterations=iterations)
    with torch.no_grad():
        weight, parts = metric.weight(zero, None), parts_of(constraint, n)
        if parts.linear is not None and parts.only_equalities and parts.nonlinear is None:
            projector = LinearProjector(parts.linear, weight, options)
            if projector.still:
                raise unmoved()
            solution = projector.solve(zero)
            return FrozenProjection(solution.tangent.apply(torch.eye(n).to(zero)).mT.contiguous(), solution.value)
        iterated(parts)  # checks them
        return FrozenIterations(IteratedProjector(parts, weight, options))


def check_dtype(z: Tensor, buffer: Tensor) -> None:
    """Reject points of another precision than the buffers, which an exported graph would not accept.

    Raises:
        ParameterError: The dtypes differ.
    """
    if z.dtype != buffer.dtype:
        raise ParameterError(
            f"A frozen projection of dtype {buffer.dtype} got points of dtype {z.dtype}.",
            "Its matrices have one precision, that of the exported graph.",
            f"Call freeze(constraint, dtype={z.dtype}), or .to({z.dtype}) on the frozen module.",
        )
