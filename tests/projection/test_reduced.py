"""Projections on shared dense rows by their multipliers, against active sets over all rows and dense algebra."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import Tensor

import probhard as ph
from probhard.errors import InfeasibleError
from probhard.laws.covariance import Covariance, Diagonal
from probhard.projection import near_rows, reduced_tangent
from probhard.projection.base import Options, Projector
from probhard.projection.coupled import CoupledProjector
from probhard.projection.dispatch import projector_of
from probhard.projection.parts import parts_of
from probhard.projection.polyhedral import FaceProjector
from probhard.projection.reduced import ReducedProjector
from probhard.rows.reduction import BatchedReduction, SharedReduction
from probhard.solvers import pivoting

N, BATCH = 12, 7


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


A, G, INNER = randn(4, N, seed=1), randn(9, N, seed=2), rand(N, seed=3)
B, D = A @ INNER, G @ INNER + 0.1
TRIANGLE = randn(N, N, seed=4).tril(-1) / N + torch.diag(rand(N, seed=5) + 0.5)
RIGHTS = B + 0.1 * randn(BATCH, 4, seed=6)

SETS = {
    "rows": lambda: ph.LinearEquality(A, B) & ph.LinearInequality(G, D),
    "rows, other right-hand sides": lambda: ph.LinearEquality(A, RIGHTS) & ph.LinearInequality(G, D + 1),
    "rows and box": lambda: ph.LinearEquality(A, B) & ph.LinearInequality(G, D) & ph.Box(0.0, 1.0),
    "inequalities": lambda: ph.LinearInequality(torch.cat([G, A]), torch.cat([D, B])),
    "repeated rows": lambda: (
        ph.LinearEquality(A, B) & ph.LinearInequality(torch.cat([G, 2 * G]), torch.cat([D, 2 * D]))
    ),
    "two-sided rows": lambda: ph.LinearInequality(torch.cat([G, -G]), torch.cat([D, 0.3 - D])),
    "dependent equalities": lambda: (
        ph.LinearEquality(torch.cat([A, A[:1] + A[1:2]]), torch.cat([B, B[:1] + B[1:2]]), rank="reveal")
        & ph.LinearInequality(G, D)
    ),
    "a known value": lambda: (
        ph.LinearEquality(torch.cat([A, torch.eye(N).double()[2:3]]), torch.cat([B, INNER[2:3]]))
        & ph.LinearInequality(G, D)
        & ph.Box(0.0, 1.0)
    ),
    "equal bounds": lambda: ph.LinearEquality(A, B) & ph.LinearInequality(G, D) & ph.Box(*EQUAL),
    "no bound in a row": lambda: ph.LinearInequality(G, torch.cat([D[:-1], torch.tensor([torch.inf])])),
}
EQUAL = torch.zeros(N).double(), torch.ones(N).double()
EQUAL[0][4] = EQUAL[1][4] = INNER[4]

WEIGHTS: dict[str, Covariance] = {
    "orthogonal": Diagonal(torch.ones(N).double()),
    "diagonal": Diagonal(rand(N, seed=7) + 0.1),
    "per element": Diagonal(rand(BATCH, N, seed=8) + 0.1),
    "low rank": ph.LowRank(randn(N, 2, seed=9), rand(N, seed=10) + 0.1),
    "dense": ph.Dense(TRIANGLE),
}


def both(name: str, weight: str, z: Tensor) -> tuple[ReducedProjector, Projector]:
    constraint, w = SETS[name](), WEIGHTS[weight]
    found = projector(constraint, w, z)
    assert isinstance(found, ReducedProjector)
    former = FaceProjector if isinstance(w, Diagonal) else CoupledProjector
    return found, former(parts_of(constraint, N), w, Options())  # type: ignore[arg-type]


def projector(constraint: ph.Constraint, weight: Covariance, z: Tensor) -> Projector:
    return projector_of(constraint, z, weight, Options())


@pytest.mark.parametrize("spread", [0.3, 3.0, 300.0])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", SETS)
def test_points_tangents_and_variances_are_those_of_all_rows(name, weight, spread):
    z = INNER + spread * randn(5, BATCH, N, seed=11)
    ours, former = both(name, weight, z)
    one, two = ours.solve(z), former.solve(z)
    assert bool(one.stats.converged.all())
    size = float(z.abs().max())
    agree = two.stats.converged
    torch.testing.assert_close(one.value[agree], two.value[agree], rtol=0, atol=1e-11 * size)
    x, cov = randn(*z.shape, seed=12), Diagonal(rand(BATCH, N, seed=13))
    if name == "repeated rows":  # either of two equal rows may be the active one
        return
    for got, expected in (
        (one.tangent.apply(x), two.tangent.apply(x)),
        (one.tangent.transpose(x), two.tangent.transpose(x)),
        (one.tangent.variance(cov), two.tangent.variance(cov)),
    ):
        torch.testing.assert_close(got[agree], expected[agree], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["rows and box", "a known value", "equal bounds"])
def test_bounds_and_known_values_hold_exactly(name):
    z = INNER + 3 * randn(50, BATCH, N, seed=14)
    value = ph.DPPL("orthogonal").project(z, SETS[name]()).value
    assert bool(((value >= 0) & (value <= 1)).all())
    if name == "equal bounds":
        assert bool((value[..., 4] == INNER[4]).all())
    if name == "a known value":
        assert bool((value[..., 2] == INNER[2]).all())


def test_a_vertex_and_a_known_value_have_no_variance():
    z = INNER + 300 * randn(200, N, seed=15)
    solution = ph.DPPL("orthogonal").project(z, SETS["a known value"]())
    variance = solution.tangent.variance(Diagonal(torch.ones(200, N).double()))
    assert bool((variance[:, 2] == 0).all())
    free = torch.linalg.matrix_rank(solution.tangent.matrix, atol=1e-9)
    assert bool((free == 0).any())
    assert bool((variance[free == 0] == 0).all())


@pytest.mark.parametrize("covariance", ["value", "variance"])
def test_gradients_to_points_weights_and_right_hand_sides(covariance):
    inputs = (
        INNER[:6] + 0.5 * randn(3, 6, seed=16), rand(3, 6, seed=17) + 0.2, A[:2, :6] @ INNER[:6],
        G[:4, :6] @ INNER[:6] + 0.1, torch.zeros(6).double(), torch.ones(6).double(),
    )  # fmt: skip

    def law(z, w, b, d, lower, upper):
        rows = ph.LinearEquality(A[:2, :6], b) & ph.LinearInequality(G[:4, :6], d) & ph.Box(lower, upper)
        law = ph.DPPL(covariance="delta")(ph.LocationScale(z, Diagonal(w)), rows)
        assert isinstance(law.projector, ReducedProjector)
        return law.mean if covariance == "value" else law.variance

    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(law, leaves, atol=1e-6)
    if covariance == "value":
        assert torch.autograd.gradgradcheck(law, leaves, fast_mode=True)


def test_gradients_under_constant_and_learned_metrics():
    z = (INNER + randn(4, N, seed=18)).requires_grad_()
    for metric in (
        ph.DenseMetric(TRIANGLE),
        ph.LowRankMetric(randn(N, 2), rand(N) + 0.1),
        ph.DiagonalMetric(rand(N) + 0.1),
    ):
        layer = ph.DPPL(metric)
        assert torch.autograd.gradcheck(lambda x, layer=layer: layer.project(x, SETS["rows and box"]()).value, z)
    learned = ph.DPPL(ph.DiagonalMetric(rand(N) + 0.1, learn=True))
    point = z.detach()
    assert isinstance(learned._projector(point, None, SETS["rows"]()), ReducedProjector)
    weight = learned.metric.values  # type: ignore[union-attr]
    (slope,) = torch.autograd.grad(learned.project(point, SETS["rows"]()).value.square().sum(), weight)
    step = 1e-6 * randn(N, seed=19)
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            weight += sign * step
            ends.append(learned.project(point, SETS["rows"]()).value.square().sum())
            weight -= sign * step
    torch.testing.assert_close((ends[0] - ends[1]) / 2, (slope * step).sum(), rtol=1e-5, atol=1e-12)


def test_single_precision_is_solved_in_double():
    z = INNER + randn(20, N, seed=20)
    constraint = SETS["rows and box"]()
    single, double = (ph.DPPL("orthogonal").project(x, constraint) for x in (z.float(), z))
    assert single.value.dtype == torch.float32
    assert bool(single.stats.converged.all())
    torch.testing.assert_close(single.value.double(), double.value, rtol=0, atol=1e-5)
    assert bool(((single.value >= 0) & (single.value <= 1)).all())


def test_an_empty_set_is_explained():
    rows = ph.LinearInequality(torch.cat([G[:3], -G[:3]]), torch.tensor([0.0, 1, 1, -1, 1, 1]).double())
    with pytest.raises(InfeasibleError, match="contradict"):
        ph.DPPL("orthogonal").project(randn(3, N), rows & ph.LinearEquality(A, B))


def test_the_factor_is_kept_while_rows_and_metric_have_the_same_values():
    layer, z = ph.DPPL(ph.DiagonalMetric(rand(N) + 0.1)), randn(3, N)
    first = layer._projector(z, None, ph.LinearEquality(A, B) & ph.LinearInequality(G, D))
    second = layer._projector(z, None, ph.LinearEquality(A, B + 1) & ph.LinearInequality(G, D))
    assert isinstance(first, ReducedProjector)
    assert isinstance(second, ReducedProjector)
    assert first.reduction is second.reduction
    layer.metric.values.mul_(2.0)  # type: ignore[union-attr, operator]
    third = layer._projector(z, None, ph.LinearEquality(A, B) & ph.LinearInequality(G, D))
    assert isinstance(third, ReducedProjector)
    assert third.reduction is not first.reduction


@pytest.mark.parametrize(
    "constraint",
    [
        ph.Simplex(),
        ph.Monotone() & ph.Box(0.0, 1.0),
        ph.LinearInequality(torch.ones(1, N), 1.0) & ph.NonNegative(),
        ph.LinearEquality(A[:2], B[:2]) & ph.Box(0.0, 1.0),  # few rows and many bounds
        ph.L1Ball(1.0) & ph.LinearInequality(G, D),
    ],
)
def test_other_structure_keeps_its_method(constraint):
    assert not isinstance(projector(constraint, WEIGHTS["orthogonal"], randn(2, N)), ReducedProjector)


def test_variables_without_weight_keep_their_method():
    weight = torch.ones(N).double()
    weight[3] = 0
    assert isinstance(projector(SETS["rows"](), Diagonal(weight), randn(2, N)), FaceProjector)


def test_reductions_agree_with_dense_algebra():
    w = rand(N, seed=21) + 0.1
    rows = torch.cat([G, torch.eye(N).double()[[1, 5]]])
    units = torch.tensor([1, 5])
    P = torch.eye(N).double() - torch.diag(w) @ A.T @ torch.linalg.inv(A @ torch.diag(w) @ A.T) @ A
    scale = (rows @ torch.diag(w) @ rows.T).diagonal().rsqrt()
    C = scale[:, None] * rows
    z, b, y = randn(3, N, seed=22), randn(3, 4, seed=23), randn(3, 11, seed=24)
    for reduction in (SharedReduction(A, rows, torch.diag(w.sqrt())), BatchedReduction(A, rows, units, w.expand(1, N))):
        K = reduction.gram(torch.zeros(1, dtype=torch.int64))[0]
        torch.testing.assert_close(K, C @ P @ torch.diag(w) @ C.T)
        some = torch.tensor([[7, 0, 9]])
        part = reduction.select(torch.zeros(1, dtype=torch.int64))
        torch.testing.assert_close(part.among(some)[0], K[some[0]][:, some[0]])
        torch.testing.assert_close(part.push(y), reduction.push(y))
        torch.testing.assert_close(reduction.project(z), z @ P.T)
        torch.testing.assert_close(reduction.project_transpose(z), z @ P)
        torch.testing.assert_close(reduction.push(y), y @ (P @ torch.diag(w) @ C.T).T)
        torch.testing.assert_close(reduction.pull(z), z @ P @ torch.diag(w) @ C.T)
        torch.testing.assert_close(reduction.nearest(z, b) @ A.T, b)
        for got, expected in zip(reduction.matrices, (P, C @ P, C @ P @ torch.diag(w))):
            torch.testing.assert_close(got.reshape(expected.shape), expected)


MANY = randn(60, N, seed=30)
CLOSE = MANY @ INNER + 0.5


@pytest.mark.parametrize("spread", [0.15, 0.3])
def test_few_rows_near_their_sides_are_solved_first_and_all_rows_checked(spread, monkeypatch):
    """Some elements have violated rows only after the first solve; all points, tangents and gradients are the same."""
    batch = 200
    weight, z = rand(batch, N, seed=31) + 0.1, INNER + spread * randn(batch, N, seed=32)
    constraint = ph.LinearEquality(A, B) & ph.LinearInequality(MANY, CLOSE)
    solved: list[int] = []
    whole = BatchedReduction.gram
    monkeypatch.setattr(BatchedReduction, "gram", lambda own, part: solved.append(len(part)) or whole(own, part))

    def answers(few: float) -> tuple[Tensor, ...]:
        monkeypatch.setattr(near_rows, "FEW", few)
        monkeypatch.setattr(reduced_tangent, "FEW", few)
        leaves = z.clone().requires_grad_(), weight.clone().requires_grad_()
        ours = projector(constraint, Diagonal(leaves[1]), z)
        assert isinstance(ours, ReducedProjector)
        with torch.no_grad():
            plain = projector(constraint, Diagonal(weight), z).solve(z)
        assert bool(plain.stats.converged.all())
        solution = ours.solve(leaves[0])
        spread = solution.tangent.variance(Diagonal(weight))
        slopes = torch.autograd.grad((solution.value**3).sum() + spread.square().sum(), leaves)
        return plain.value, plain.tangent.apply(z), solution.value, spread, *slopes

    few = answers(1.0)
    assert solved, "no element has a row that is violated later"
    assert max(solved) < 0.5 * batch
    solved.clear()
    every = answers(0.0)
    assert max(solved) > 20
    for one, two in zip(few, every):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)
    face = FaceProjector(parts_of(constraint, N), Diagonal(weight), Options()).solve(z)
    torch.testing.assert_close(few[0], face.value, rtol=0, atol=1e-11)


@pytest.mark.parametrize("stage", ["pivoting", "relaxation", "interior point"])
def test_every_stage_of_the_solver_finds_the_sides(stage, monkeypatch):
    if stage != "pivoting":
        monkeypatch.setattr(pivoting, "QUICK", 0)
    if stage == "interior point":
        monkeypatch.setattr(pivoting, "STAGES", ())
    root = randn(8, 8, seed=25)
    root = root / root.norm(dim=-1, keepdim=True)
    value = randn(30, 8, seed=26)
    ends = torch.zeros_like(value) - 0.2, torch.zeros_like(value) + 0.1
    owner = torch.zeros(30, dtype=torch.int64)
    problem = pivoting.DualProblem((root @ root.T)[None], owner, value, *ends, value.abs(), 8)
    sides = pivoting.solve(problem)
    assert bool(sides.done.all())
    y, reached = sides.multiplier, value - sides.multiplier @ (root @ root.T)
    assert bool(((reached >= ends[0] - 1e-9) & (reached <= ends[1] + 1e-9)).all())
    gap = torch.where(y > 0, (reached - ends[1]).abs(), torch.where(y < 0, (reached - ends[0]).abs(), 0.0))
    assert float(gap.max()) < 1e-9
    assert int((sides.side != 0).sum()) > 30


def test_chunks_do_not_change_the_answers(monkeypatch):
    z, constraint = INNER + 3 * randn(40, N, seed=27), SETS["rows and box"]()
    whole = ph.DPPL("orthogonal").project(z, constraint).value
    monkeypatch.setattr(pivoting, "CHUNK", 7 * 21 * 21)
    torch.testing.assert_close(ph.DPPL("orthogonal").project(z, constraint).value, whole, rtol=0, atol=1e-12)


def test_the_answer_of_a_quadratic_solver():
    z = (INNER + 3 * randn(3, N, seed=28)).numpy()
    value = ph.DPPL("orthogonal").project(torch.from_numpy(z), SETS["rows and box"]()).value.numpy()
    u = cp.Variable(N)
    for k in range(3):
        rows = [A.numpy() @ u == B.numpy(), G.numpy() @ u <= D.numpy(), u >= 0, u <= 1]
        cp.Problem(cp.Minimize(cp.sum_squares(u - z[k])), rows).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(value[k], u.value, atol=1e-6)
