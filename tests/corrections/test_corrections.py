"""Corrections against their definitions: dense algebra, cvxpy, the published loops in numpy, and differences."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch

import probhard as ph
from bad_input import explained
from probhard.corrections import AffineShift, Completion, Correction, CorrectionLayer, DampedSweeps

DOUBLE = torch.float64
N, EQUAL, UNEQUAL, BATCH = 8, 2, 3, 5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


A, G = normal(EQUAL, N, seed=1), normal(UNEQUAL, N, seed=2)
B, D = normal(BATCH, EQUAL, seed=3), normal(UNEQUAL, seed=4) - 0.5
Z = 2 * normal(BATCH, N, seed=5)


def rows() -> ph.Constraint:
    return ph.LinearEquality(A, B) & ph.LinearInequality(G, D)


def corrected(correction: Correction, z: torch.Tensor = Z, constraint: ph.Constraint | None = None) -> torch.Tensor:
    return CorrectionLayer(correction).project(z, rows() if constraint is None else constraint).value


# ------------------------------------------------------------------------------------------------- HardNet-Aff


def test_the_shift_is_the_published_formula():
    matrix = np.vstack([A, G])
    for z, b, y in zip(Z.numpy(), B.numpy(), corrected(AffineShift()).numpy()):
        low, high = np.concatenate([b, np.full(UNEQUAL, -np.inf)]), np.concatenate([b, D])
        excess = np.maximum(low - matrix @ z, 0) - np.maximum(matrix @ z - high, 0)
        np.testing.assert_allclose(y, z + np.linalg.pinv(matrix) @ excess, atol=1e-12)


def test_the_shift_meets_two_sided_rows_and_keeps_those_that_are_met():
    low, high = -0.3 * torch.ones(BATCH, dtype=DOUBLE), torch.linspace(0.1, 0.5, BATCH, dtype=DOUBLE)
    constraint = ph.LinearInequality.between(G[0], low, high) & ph.LinearInequality(G[1:], D[1:])
    y = corrected(AffineShift(), constraint=constraint)
    assert constraint.violation(y).max() < 1e-12
    before, after = Z @ G[0], y @ G[0]
    torch.testing.assert_close(after, before.clamp(low, high), atol=1e-12, rtol=0)
    assert ((before < low) | (before > high)).any()


def test_the_shift_is_the_projection_if_rows_are_orthonormal_and_not_otherwise():
    frame = torch.linalg.qr(normal(N, 4, seed=6))[0].mT
    nearest = ph.DPPL("orthogonal")
    for matrix, same in ((frame, True), (normal(4, N, seed=7), False)):
        constraint = ph.LinearInequality(matrix, -0.2) & ph.LinearInequality(-matrix, 0.9)
        y, u = corrected(AffineShift(), constraint=constraint), nearest.project(Z, constraint).value
        assert constraint.violation(y).max() < 1e-12
        assert torch.allclose(y, u, atol=1e-9) is same
        assert ((y - Z).norm(dim=-1) >= (u - Z).norm(dim=-1) - 1e-9).all()


def test_the_shift_on_equalities_alone_is_the_orthogonal_law():
    law = ph.LocationScale(Z, ph.Diagonal(0.1 + normal(BATCH, N, seed=8).square()))
    constraint = ph.LinearEquality(A, B)
    ours, theirs = ph.DPPL("orthogonal")(law, constraint), CorrectionLayer(AffineShift())(law, constraint)
    torch.testing.assert_close(theirs.mean, ours.mean, atol=1e-12, rtol=0)
    torch.testing.assert_close(theirs.variance, ours.variance, atol=1e-12, rtol=0)
    assert theirs.feasible


@pytest.mark.parametrize(
    "constraint",
    [
        ph.Box(-0.2, 0.4),
        ph.Monotone("increasing"),
        ph.Convex("up"),
        ph.Conservation(torch.ones(N, dtype=DOUBLE), torch.ones(BATCH, dtype=DOUBLE)),
        ph.LinearInequality(normal(BATCH, 3, N, seed=9), normal(BATCH, 3, seed=10)),
    ],
    ids=lambda c: type(c).__name__,
)
def test_the_shift_takes_rows_in_disguise_and_rows_of_each_element(constraint):
    law = CorrectionLayer(AffineShift())((Z, torch.ones_like(Z)), constraint)
    assert law.feasible
    assert constraint.violation(law.sample((40,), torch.Generator().manual_seed(0))).max() < 1e-10
    assert constraint.violation(law.mean).max() < 1e-10


def test_the_shift_refuses_too_many_rows_dependent_rows_and_curves():
    layer = CorrectionLayer(AffineShift())
    with pytest.raises(ph.ParameterError) as many:
        layer.project(Z, rows() & ph.NonNegative())
    assert "13 rows on 8 variables" in str(many.value)
    explained(many.value, [])
    twice = torch.cat([G, G[:1] + G[1:2]])
    with pytest.raises(ph.RankError) as dependent:
        layer.project(Z, ph.LinearInequality(twice, 1.0))
    explained(dependent.value, [])
    with pytest.raises(ph.ParameterError) as curved:
        layer.project(Z, ph.Ball(1.0))
    explained(curved.value, [])


# --------------------------------------------------------------------------------------------------- HardNet++


def test_sweeps_are_the_published_iteration():
    matrix = np.vstack([A, G])
    gain = matrix.T @ np.linalg.inv(matrix @ matrix.T + 0.3 * np.eye(len(matrix)))
    y = Z.numpy().copy()
    for _ in range(3):
        high = np.hstack([B, np.tile(D, (BATCH, 1))])
        low = np.hstack([B, np.full((BATCH, UNEQUAL), -np.inf)])
        value = y @ matrix.T
        y = y - (np.maximum(value - high, 0) - np.maximum(low - value, 0)) @ gain.T
    np.testing.assert_allclose(corrected(DampedSweeps(steps=3)).numpy(), y, atol=1e-12)


def circle(u: torch.Tensor) -> torch.Tensor:
    return u[..., :2].square().sum(-1, keepdim=True) - 1


def test_sweeps_on_curves_use_the_jacobian_at_each_point():
    constraint = ph.NonlinearEquality(circle) & ph.LinearInequality(G, D)
    y = Z.numpy().copy()
    for _ in range(4):
        for k, point in enumerate(y):
            slope = np.zeros(N)
            slope[:2] = 2 * point[:2]
            jacobian = np.vstack([G, slope])
            value = np.concatenate([np.maximum(G.numpy() @ point - D.numpy(), 0), [point[:2] @ point[:2] - 1]])
            y[k] = point - jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 0.3 * np.eye(4), value)
    np.testing.assert_allclose(corrected(DampedSweeps(steps=4), constraint=constraint).numpy(), y, atol=1e-10)
    solution = CorrectionLayer(DampedSweeps()).project(Z, constraint)
    assert constraint.violation(solution.value).max() < 1e-7
    assert 1 < int(solution.stats.steps[0]) <= 500


def test_sweeps_promise_nothing_and_report_what_they_leave():
    layer = CorrectionLayer(DampedSweeps(steps=2))
    law = layer((Z, torch.ones_like(Z)), rows())
    draws = law.sample((30,), torch.Generator().manual_seed(1))
    assert not law.feasible
    assert torch.isfinite(draws).all()  # as they are, neither NaN nor drawn again
    assert rows().violation(draws).max() > 1e-3
    assert not law.stats.converged.all()
    for constraint in (ph.Ball(0.5), ph.L1Ball(0.7), ph.TotalVariation(0.5)):
        y = corrected(DampedSweeps(), constraint=constraint)
        assert constraint.violation(y).max() < 1e-6, constraint


# --------------------------------------------------------------------------------------------------------- DC3


def test_completion_solves_the_equalities_for_any_choice_of_variables():
    for solved in (None, (0, 5), (6, 3)):
        y = corrected(Completion(solved, steps=0))
        assert (y @ A.mT - B).abs().max() < 1e-12
        if solved is not None:
            free = [i for i in range(N) if i not in solved]
            assert torch.equal(y[:, free], Z[:, free])


def test_correction_is_the_published_loop():
    solved, rate, momentum, steps = (1, 4), 1e-3, 0.5, 7
    free = [i for i in range(N) if i not in solved]
    a, g = A.numpy(), G.numpy()
    inverse = np.linalg.inv(a[:, solved])
    effective = g[:, free] - g[:, solved] @ inverse @ a[:, free]
    y = np.zeros((BATCH, N))
    y[:, free] = Z[:, free]
    y[:, solved] = (B.numpy() - y[:, free] @ a[:, free].T) @ inverse.T
    step = 0.0
    for _ in range(steps):
        offset = D.numpy() - (B.numpy() @ inverse.T) @ g[:, solved].T
        slope = 2 * np.maximum(y[:, free] @ effective.T - offset, 0) @ effective
        whole = np.zeros_like(y)
        whole[:, free], whole[:, solved] = slope, -(slope @ a[:, free].T) @ inverse.T
        step = rate * whole + momentum * step
        y = y - step
    found = corrected(Completion(solved, steps, rate, momentum))
    np.testing.assert_allclose(found.numpy(), y, atol=1e-12)


def test_a_nonlinear_inequality_takes_the_same_steps_as_its_linear_twin():
    curved = ph.LinearEquality(A, B) & ph.NonlinearInequality(lambda u: u @ G.to(u).mT - D.to(u))
    settings = Completion(steps=6, rate=1e-2)
    torch.testing.assert_close(corrected(settings, constraint=curved), corrected(settings), atol=1e-12, rtol=0)


def sphere(u: torch.Tensor) -> torch.Tensor:
    return torch.stack([u[..., :4].exp().sum(-1) - 5, u[..., 4:].pow(3).sum(-1) + u[..., 7] - 1], -1)


def test_newton_completion_solves_nonlinear_equalities_with_implicit_gradients():
    constraint = ph.NonlinearEquality(sphere) & ph.LinearInequality(G, D)
    z, correction = 0.3 * Z, Completion((0, 7), steps=3, rate=1e-2)
    y = corrected(correction, z, constraint)
    assert sphere(y).abs().max() < 1e-10
    assert torch.equal(corrected(Completion((0, 7), steps=0), z, constraint)[:, 1:7], z[:, 1:7])
    weights = normal(BATCH, N, seed=11)

    def value(point: torch.Tensor) -> torch.Tensor:
        return (weights * corrected(correction, point, constraint)).sum()

    point = z.clone().requires_grad_()
    value(point).backward()
    step, slopes = 1e-6, torch.zeros_like(z)
    for k in range(BATCH):
        for i in range(N):
            unit = torch.zeros_like(z)
            unit[k, i] = step
            slopes[k, i] = (value(z + unit) - value(z - unit)) / (2 * step)
    torch.testing.assert_close(point.grad, slopes, atol=2e-6, rtol=1e-5)


def test_newton_completion_takes_linear_rows_too_and_needs_names():
    constraint = ph.LinearEquality(A[:1], B[:, :1]) & ph.NonlinearEquality(circle)
    y = corrected(Completion((1, 6), steps=0), 0.3 * Z, constraint)
    assert constraint.violation(y).max() < 1e-10
    for correction in (Completion(), Completion((1,))):
        with pytest.raises(ph.ParameterError) as error:
            corrected(correction, constraint=constraint)
        explained(error.value, [])
    with pytest.raises(ph.RankError) as error:
        corrected(Completion((2, 2)))
    explained(error.value, [])


def test_completion_of_a_law_is_the_law_of_its_free_variables():
    law = ph.LocationScale(Z, ph.Diagonal(0.1 + normal(BATCH, N, seed=12).square()))
    constraint = ph.LinearEquality(A, B)
    layer = CorrectionLayer(Completion((2, 3), steps=0))
    found = layer(law, constraint)
    draws = layer.project(law.sample((40_000,), torch.Generator().manual_seed(0)), constraint).value
    torch.testing.assert_close(found.mean, draws.mean(0), atol=0.1, rtol=0)
    torch.testing.assert_close(found.stddev, draws.std(0), atol=0, rtol=0.03)
    free = [i for i in range(N) if i not in (2, 3)]
    torch.testing.assert_close(found.variance[:, free], law.variance[:, free])
    assert found.feasible
    assert not layer(law, rows()).feasible


# -------------------------------------------------------------------------------------------------- all of them

EVERY = [AffineShift(), DampedSweeps(steps=20), Completion(steps=5, rate=1e-2)]


@pytest.mark.parametrize("correction", EVERY, ids=lambda c: c.kind)
def test_gradients_agree_with_differences(correction):
    layer = CorrectionLayer(correction)
    assert torch.autograd.gradcheck(lambda z: layer.project(z, rows()).value, (Z.clone().requires_grad_(),))
    tangent, x = layer.project(Z, rows()).tangent, normal(BATCH, N, seed=13)
    moved = (layer.project(Z + 1e-6 * x, rows()).value - layer.project(Z - 1e-6 * x, rows()).value) / 2e-6
    torch.testing.assert_close(tangent.apply(x), moved, atol=1e-6, rtol=1e-6)
    y = normal(BATCH, N, seed=14)
    torch.testing.assert_close((tangent.transpose(y) * x).sum(), (y * tangent.apply(x)).sum())


@pytest.mark.parametrize("correction", EVERY, ids=lambda c: c.kind)
def test_records_and_single_precision(correction):
    assert Correction.from_record(correction.record()) == correction
    method = ph.Method(ph.Step(correction=correction), ph.Step(correction=correction), warm_up=3)
    assert ph.Method.from_record(method.record()) == method
    single = corrected(correction, Z.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), corrected(correction), atol=1e-4, rtol=1e-4)


def test_a_step_has_a_metric_or_a_correction():
    with pytest.raises(ph.ParameterError) as error:
        ph.Step("orthogonal", correction=AffineShift())
    explained(error.value, [])
    for wrong in (lambda: DampedSweeps(damping=0), lambda: Completion(steps=-1), lambda: ph.Method(warm_up=-1)):
        with pytest.raises(ph.ParameterError) as error:
            wrong()
        explained(error.value, [])


def test_hardnet_cvx_is_the_orthogonal_projection():
    """Its definition, the nearest point of the rows, by cvxpy."""
    nearest = ph.DPPL(ph.METHODS["probhard-or"].inference.metric).project(Z, rows()).value
    for z, b, u in zip(Z.numpy(), B.numpy(), nearest.numpy()):
        y = cp.Variable(N)
        problem = cp.Problem(cp.Minimize(cp.sum_squares(y - z)), [A.numpy() @ y == b, G.numpy() @ y <= D.numpy()])
        problem.solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(u, y.value, atol=1e-6)
