"""Nonlinear equalities: projecting draws and training through the projection, against the paper's plain iteration.

Peers: the plain iteration ``u+ = z - W J^T (J W J^T)^-1 (h + J (z - u))`` on the same batch, its unrolled gradients,
and scipy's SLSQP point by point. ``convergence_study`` prints how many draws each solver makes feasible as curvature
grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from scipy.optimize import minimize
from torch import Tensor

import probhard as ph
from benchmarks.timing import Comparison, measured, worst

STEPS = 50  # of the plain iteration
SHARE = 1e-10  # relative residual up to which a draw counts as feasible
STATIONARY = 1e-8  # relative length of the step that is left, up to which it counts as nearest
CHECKED = (
    "The plain iteration stops when its step is short. Ours takes fewer steps, but in a profile half of its time goes "
    "to the products with exact second derivatives that make the last of them; python -m benchmarks.nonlinear counts "
    "the draws that each makes feasible on stronger curvature."
)


def sphere(u: Tensor) -> Tensor:
    return u.square().sum(-1, keepdim=True) - 1


def quadratics(scale: float, rows: int, variables: int) -> Callable[[Tensor], Tensor]:
    """``scale u A u / 2 + B u - c`` with random A and B, and c such that a feasible point exists."""
    source = torch.Generator().manual_seed(0)
    kwargs: dict[str, Any] = {"generator": source, "dtype": torch.float64}
    bends, slopes = torch.randn(rows, variables, variables, **kwargs), torch.randn(rows, variables, **kwargs)
    inside = torch.randn(variables, **kwargs)

    bends = bends + bends.mT

    def value(u: Tensor) -> Tensor:
        return 0.5 * scale * torch.einsum("...i,kij,...j->...k", u, bends, u) + u @ slopes.mT

    right = value(inside)
    return lambda u: value(u) - right


def plain(constraint: ph.NonlinearEquality, z: Tensor, variance: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's iteration: points, the steps that each took, and the relative length of its last one."""
    u, taken = z, torch.zeros(z.shape[:-1])
    done = torch.zeros(z.shape[:-1], dtype=torch.bool)
    left = torch.full(z.shape[:-1], torch.inf, dtype=z.dtype)
    for _ in range(steps):
        rows, h = constraint.jacobian(u), constraint.residual(u)
        pushed = rows * variance.unsqueeze(-2)
        right = h.unsqueeze(-1) + rows @ (z - u).unsqueeze(-1)
        multiplier = torch.linalg.solve_ex(pushed @ rows.mT, right)[0]
        full = z - (pushed.mT @ multiplier).squeeze(-1)
        size = (u.norm(dim=-1) + z.norm(dim=-1)).detach()
        left = torch.where(done, left, (full - u).detach().norm(dim=-1) / size)
        taken = taken + (~done).to(taken.dtype)
        u = torch.where(done.unsqueeze(-1), u, full)
        done = done | (left <= 1e-9)
        if bool(done.all()):
            break
    return u, taken, left


