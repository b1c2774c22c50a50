"""An attentive neural process (Kim et al., 2019): fields from scattered observations.

    r(x) = cross attention of a target place x to encoded observations,     z ~ N(m, s) of their pooled encoding,
    u(x) ~ N(mean, stddev)(r(x), z, x).

In training z is drawn from the encoding of the targets. The loss is -log p(targets) + KL(their z || the context's z).
A forecast is the mixture over several draws of z from the context alone, as ProbConserv uses it (Hansen et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from probhard import score as scores
from probhard.ensembles import Mixture, MixtureBackbone
from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale
from probhard.model import Batch

LEAST = 1e-3  # of standard deviations, as in ProbConserv
LAYERS = 2  # of self and of cross attention


@dataclass(frozen=True)
class Observations:
    """Inputs of a process: some values of a function, and places to predict.

    Args:
        places: Of the observations, (batch, c, d).
        values: Observed there, (batch, c).
        targets: Places to predict, (batch, n, d).
        truth: Values at the targets, (batch, n), which a latent variable is encoded from in training; None else.
    """

    places: Tensor
    values: Tensor
    targets: Tensor
    truth: Tensor | None = None

    @classmethod
    def of(cls, inputs: Any) -> Observations:
        """Observations of themselves, or of a tuple or mapping with these fields.

        Raises:
            ShapeError: If shapes do not fit.
        """
        parts = inputs if isinstance(inputs, cls) else cls(**inputs) if isinstance(inputs, dict) else cls(*inputs)
        fits = parts.values.shape == parts.places.shape[:-1] and parts.places.dim() == parts.targets.dim() == 3
        if not fits or (parts.truth is not None and parts.truth.shape != parts.targets.shape[:-1]):
            shapes = [None if x is None else tuple(x.shape) for x in vars(parts).values()]
            raise ShapeError(
                f"Got places, values, targets and truth of shapes {', '.join(map(str, shapes))}.",
                "Every function has c observed places with one value each, and n places to predict.",
                "Pass (batch, c, d), (batch, c), (batch, n, d) and, in training, (batch, n).",
            )
        return parts


class Attention(nn.Module):
    """Multi-head attention with a residual and layer norm; queries are concatenated with what they attend to."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.key, self.value, self.query = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.last, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, key: Tensor, value: Tensor, query: Tensor) -> Tensor:
        """Attend; all (batch, count, width), and the result has the shape of the query."""
        asked, keys, values = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (batch, heads, count, width / heads)
            for linear, x in ((self.query, query), (self.key, key), (self.value, value))
        )
        # Plain products: torch's fused attention has no second derivatives, which penalties on PDE residuals need.
        weight = torch.softmax(asked @ keys.mT / keys.shape[-1] ** 0.5, -1)
        seen = (weight @ values).transpose(1, 2).flatten(2)
        return self.norm(query + self.dropout(self.last(torch.cat([query, seen], -1))))


