"""Functionals in the training loss, in records of methods and in saved models; the variogram score."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scoringrules
import torch

import probhard as ph
from probhard.errors import ParameterError, ShapeError
from small_model import ROWS, SIZE, Backbone, N, S, data, dense_projection, model, predicted

LEVELS = ph.Levels(S)
FAMILY = LEVELS + ph.Directions(torch.ones(1, N), ["everything"])


def functional_loss(y: np.ndarray, mean: np.ndarray, cov: np.ndarray, observed: np.ndarray | None = None) -> float:
    """``n sum_groups mean_f CRPS(f . u) / |f|_1`` of normal laws (SIZE, n), point by point and group by group."""
    rows, total = FAMILY.matrix.toarray(), 0.0
    for k in range(len(y)):
        for group in range(len(FAMILY.names)):
            members = [f for f, g in zip(rows, FAMILY.group.tolist()) if g == group]
            for f in members:
                if observed is None or observed[k][f != 0].all():
                    variance, error = f @ cov[k] @ f, f @ (y[k] - mean[k])
                    fixed = variance < 1e-12 * (f**2 @ np.diag(cov[k]) + 1e-300)
                    score = abs(error) if fixed else scoringrules.crps_normal(error, 0.0, variance**0.5)
                    total += N * score / abs(f).sum() / len(members)
    return total


def projected_moments(x: torch.Tensor, oblique: bool) -> tuple[np.ndarray, np.ndarray]:
    mean, stddev = predicted(x)
    covariances = []
    for spread in stddev**2:
        W = np.diag(spread) if oblique else np.eye(N)
        P = np.eye(N) - W @ ROWS.T @ np.linalg.solve(ROWS @ W @ ROWS.T, ROWS)
        covariances.append(P @ np.diag(spread) @ P.T)
    return dense_projection(mean, stddev**2, oblique)[0], np.stack(covariances)


@pytest.mark.parametrize("name", ["base", "probhard-ob", "probhard-or", "hardc", "softc"])
def test_the_loss_adds_the_mean_score_of_every_group(name):
    x, y = data()
    mean, stddev = predicted(x)
    cov = np.stack([np.diag(spread) for spread in stddev**2])
    if name.startswith("probhard"):
        mean, cov = projected_moments(x, name == "probhard-ob")
    if name == "hardc":
        mean = projected_moments(x, False)[0]
    method = ph.METHODS[name].replace(functionals=FAMILY, functional_weight=0.7)
    added = model(method).loss((x, y)).item() - model(name).loss((x, y)).item()
    assert added == pytest.approx(0.7 * functional_loss(y.numpy(), mean, cov), rel=1e-9)
    assert model(method.replace(functional_weight=0.0)).loss((x, y)).item() == model(name).loss((x, y)).item()


def test_the_loss_with_unobserved_targets():
    x, y = data()
    mask = torch.ones(SIZE, N, dtype=torch.bool)
    mask[0, 5] = mask[2, 0] = False
    broken = torch.where(mask, y, torch.nan)
    mean, cov = projected_moments(x, True)
    method = ph.METHODS["probhard-ob"].replace(functionals=FAMILY)
    added = model(method).loss((x, broken, mask)).item() - model("probhard-ob").loss((x, broken, mask)).item()
    assert added == pytest.approx(0.3 * functional_loss(y.numpy(), mean, cov, mask.numpy()), rel=1e-9)


@pytest.mark.parametrize("score", ["quantile", "crps"])
def test_the_loss_of_draws_scores_functionals_of_the_same_draws(score):
    x, y = data()
    method = ph.METHODS["hier-e2e"].replace(score=score)
    one = model(method.replace(functionals=FAMILY))
    torch.manual_seed(7)
    added = one.loss((x, y))
    torch.manual_seed(7)
    added = added - model(method).loss((x, y))
    torch.manual_seed(7)
    draws = one.forecast(x).rsample((100,)).detach() @ torch.from_numpy(FAMILY.matrix.toarray()).T
    values = y @ torch.from_numpy(FAMILY.matrix.toarray()).T
    scores = scoringrules.crps_ensemble(values.numpy(), draws.numpy(), m_axis=0, estimator="fair")
    assert added.item() == pytest.approx(0.3 * N * float((scores * FAMILY.weight.numpy()).sum()), rel=1e-9)


@pytest.mark.parametrize("constraint", [ph.Hierarchy(S), ph.Hierarchy(S) & ph.NonNegative()], ids=["rows", "bounds"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_with_functionals_reaches_every_parameter(constraint, dtype):
    x, y = (part.to(dtype) for part in data())
    family = ph.Levels(S) + ph.Directions(ROWS, ["coherence"] * len(ROWS))  # the rows themselves have variance 0
    method = ph.METHODS["probhard-ob"].replace(functionals=family)
    one = ph.ConstrainedModel(Backbone().to(dtype), constraint, method)
    one.loss((x, y.abs())).backward()
    for parameter in one.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


def test_training_with_functionals_finds_a_correlation():
    """A law with one factor learns the spread of the total; without functionals its factor stays idle."""
    n, batch = 8, 4000
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(batch, 1, generator=generator) + 0.5 * torch.randn(batch, n, generator=generator)

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(0.1 * torch.ones(n, 1))
            self.spread = torch.nn.Parameter(torch.zeros(n))

        def forward(self, x: torch.Tensor) -> ph.LocationScale:
            return ph.LocationScale(torch.zeros(batch, n), ph.LowRank(self.factor, self.spread.exp()))

    scales = []
    for method in (ph.Method(), ph.Method(functionals=ph.BlockMeans((n,), (2, 4, "total")))):
        head = Head()
        one = ph.ConstrainedModel(head, ph.Box(), method)
        optimiser = torch.optim.Adam(head.parameters(), lr=0.05)
        for _ in range(150):
            optimiser.zero_grad()
            one.loss((y, y)).backward()
            optimiser.step()
        law = head(y)
        scales.append(float(law.functional(ph.Directions(torch.ones(1, n) / n).rows(n)).scale[0].detach()))
    truth = (1 + 0.25 / n) ** 0.5
    assert scales[1] == pytest.approx(truth, rel=0.05)
    assert scales[0] < 0.7 * truth


# --------------------------------------------------------------------------------------------------- records


def test_methods_with_functionals_are_saved_and_restored(tmp_path):
    x, y = data()
    method = ph.METHODS["probhard-ob"].replace(functionals=FAMILY, functional_weight=0.1)
    assert ph.Method.from_record(json.loads(json.dumps(method.record()))) == method
    assert ph.Method.from_record(method.record()) == method
    assert hash(method) == hash(ph.Method.from_record(method.record()))
    one = model(method)
    one.save(tmp_path / "model.pt")
    again = ph.ConstrainedModel.load(tmp_path / "model.pt", Backbone(seed=5), ph.Hierarchy(S))
    assert again.method == method
    assert again.loss((x, y)).item() == one.loss((x, y)).item()


def test_records_from_before_functionals_still_load():
    record = ph.METHODS["softc"].record()
    assert record is not None
    del record["functionals"], record["functional_weight"]
    assert ph.Method.from_record(record) == ph.METHODS["softc"]


def test_methods_reject_what_is_no_family():
    with pytest.raises(ParameterError, match="Directions"):
        ph.METHODS["base"].replace(functionals=torch.ones(1, N))
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ParameterError, match="functional_weight"):
            ph.METHODS["base"].replace(functional_weight=weight)
    x, y = data()
    with pytest.raises(ShapeError, match="the law has 7"):
        model(ph.METHODS["base"].replace(functionals=ph.Horizons(5))).loss((x, y))


# ----------------------------------------------------------------------------------------- variogram score


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0])
def test_the_variogram_score(p, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    samples, y = torch.randn(9, 2, 3, 5, generator=generator), torch.randn(2, 3, 5, generator=generator)
    oracle = scoringrules.vs_ensemble(y.numpy(), samples.numpy(), m_axis=0, p=p, backend="numpy")
    np.testing.assert_allclose(ph.variogram_score(samples, y, p), oracle, rtol=1e-12)
    monkeypatch.setattr("probhard._score.ensembles.ENTRIES", 7 * 54)  # several chunks
    np.testing.assert_allclose(ph.variogram_score(samples, y, p), oracle, rtol=1e-12)
    pairs = torch.tensor([[0, 1], [3, 2], [4, 4]])
    weight = np.zeros((5, 5))
    weight[[0, 3], [1, 2]] = 1
    chosen = scoringrules.vs_ensemble(y.numpy(), samples.numpy(), weight, m_axis=0, p=p, backend="numpy")
    np.testing.assert_allclose(ph.variogram_score(samples, y, p, pairs), chosen, rtol=1e-12)


def test_the_variogram_score_leaves_unobserved_pairs_out():
    generator = torch.Generator().manual_seed(0)
    samples, y = torch.randn(9, 2, 5, generator=generator), torch.randn(2, 5, generator=generator)
    mask = torch.tensor([[True] * 5, [True, False, True, True, False]])
    score = ph.variogram_score(samples, torch.where(mask, y, torch.nan), mask=mask)
    torch.testing.assert_close(score[0], ph.variogram_score(samples[:, 0], y[0]))
    torch.testing.assert_close(score[1], ph.variogram_score(samples[:, 1, mask[1]], y[1, mask[1]]))


def test_the_variogram_score_rejects_bad_input():
    samples, y = torch.randn(9, 2, 5), torch.randn(2, 5)
    for p in (0.0, -1.0, float("nan")):
        with pytest.raises(ParameterError, match="order"):
            ph.variogram_score(samples, y, p)
    for pairs in (torch.tensor([0, 1]), torch.tensor([[0, 5]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[-1, 0]])):
        with pytest.raises(ShapeError, match="pairs"):
            ph.variogram_score(samples, y, pairs=pairs)
    with pytest.raises(ParameterError, match="draws"):
        ph.variogram_score(samples[:1], y)
