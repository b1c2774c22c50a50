"""DeepVAR: one recurrent network for all series of a hierarchy (Salinas et al., 2019).

    scale_i = mean |y_i|,  centre_i = 0 or mean y_i,  over the observed context,
    x_t = ((y_{t - lag} - centre) / scale for every lag,  features_t,  log scale - mean log scale),
    h_t = LSTM layers (x_t), each after the first with a residual,
    z_t = centre + scale * (loc(h_t) + softplus(h_t) e + factor(h_t) f),      in data units (other laws: ``heads``).

With a centre of 0, all inputs are near 1 and a step of Adam moves every gate by their number. This is slow with many
series, but it limits overfitting to few rows. The network knows no constraints; z_t is projected in data units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from probhard.errors import check_choice
from probhard.forecasting.models.heads import HEADS, Law, LocationScaleHead, PoissonMixtureHead, Units
from probhard.forecasting.models.windows import Layout, Window
from probhard.laws.family import LAPLACE, LOGISTIC, NORMAL, UNIFORM, Family
from probhard.laws.student_t import student_t

State = list[tuple[Tensor, Tensor]]  # hidden and cell state of every layer, (1, B, hidden)

SCALINGS = ("mean", "centre", "none")
FAMILIES: dict[str, Family] = {family.name: family for family in (NORMAL, LAPLACE, LOGISTIC, UNIFORM)}


class DeepVAR(nn.Module):
    """Maps windows to the laws of their context and horizon steps, each given the true values before it.

    Args:
        layout: Shape and features of a window.
        variables: Number of series n.
        num_layers, hidden_size: Number of LSTM layers, and units per layer.
        dropout_rate: Dropout between the layers.
        rank: Columns of the covariance's low-rank part; 0 is diagonal.
        family: Distribution of the noise.
        scaling: ``"mean"`` divides each series by its mean absolute value, ``"centre"`` also subtracts its mean,
            ``"none"`` does neither.
        law: ``"location-scale"``, or ``"poisson-mixture"`` for counts, which has no rank and family.
        components, count_unit: Number of components of the mixture, and value of one count.
        outputs: Number of series that the law covers, the last ones; None for all.
    An unknown scaling or law raises ParameterError.
    """

    typical: Tensor

    def __init__(
        self,
        layout: Layout,
        variables: int,
        num_layers: int = 2,
        hidden_size: int = 40,
        dropout_rate: float = 0.1,
        rank: int = 0,
        family: Family = NORMAL,
        scaling: str = "mean",
        law: str = "location-scale",
        components: int = 10,
        count_unit: float = 1.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        check_choice("scaling", scaling, SCALINGS)
        check_choice("law", law, HEADS)
        self.options: dict[str, Any] = {"num_layers": num_layers, "hidden_size": hidden_size}
        self.options |= {"dropout_rate": dropout_rate, "law": law, "components": components}
        self.options |= {"count_unit": count_unit, "outputs": outputs}
        self.layout, self.variables, self.rank, self.family, self.scaling = layout, variables, rank, family, scaling
        size = variables * (len(layout.lags_seq) + 1) + layout.num_features
        self.layers = nn.ModuleList(
            nn.LSTM(size if k == 0 else hidden_size, hidden_size, batch_first=True) for k in range(num_layers)
        )
        self.dropout = nn.Dropout(dropout_rate)
        self.head: LocationScaleHead | PoissonMixtureHead
        if law == "poisson-mixture":
            self.head = PoissonMixtureHead(hidden_size, outputs or variables, components, count_unit)
        else:
            self.head = LocationScaleHead(hidden_size, outputs or variables, rank, family)
        self.register_buffer("typical", torch.ones(variables))  # scales of series without values in the context
        for parameter in self.parameters():
            nn.init.xavier_uniform_(parameter) if parameter.dim() > 1 else nn.init.zeros_(parameter)
        self.float()

    def record(self) -> dict[str, Any]:
        """Return the architecture as plain values for ``from_record``."""
        law = {"name": self.family.name, "exact": self.family.exact, "df": getattr(self.family, "df", None)}
        sizes = {"variables": self.variables, "rank": self.rank, "scaling": self.scaling}
        return {"layout": asdict(self.layout), **sizes, **self.options, "family": law}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DeepVAR:
        """Build an untrained network from ``record()``."""
        tuples: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in record["layout"].items()}
        law = record["family"]
        family: Family = FAMILIES[law["name"]] if law["df"] is None else student_t(law["df"])
        rest = {name: value for name, value in record.items() if name not in ("layout", "family")}
        return cls(Layout(**tuples), family=family if law["exact"] else family.independent(), **rest)

    def forward(self, window: Window) -> Law:
        """Return the laws of the context and horizon steps, batch shape (B, steps), event shape (n,), in data units."""
        values, units = self.scaled(window.target)
        hidden, _ = self.recur(self.inputs(values, window.features, units))
        return self.law(hidden, units)

    def scaled(
        self,
        target: Tensor,  # (B, lags + context + horizon, n), NaN where unknown
    ) -> tuple[Tensor, Units]:  # the same in its units, 0 where unknown
        """Normalize targets by their location and scale in the context.

        Args:
            target: Targets in data units, (B, lags + context + horizon, n); NaN where unknown.

        Returns:
            Normalized targets of the same shape, 0 where unknown, and their units.
        """
        observed = ~torch.isnan(target)
        values = torch.where(observed, target, 0.0)
        zero = torch.zeros_like(values[:, :1])
        if self.scaling == "none":
            return values, Units(zero, zero + 1)
        context = slice(self.layout.longest_lag, self.layout.past)
        count = observed[:, context].sum(1, keepdim=True).clamp(min=1)
        size = values[:, context].abs().sum(1, keepdim=True) / count
        centre = values[:, context].sum(1, keepdim=True) / count if self.scaling == "centre" else zero
        units = Units(centre, torch.where(size > 0, size, self.typical))
        return torch.where(observed, (values - units.centre) / units.scale, 0.0), units

    def inputs(
        self,
        values: Tensor,  # (B, lags + steps, n)
        features: Tensor,  # (B, steps, F)
        units: Units,
    ) -> Tensor:  # (B, steps, inputs)
        """Collect the inputs of each step, which never hold the value of the step itself.

        Args:
            values: Normalized values, (B, lags + steps, n).
            features: Features, (B, steps, F).
            units: Their scales are inputs too.

        Returns:
            Inputs, (B, steps, inputs).
        """
        steps, first = features.shape[1], self.layout.longest_lag
        lagged = [values[:, first - lag : first - lag + steps] for lag in self.layout.lags_seq]
        size = units.scale.log()
        size = (size - size.mean(-1, keepdim=True)).expand(-1, steps, -1)  # independent of the unit
        return torch.cat([*lagged, features, size], -1)

    def recur(self, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run the layers over the steps.

        Args:
            inputs: Inputs, (B, steps, inputs).
            state: State before the first step; None starts from zeros.

        Returns:
            Hidden states, (B, steps, hidden), and the state after the last step.
        """
        hidden, after = inputs, []
        for k, layer in enumerate(self.layers):
            out, last = layer(self.dropout(hidden) if k else hidden, None if state is None else state[k])
            hidden = hidden + out if k else out
            after.append(last)
        return hidden, after

    def law(self, hidden: Tensor, units: Units) -> Law:
        """Map hidden states to laws in data units.

        Args:
            hidden: Hidden states, (*batch, hidden).
            units: Location and scale, broadcast to (*batch, n).
        """
        return self.head.law(hidden, Units(*(unit[..., -self.head.series :] for unit in units)))
