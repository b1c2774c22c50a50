"""A million draws on a real hierarchy: every one coherent and, where asked, non-negative."""

import os

import numpy as np
import pytest
import torch

import probhard as ph

needs_data = pytest.mark.skipif(
    "PROBHARD_DATA" not in os.environ, reason="the benchmark data are not here: PROBHARD_DATA is not set"
)
CASES = [
    ("labour", 10**6, 20_000),
    ("tourism_large", 10**4, 1_000),
]


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize(("dataset", "count", "chunk"), CASES)
def test_all_draws_obey(dataset, count, chunk, nonnegative):
    from probhard.forecasting.data.datasets import load

    data = load(dataset)
    values = torch.from_numpy(data.values[-24:])
    hierarchy = data.hierarchy
    constraint = hierarchy & ph.NonNegative() if nonnegative else hierarchy
    mean = values.mean(0)
    law = ph.DPPL("oblique")((mean, values.std(0) + mean), constraint)  # wide: a draw in six of each series is negative
    generator = torch.Generator().manual_seed(0)
    worst, smallest, negative = 0.0, np.inf, 0
    for _ in range(count // chunk):
        draws = law.sample((chunk,), generator)
        summed = draws[:, hierarchy.aggregates :] @ torch.from_numpy(hierarchy.summation.toarray()).mT
        size = summed.abs().clamp(min=1e-6 * float(mean.max()))
        worst = max(worst, float(((draws - summed).abs() / size).max()))
        smallest = min(smallest, float(draws.min()))
        negative += int((draws < 0).sum())
    assert worst <= 1e-9
    assert (negative == 0) == nonnegative
    assert (smallest >= 0) == nonnegative
