"""Models of points: backbones that return a tensor, and scores that are functions of the prediction and the batch."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import nn

from bad_input import explained
from probhard import (
    METHODS,
    ConstrainedModel,
    DiagonalMetric,
    LinearEquality,
    LinearInequality,
    Method,
    ParameterError,
    ShapeError,
    Simplex,
    Step,
)
from probhard.model import Batch
from probhard.training import Schedule, fit
from small_model import DOUBLE, ROWS, Backbone, data, model

N, EQUALITIES, INEQUALITIES = 12, 5, 5


def network(inputs: int, outputs: int, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 48), nn.ReLU(), nn.Linear(48, outputs)).to(DOUBLE)


def points(method: str | Method = "probhard-or", score=None, constraint=None) -> ConstrainedModel:
    return ConstrainedModel(network(3, 7), model().constraint_fn if constraint is None else constraint, method, score)


def test_a_point_is_projected_as_dense_algebra_says():
    inputs, _ = data()
    trainee = points()
    z = trainee.backbone(inputs).detach().numpy()
    expected = z - (np.linalg.pinv(ROWS) @ (ROWS @ z.T)).T
    np.testing.assert_allclose(trainee(inputs).detach().numpy(), expected, atol=1e-12)
    weights = torch.rand(7, dtype=DOUBLE, generator=torch.Generator().manual_seed(2)) + 0.1
    step = Step(DiagonalMetric(weights))
    u = points(Method(step, step))(inputs).detach().numpy()
    W = np.diag(weights.numpy())
    gain = W @ ROWS.T @ np.linalg.inv(ROWS @ W @ ROWS.T)
    np.testing.assert_allclose(u, z - (gain @ ROWS @ z.T).T, atol=1e-12)


def test_calling_a_model_of_laws_gives_its_forecast():
    inputs, _ = data()
    trainee = model()
    torch.testing.assert_close(trainee(inputs).mean, trainee.forecast(inputs).mean, rtol=0, atol=0)
    torch.testing.assert_close(trainee(inputs).stddev, trainee.forecast(inputs).stddev, rtol=0, atol=0)


def test_the_default_loss_of_points_is_the_absolute_error():
    inputs, target = data()
    trainee = points()
    expected = (trainee(inputs) - target).abs()
    torch.testing.assert_close(trainee.loss((inputs, target)), expected.sum())
    mask = torch.rand(target.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    holes = torch.where(mask, target, torch.nan)
    loss = trainee.loss((inputs, holes, mask))
    torch.testing.assert_close(loss, expected[mask].sum())
    loss.backward()
    assert all(p.grad.isfinite().all() for p in trainee.parameters())


def test_a_score_of_points_gets_points_and_batch_and_needs_no_target():
    inputs, _ = data()

    def cost(u, batch):
        return (u.square() * batch.inputs[:, :1]).sum(-1)

    trainee = points(score=cost)
    torch.testing.assert_close(trainee.loss(inputs), cost(trainee(inputs), Batch(inputs)).sum())
    by_method = points(METHODS["probhard-or"].replace(score=cost))
    torch.testing.assert_close(by_method.loss({"inputs": inputs}), trainee.loss(inputs))
    soft = points(METHODS["softc"].replace(score=cost, penalty=2.0))
    z = soft.backbone(inputs)
    expected = cost(z, Batch(inputs)).sum() + 2.0 * (z.detach().numpy() @ ROWS.T).__pow__(2).sum()
    torch.testing.assert_close(soft.loss(inputs), expected)


def test_a_score_of_laws_gets_the_law_or_its_draws():
    inputs, target = data()
    seen = []

    def score(prediction, batch):
        seen.append(prediction)
        value = prediction if isinstance(prediction, torch.Tensor) else prediction.mean
        return (value - batch.target).square()

    laws = ConstrainedModel(Backbone(), model().constraint_fn, score=score)
    torch.testing.assert_close(laws.loss((inputs, target)), (laws(inputs).mean - target).square().sum())
    draws = METHODS["hier-e2e"].replace(score=score)
    ConstrainedModel(Backbone(), model().constraint_fn, draws).loss((inputs, target))
    assert seen[-1].shape == (100, *target.shape)
    assert float(model().constraint_fn.violation(seen[-1].detach()).max()) < 1e-12


class Problems:
    """DC3's convex problems: minimise ``u Q u / 2 + p u`` subject to ``A u = x`` and ``G u <= h``."""

    def __init__(self) -> None:
        random = np.random.RandomState(17)
        self.Q = np.diag(random.rand(N))
        self.p = random.rand(N)
        self.A = random.normal(size=(EQUALITIES, N))
        self.G = random.normal(size=(INEQUALITIES, N))
        self.h = np.abs(self.G @ np.linalg.pinv(self.A)).sum(1)
        self.x = random.uniform(-1, 1, size=(120, EQUALITIES))

    def constraint(self, x: torch.Tensor):
        return LinearEquality(self.A, x) & LinearInequality(self.G, self.h)

    def cost(self, u: torch.Tensor, batch=None) -> torch.Tensor:
        Q, p = torch.from_numpy(self.Q), torch.from_numpy(self.p)
        return 0.5 * ((u @ Q) * u).sum(-1) + u @ p

    def optimum(self, x: np.ndarray) -> float:
        u, right = cp.Variable(N), cp.Parameter(EQUALITIES)
        objective = cp.Minimize(cp.quad_form(u, self.Q) / 2 + self.p @ u)
        problem = cp.Problem(objective, [self.A @ u == right, self.G @ u <= self.h])
        values = []
        for row in x:
            right.value = row
            values.append(problem.solve(solver=cp.CLARABEL))
        return float(np.mean(values))


