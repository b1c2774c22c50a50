"""The nonlinear porous medium law on batches of 20 fields of 2,000 values, float64.

Peers: (a) the same law as 138 rows (initial, boundary and flux rows), its Jacobian by ``torch.func.jacrev``, the
paper's plain iteration; (b) scipy's trust-constr, field by field. ``convergence_study`` prints how many draws of an
untrained, an early and a trained network each solver makes feasible: ``python -m benchmarks.porous_medium``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import scipy.sparse as sp
import torch
from scipy.optimize import NonlinearConstraint, minimize
from torch import Tensor
from tqdm import tqdm

import probhard as ph
from benchmarks.nonlinear import SHARE, STATIONARY, plain
from benchmarks.timing import Comparison, measured, worst
from probhard.pde import PorousMedium
from probhard.pde.demo import FULL, BranchTrunk, batch_of, train
from probhard.pde.laws import known_values, porous_medium_flux, porous_medium_law

FIELDS, STEPS = 20, 12
UNBOUNDED = "The peer's iteration has no bounds: it solves the law alone."
CHUNK = 200  # draws projected at once
SHARES = {"untrained": 0.04, "5 epochs": 0.2, "120 epochs": 1.0}  # of the draws asked for


def all_rows(problem: PorousMedium, m: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``fn(u, b, m)``: known values and flux rows of one field as one function, 100 + 19 + 19 of them."""
    known, flux = known_values(problem, m), porous_medium_flux(problem, m)
    picks = known.A.to(torch.float64)

    def fn(u: Tensor, b: Tensor, exponent: Tensor) -> Tensor:
        return torch.cat([picks @ u - b, flux.fn(u, exponent)], -1)

    return fn


def generic(problem: PorousMedium, m: Tensor, z: Tensor, variance: Tensor, steps: int = STEPS) -> Tensor:
    """The plain iteration on 138 rows, Jacobians by jacrev, until all residuals are at most 1e-10."""
    fn = all_rows(problem, m)
    data = known_values(problem, m).b, porous_medium_flux(problem, m).args[0]
    value = torch.func.vmap(fn)
    jacobian = torch.func.vmap(torch.func.jacrev(fn))
    u = z
    for _ in range(steps):
        h = value(u, *data)
        if float(h.abs().max()) <= 1e-10:
            break
        rows = jacobian(u, *data)
        pushed = rows * variance.unsqueeze(-2)
        right = h.unsqueeze(-1) + rows @ (z - u).unsqueeze(-1)
        u = z - (pushed.mT @ torch.linalg.solve(pushed @ rows.mT, right)).squeeze(-1)
    return u


def scipy_field(problem: PorousMedium, m: Tensor, z: Tensor, variance: Tensor) -> Tensor:
    """One field by trust-constr, with our Jacobian and the Hessian of the distance."""
    law = porous_medium_law(problem, m)
    flux = porous_medium_flux(problem, m)
    picks = sp.csr_matrix(known_values(problem, m).A.numpy())

    def residual(u: np.ndarray) -> np.ndarray:
        return law.residual(torch.from_numpy(u)).numpy()

    def jacobian(u: np.ndarray) -> sp.csr_matrix:
        return sp.vstack([picks, sp.csr_matrix(flux.jacobian(torch.from_numpy(u)).numpy())]).tocsr()

    weight, target = (1 / variance).numpy(), z.numpy()
    rows = NonlinearConstraint(residual, 0, 0, jac=jacobian, hess=lambda u, y: sp.csr_matrix((len(u), len(u))))
    result = minimize(
        lambda u: 0.5 * float(weight @ (u - target) ** 2),
        target,
        jac=lambda u: weight * (u - target),
        hess=lambda u: sp.diags(weight),
        constraints=[rows],
        method="trust-constr",
        options={"maxiter": 60, "gtol": 1e-10, "xtol": 1e-12},
    )
    return torch.from_numpy(result.x)


