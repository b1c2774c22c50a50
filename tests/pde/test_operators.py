"""Neural operators: the real truncated transform against torch.fft, and operators of another library as backbones."""

from __future__ import annotations

import copy
import io
import pickle
import sys

import pytest
import torch
from torch.nn.functional import gelu, pad, softplus

import probhard as ph
from probhard.ensembles import DeepEnsemble, MCDropout
from probhard.pde import Advection
from probhard.pde.adapters import OperatorBackbone
from probhard.pde.operators import FLOOR, FourierLayer, VarianceNO, _basis


def spectral_reference(layer: FourierLayer, v: torch.Tensor) -> torch.Tensor:
    """``F^-1 R F`` with torch's real transform, one-sided in the first axis of the grid."""
    axes, width = len(layer.modes), layer.width
    moved = v.movedim(2, -1)
    dims = tuple(range(2, 2 + axes))
    spectrum = torch.fft.rfftn(moved, dim=dims)
    weight = torch.complex(layer.weight[:, :width], layer.weight[:, width:])
    weight = weight.reshape(len(layer.signs), *layer.modes, width, width)
    mixed = torch.zeros_like(spectrum)
    for pattern, part in zip(layer.signs, weight):
        places = [torch.arange(k) if sign > 0 else -1 - torch.arange(k) for sign, k in zip(pattern, layer.modes)]
        index = torch.meshgrid(*places[1:], places[0], indexing="ij")
        kept = spectrum[(slice(None), slice(None), *index)]
        mixed[(slice(None), slice(None), *index)] = torch.einsum("bi...,...io->bo...", kept, part.movedim(0, axes - 1))
    return torch.fft.irfftn(mixed, s=moved.shape[2:], dim=dims).movedim(-1, 2)


def reference(net: VarianceNO, inputs: torch.Tensor) -> torch.Tensor:
    """The whole network, padded before the first layer and cropped after the last."""

    def pointwise(linear, v):
        return (v.movedim(1, -1) @ linear.weight.T + linear.bias).movedim(-1, 1)

    grid = inputs.shape[2:]
    v = pad(pointwise(net.lift, inputs), (0, net.padding) * len(grid))
    for index, (layer, linear) in enumerate(zip(net.spectral, net.pointwise)):
        v = spectral_reference(layer, v) + pointwise(linear, v)
        v = gelu(v) if index < len(net.spectral) - 1 else v
    v = v[(..., *(slice(0, n) for n in grid))]
    mean, spread = pointwise(net.head, gelu(pointwise(net.hidden, v))).unbind(1)
    return torch.stack([mean, softplus(spread) + FLOOR], 1)


def operator(modes, **options) -> VarianceNO:
    """A small operator whose spectral weights matter."""
    net = VarianceNO(**{"modes": modes, "width": 5, "layers": 3, **options})
    for layer in net.spectral:
        torch.nn.init.normal_(layer.weight, std=0.5)
    return net


