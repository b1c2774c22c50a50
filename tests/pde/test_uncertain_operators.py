"""Operators that know their uncertainty: heads kept apart, and the posterior of a last layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import probhard as ph
from probhard.ensembles import DeepEnsemble, MCDropout
from probhard.model import Batch
from probhard.pde import BayesianNO, DiverseNO, Heat, VarianceNO, relative_l2
from probhard.pde.bayesian import evidence_maximum

SMALL = {"width": 4, "modes": (3, 3), "layers": 2}


def data(problem: Heat, count: int = 4) -> Batch:
    k = problem.parameters(count, torch.Generator().manual_seed(0))
    return Batch(problem.inputs(k), problem.solution(k).flatten(-2), None, k)


@pytest.fixture
def problem() -> Heat:
    return Heat(points=12, slices=5, dtype=torch.float64)


def test_heads_are_the_members(problem: Heat) -> None:
    operator, batch = DiverseNO(4, **SMALL).double(), data(problem)
    fields = operator.moments(batch.inputs).flatten(2)
    law = operator(batch.inputs)
    torch.testing.assert_close(law.mean, fields.mean(1))
    torch.testing.assert_close(law.variance, fields.var(1, correction=0) + 1e-12)
    torch.testing.assert_close(torch.stack(operator._fields(law), 1), fields)


def test_diversity_is_the_mean_over_pairs() -> None:
    operator = DiverseNO(5, **SMALL)
    w = operator.head.weight
    pairs = [(w[i] - w[j]).square().sum() for i in range(5) for j in range(i)]
    torch.testing.assert_close(operator.diversity(), torch.stack(pairs).mean())
    assert DiverseNO(1, **SMALL).diversity() == 0


def test_the_score_pushes_heads_apart_after_the_warm_up(problem: Heat) -> None:
    operator, batch = DiverseNO(3, **SMALL).double(), data(problem)
    model = ph.ConstrainedModel(operator, problem.constraint, "base", operator.diverse_score(2.0, warm_up=1))
    fields = operator.moments(batch.inputs).flatten(2)
    plain = torch.stack([relative_l2(field, batch.target) for field in fields.unbind(1)]).mean(0).sum()
    torch.testing.assert_close(model.loss(batch), plain)  # the warm-up
    torch.testing.assert_close(model.loss(batch), plain - 2.0 * operator.diversity())
    model.loss(batch).backward()
    assert all(weight.grad is not None for weight in operator.parameters())
    assert int(operator.state_dict()["steps"]) == 3
    torch.testing.assert_close(model.eval().loss(batch), plain)  # validation


def test_the_score_needs_the_law_before_projection(problem: Heat) -> None:
    operator, batch = DiverseNO(3, **SMALL).double(), data(problem)
    model = ph.ConstrainedModel(operator, problem.constraint, "probhard-or", operator.diverse_score())
    with pytest.raises(ph.ParameterError, match="before any projection"):
        model.loss(batch)


def test_one_head_serves_ensembles_and_dropout(problem: Heat) -> None:
    batch = data(problem)
    ensemble = DeepEnsemble([DiverseNO(1, **SMALL).double() for _ in range(3)])
    means = torch.stack([member(batch.inputs).mean for member in ensemble.members])
    torch.testing.assert_close(ensemble(batch.inputs).variance, means.var(0, correction=0) + 1e-12)
    law = MCDropout(DiverseNO(1, dropout=0.3, **SMALL).double(), 3)(batch.inputs)
    assert float(law.variance.min()) > 1e-12


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("build", [lambda: DiverseNO(1, **SMALL), lambda: VarianceNO(**SMALL)])
def test_posterior_against_dense_algebra(problem: Heat, build, noise: bool) -> None:
    operator, batch = build().double(), data(problem)
    backbone = BayesianNO(operator, noise).double().fit(batch.inputs, batch.target)
    phi = operator.features(batch.inputs).flatten(2).mT.detach()  # (batch, n, J)
    p, s = float(backbone.prior), float(backbone.variance)
    full = p * torch.eye(phi.shape[-1], dtype=torch.float64) + torch.einsum("bnj,bnk->jk", phi, phi) / s
    cov = phi @ torch.diag(1 / full.diagonal()) @ phi.mT
    law = backbone(batch.inputs)
    expected = cov.diagonal(dim1=-2, dim2=-1) + (s if noise else 1e-12)
    torch.testing.assert_close(law.variance, expected)
    torch.testing.assert_close(law.mean, operator(batch.inputs).mean)
    assert ph.ConstrainedModel(backbone, problem.constraint, "probconserv").sample(batch, 3).isfinite().all()


def test_evidence_maximum_against_scipy() -> None:
    squares, errors, count, norm = torch.rand(8, dtype=torch.float64) * 50, 3.0, 60, 2.0

    def negative(logs: np.ndarray) -> float:
        p, s = np.exp(logs)
        h = p + squares.numpy() / s
        likelihood = -errors / (2 * s) - count / 2 * np.log(s)
        return -(likelihood - p * norm / 2 + len(h) / 2 * np.log(p) - np.log(h).sum() / 2)

    best = np.exp(minimize(negative, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13}).x)
    np.testing.assert_allclose(evidence_maximum(squares, errors, count, norm), best, rtol=1e-5)


def test_bad_requests(problem: Heat) -> None:
    with pytest.raises(ph.ParameterError, match="heads=0"):
        DiverseNO(0)
    with pytest.raises(ph.ParameterError, match="strength"):
        DiverseNO(2, **SMALL).diverse_score(-1.0)
    with pytest.raises(ph.ParameterError, match="heads"):
        BayesianNO(DiverseNO(4, **SMALL))
    with pytest.raises(ph.ParameterError, match=r"fit\(\)"):
        BayesianNO(DiverseNO(1, **SMALL).double())(problem.inputs(torch.tensor([2.0], dtype=torch.float64)))
