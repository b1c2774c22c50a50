"""Heads of joint laws: operators with a rank, operators of other libraries, surrogates and ensembles."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import probhard as ph
from probhard.laws.covariance import Dense, Diagonal, LowRank
from probhard.laws.distribution import LocationScale
from probhard.laws.spectral import Spectral
from probhard.pde.adapters import OperatorBackbone
from probhard.pde.heads import FLOOR, OWN, SHARED, Head
from probhard.pde.operators import VarianceNO
from probhard.pde.samples import Samples
from probhard.pde.settings import Settings
from probhard.pde.surrogate import Normalised, Surrogate
from probhard.projection.mixture import COLUMNS, Mixture
from probhard.score import BlockMeans

GRID = (4, 6)


def cosines(count: int, grid: tuple[int, ...]) -> np.ndarray:
    """The smoothest cosines without the constant, scaled to mean square 1 at every point, (count, *grid)."""
    waves = sorted(np.ndindex(*[9] * len(grid)), key=lambda k: (sum(x * x for x in k), k))[1 : 1 + count]
    places = np.meshgrid(*((np.arange(n) + 0.5) / n for n in grid), indexing="ij")
    fields = np.stack([np.prod([np.cos(np.pi * k * x) for k, x in zip(wave, places)], 0) for wave in waves])
    return fields / np.sqrt((fields**2).mean(0))


@pytest.mark.parametrize("grid", [(9,), GRID, (3, 4, 5)])
def test_channels_of_a_law(grid: tuple[int, ...]) -> None:
    outputs = torch.randn(2, Head(5).channels, *grid)
    law = Head(5).moments(outputs)
    smooth = torch.from_numpy(cosines(5, grid))
    factor = ((softplus(outputs[:, 2:3] + SHARED) + FLOOR) / 5).sqrt() * smooth * (1 + outputs[:, 3:])
    expected = torch.cat([outputs[:, :1], softplus(outputs[:, 1:2] + OWN) + FLOOR, factor], 1)
    torch.testing.assert_close(law, expected)
    assert Head().channels == 2


def test_an_operator_with_a_rank_predicts_correlated_points() -> None:
    net = VarianceNO(modes=(2, 3), width=4, layers=2, rank=3)
    inputs = torch.randn(2, 3, *GRID)
    law = net(inputs)
    assert isinstance(law.cov, LowRank)
    moments = net.moments(inputs).flatten(2)
    torch.testing.assert_close(law.cov.dense(), torch.diag_embed(moments[:, 1]) + moments[:, 2:].mT @ moments[:, 2:])
    (law.mean.sum() + law.rsample().square().sum()).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    again = copy.deepcopy(net)(inputs)
    torch.testing.assert_close(again.cov.dense(), law.cov.dense())
    assert isinstance(VarianceNO(modes=(2, 3), width=4, layers=2)(inputs).cov, Diagonal)
    with pytest.raises(ph.ParameterError, match="rank"):
        VarianceNO(rank=-1)


def test_the_first_factor_keeps_a_gradient_under_a_mass_constraint() -> None:
    torch.manual_seed(0)
    net = VarianceNO(modes=(2, 3), width=4, layers=2, rank=3)
    family = BlockMeans(GRID, (2,))
    method = ph.METHODS["probhard-ob"].replace(functionals=family)
    model = ph.ConstrainedModel(net, ph.Conservation(torch.ones(24) / 24, torch.zeros(5)), method)
    model.loss((torch.randn(5, 3, *GRID), torch.randn(5, 24))).backward()
    assert net.spread is not None
    assert net.spread.weight.grad is not None
    size = net.spread.weight.grad.norm(dim=1)
    assert float(size[1:].min()) > 1e-3 * float(size[0])


class Linear(nn.Module):
    """An operator with a given number of output channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.map = nn.Conv2d(2, channels, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.map(inputs)


def test_operators_of_other_libraries_have_ranks_too() -> None:
    inputs = torch.randn(2, 2, *GRID)
    operator = Linear(Head(4).channels)
    law = OperatorBackbone(operator, rank=4)(inputs)
    expected = Head(4).moments(operator(inputs)).flatten(2)
    torch.testing.assert_close(law.cov.dense(), torch.diag_embed(expected[:, 1]) + expected[:, 2:].mT @ expected[:, 2:])
    with pytest.raises(ph.ShapeError, match=r"3 \+ rank"):
        OperatorBackbone(operator, rank=2)(inputs)
    with pytest.raises(ph.ParameterError, match=r"rank=2 and stddev=0\.1"):
        OperatorBackbone(operator, stddev=0.1, rank=2)


def test_a_surrogate_keeps_the_joint_law_of_its_cells() -> None:
    operator = VarianceNO(modes=(2, 3), width=4, layers=2, rank=3).float()
    index = torch.arange(24).reshape(2, 12)[:, 3:]  # two events of nine cells
    backbone = Normalised(operator, 3, index)
    backbone.shift, backbone.scale = torch.tensor(2.0), torch.tensor(3.0)
    inputs = torch.randn(5, 3, *GRID)
    law, whole = backbone(inputs), operator(inputs.float())
    assert isinstance(law.cov, LowRank)
    block = whole.cov.dense().double()[:, index[:, :, None], index[:, None, :]].flatten(0, 1)
    torch.testing.assert_close(law.cov.dense(), 9 * block, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(law.mean, 2 + 3 * whole.mean.double()[:, index].flatten(0, 1))


def mixture_covariance(members: list[LocationScale]) -> torch.Tensor:
    means = torch.stack([member.mean for member in members])
    apart = means - means.mean(0)
    own = torch.stack([member.cov.dense() * member.family.unit_variance for member in members]).mean(0)
    return own + torch.einsum("m...i,m...j->...ij", apart, apart) / len(members)


@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense", "Laplace", "all"])
def test_a_matched_law_has_the_covariance_of_the_mixture(kind: str) -> None:
    torch.manual_seed(0)
    variance = Diagonal(torch.rand(2, 7) + 0.1)
    low_rank = LowRank(torch.randn(2, 7, 2), torch.rand(2, 7) + 0.1)
    dense = Dense(torch.randn(2, 7, 7).tril())
    laws = {"diagonal": [variance] * 3, "low rank": [low_rank] * 2, "dense": [dense] * 2, "Laplace": [low_rank] * 2}
    family = ph.LAPLACE if kind == "Laplace" else ph.NORMAL
    members = [
        LocationScale(torch.randn(2, 7), cov, family) for cov in laws.get(kind, [variance, low_rank, dense, low_rank])
    ]
    law = Mixture(tuple(members)).matched()
    assert isinstance(law.cov, LowRank)
    torch.testing.assert_close(law.cov.dense(), mixture_covariance(members))
    plain = Mixture(tuple(members)).matched(correlated=False)
    assert isinstance(plain.cov, Diagonal)
    torch.testing.assert_close(plain.variance, law.variance)


def test_many_columns_keep_variances_and_the_leading_covariance() -> None:
    torch.manual_seed(0)
    members = [LocationScale(torch.randn(90), LowRank(torch.randn(90, 30) * 0.9**k, torch.rand(90))) for k in range(4)]
    law, exact = Mixture(tuple(members)).matched(), mixture_covariance(members)
    assert isinstance(law.cov, LowRank)
    assert law.cov.factor.shape == (90, COLUMNS)
    torch.testing.assert_close(law.variance, exact.diagonal())
    own = torch.stack([member.cov.dense() - member.cov.factor @ member.cov.factor.T for member in members]).mean(0)
    kept, shared = law.cov.factor @ law.cov.factor.T, exact - own
    values, vectors = torch.linalg.eigh(shared)
    best = vectors[:, -COLUMNS:] @ torch.diag(values[-COLUMNS:]) @ vectors[:, -COLUMNS:].T
    torch.testing.assert_close(kept, best)


def test_one_diagonal_member_stays_diagonal() -> None:
    member = LocationScale(torch.randn(3), Diagonal(torch.rand(3)))
    assert isinstance(Mixture((member,)).matched().cov, Diagonal)


@pytest.mark.parametrize("boundary", ["reflecting", "periodic", "zero"])
def test_a_spectral_law_has_the_spreads_of_its_channels(boundary: str) -> None:
    net = VarianceNO(modes=(2, 3), width=4, layers=2, covariance="spectral", boundary=boundary)
    inputs = torch.randn(2, 3, *GRID)
    law, moments = net(inputs), net.moments(inputs).flatten(2)
    assert isinstance(law.cov, Spectral)
    torch.testing.assert_close(law.variance, moments[:, 1] + moments[:, 2])
    torch.testing.assert_close(law.cov.diagonal_part, moments[:, 1])
    family = BlockMeans(GRID, (2,))
    ph.crps(law, torch.randn(2, 24), functionals=family).sum().backward()
    assert all(p.grad is not None for name, p in net.named_parameters() if name != "head.bias" or p.grad is not None)
    assert float(net.law.log_length.grad.abs().min()) > 0


def test_longer_lengths_correlate_points_that_are_farther_apart() -> None:
    head = Head(covariance="spectral", axes=1)
    moments = torch.zeros(1, 3, 40) + torch.tensor([0.0, 1e-6, 1.0])[:, None]
    correlations = []
    for length in (0.1, 0.3, 1.0):
        head.log_length.data.fill_(np.log(length))
        correlations.append(head(moments).cov.dense()[0, 20, 26].item())
    assert 0 < correlations[0] < correlations[1] < correlations[2] < 1
    with pytest.raises(ph.ParameterError, match="rank=2 and covariance='spectral'"):
        Head(2, "spectral")


@pytest.mark.parametrize("masked", [False, True])
def test_settings_of_a_run_give_a_joint_law_and_its_functionals(masked: bool) -> None:
    rng = np.random.default_rng(0)
    arrays = {"parameters": rng.random(4), "solutions": rng.random((4, 6, 8)), "x": np.arange(6.0), "y": np.arange(8.0)}
    inside = np.ones((6, 8), dtype=bool)
    if masked:
        inside[:2, :4] = False
        arrays["mask"] = inside
    content = {"constraints": ["nonnegative"], "rank": 2, "functionals": [2, 4], "functional_weight": 0.1,
               "width": 4, "modes": [2], "axes": ["x", "y"]}  # fmt: skip
    spec, settings = Settings.read(content)
    samples = Samples.solved(arrays, spec)
    model = Surrogate.build(settings.resolved((6, 8)), samples, np.arange(4))
    batch = samples.batch()
    family = model.method.functionals
    assert family is not None
    assert model.method.functional_weight == 0.1
    fields = arrays["solutions"][:, inside]
    means = family.matrix @ fields.T
    blocks = [arrays["solutions"][:, i : i + 2, j : j + 2] for i in range(0, 6, 2) for j in range(0, 8, 2)]
    kept = [b.mean((1, 2)) for b, i in zip(blocks, np.ndindex(3, 4)) if not masked or i[0] > 0 or i[1] > 1]
    np.testing.assert_allclose(means[: len(kept)], kept)
    np.testing.assert_allclose(means[-1], fields.mean(1))
    assert isinstance(model.backbone(batch.inputs).cov, LowRank)
    model.loss(batch).backward()
    with pytest.raises(ph.ParameterError, match="at least one cell"):
        Settings.read({**content, "functionals": [0]})
