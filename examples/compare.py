"""One constraint, every method: forecasts of five stores whose sum is known, none of them negative."""

import sys

import torch

import probhard as ph
from probhard.training import Schedule

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.rand(240, 3)  # weather, day and price
shares = torch.softmax(x @ torch.randn(3, 5) * 2 + 0.3 * torch.randn(240, 5), -1)
total = 10 + 5 * x[:, 0]  # known from the till of the mall
sales = total[:, None] * shares


class Network(torch.nn.Module):
    """Means and standard deviations of five stores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.layers(inputs).chunk(2, -1)
        return 3 + mean, 0.05 + torch.nn.functional.softplus(spread)


def law(inputs: torch.Tensor) -> ph.Constraint:
    """What the stores sell in total, and no store less than nothing."""
    return ph.LinearEquality(torch.ones(1, 5), 10 + 5 * inputs[:, :1]) & ph.NonNegative()


result = ph.compare(Network, law, (x, sales), schedule=Schedule(epochs=20), progress=False, plot=sys.argv[1])
print(result)  # hardnet-aff has more rows than variables: listed with the reason
model = ph.ConstrainedModel(Network(), law, "probhard-ob")
constraint, after = law(x), model.sample(x, 20)
