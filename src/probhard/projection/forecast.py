"""What a model forecasts: a law, projected or not, its sums, or a mixture of laws."""

from probhard.laws.distribution import LocationScale
from probhard.projection.bottom_up import BottomUp
from probhard.projection.mixture import Mixture
from probhard.projection.projected import Projected

Forecast = Projected | LocationScale | BottomUp | Mixture
