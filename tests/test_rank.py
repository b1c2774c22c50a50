"""Dependent rows: they are named, rejected or dropped, and contradictions among them are found."""

from __future__ import annotations

import re

import pytest
import torch

from bad_input import DOUBLE, explained, eye, ones, zeros
from probhard import (
    DPPL,
    Conservation,
    Dense,
    Diagonal,
    InfeasibleError,
    LinearEquality,
    LocationScale,
    LowRank,
    RankError,
    per_slice,
    trapezoid_weights,
)


def numbers(text: str) -> list[int]:
    return [int(k) for k in re.findall(r"\d+", text)]


def test_the_rows_named_as_redundant_are_redundant():
    generator = torch.Generator().manual_seed(1)
    free = torch.randn(4, 9, dtype=DOUBLE, generator=generator)
    rows = torch.stack([free[0], free[1], free[0] - 2 * free[2], free[2], free[3], free[1] + free[3]])
    with pytest.raises(RankError) as caught:
        LinearEquality(rows, 0.0)
    named, source = (numbers(part) for part in re.findall(r"\[(.*?)\]", caught.value.what))
    assert len(named) == 2
    rest = [i for i in range(6) if i not in named]
    assert torch.linalg.matrix_rank(rows[rest]) == 4
    assert torch.linalg.matrix_rank(rows[source]) == len(source)
    assert torch.linalg.matrix_rank(rows[source + named]) == len(source)


REVEALED = {
    "repeated": (ones(2, 5), torch.tensor([2.0, 2.0], dtype=DOUBLE), [0]),
    "scaled": (torch.stack([ones(5), -3 * ones(5), eye(5)[1] - eye(5)[2]]), [1.0, -3.0, 0.5], [0, 2]),
    "pinned and summed": (torch.cat([eye(5)[:2], eye(5)[:2].sum(0)[None], ones(1, 5)]), [1.0, 2, 3, 9], [0, 1, 3]),
    "zero row": (torch.stack([zeros(5), ones(5)]), [0.0, 1.0], [1]),
}


@pytest.mark.parametrize("name", REVEALED)
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
def test_reveal_drops_redundant_rows(name, metric, kind):
    rows, right, independent = REVEALED[name]
    right = torch.as_tensor(right, dtype=DOUBLE)
    generator = torch.Generator().manual_seed(2)
    variance = torch.rand(5, dtype=DOUBLE, generator=generator) + 0.5
    factor = torch.randn(5, 5, dtype=DOUBLE, generator=generator)
    cov = {"diagonal": Diagonal(variance), "low rank": LowRank(factor[:, :2], variance)}
    cov["dense"] = Dense(factor.tril(-1) + torch.diag(variance))
    base = LocationScale(torch.randn(5, dtype=DOUBLE, generator=generator), cov[kind])
    constraint = LinearEquality(rows, right, rank="reveal")
    projected = DPPL(metric)(base, constraint)
    A, b, sigma = rows[independent], right[independent], base.cov.dense()
    W = sigma if metric == "oblique" else eye(5)
    gain = W @ A.mT @ torch.linalg.inv(A @ W @ A.mT)
    P = eye(5) - gain @ A
    torch.testing.assert_close(projected.mean, base.mean - gain @ (A @ base.mean - b), rtol=0, atol=1e-11)
    torch.testing.assert_close(projected.variance, (P @ sigma @ P.mT).diagonal(), rtol=0, atol=1e-11)
    draws = projected.sample((5,), generator)
    assert constraint.residual(draws).abs().max() < 1e-11  # the dropped rows hold too


NT, NX = 4, 6
WEIGHTS = trapezoid_weights(torch.linspace(0, 1, NX, dtype=DOUBLE))
INITIAL = torch.linspace(0.2, 1.4, NX, dtype=DOUBLE)
START = eye(NT * NX)[:NX]


def masses(first: float) -> torch.Tensor:
    return torch.cat([torch.tensor([first], dtype=DOUBLE), torch.linspace(0.7, 0.9, NT - 1, dtype=DOUBLE)])


@pytest.mark.parametrize("order", ["initial first", "mass first"])
def test_initial_condition_and_mass_at_the_start(order):
    """The initial condition already fixes the mass at t = 0."""
    true_mass = float(WEIGHTS @ INITIAL)

    def both(first: float, rank: str = "strict") -> LinearEquality:
        start = LinearEquality(START, INITIAL, rank=rank)
        slices = per_slice(Conservation(WEIGHTS, masses(first)), (NT, NX))
        return start & slices if order == "initial first" else slices & start

    with pytest.raises(RankError) as caught:
        both(true_mass)
    explained(caught.value, ["reveal"])
    named, source = (numbers(part) for part in re.findall(r"\[(.*?)\]", caught.value.what))
    involved = set(range(NX + 1)) if order == "initial first" else {0, *range(NT, NT + NX)}
    assert set(named) | set(source) == involved
    assert len(named) == 1

    with pytest.raises(InfeasibleError) as caught:
        both(true_mass + 0.125)
    explained(caught.value, ["contradicts"])
    assert int(re.search(r"Row (\d+)", caught.value.what).group(1)) in involved
    with pytest.raises(InfeasibleError):
        both(true_mass + 0.125, rank="reveal")

    revealed = both(true_mass, rank="reveal")
    generator = torch.Generator().manual_seed(3)
    n = NT * NX
    loc, variance = torch.randn(n, dtype=DOUBLE, generator=generator), torch.rand(n, dtype=DOUBLE, generator=generator)
    projected = DPPL()(LocationScale(loc, Diagonal(variance)), revealed)
    A = torch.cat([START, torch.block_diag(*[WEIGHTS[None]] * NT)[1:]])
    b, W = torch.cat([INITIAL, masses(true_mass)[1:]]), torch.diag(variance)
    gain = W @ A.mT @ torch.linalg.inv(A @ W @ A.mT)
    P = eye(n) - gain @ A
    torch.testing.assert_close(projected.mean, loc - gain @ (A @ loc - b), rtol=0, atol=1e-11)
    torch.testing.assert_close(projected.variance, (P @ W @ P.mT).diagonal(), rtol=0, atol=1e-11)
    torch.testing.assert_close(projected.mean[:NX], INITIAL, rtol=0, atol=1e-14)
    assert not projected.variance[:NX].any()


def test_a_matrix_changed_in_place_is_looked_at_again():
    rows = torch.stack([ones(5), eye(5)[0]])
    LinearEquality(rows, 0.0)
    rows[1] = 1.0
    with pytest.raises(RankError):
        LinearEquality(rows, 0.0)


def test_nearly_redundant_rows_are_not_redundant():
    rows = torch.stack([ones(5), ones(5) + 1e-4 * eye(5)[0]])
    constraint = LinearEquality(rows, torch.tensor([1.0, 1.0001], dtype=DOUBLE))
    nearest = DPPL("orthogonal").project(zeros(5), constraint).value
    torch.testing.assert_close(nearest[0], torch.tensor(1.0, dtype=DOUBLE), rtol=0, atol=1e-8)
    assert constraint.violation(nearest) < 1e-11