class AttentiveNP(MixtureBackbone):
    """A backbone that predicts a field from scattered observations.

    Inputs are ``Observations``, or a tuple or mapping with their fields. With ``truth``, the law is that of one draw of
    z from the targets' encoding: use ``latent_score`` as the score then.

    Args:
        dim: Dimension d of a place.
        width: Number of hidden units, a multiple of 4.
        draws: Number of draws of z in a forecast.
        dropout: Rate of dropout after every attention.
        correlated: Keep the covariances between places that the draws of z give, or their variances only.
        scale: Places are divided by it before they are encoded, d numbers; None for ones.
        seed: Selects the draws of z in forecasts.

    Raises:
        ParameterError: If a number is out of range.
    """

    scale: Tensor

    def __init__(
        self,
        dim: int = 2,
        width: int = 128,
        draws: int = 20,
        dropout: float = 0.0,
        correlated: bool = False,
        scale: tuple[float, ...] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(dim, draws, width) < 1 or width % 4 or not 0 <= dropout < 1:
            raise ParameterError(
                f"Got dim={dim}, width={width}, draws={draws}, dropout={dropout}.",
                "There are places to encode, four attention heads of equal width, and draws to average.",
                "Pass positive numbers, a width that 4 divides, and a dropout from 0 to below 1.",
            )
        self.draws, self.correlated, self.seed = draws, correlated, seed
        self.register_buffer("scale", torch.ones(dim) if scale is None else torch.tensor(scale))

        def attentions() -> nn.ModuleList:
            return nn.ModuleList(Attention(width, 4, dropout) for _ in range(LAYERS))

        self.lift, self.own = nn.Linear(dim + 1, width), attentions()
        self.key, self.query, self.cross = nn.Linear(dim, width), nn.Linear(dim, width), attentions()
        self.latent_lift, self.latent_own = nn.Linear(dim + 1, width), attentions()
        self.latent_hidden, self.latent = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.place = nn.Linear(dim, width)
        self.decoder = nn.ModuleList(nn.Linear(3 * width, 3 * width) for _ in range(3))
        self.last = nn.Linear(3 * width, 2)

    def forward(self, inputs: Any) -> LocationScale:
        """The law over the targets, batch (batch,), with the moments of the mixture."""
        return self.mixture(inputs).matched(self.correlated)

    def mixture(self, inputs: Any) -> Mixture:
        """The laws for draws of z: of one from the truth, if it is there, else of several from the observations."""
        parts = Observations.of(inputs)
        targets = parts.targets / self.scale
        read = self._read(parts, targets)
        if parts.truth is not None:
            mean, stddev = self._encoded(parts.targets, parts.truth)
            return Mixture((self._decoded(read, mean + stddev * torch.randn_like(mean), targets),))
        mean, stddev = self._encoded(parts.places, parts.values)
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(self.draws, mean.shape[-1], generator=generator, dtype=torch.float64)
        return Mixture(tuple(self._decoded(read, mean + stddev * one.to(mean), targets) for one in noise))

    def divergence(self, inputs: Any) -> Tensor:
        """``KL(z of the targets || z of the observations)``, (batch,), for inputs with truth."""
        parts = Observations.of(inputs)
        assert parts.truth is not None
        first = torch.distributions.Normal(*self._encoded(parts.targets, parts.truth))
        second = torch.distributions.Normal(*self._encoded(parts.places, parts.values))
        return torch.distributions.kl_divergence(first, second).sum(-1)

    def latent_score(self, of: Callable[..., Tensor] = scores.nll) -> Callable[[Any, Batch], Tensor]:
        """The training loss ``score of the targets + KL`` as a score of ``ConstrainedModel``.

        Args:
            of: Score of the targets, such as ``nll`` or ``crps``.

        Returns:
            A function of the law and the batch; without truth in the inputs, as in validation, the KL is left out.
        """

        def score(law: Any, batch: Batch) -> Tensor:
            assert batch.target is not None
            total = of(law, batch.target).sum(-1)
            known = Observations.of(batch.inputs).truth is not None
            return total + self.divergence(batch.inputs) if known else total

        return score

    def _read(self, parts: Observations, targets: Tensor) -> Tensor:
        """What every target reads from the observations, (batch, n, width)."""
        places = parts.places / self.scale
        values = self.lift(torch.cat([places, parts.values.unsqueeze(-1)], -1))
        for own in self.own:
            values = own(values, values, values)
        keys, query = self.key(places), self.query(targets)
        for cross in self.cross:
            query = cross(keys, values, query)
        return query

    def _encoded(self, places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of z, (batch, width) each."""
        hidden = self.latent_lift(torch.cat([places / self.scale, values.unsqueeze(-1)], -1))
        for own in self.latent_own:
            hidden = own(hidden, hidden, hidden)
        mean, spread = self.latent(relu(self.latent_hidden(hidden.mean(1)))).chunk(2, -1)
        return mean, torch.exp(0.5 * spread)

    def _decoded(self, read: Tensor, z: Tensor, targets: Tensor) -> LocationScale:
        hidden = torch.cat([read, z.unsqueeze(1).expand_as(read), self.place(targets)], -1)
        for linear in self.decoder:
            hidden = relu(linear(hidden))
        mean, spread = self.last(hidden).unbind(-1)
        return LocationScale(mean, Diagonal((softplus(spread) + LEAST).square()), validate_args=False)