def test_a_network_learns_to_solve_quadratic_programs():
    problems = Problems()
    x = torch.from_numpy(problems.x)
    solver = ConstrainedModel(network(EQUALITIES, N), problems.constraint, "probhard-or", score=problems.cost)
    schedule = Schedule(epochs=30, batch_size=20, lr=4e-3, weight_decay=0.0, halvings=4, warm_up=0)
    done = fit(solver, x[:100], x[100:], schedule, progress=False)
    u = solver(x[100:]).detach()
    assert problems.constraint(x[100:]).violation(u).max() < 1e-12
    reached, best = float(problems.cost(u).mean()), problems.optimum(problems.x[100:])
    assert done.best_score == pytest.approx(reached, rel=1e-9)  # per sample
    assert best - 1e-9 <= reached <= best + 0.01 * abs(best)


def test_warm_up_and_checkpoints_work_without_targets(tmp_path):
    inputs, _ = data(20)
    trainee = points(score=lambda u, batch: u.square().sum(-1))
    schedule = Schedule(epochs=3, batch_size=10, warm_up=1)
    fit(trainee, inputs, inputs, schedule, directory=tmp_path, progress=False)
    longer = fit(
        points(score=lambda u, batch: u.square().sum(-1)),
        inputs,
        inputs,
        Schedule(epochs=4, batch_size=10, warm_up=1),
        directory=tmp_path,
        progress=False,
    )
    assert longer.epochs == 4


def test_a_saved_model_takes_its_score_again(tmp_path):
    inputs, _ = data()

    def cost(u, batch):
        return u.square().sum(-1)

    trainee = points(score=cost)
    trainee.save(tmp_path / "model.pt")
    with pytest.raises(ParameterError) as caught:
        ConstrainedModel.load(tmp_path / "model.pt", network(3, 7, seed=5), trainee.constraint_fn)
    explained(caught.value, ["score=", "function"])
    loaded = ConstrainedModel.load(tmp_path / "model.pt", network(3, 7, seed=5), trainee.constraint_fn, score=cost)
    torch.testing.assert_close(loaded.loss(inputs), trainee.loss(inputs), rtol=0, atol=0)
    assert loaded.method == trainee.method
    named = ConstrainedModel.load(tmp_path / "model.pt", network(3, 7), trainee.constraint_fn, score="crps")
    assert named.method == METHODS["probhard-or"]


REJECTED = {
    "oblique points": (lambda x, y: points("probhard-ob")(x), ["probhard-or", "covariance"]),
    "forecast": (lambda x, y: points().forecast(x), ["model(x)"]),
    "sample": (lambda x, y: points().sample(x), ["model(x)"]),
    "density": (lambda x, y: points(score="nll").loss((x, y)), ["nll"]),
    "draws": (lambda x, y: points("hier-e2e").loss((x, y)), ["draws"]),
    "no target": (lambda x, y: points().loss(x), ["target", "score="]),
    "fit without targets": (lambda x, y: fit(points(), x, x, progress=False), ["targets", "score"]),
    "fit without tensors": (lambda x, y: fit(points(score=len), "x", "x", progress=False), ["str", "as_tensor"]),
    "a number as a score": (lambda x, y: points(score=lambda u, b: 1.0).loss(x), ["float"]),
    "an unknown score": (lambda x, y: points(score="mae"), ["mae", "crps"]),
    "no score": (lambda x, y: METHODS["base"].replace(score=3), ["3"]),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name):
    action, words = REJECTED[name]
    with pytest.raises(ParameterError) as caught:
        action(*data())
    explained(caught.value, words)


def test_points_have_the_constraint_of_their_sample():
    inputs, _ = data()
    trainee = points(constraint=lambda x: Simplex(x[:, 0].abs() + 1))
    u = trainee(inputs)
    torch.testing.assert_close(u.sum(-1), inputs[:, 0].abs() + 1)
    with pytest.raises(ShapeError):
        trainee.loss((inputs, inputs))