def slsqp(constraint: ph.NonlinearEquality, z: Tensor, variance: Tensor) -> Tensor:
    """Point by point, with the same Jacobian."""
    points = []
    for target, weight in zip(z.numpy(), (1 / variance).expand(z.shape).numpy()):
        rows = {
            "type": "eq",
            "fun": lambda u: constraint.residual(torch.as_tensor(u)).numpy(),
            "jac": lambda u: constraint.jacobian(torch.as_tensor(u)).numpy(),
        }
        answer = minimize(
            lambda u, target=target, weight=weight: float(weight @ (u - target) ** 2),
            target,
            jac=lambda u, target=target, weight=weight: 2 * weight * (u - target),
            constraints=rows,
            method="SLSQP",
            options={"maxiter": 200, "ftol": 1e-12},
        )
        points.append(torch.as_tensor(answer.x))
    return torch.stack(points)


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare in float64."""
    kwargs: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    constraint = ph.NonlinearEquality(quadratics(0.02, 3, 20))
    variance = torch.rand(20, **kwargs) + 0.1
    z = torch.randn(100 if quick else 10_000, 20, **kwargs)
    layer = ph.DPPL(on_failure="flag", validate_args=False)
    dist = (torch.zeros_like(variance), variance.sqrt())
    judge = partial(worst, constraint)

    def ours(points: Tensor) -> Tensor:
        return layer.project(points, constraint, dist).value

    theirs, exact = measured(lambda: plain(constraint, z, variance, STEPS)[0], lambda: ours(z))
    case = f"{len(z):,} draws on 3 mild quadratics, n = 20"
    yield Comparison.of(case, "plain iteration", theirs, exact, judge, explanation=CHECKED)

    few = z[:20]
    theirs, exact = measured(lambda: slsqp(constraint, few, variance), lambda: ours(few))
    yield Comparison.of("20 draws on 3 mild quadratics, n = 20", "scipy SLSQP, one by one", theirs, exact, judge)

    mean = z[:400].clone().requires_grad_()
    stddev = variance.sqrt().expand(mean.shape).clone().requires_grad_()
    target = torch.randn(mean.shape, **kwargs)

    def unrolled() -> Tensor:
        nearest = plain(constraint, mean, stddev.square(), STEPS)[0]
        nearest.sub(target).square().sum().backward()
        return nearest.detach()

    for curvature in ("gauss-newton", "exact"):
        trained = ph.DPPL(curvature=curvature, on_failure="flag", validate_args=False)

        def implicit(trained: ph.DPPL = trained) -> Tensor:
            nearest = trained.project(mean, constraint, (mean, stddev)).value
            nearest.sub(target).square().sum().backward()
            return nearest.detach()

        case = f"gradient of {len(mean)} projected means, {curvature}"
        theirs, exact = measured(unrolled, implicit)
        yield Comparison.of(case, "unrolled plain iteration", theirs, exact, judge, explanation=CHECKED)


def convergence_study(draws: int = 10_000) -> None:
    """Print the share of draws made feasible and nearest, and the mean steps, from mild to strong curvature."""
    kwargs: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    unit = torch.nn.functional.normalize(torch.randn(draws, 10, **kwargs), dim=-1)
    noise, variance = torch.randn(draws, 10, **kwargs), torch.rand(10, **kwargs) + 0.1
    ones = torch.ones(10, dtype=torch.float64)
    radii = (0.05, 0.3, 0.9, 1.1, 2, 5, 30)
    cases: list[tuple[str, Callable[[Tensor], Tensor], Tensor, Tensor]]
    cases = [(f"sphere from radius {r:g}, orthogonal", sphere, r * unit, ones) for r in radii]
    cases += [(f"sphere from radius {r:g}, oblique", sphere, r * unit, variance) for r in radii]
    for scale in (0.05, 0.1, 0.2, 0.5, 1):
        cases.append((f"2 quadratics of scale {scale:g}, oblique", quadratics(scale, 2, 10), noise, variance))
    print(f"{'':<38} {'ours':>30}   {'plain iteration':>30}")
    print(f"{'case':<38}" + 2 * f" {'feasible':>10} {'nearest':>10} {'steps':>8}  ")
    for name, fn, z, weights in cases:
        constraint = ph.NonlinearEquality(fn)
        solution = ph.DPPL(on_failure="flag").project(z, constraint, (torch.zeros_like(weights), weights.sqrt()))
        ours = constraint.relative_violation(solution.value) <= SHARE
        u, steps, left = plain(constraint, z, weights, STEPS)
        theirs = constraint.relative_violation(u).nan_to_num(torch.inf) <= SHARE
        parts = (ours, solution.stats.converged, solution.stats.steps), (theirs, left <= STATIONARY, steps)
        columns = [
            f" {_share(good):>10} {_share(good & near):>10} {float(count.double().mean()):>8.1f}  "
            for good, near, count in parts
        ]
        print(f"{name:<38}" + "".join(columns), flush=True)


def _share(flags: Tensor) -> str:
    return f"{100 * float(flags.double().mean()):.2f} %"


if __name__ == "__main__":
    torch.set_num_threads(1)
    convergence_study()
