"""Input that is easily wrong, and must give a clear error or the right answer: never a silent wrong one."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import probhard as ph
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.models.pool import best_weights, pooled
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import Reconciliation
from probhard.forecasting.report.evaluation import crps_levels
from probhard.rows.pattern import Pattern

S = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])


def circle(u, radius):
    return u.square().sum(-1, keepdim=True) - radius**2


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_data_of_slices_is_not_taken_for_a_batch(batch):
    radius = torch.tensor([[0.5], [1.0], [2.0]])  # of three slices
    field = ph.per_slice(ph.NonlinearEquality(circle, (radius,)), (3, 4))
    z = 3 * torch.randn(batch, 12, generator=torch.Generator().manual_seed(1))
    solution = ph.DPPL().project(z, field, (z, torch.ones(12)))
    assert bool(solution.stats.converged.all())
    assert solution.stats.local
    assert float(field.violation(solution.value).max()) < 1e-8
    norms = solution.value.unflatten(-1, (3, 4)).norm(dim=-1)
    torch.testing.assert_close(norms, radius.squeeze(-1).expand(batch, 3))


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_curved_bounds_of_slices_too(batch):
    radius = torch.tensor([[0.5], [1.0], [2.0]])
    field = ph.per_slice(ph.NonlinearInequality(circle, (radius,), convex=True), (3, 4))
    z = 3 * torch.randn(batch, 12, generator=torch.Generator().manual_seed(2))
    value = ph.DPPL("orthogonal").project(z, field).value
    assert value.shape == (batch, 12)
    expected = z.unflatten(-1, (3, 4))
    expected = expected * (radius / expected.norm(dim=-1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(value, expected.flatten(-2), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("constraint", "covariance"),
    [
        (ph.TotalVariationDiminishing((3, 4)), "auto"),
        (ph.Semicontinuous(0.2), "auto"),
        (ph.NonlinearInequality(lambda u: 1 - u.square().sum(-1, keepdim=True), convex=False), "auto"),
        (ph.NonlinearEquality(lambda u: circle(u, 1.0)) & ph.Monotone(), "auto"),
        (ph.NonlinearEquality(lambda u: circle(u, 1.0)), "monte-carlo"),
    ],
)
def test_means_lie_in_sets_that_are_not_convex(constraint, covariance):
    generator = torch.Generator().manual_seed(3)
    loc = 0.1 * torch.randn(2, 12, generator=generator)
    law = ph.DPPL("oblique", covariance, draws=40)((loc, torch.full((2, 12), 0.5)), constraint)
    assert law.feasible
    assert float(constraint.violation(law.mean).max()) < 1e-8


@pytest.mark.parametrize(
    "constraint",
    [ph.Monotone(), ph.TotalVariation(1.0), ph.TotalVariationPenalty(1.0), ph.Simplex(1.0)],
    ids=lambda constraint: type(constraint).__name__,
)
def test_lifted_profiles_keep_their_width(constraint):
    field = ph.per_slice(constraint, (3, 4))
    assert field.variables == 12
    assert ph.DPPL("orthogonal").project(torch.randn(2, 12), field).value.shape == (2, 12)
    with pytest.raises(ph.ShapeError):
        ph.DPPL("orthogonal").project(torch.randn(2, 15), field)
    with pytest.raises(ph.ShapeError, match="shape=\\(0, 4\\)"):
        ph.per_slice(constraint, (0, 4))


def test_no_profile_at_all():
    with pytest.raises(ph.ParameterError, match="slices=0"):
        ph.Monotone(slices=0)


def test_integers():
    total = ph.Conservation(torch.tensor([1, 1, 1]), 2.5)
    assert total.b.tolist() == [2.5]
    assert float(total.violation(ph.DPPL("orthogonal").project(torch.randn(3), total).value)) < 1e-12
    layer, whole = ph.DPPL("orthogonal"), torch.tensor([1, -2])
    for call in (
        lambda: layer.project(whole, ph.NonNegative()),
        lambda: layer.project_samples(whole.expand(3, 2), ph.NonNegative()),
        lambda: layer((whole, torch.tensor([1, 1])), ph.NonNegative()),
    ):
        with pytest.raises(ph.ProbhardError, match=r"int64|dtype"):
            call()


def test_functions_with_a_pattern_join():
    rows = Pattern(np.array([0, 0]), np.array([0, 1]), (1, 3))
    first = ph.NonlinearEquality(
        lambda u: u[..., :2].square().sum(-1, keepdim=True) - 1, (), lambda u: 2 * u[..., :2], rows
    )
    second = ph.NonlinearEquality(
        lambda u: u[..., 2:] ** 3 - 8, (), lambda u: (3 * u**2 * torch.tensor([0.0, 0, 1])).unsqueeze(-2)
    )
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) + torch.tensor([1.0, 1.0, 2.0])
    for both in (first & second, second & first):
        nearest = ph.DPPL("orthogonal").project(z, both).value
        assert float(both.violation(nearest).max()) < 1e-9


@pytest.mark.parametrize(
    "constraint",
    [
        ph.NonlinearEquality(circle, (torch.ones(4, 1),)),
        ph.NonlinearInequality(circle, (torch.ones(4, 1),), convex=True),
    ],
)
def test_batches_that_do_not_fit(constraint):
    with pytest.raises(ph.ShapeError):
        ph.DPPL("orthogonal").project(torch.randn(2, 3), constraint)


@pytest.mark.parametrize("constraint", [ph.Box(torch.zeros(5), torch.ones(5)), ph.Ball(1.0, torch.zeros(5))])
def test_points_of_another_width(constraint):
    for asked in (constraint.violation, constraint.relative_violation, constraint.penalty):
        with pytest.raises(ph.ShapeError, match="5 variables"):
            asked(torch.zeros(4, 7))


def test_metrics_that_do_not_fit():
    law, total = (torch.zeros(4, 7), torch.ones(4, 7)), ph.LinearEquality(torch.ones(1, 7), 1.0)
    for constraint in (total, ph.Box(0.0, None)):
        with pytest.raises(ph.ShapeError, match="the metric"):
            ph.DPPL(ph.DiagonalMetric(torch.ones(3, 7)))(law, constraint)
    with pytest.raises(ph.ParameterError, match="when the layer is called"):
        ph.DPPL(total)


@pytest.mark.parametrize("score", [ph.crps, ph.nll, ph.mse])
def test_masks_are_yes_or_no(score):
    law, target = (torch.zeros(4, 7), torch.ones(4, 7)), torch.zeros(4, 7)
    with pytest.raises(ph.ParameterError, match=r"mask\.bool\(\)"):
        score(law, target, mask=torch.ones(4, 7))
    assert float(score(law, target, mask=torch.zeros(4, 7).bool()).abs().max()) == 0


def test_complex_rows():
    for kind in (ph.LinearEquality, ph.LinearInequality):
        for rows in (
            torch.ones(1, 3, dtype=torch.complex64),
            np.ones((1, 3), dtype=complex),
            sp.csr_array(np.ones((1, 3), dtype=complex)),
        ):
            with pytest.raises(ph.ParameterError, match=r"[AG]: got the dtype .*complex"):
                kind(rows)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda value: ph.Box(value, None), "The lower bound"),
        (lambda value: ph.Box(None, value), "The upper bound"),
        (ph.Simplex, "The total of the simplex"),
        (ph.Ball, "The radius of the ball"),
        (lambda value: ph.Ball(1.0, value), "The center of the ball"),
        (ph.TotalVariation, "The bound of the total variation"),
        (ph.TotalVariationPenalty, "The weight of the total variation"),
        (ph.Semicontinuous, "The least value"),
        (lambda value: ph.Conservation(value, 1.0), "The weights"),
        (lambda value: ph.Conservation(torch.ones(3), value), "The mass"),
        (ph.LinearEquality, "A"),
        (lambda value: ph.LinearEquality(torch.ones(1, 3), value), "The right-hand side b"),
        (ph.LinearInequality, "G"),
        (lambda value: ph.LinearInequality(torch.ones(1, 3), value), "d"),
        (lambda value: ph.ConvexProgram(lambda u, p: u <= p, 3, (value,), ((),)), "Argument 0 of the program"),
    ],
)
@pytest.mark.parametrize("value", ["much", ["a", "b"], 1j, np.array([1j]), torch.ones(2, dtype=torch.complex64)])
def test_data_of_constraints_are_real_numbers(made, name, value):
    with pytest.raises(ph.ParameterError, match=f"^{name}: got .*Constraints are made of real numbers.*(Pass|Treat)"):
        made(value)


def test_numbers_are_taken_exactly():
    # as lists, arrays of any kind and whole numbers: in float64, not rounded to torch's default
    assert float(ph.Ball(1, [0.1, 0.2]).center[0]) == 0.1
    assert float(ph.Conservation([0.1, 0.2], 1).weights[0]) == 0.1
    assert float(ph.LinearEquality([[0.1, 0.2]], [0.3]).residual(torch.zeros(2).double())) == -0.3
    assert ph.Box(np.array([1, 2], dtype=np.int32), None).lower.dtype == torch.float64
    frame = pd.DataFrame({"a": [0.1], "b": [0.2]})
    assert float(ph.LinearEquality(frame, frame["a"]).residual(torch.zeros(2).double())) == -0.1


@pytest.mark.parametrize("draws", [-5, 0, 1])
def test_too_few_draws(draws):
    with pytest.raises(ph.ParameterError, match=f"draws={draws}"):
        ph.DPPL(draws=draws)


def test_negative_draws_of_a_step():
    with pytest.raises(ph.ParameterError, match="draws=-3"):
        ph.Step(draws=-3)


def test_scores_take_what_they_say():
    pair = torch.zeros(2, 3), torch.ones(2, 3)
    assert float(ph.constraint_error(ph.Conservation(torch.ones(3), 1.0), pair).largest) == 1
    with pytest.raises(ph.ParameterError, match="mse got a tensor"):
        ph.mse(torch.zeros(4, 2, 3), torch.zeros(2, 3))


def test_levels_of_zeros_have_no_score():
    levels = {"all": np.arange(3), "zero": np.array([2])}
    scores = crps_levels(np.ones((5, 2, 3)), np.array([[1.0, 1.0, 0.0]] * 2), levels)
    assert np.isnan(scores["zero"])
    assert scores["all"] > 0


def test_weights_of_a_pool():
    draws = [np.zeros((4, 1, 1)), np.ones((4, 1, 1))]
    assert pooled(draws, np.array([0.5, 0.5]), 4).sum() == 2
    for weights in ([1.0, 1.0], [0.2, 0.2], [1.0], [1.5, -0.5]):
        with pytest.raises(ph.ParameterError, match="members got the weights"):
            pooled(draws, np.array(weights), 4)
    with pytest.raises(ph.ParameterError, match="no windows"):
        best_weights([])


def test_keys_that_hold_the_separator():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"k1": ["a/b", "a"], "k2": ["c", "b/c"], "k3": ["x", "y"]})
    with pytest.raises(ph.ParameterError, match="one label, 'a/b/c'"):
        ph.Hierarchy.from_frame(frame, [["k1", "k2"], ["k1", "k2", "k3"]])


def test_shapes_of_forecasts():
    with pytest.raises(ph.ShapeError, match="stddev"):
        Forecasts(np.zeros((2, 3)), np.ones((3, 3)))
    with pytest.raises(ph.ShapeError, match="steps and n series"):
        Forecasts(np.zeros(3))
    with pytest.raises(ph.ParameterError, match="samples=0"):
        Reconciliation(ph.Hierarchy(S))(Forecasts(np.zeros((2, 3)), np.ones((2, 3))), samples=0)


def test_counts_of_rows():
    pd = pytest.importorskip("pandas")
    index = pd.period_range("2020-01", periods=6, freq="M")
    values = np.ones((6, 2)) @ S.T
    data = HierarchicalData(values, index, ph.Hierarchy(S, names=["t", "a", "b"]), horizon=2)
    with pytest.raises(ph.ParameterError, match="horizon 0"):
        data.train_test(horizon=0)
    with pytest.raises(ph.ParameterError, match="season=0"):
        HierarchicalData(values, index, data.hierarchy, season=0)


def test_counts_of_training():
    training = pytest.importorskip("probhard.training", reason="lightning is not installed")
    for options in ({"patience": 0}, {"clip": 0.0}):
        with pytest.raises(ph.ParameterError):
            training.Schedule(**options)
    model = ph.ConstrainedModel(torch.nn.Linear(2, 3), ph.NonNegative(), "base")
    with pytest.raises(ph.ShapeError, match="8 and 10 samples"):
        training.fit(model, (torch.zeros(10, 2), torch.zeros(8, 3)), (torch.zeros(2, 2), torch.zeros(2, 3)))
