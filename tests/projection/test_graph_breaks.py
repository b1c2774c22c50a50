"""The O(n) projections trace as one graph and never wait for a number from the device."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import probhard as ph

N = 12
QUARTERS = torch.kron(torch.eye(4, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64))
SUMS = torch.cat([torch.ones(1, N), QUARTERS, torch.eye(N)])
CASES = {
    "mass": lambda: ph.Conservation(torch.linspace(1, 2, N), torch.tensor(3.0)),
    "slices": lambda: ph.per_slice(ph.Conservation(torch.linspace(1, 2, 4), torch.tensor([1.0, 2, 3])), shape=(3, 4)),
    "tree": lambda: ph.Hierarchy(SUMS),
    "box": lambda: ph.Box(0.0, torch.linspace(0.5, 1, N)),
}
SYNCHRONISING = {
    getattr(torch.ops.aten, name)
    for name in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique_dim", "_unique2")
}


class NoSync(TorchDispatchMode):
    """Refuses operations for which the host waits."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masked = function.overloadpacket is torch.ops.aten.index and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if masked or function.overloadpacket in SYNCHRONISING:
            raise AssertionError(f"{function} waits for the device")
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=list(CASES))
def constraint(request):
    return CASES[request.param]()


@pytest.fixture(params=["oblique", "orthogonal"])
def metric(request):
    return request.param


def inputs(constraint, batch: int = 3, device: str = "cpu") -> list[torch.Tensor]:
    """Means and deviations that want gradients, and targets."""
    n = constraint.variables or N
    mean, stddev, target = (torch.rand(batch, n, device=device) + 0.1 for _ in range(3))
    return [mean.requires_grad_(), stddev.requires_grad_(), target]


def scored(layer, constraint):
    def loss(mean, stddev, target):
        projected = layer((mean, stddev), constraint)
        return ph.crps(projected, target).sum() + projected.mean.square().sum() + projected.variance.sum()

    return loss


def assert_one_graph(function, *arguments) -> None:
    """No break, and no number that the host reads: without ``fullgraph``, which would capture it, that is a break."""
    torch._dynamo.reset()
    seen = torch._dynamo.explain(function)(*arguments)
    assert not seen.break_reasons
    assert seen.graph_count == 1


def test_a_training_loss_is_one_graph(constraint, metric):
    loss, arguments = scored(ph.DPPL(metric), constraint), inputs(constraint)
    assert_one_graph(loss, *arguments)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)(*arguments)
    torch.testing.assert_close(compiled, loss(*arguments), rtol=1e-10, atol=1e-12)


def test_draws_are_one_graph(constraint, metric):
    layer, (mean, stddev, _) = ph.DPPL(metric), inputs(constraint)

    def drawn(mean, stddev):
        return layer((mean, stddev), constraint).rsample((5,))

    assert_one_graph(drawn, mean, stddev)
    draws = torch.compile(drawn, backend="eager", fullgraph=True)(mean, stddev).detach()
    assert float(constraint.relative_violation(draws).max()) < 1e-12
    assert draws.std(0).max() > 0


def test_nothing_waits_for_the_device(constraint, metric):
    loss, arguments = scored(ph.DPPL(metric, validate_args=False), constraint), inputs(constraint)
    loss(*arguments)  # fills the caches of the constraint
    with NoSync():
        loss(*arguments).backward()
    assert all(x.grad.isfinite().all() for x in arguments[:2])


def test_nothing_looks_at_a_number(constraint, metric):
    """On a device without numbers, where none of the CPU's own kernels are taken."""
    arguments = inputs(constraint, device="meta")
    scored(ph.DPPL(metric, validate_args=False), constraint)(*arguments).backward()
    assert [x.grad.shape for x in arguments[:2]] == [x.shape for x in arguments[:2]]


@pytest.mark.parametrize("look", [lambda x: x.sum().item(), lambda x: bool((x > 0).all()), lambda x: x[x > 0.5]])
def test_the_guards_would_notice(look):
    with pytest.raises(AssertionError, match="waits for the device"), NoSync():
        look(torch.rand(4))
    with pytest.raises((RuntimeError, NotImplementedError)):
        look(torch.rand(4, device="meta"))
    with pytest.raises(AssertionError, match="break_reasons"):
        assert_one_graph(look, torch.rand(4))