def noisy(problem: PorousMedium, fields: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Exponents, exact fields with noise, and variances."""
    source = torch.Generator().manual_seed(seed)
    m = problem.lower + (problem.upper - problem.lower) * torch.rand(fields, generator=source, dtype=torch.float64)
    exact = problem.solution(m).flatten(1).to(torch.float64)
    noise = torch.randn(exact.shape, generator=source, dtype=torch.float64)
    stddev = 0.01 + 0.02 * torch.rand(exact.shape, generator=source, dtype=torch.float64)
    return m, exact + 0.01 * noise, stddev.square()


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare in float64."""
    problem, fields = PorousMedium(dtype=torch.float64), 2 if quick else FIELDS
    m, z, variance = noisy(problem, fields)
    law, layer = porous_medium_law(problem, m), ph.DPPL(on_failure="flag")
    both = law & ph.NonNegative()

    def ours(constraint: ph.Constraint) -> Tensor:
        return layer.project(z, constraint, (z, variance.sqrt())).value

    peer, structured, positive = measured(
        lambda: generic(problem, m, z, variance), partial(ours, law), partial(ours, both)
    )
    judge, case = partial(worst, law), f"porous medium law, {fields} x 2,000"
    yield Comparison.of(case, "138 rows by jacrev", peer, structured, judge, goal=50)
    yield Comparison.of(
        f"{case}, and u >= 0", "138 rows by jacrev", peer, positive, partial(worst, both), explanation=UNBOUNDED
    )
    one, single = measured(
        lambda: scipy_field(problem, m[0], z[0], variance[0]),
        lambda: layer.project(z[:1], porous_medium_law(problem, m[:1]), (z[:1], variance[:1].sqrt())).value,
    )
    judge = partial(worst, porous_medium_law(problem, m[0]))
    yield Comparison.of("porous medium law, 1 x 2,000", "scipy trust-constr", one, single, judge)


def laws_of(problem: PorousMedium, parameter: Tensor) -> Iterator[tuple[str, ph.LocationScale]]:
    """Predictive laws of 20 test fields from an untrained, an early and a trained network."""
    test = batch_of(problem, parameter)
    low, high = problem.lower, problem.upper
    sample = low + (high - low) * torch.rand(FULL.train, generator=torch.Generator().manual_seed(1))
    for name, epochs in (("untrained", 0), ("5 epochs", 5), ("120 epochs", 120)):
        torch.manual_seed(0)
        with torch.enable_grad(), tqdm(total=max(epochs, 1), desc=name, disable=None) as bar:
            if epochs:
                network = train(problem, sample, "base", epochs, 0, FULL, bar).backbone
            else:
                network = BranchTrunk(problem, FULL.width)
        with torch.no_grad():
            law = network(test["inputs"])
        yield name, ph.LocationScale(law.loc.double(), ph.Diagonal(law.cov.diagonal().double()))


@torch.no_grad()
def convergence_study(most: int, networks: list[str]) -> None:
    """Print the share of draws made feasible and nearest, and the mean steps, for both rules of the mass.

    Draws of an untrained network are far from the law and cost up to a second each, so that fewer of them are taken.
    ``networks`` names some of them; none means all.
    """
    problem = PorousMedium()
    low, high = problem.lower, problem.upper
    parameter = low + (high - low) * torch.rand(FIELDS, generator=torch.Generator().manual_seed(2))
    m = parameter.double()
    columns = f"{'draws':>6} {'feasible':>9} {'nearest':>9} {'steps':>6} {'ms/draw':>8}   plain: feasible nearest"
    print(f"{'network, rule of the mass':<30} {columns}")
    for name, law in laws_of(problem, parameter):
        share = SHARES[name]
        if networks and name not in networks:
            continue
        for rule in ("trapezoid", "product"):
            constraint, known = porous_medium_law(problem, m, rule), known_values(problem, m)
            flux = porous_medium_flux(problem, m, rule)
            free = known.system.movable(law.cov.diagonal())
            rounds = max(1, round(share * most / FIELDS))
            tallies, seconds, source = np.zeros(5), 0.0, torch.Generator().manual_seed(3)
            for first in tqdm(range(0, rounds, CHUNK // FIELDS), desc=f"{name}, {rule}", disable=None):
                z = law.sample((min(CHUNK // FIELDS, rounds - first),), source)
                begin = time.perf_counter()
                solution = ph.DPPL(on_failure="flag").project(z, constraint, law)
                seconds += time.perf_counter() - begin
                good = constraint.relative_violation(solution.value).nan_to_num(torch.inf) <= SHARE
                u, _, left = plain(flux, known.system.substitute(z, known.b)[0], free, 20)
                theirs = flux.relative_violation(u).nan_to_num(torch.inf) <= SHARE
                flags = good, solution.stats.converged, solution.stats.steps, theirs, theirs & (left <= STATIONARY)
                tallies += [float(x.double().sum()) for x in flags]
            count = rounds * FIELDS
            part = 100 * tallies / count
            print(
                f"{name + ', ' + rule:<30} {count:>6} {part[0]:>7.2f} % {part[1]:>7.2f} % {part[2] / 100:>6.1f} "
                f"{1e3 * seconds / count:>8.1f}   {part[3]:>13.2f} % {part[4]:>6.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    convergence_study(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, sys.argv[2:])
