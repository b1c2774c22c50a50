"""The layer under torch.func, torch.compile, torch.export, freeze, autocast, other dtypes and devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import probhard as ph
from registry import CONSTRAINTS, METRICS, rand, randn

NAMES = ["conservation", "slices", "disjoint", "tree", "fixed nodes", "crossed sparse", "dense", "complement", "pins"]


@pytest.fixture(params=NAMES)
def constraint(request):
    return CONSTRAINTS[request.param]()


def moments(mean, stddev, constraint, metric="oblique"):
    projected = ph.DPPL(metric)((mean, stddev), constraint)
    return projected.mean, projected.variance


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_vmap_and_jacrev(constraint, metric):
    n = constraint.variables
    mean, stddev = randn(4, n), rand(4, n)
    expected = moments(mean, stddev, constraint, metric)
    actual = torch.func.vmap(lambda m, s: moments(m, s, constraint, metric))(mean, stddev)
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    # the Jacobian of the projection is the tangent
    jacobian = torch.func.jacrev(lambda m: moments(m, stddev[0], constraint, metric)[0])(mean[0])
    tangent = ph.DPPL(metric)((mean[0], stddev[0]), constraint).tangent
    torch.testing.assert_close(jacobian, tangent.apply(torch.eye(n)).mT, rtol=1e-9, atol=1e-11)
    forward = torch.func.jacfwd(lambda m: moments(m, stddev[0], constraint, metric)[0])(mean[0])
    torch.testing.assert_close(forward, jacobian, rtol=1e-9, atol=1e-11)
    both = torch.func.vmap(torch.func.jacrev(lambda m, s: moments(m, s, constraint, metric)[1], argnums=1))
    assert both(mean, stddev).shape == (4, n, n)


EXACT = {
    "turnover": lambda: ph.Simplex() & ph.L1Ball(0.3, torch.full((7,), 1 / 7)),
    "profile": lambda: ph.Monotone() & ph.Conservation(torch.ones(7), 1.0),
    "ball": lambda: ph.Ball(0.5),
}


@pytest.mark.parametrize("name", EXACT)
def test_jacobians_of_a_set_that_is_first_seen_inside_a_transform(name):
    constraint, layer, z = EXACT[name](), ph.DPPL("orthogonal"), randn(7)

    def project(x):
        return layer.project(x, constraint).value

    inside = torch.func.jacrev(project)(z)
    torch.testing.assert_close(inside, torch.autograd.functional.jacobian(project, z))
    torch.testing.assert_close(torch.func.jacfwd(project)(z), inside)


@pytest.mark.parametrize("name", EXACT)
def test_vmap_of_an_exact_solver_is_refused(name):
    constraint, layer = EXACT[name](), ph.DPPL("orthogonal")
    for outer in (torch.func.vmap, lambda f: torch.func.vmap(torch.func.jacrev(f))):
        with pytest.raises(ph.ParameterError, match=r"vmap got an exact projection.*Pass all points at once"):
            outer(lambda x: layer.project(x, constraint).value)(randn(4, 7))


@pytest.mark.parametrize("metric", list(METRICS))
@pytest.mark.parametrize("name", ["slices", "tree", "pins and mass", "crossed small"])
def test_tangent_transpose_is_the_adjoint(name, metric):
    constraint = CONSTRAINTS[name]()
    n = constraint.variables
    tangent = ph.DPPL(METRICS[metric](n))((randn(n), rand(n)), constraint).tangent
    x, y = randn(n), randn(n)
    torch.testing.assert_close(tangent.apply(x) @ y, x @ tangent.transpose(y), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["slices", "tree", "crossed sparse", "dense"])
def test_compile_without_graph_breaks(name, compiler):
    constraint = CONSTRAINTS[name]()
    n = constraint.variables
    layer = ph.DPPL("oblique")

    def loss(mean, stddev, y):
        return ph.crps(layer((mean, stddev), constraint), y).sum()

    inputs = [randn(3, n).requires_grad_(), rand(3, n).requires_grad_()]
    y = randn(3, n)
    expected = torch.autograd.grad(loss(*inputs, y), inputs)
    actual = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs, y), inputs)
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_compile_with_data_built_inside(compiler):
    """A conservation law whose mass depends on the batch is built inside the compiled region."""
    weights, layer = rand(12), ph.DPPL("orthogonal")

    def project(mean, stddev, mass):
        projected = layer((mean, stddev), ph.Conservation(weights, mass))
        return projected.mean, projected.variance

    arguments = randn(5, 12), rand(5, 12), rand(5)
    for a, b in zip(torch.compile(project, fullgraph=True)(*arguments), project(*arguments)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Wrapped(nn.Module):
    def __init__(self, constraint, metric):
        super().__init__()
        self.constraint, self.layer = constraint, ph.DPPL(metric)

    def forward(self, mean, stddev):
        projected = self.layer((mean, stddev), self.constraint)
        return projected.mean, projected.variance


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("name", ["slices", "tree", "crossed sparse", "dense", "fixed nodes"])
def test_export_with_a_dynamic_batch(name, metric):
    constraint = CONSTRAINTS[name]()
    n = constraint.variables
    module = Wrapped(constraint, metric)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (randn(3, n), rand(3, n)), dynamic_shapes=({0: batch}, {0: batch}))
    mean, stddev = randn(7, n), rand(7, n)
    for a, b in zip(program.module()(mean, stddev), module(mean, stddev)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("metric", ["orthogonal", "diagonal", "low rank", "dense"])
def test_freeze_is_one_matrix_product(constraint, metric):
    n = constraint.variables
    layer = ph.DPPL(METRICS[metric](n))
    frozen = layer.freeze(constraint)
    mean, stddev = randn(5, n), rand(5, n)
    projected = layer((mean, stddev), constraint)
    torch.testing.assert_close(frozen(mean), projected.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(frozen.variance(stddev.square()), projected.variance, rtol=1e-9, atol=1e-10)
    assert set(frozen.state_dict()) == {"matrix", "offset"}
    program = torch.export.export(frozen, (mean,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    assert constraint.relative_violation(program.module()(randn(9, n))).max() < 1e-11


def test_autocast_is_off_inside():
    constraint = CONSTRAINTS["tree"]().to(torch.float32)
    network = nn.Linear(4, constraint.variables).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean = network(torch.randn(6, 4, dtype=torch.float32))
        assert mean.dtype == torch.bfloat16
        projected = ph.DPPL()((mean, torch.ones_like(mean)), constraint)
        draws = projected.sample((10,))
    assert draws.dtype == projected.mean.dtype == torch.float32
    assert constraint.relative_violation(draws).max() < 1e-6


@pytest.mark.parametrize("name", ["slices", "tree", "crossed sparse", "dense"])
def test_matrix_products_keep_full_precision_under_autocast(name):
    constraint = CONSTRAINTS[name]()
    n = constraint.variables
    mean, stddev = randn(3, n).float(), rand(3, n).float()
    expected = moments(mean, stddev, constraint, "orthogonal")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = moments(mean, stddev, constraint, "orthogonal")
    for a, b in zip(actual, expected):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_follows_the_device_of_its_input(constraint):
    n = constraint.variables
    mean, stddev = randn(3, n).cuda(), rand(3, n).cuda()
    projected = ph.DPPL()((mean, stddev), constraint)
    assert projected.mean.is_cuda
    expected = moments(mean.cpu(), stddev.cpu(), constraint)
    torch.testing.assert_close(projected.mean.cpu(), expected[0], rtol=1e-9, atol=1e-10)


def test_follows_the_device_without_touching_data(constraint):
    """On the meta device nothing can be read, so every tensor must have moved."""
    if "complement" in constraint.algorithm:
        pytest.skip("this factor looks at its weights to choose its pivots")
    n = constraint.variables
    mean, stddev = randn(3, n).to("meta"), rand(3, n).to("meta")
    layer = ph.DPPL("oblique", validate_args=False)
    projected = layer((mean, stddev), constraint)
    assert projected.mean.device.type == "meta"
    assert projected.variance.shape == (3, n)
