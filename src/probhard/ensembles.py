"""Backbones whose forecast is a mixture: deep ensembles and Monte Carlo dropout.

The equal mixture of M members with means m_i and covariances C_i = diag(d_i) + F_i F_i^T has the moments

    mean = 1/M sum(m_i),      cov = 1/M sum(C_i) + 1/M sum((m_i - mean)(m_i - mean)^T)   (members' own + disagreement)
         = diag(1/M sum(d_i)) + F F^T,     F = [F_1, ..., F_M, m_1 - mean, ..., m_M - mean] / sqrt(M).

As a backbone, an ensemble returns the normal law with these moments, which every method takes. Draws of that law lose
the shape of the mixture. To keep it, ``mixture(inputs).project(layer, ...)`` draws from the members and projects each
draw.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from probhard.errors import ParameterError
from probhard.laws.distribution import LocationScale, as_location_scale
from probhard.model import ConstrainedModel
from probhard.projection.mixture import Mixture

if TYPE_CHECKING:
    from probhard.training import Fit, Schedule

FEATURES = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # these drop entire channels
DROPOUTS = (nn.Dropout, *FEATURES)


class MixtureBackbone(nn.Module, ABC):
    """A backbone that forecasts a mixture; subclasses implement ``mixture``."""

    @abstractmethod
    def mixture(self, inputs: Any) -> Mixture:
        """The members' forecasts for inputs of a batch (*batch, ...), laws over (*batch, n)."""

    def forward(self, inputs: Any) -> LocationScale:
        """The normal law over (*batch, n) with the moments of the mixture."""
        return self.mixture(inputs).matched()


class DeepEnsemble(MixtureBackbone):
    """Networks trained independently from different initial weights (Lakshminarayanan et al., 2017).

    Args:
        members: Backbones of the kind that ``ConstrainedModel`` takes.

    Raises:
        ParameterError: If there are no members.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not members:
            raise ParameterError("The ensemble has no members.", "There is nothing to average.", "Pass backbones.")
        self.members = nn.ModuleList(members)

    def mixture(self, inputs: Any) -> Mixture:
        return Mixture(tuple(as_location_scale(member(inputs)) for member in self.members))


class MCDropout(MixtureBackbone):
    """A network run several times with dropout on, in ``train`` and ``eval`` mode alike.

    A pass drops the same units for all elements of a batch, so a forecast does not depend on the rest of its batch.
    With a seed, every call drops the same units. Train the network alone, then wrap it.

    Args:
        backbone: A network with ``nn.Dropout``, ``Dropout1d``, ``Dropout2d`` or ``Dropout3d`` modules.
        passes: Number of passes, each of which is one member of the mixture.
        seed: Selects the dropped units; None draws new ones in every call.

    Raises:
        ParameterError: If ``passes`` is below 1 or no dropout module has a positive rate.
    """

    def __init__(self, backbone: nn.Module, passes: int = 20, seed: int | None = 0) -> None:
        super().__init__()
        active = any(isinstance(module, DROPOUTS) and module.p > 0 for module in backbone.modules())
        if passes < 1 or not active:
            raise ParameterError(
                f"Got passes={passes} and a backbone {'with' if active else 'without'} active dropout modules.",
                "The members of the mixture differ only in the units that are dropped.",
                "Pass passes >= 1 and a backbone with dropout, such as VarianceNO(dropout=0.1).",
            )
        self.backbone, self.passes, self.seed = backbone, passes, seed

    def mixture(self, inputs: Any) -> Mixture:
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        # Compiled code ignores the hooks, so the passes run in eager mode.
        with torch.compiler.set_stance("force_eager"):
            return Mixture(tuple(self._thinned(inputs, seed + index) for index in range(self.passes)))

    def _thinned(self, inputs: Any, seed: int) -> LocationScale:
        with _dropping(self.backbone, torch.Generator().manual_seed(seed)):
            return as_location_scale(self.backbone(inputs))


@contextmanager
def _dropping(backbone: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Replace dropout by masks of one generator that all elements of a batch share, in any mode of the modules."""

    def dropped(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (x,) = args
        assert isinstance(module, DROPOUTS)
        shape = (1, *x.shape[1:2], *[1] * (x.dim() - 2)) if isinstance(module, FEATURES) else (1, *x.shape[1:])
        kept = torch.rand(shape, generator=generator, dtype=torch.float64) >= module.p
        return x * (kept.to(x) / max(1 - module.p, torch.finfo(x.dtype).tiny))

    modules = [module for module in backbone.modules() if isinstance(module, DROPOUTS)]
    modes = [module.training for module in modules]
    hooks = [module.eval().register_forward_hook(dropped) for module in modules]
    try:
        yield
    finally:
        for module, mode, hook in zip(modules, modes, hooks):
            module.train(mode)
            hook.remove()


def fit_ensemble(
    build: Callable[[], ConstrainedModel],
    members: int,
    train: Any,
    validation: Any,
    schedule: Schedule,
    *,
    seed: int = 0,
    directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> tuple[DeepEnsemble, list[Fit]]:
    """Train the members one after the other with ``training.fit``, each with its own seed.

    Args:
        build: Returns a new model with random weights.
        members: Number of members.
        train: Training data, as in ``fit``.
        validation: Validation data, as in ``fit``.
        schedule: Schedule of every member.
        seed: Member i has the seed ``seed * members + i``, so ensembles of one size share no member seed.
        directory: Holds checkpoints in folders 0, 1, ... from which a run resumes; None keeps none.
        **options: Further options of ``fit``, which also says what is raised.
    """
    from probhard.training import fit

    networks, fits = [], []
    for index in range(members):
        member_seed = seed * members + index
        torch.manual_seed(member_seed)
        model = build()
        folder = None if directory is None else Path(directory) / str(index)
        fits.append(fit(model, train, validation, schedule, seed=member_seed, directory=folder, **options))
        networks.append(model.backbone)
    return DeepEnsemble(networks), fits
