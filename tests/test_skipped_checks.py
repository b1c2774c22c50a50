"""Checks of values are skipped inside transforms or on request; checks of shapes never are."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as td

from bad_input import DOUBLE, NAN, ROW, hierarchy, law, ones, spoiled, zeros
from probhard import (
    DPPL,
    Diagonal,
    InfeasibleError,
    LinearEquality,
    LocationScale,
    ParameterError,
    ShapeError,
    as_location_scale,
)
from probhard._util.tensors import checking


@pytest.fixture(autouse=True)
def _torchs_switch():
    """torch.compile turns the checks of torch's distributions off for the whole process; turn them on again."""
    before = td.Distribution._validate_args
    yield
    td.Distribution.set_default_validate_args(before)


def test_checks_look_at_nothing_inside_transforms():
    assert checking()
    seen = []

    def look(x):
        seen.append(checking())
        return x.sum()

    torch.func.vmap(look)(ones(2, 3))
    torch.func.grad(look)(ones(3))
    torch.func.jacrev(look)(ones(3))
    assert seen == [False] * 3
    compiled = torch.compile(lambda x: x + (1 if checking() else 2), backend="eager", fullgraph=True)
    assert compiled(zeros(1)).item() == 2.0


CONSTRAINTS = {"row": lambda: ROW, "hierarchy": hierarchy}
each_constraint = pytest.mark.parametrize("name", CONSTRAINTS)


def moderate(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    loc = torch.randn(3, n, dtype=DOUBLE, generator=generator)
    return loc, torch.rand(3, n, dtype=DOUBLE, generator=generator) + 0.5


@each_constraint
@pytest.mark.parametrize("transform", ["vmap", "compile"])
def test_values_are_not_checked_inside_transforms(name, transform):
    constraint, layer = CONSTRAINTS[name](), DPPL()
    loc, scale = moderate(constraint.variables)

    def projected(loc, scale):
        return layer((loc, scale), constraint).mean

    truth = projected(loc, scale)
    if transform == "vmap":
        inside = torch.func.vmap(projected)
    else:
        inside = torch.compile(projected, backend="eager", fullgraph=True)
    torch.testing.assert_close(inside(loc, scale), truth, rtol=1e-12, atol=1e-12)
    mean = inside(spoiled(loc, NAN), scale)  # the same call raises in eager mode
    assert mean[0].isnan().any()
    torch.testing.assert_close(mean[1:], truth[1:], rtol=1e-12, atol=1e-12)
    inside(loc, 0 * scale)
    with pytest.raises(ParameterError):
        projected(spoiled(loc, NAN), scale)
    with pytest.raises(InfeasibleError):
        projected(loc, 0 * scale)


@each_constraint
def test_moments_compile_into_one_graph(name):
    constraint, layer = CONSTRAINTS[name](), DPPL()
    loc, scale = moderate(constraint.variables)

    def variance(loc, scale):
        return layer((loc, scale), constraint).variance

    compiled = torch.compile(variance, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(loc, scale), variance(loc, scale), rtol=1e-12, atol=1e-12)


def test_compiling_does_not_switch_the_layers_checks_off():
    torch.compile(torch.sin, backend="eager")(zeros(2))
    with pytest.raises(ParameterError, match="NaN"):
        DPPL()((spoiled(zeros(5), NAN), ones(5)), ROW)


def test_shapes_are_checked_under_vmap():
    with pytest.raises(ShapeError, match="5"):
        torch.func.vmap(lambda loc: DPPL("orthogonal").project(loc, ROW).value)(zeros(3, 4))


def test_validate_args_false_skips_values_and_keeps_shapes():
    bad = spoiled(zeros(5), NAN)
    assert LocationScale(bad, Diagonal(-ones(5)), validate_args=False).mean[0].isnan()
    assert as_location_scale((bad, -ones(5)), validate_args=False).mean[0].isnan()
    layer = DPPL(validate_args=False)
    assert layer((bad, ones(5)), ROW).mean.isnan().any()
    assert layer.project(bad, ROW, dist=law()).value.isnan().any()
    assert layer.project_samples(torch.stack([bad, bad]), ROW).value.isnan().any()
    layer((zeros(5), zeros(5)), ROW)  # nothing can move, and nothing is said
    for action in (
        lambda: LocationScale(bad, Diagonal(ones(4)), validate_args=False),
        lambda: layer(law(4), ROW),
        lambda: layer(law(5, (3,)), LinearEquality(ones(1, 5), zeros(4, 1))),
    ):
        with pytest.raises(ShapeError):
            action()


def test_torchs_switch_does_not_silence_the_checks():
    """torch.compile turns torch's own switch off for the whole process."""
    bad = spoiled(zeros(5), NAN)
    td.Distribution.set_default_validate_args(False)
    with pytest.raises(ParameterError):
        LocationScale(bad, Diagonal(ones(5)))
    assert LocationScale(bad, Diagonal(ones(5)), validate_args=False).mean[0].isnan()


def test_a_checked_law_is_not_checked_again(monkeypatch):
    calls = []
    base = LocationScale(zeros(5), Diagonal(ones(5)))
    monkeypatch.setattr("probhard.laws.distribution.check_finite", lambda *args, **kwargs: calls.append(args))
    DPPL()(base, ROW)
    assert calls == []
    DPPL()(LocationScale(zeros(5), Diagonal(ones(5)), validate_args=False), ROW)
    assert len(calls) == 1


def test_a_sparse_matrix_cannot_be_trained():
    with pytest.raises(ParameterError, match="requires a gradient"):
        LinearEquality(torch.ones(1, 4).to_sparse().requires_grad_(), 1.0)
