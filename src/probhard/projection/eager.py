"""Exact projections inside ``torch.compile``: one graph break around solvers that look at numbers.

Linear equalities and bounds are traced. Other methods search for active rows, run compiled kernels or call other
packages. They run outside the graph, as they do without it, and autograd joins both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from probhard._util.tensors import checking
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError
from probhard.projection.projected import Projected

TRACED = (("linear",), ("box",))  # roles of the parts whose projection is one graph


def breaks_graph(constraint: Constraint) -> bool:
    """Whether a projection is being compiled or exported that has to run outside the graph.

    Args:
        constraint: The constraint.

    Raises:
        ParameterError: The projection is being exported, where nothing can run outside the graph.
    """
    if not torch.compiler.is_compiling() or not isinstance(constraint, Constraint):
        return False
    if tuple(part.role for part in constraint.parts()) in TRACED:
        return False
    if torch.compiler.is_exporting():
        raise ParameterError(
            f"torch.export got an exact projection on {constraint!r}.",
            "Its solver looks at numbers, which an exported graph cannot.",
            "Export DPPL(..., iterations=K): a fixed number of iterations, with a residual.",
        )
    return torch.compiler.is_dynamo_compiling()


def check_vmap(constraint: Constraint, z: Tensor) -> None:
    """Check that points inside ``torch.func.vmap`` have a projection that looks at no numbers.

    Args:
        constraint: The constraint.
        z: The points.

    Raises:
        ParameterError: It has none.
    """
    if checking() or torch.compiler.is_compiling() or tuple(part.role for part in constraint.parts()) in TRACED:
        return
    while torch._C._functorch.is_functorch_wrapped_tensor(z):
        if torch._C._functorch.is_batchedtensor(z):
            raise ParameterError(
                f"torch.func.vmap got an exact projection on {constraint!r}.",
                "Its solver looks at numbers, which vmap hides.",
                "Pass all points at once as (batch, n), without vmap, or use DPPL(..., iterations=K).",
            )
        z = torch._C._functorch.get_unwrapped(z)


class EagerProjected(Projected):
    """A projected law whose moments and draws are computed outside the graph, with all checks.

    Args:
        inner: The law.
    """

    def __init__(self, inner: Projected) -> None:
        self.inner = inner
        td.Distribution.__init__(self, inner.batch_shape, inner.event_shape, validate_args=False)


def _property(name: str) -> property:
    return property(lambda self: _outside(getattr, self.inner, name), doc=getattr(Projected, name).__doc__)


def _method(name: str) -> Callable[..., Any]:
    def method(self: EagerProjected, *args: Any, **options: Any) -> Any:
        return _outside(getattr(Projected, name), self.inner, *args, **options)

    return functools.wraps(getattr(Projected, name))(method)


for _name, _member in vars(Projected).items():  # dynamo would trace a property that is itself disabled
    if isinstance(_member, property):
        setattr(EagerProjected, _name, _property(_name))
    elif callable(_member) and not _name.startswith("_"):
        setattr(EagerProjected, _name, _method(_name))


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


_outside: Callable[..., Any] = torch.compiler.disable(_called)


def outside(method: Callable[..., Any], *args: Any) -> Any:
    """Call a method of a layer outside the graph.

    Args:
        method: The method.
        args: Its arguments.

    Returns:
        Its result. A ``Projected`` also does its later work outside the graph.
    """
    return _outside(_wrapped, method, *args)


def _wrapped(method: Callable[..., Any], *args: Any) -> Any:
    result = method(*args)
    return EagerProjected(result) if type(result) is Projected else result