CASES = {
    "1-D": ((7,), (31,), {}),
    "1-D, one layer": ((3,), (10,), {"layers": 1, "padding": 0}),
    "2-D": ((5, 6), (20, 30), {}),
    "2-D, all modes": ((4, 5), (8, 10), {"padding": 0, "layers": 2}),
    "2-D, prime sizes": ((3, 4), (14, 22), {"padding": 9}),
    "3-D": ((2, 3, 4), (7, 8, 11), {"padding": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_the_complex_transform(case):
    modes, grid, options = CASES[case]
    net = operator(modes, **options)
    inputs = torch.randn(3, 3, *grid)
    expected = reference(net, inputs).detach()
    torch.testing.assert_close(net.moments(inputs), expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("modes", [(5,), (3, 4), (2, 3, 2)])
def test_layer_does_not_depend_on_the_grid_of_a_smooth_field(modes):
    layer = FourierLayer(4, modes)
    coarse = [2 * k + 3 for k in modes]
    spectrum = torch.zeros(2, 4, *[2 * n for n in coarse], dtype=torch.complex128)
    spectrum[(..., *(slice(0, k) for k in modes))] = torch.randn(2, 4, *modes, dtype=torch.complex128)
    fine = torch.fft.ifftn(spectrum, dim=tuple(range(2, 2 + len(modes)))).real
    every_second = (..., *[slice(None, None, 2)] * len(modes))

    def applied(v):
        bases = [_basis(n, n, k, v) for n, k in zip(v.shape[2:], modes)]
        return layer(v, bases, [basis / n for basis, n in zip(bases, v.shape[2:])])

    torch.testing.assert_close(applied(fine)[every_second], applied(fine[every_second]), rtol=1e-12, atol=1e-14)


def test_casts_take_the_buffers_along():
    net = operator((4, 5)).float()
    inputs = torch.randn(2, 3, 12, 14)
    single = net.moments(inputs.float())
    net.double()
    assert all(buffer.dtype == torch.float64 for buffer in net.buffers())
    double = net.moments(inputs.float().double())
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(double, reference(net, inputs.float().double()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("modes", [(5,), (3, 4), (2, 3, 2)])
def test_every_parameter_gets_a_gradient(modes):
    net = operator(modes)
    law = net(torch.randn(2, 3, *[12] * len(modes)))
    ph.crps(law, torch.zeros_like(law.mean)).sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]).any(-1).all()), name


def test_law_flattens_the_first_axis_slowest():
    net = operator((3, 4))
    inputs = torch.randn(2, 3, 9, 11)
    law = net(inputs)
    mean, variance = net.moments(inputs).unbind(1)
    assert (law.batch_shape, law.event_shape) == ((2,), (99,))
    assert torch.equal(law.mean.unflatten(-1, (9, 11)), mean)
    assert torch.equal(law.variance.unflatten(-1, (9, 11)), variance)
    assert variance.min().item() > 0


def test_other_grids_and_batches():
    net = operator((3, 4))
    for grid in ((9, 11), (18, 22), (5, 30)):
        inputs = torch.randn(4, 3, *grid)
        whole = net.moments(inputs)
        torch.testing.assert_close(whole, reference(net, inputs), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(net.moments(inputs[:1]), whole[:1], rtol=1e-12, atol=1e-13)
        assert net(inputs[:0]).mean.shape == (0, grid[0] * grid[1])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager_and_copies_are_their_own(compiler, backend):
    net = operator((2,), width=3, layers=2)
    eager = copy.deepcopy(net)
    net.compile(backend=backend)
    for shape in ((3, 3, 9), (5, 3, 9)):
        inputs = torch.randn(shape)
        compiled, expected = net(inputs), eager(inputs)
        torch.testing.assert_close(compiled.mean, expected.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(compiled.variance, expected.variance, rtol=1e-12, atol=1e-12)
    for law in (compiled, expected):
        (law.mean.sum() + law.variance.sum()).backward()
    for mine, other in zip(net.parameters(), eager.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-10)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        before = net(inputs).mean
        torch.nn.init.zeros_(twin.head.weight)
        assert torch.equal(net(inputs).mean, before)
        assert torch.equal(twin(inputs).mean, twin.head.bias[0].expand_as(before))


def test_state_goes_round_strictly_and_holds_parameters_only():
    net, other = operator((3, 4)), operator((3, 4))
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert set(state) == {name for name, _ in net.named_parameters()}
    other.load_state_dict(state, strict=True)
    inputs = torch.randn(2, 3, 9, 11)
    assert torch.equal(other.moments(inputs), net.moments(inputs))


def test_errors_say_what_to_do():
    net = operator((6, 4), padding=2)
    with pytest.raises(ph.ShapeError, match=r"3 channels on a grid of 2 axes"):
        net(torch.randn(2, 3, 20))
    with pytest.raises(ph.ShapeError, match=r"Pass \(batch, 3, \*grid\)"):
        net(torch.randn(2, 4, 20, 20))
    with pytest.raises(ph.ShapeError, match=r"grid \(9, 20\) with 2 points of padding is too small for the modes"):
        net(torch.randn(2, 3, 9, 20))
    assert net(torch.randn(2, 3, 10, 6)).mean.shape == (2, 60)
    for options in ({"modes": ()}, {"modes": (1, 2, 3, 4)}, {"width": 0}, {"padding": -1}, {"layers": 0}):
        with pytest.raises(ph.ParameterError, match="at least one of each"):
            VarianceNO(**options)


@pytest.mark.parametrize("method", sorted(ph.METHODS))
def test_every_method_trains_it_on_a_conservation_law(method):
    problem = Advection(points=16, slices=6, dtype=torch.float64)
    parameters = problem.parameters(3)
    model = ph.ConstrainedModel(operator((2, 3)), problem.constraint, method)
    batch = {
        "inputs": problem.inputs(parameters),
        "target": problem.solution(parameters).flatten(-2),
        "context": parameters,
    }
    model.loss(batch).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    forecast = model.forecast(batch)
    if forecast.feasible:
        assert float(problem.constraint(parameters).violation(forecast.sample((20,))).max()) < 1e-12


# Operators of another library


def neural_operator(kind: str, out_channels: int = 2):
    models = pytest.importorskip("neuralop.models")
    sizes = {"in_channels": 3, "out_channels": out_channels, "hidden_channels": 6}
    if kind == "UNO":
        shape = {"uno_out_channels": [6] * 3, "uno_n_modes": [[4, 4]] * 3, "uno_scalings": [[1, 1]] * 3}
        return models.UNO(n_layers=3, channel_mlp_skip="linear", **shape, **sizes)
    return getattr(models, kind)(n_modes=(6, 6), n_layers=2, **sizes)


def test_adapted_operators_in_ensembles_and_with_dropout():
    members = [OperatorBackbone(neural_operator("FNO"), variance=True) for _ in range(2)]
    models = pytest.importorskip("neuralop.models")
    dropping = models.FNO((4, 4), 3, 2, 6, n_layers=2, channel_mlp_dropout=0.3)
    inputs, law = torch.randn(2, 3, 8, 10), ph.Simplex(4.0)
    for backbone in (DeepEnsemble(members), MCDropout(OperatorBackbone(dropping, variance=True), 8)):
        model = ph.ConstrainedModel(backbone.double(), law, "probhard-ob")
        draws = model.sample(inputs.double(), 5)
        assert draws.shape == (5, 2, 80)
        assert float(law.violation(draws).max()) < 1e-10


def test_an_adapted_variance_stays_movable():
    class Sure(torch.nn.Module):
        def forward(self, inputs):
            return inputs.new_full((len(inputs), 2, *inputs.shape[2:]), -200.0)

    law = OperatorBackbone(Sure(), variance=True)(torch.zeros(1, 3, 4, 4, dtype=torch.float32))  # whose softplus is 0
    assert float(law.variance.min()) > 0
    total = ph.LinearEquality(torch.ones(1, 16), torch.ones(1))
    assert float(total.violation(ph.DPPL("oblique")(law, total).mean)) < 1e-2


@pytest.mark.parametrize("kind", ["FNO", "TFNO", "UNO"])
def test_adapter_takes_any_operator(kind):
    backbone = OperatorBackbone(neural_operator(kind), variance=True).float()
    inputs = torch.randn(3, 3, 10, 12, dtype=torch.float32)
    law = backbone(inputs)
    mean, spread = backbone.operator(inputs).unbind(1)
    assert torch.equal(law.mean, mean.flatten(1))
    assert torch.equal(law.variance, softplus(spread).flatten(1) + FLOOR)
    (law.mean.sum() + law.variance.sum()).backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())
    state = backbone.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    twin = copy.deepcopy(backbone)
    for parameter in twin.parameters():
        torch.nn.init.zeros_(parameter)
    twin.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(twin(inputs).mean, law.mean)
    double = ph.ConstrainedModel(backbone, ph.NonNegative(), "base").double().forecast(inputs.double())
    assert double.mean.dtype == torch.float64
    torch.testing.assert_close(double.mean, law.mean.double(), rtol=1e-4, atol=1e-5)
    assert torch.equal(backbone.float()(inputs).mean, law.mean)


def test_adapter_of_a_mean_with_one_spread():
    inputs = torch.randn(2, 3, 10, 12)
    fixed = OperatorBackbone(neural_operator("FNO", 1), stddev=0.3, learned=False).double()
    torch.testing.assert_close(fixed(inputs).stddev, torch.full((2, 120), 0.3), rtol=1e-6, atol=0)
    assert not fixed.log_stddev.requires_grad
    learned = OperatorBackbone(neural_operator("FNO", 1), stddev=0.3).double()
    target = learned(inputs).mean.detach() + 2.0 * torch.randn(2, 120)
    error = (target - learned(inputs).mean.detach()).square().mean().sqrt()
    for stddev, sign in ((error / 2, -1), (error, 0), (error * 2, 1)):  # the likelihood is greatest at the error's size
        torch.nn.init.constant_(learned.log_stddev, float(stddev.log()))
        ph.nll(learned(inputs), target).sum().backward()
        slope = float(learned.log_stddev.grad) / target.numel()
        assert (slope > 0.5) - (slope < -0.5) == sign
        assert sign or abs(slope) < 1e-6
        learned.zero_grad()


def test_adapter_counts_modes_as_variance_no_does():
    pytest.importorskip("neuralop")
    backbone = OperatorBackbone.fourier(modes=(3, 4), width=6, layers=2, domain_padding=0.2)
    assert tuple(backbone.operator.n_modes[:1]) == (6,)
    weight = next(parameter for parameter in backbone.parameters() if parameter.is_complex())
    assert weight.shape == (6, 6, 6, 5)  # -3 .. 2 and 0 .. 4
    assert backbone.double()(torch.randn(2, 3, 12, 14)).event_shape == (168,)


def test_adapter_errors(monkeypatch):
    with pytest.raises(ph.ShapeError, match="out_channels=2"):
        OperatorBackbone(torch.nn.Conv2d(3, 1, 1), variance=True)(torch.randn(2, 3, 4, 5))
    with pytest.raises(ph.ShapeError, match=r"its output must be \(2, 1, 4, 5\): the mean"):
        OperatorBackbone(torch.nn.Conv2d(3, 2, 1), stddev=0.1)(torch.randn(2, 3, 4, 5))
    with pytest.raises(ph.ParameterError, match="positive spread"):
        OperatorBackbone(torch.nn.Conv2d(3, 1, 1), stddev=0.0)
    with pytest.raises(ph.ParameterError, match="mean and variance, or two variables"):
        OperatorBackbone(torch.nn.Conv2d(3, 2, 1))
    with pytest.raises(ph.ParameterError, match="Only one can be the spread"):
        OperatorBackbone(torch.nn.Conv2d(3, 2, 1), stddev=0.1, variance=True)
    monkeypatch.setitem(sys.modules, "neuralop", None)
    monkeypatch.setitem(sys.modules, "neuralop.models", None)
    with pytest.raises(ph.MissingExtraError, match=r"probhard\[operators\]"):
        OperatorBackbone.fourier()
