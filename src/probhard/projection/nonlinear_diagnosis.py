"""Why a nonlinear projection failed: a kink, a rank-deficient Jacobian, or no feasible point.

At the point u that the solver reached, with the size s of u and z:

| cause                   | test                                                                                  |
|-------------------------|---------------------------------------------------------------------------------------|
| kink                    | ``J(u + d)`` and ``J(u - d)`` differ by a tenth of their size for d of 1e-6 s and 1e-9 s |
| no feasible point       | h is not 0, and the linearised rows reach 0 only by steps of 10 s, or not at all         |
| rank-deficient Jacobian | ``J W^1/2`` has singular values below 1e-4, its rows scaled by their length nearby         |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.errors import ConvergenceError
from probhard.projection.base import Stats
from probhard.projection.policy import failure
from probhard.solvers.sqp_steps import ACCEPTED, Iterates

NEARBY, CLOSER = 1e-6, 1e-9  # distances between which a kink does not smooth out
JUMP = 0.1  # relative change of the Jacobian across a kink
DEFICIENT = 1e-4  # singular values of the scaled rows that count as 0
AROUND = 0.1  # distance at which rows have their usual length, relative to the point
FAR = 10.0  # length of a step, relative to the point, that linearised rows do not justify
TRIALS = 8  # directions in which kinks are sought


@dataclass(frozen=True)
class Attempt:
    """What a solver reached, kept for an explanation.

    Args:
        equation: h.
        z: Points to project, (*lead, n).
        weight: Diagonal of W, broadcasting with z.
        iterates: Where the solver ended, over (*lead).
    """

    equation: NonlinearEquality
    z: Tensor
    weight: Tensor
    iterates: Iterates

    def explained(self, stats: Stats) -> ConvergenceError | None:
        """The error for the first point that failed; None if its data cannot be separated."""
        lead = self.z.shape[:-1]
        failed = torch.nonzero(~stats.converged.expand(lead).reshape(-1)).squeeze(-1)[:1]
        equation = self.equation.select(failed, lead or torch.Size((1,)))
        if equation is None:
            return None
        n = self.z.shape[-1]
        u, z = (x.detach().expand(self.z.shape).reshape(-1, n)[failed] for x in (self.iterates.u, self.z))
        weight = self.weight.detach().expand(self.z.shape).reshape(-1, n)[failed]
        residual = float(self.iterates.residual.expand(lead).reshape(-1)[failed])
        what, why, fix = cause(equation, u, z, weight, residual)
        return ConvergenceError(f"{failure(stats, 'points')} Point {int(failed)} of these: {what}.", why, fix)


@torch.no_grad()
def cause(equation: NonlinearEquality, u: Tensor, z: Tensor, weight: Tensor, residual: float) -> tuple[str, str, str]:
    """The three parts of an error.

    Args:
        equation: h of one point.
        u: The point that was reached, (1, n).
        z: The point to project, (1, n).
        weight: Diagonal of W, (1, n).
        residual: Relative residual at u.
    """
    size = max(float(u.abs().max()), float(z.abs().max()), TINY)
    jump = min(_jump(equation, u, distance * size) for distance in (NEARBY, CLOSER))
    h = equation.residual(u)[0]
    root = weight[0].sqrt()
    nearby = _around(equation, u, z, AROUND * size)
    rows, around = equation.jacobian(u)[0] * root, nearby * root
    rank, unreached, step = _linear(rows, around.norm(dim=-1).amax(0), h)
    usual = size * nearby.norm(dim=-1).amax(0)  # sizes of h around the point: at a tip all terms of h vanish
    feasible = residual <= ACCEPTED or bool((h.abs() <= ACCEPTED * usual).all())
    if jump > JUMP:
        where = "a feasible point" if feasible else f"a point where |h| is {float(h.abs().max()):.3g}"
        return (
            f"the function has a kink at {where} that was reached: its Jacobian jumps by {100 * jump:.0f} %",
            "The solver follows derivatives, and the nearest point lies on a kink or behind one.",
            "Write absolute values, maxima and minima as bounds or inequalities (Box, L1Ball, LinearInequality), or "
            "smooth them.",
        )
    span = size * float((weight[0] > 0).double().mean()) ** 0.5 / float(weight[0].amax().clamp(min=TINY).sqrt())
    if not feasible and (unreached > JUMP or step > FAR * span):
        return (
            f"no feasible point was found; |h| stays at {float(h.abs().max()):.3g}",
            "From all starts the residual ends at a local minimum: the set may be empty for the data of this point.",
            "Check the data of this point, or pass a feasible start=.",
        )
    if rank < len(h):
        return (
            f"the Jacobian is rank-deficient at the point that was reached: rank {rank} of {len(h)} rows",
            "The set has no tangent space there: a tip, a double root, or rows that contradict each other nearby.",
            "Remove such rows, take roots of squared functions, or move the point off the tip.",
        )
    return (
        "the solver ran out of steps" + ("" if feasible else f" at |h| = {float(h.abs().max()):.3g}"),
        "The set is strongly curved next to the distance of the point, or scales differ by many orders of magnitude.",
        "Rescale variables and functions, set a floor on the variances, or pass a nearer start=.",
    )


def _jump(equation: NonlinearEquality, u: Tensor, distance: float) -> float:
    """Largest relative change of a row of the Jacobian across u (1, n), over fixed directions of this length."""
    ahead, behind = (
        torch.cat([equation.jacobian(u + sign * shift) for shift in _shifts(u, distance)]) for sign in (1, -1)
    )
    change = (ahead - behind).norm(dim=-1)
    size = torch.maximum(ahead.norm(dim=-1), behind.norm(dim=-1)).clamp(min=TINY)
    return float((change / size).nan_to_num(0.0, 0.0, 0.0).max())


def _around(equation: NonlinearEquality, u: Tensor, z: Tensor, distance: float) -> Tensor:
    """Jacobians at u, at z and at this distance from u, (k, q, n)."""
    points = [u, z, *(u + shift for shift in _shifts(u, distance))]
    return torch.cat([equation.jacobian(point) for point in points]).nan_to_num(0.0, 0.0, 0.0)


def _shifts(u: Tensor, distance: float) -> Tensor:
    """Fixed directions of this length, (TRIALS, 1, n)."""
    source = torch.Generator().manual_seed(0)
    shifts = torch.randn(TRIALS, 1, u.shape[-1], generator=source, dtype=torch.float64).to(u)
    return distance * shifts / shifts.norm(dim=-1, keepdim=True)


def _linear(rows: Tensor, length: Tensor, h: Tensor) -> tuple[int, float, float]:
    """The rank of rows (q, n) next to their usual length, the share of h that they miss, and the step to the rest."""
    scale = torch.where(length > TINY, length, 1.0)
    left, values, right = torch.linalg.svd((rows / scale.unsqueeze(-1)).nan_to_num(0.0), full_matrices=False)
    kept = values > DEFICIENT
    along = left.mT @ (h / scale)
    missed = (h / scale - left @ torch.where(kept, along, 0.0)).norm() / (h / scale).norm().clamp(min=TINY)
    step = (right.mT @ torch.where(kept, along / values.clamp(min=TINY), 0.0)).norm()
    return int(kept.sum()), float(missed), float(step)
