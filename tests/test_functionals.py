"""Families of functionals against plain sums, reshaped fields and their own records."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import probhard as ph
from functional_cases import FAMILIES, GRID, dense_rows, randn
from probhard.errors import ParameterError, ShapeError
from registry import binary_tree, crossed


@pytest.mark.parametrize("shape", [(12,), (6, 8), (4, 4, 6)])
def test_block_means_are_means_of_reshaped_fields(shape):
    family, field = ph.BlockMeans(shape, (2, "total")), randn(5, *shape)
    split = field.reshape(5, *(part for length in shape for part in (length // 2, 2)))
    expected = split.mean(tuple(range(2, 2 * len(shape) + 1, 2))).flatten(1)
    values = family.rows(math.prod(shape)).apply(field.flatten(1))
    torch.testing.assert_close(values, torch.cat([expected, field.flatten(1).mean(1, keepdim=True)], 1))
    assert family.names == (f"blocks of {' x '.join('2' * len(shape))}", "total")


def test_blocks_at_the_edge_are_smaller_and_sizes_are_clipped():
    family, field = ph.BlockMeans((5, 3), (4, 1, (2, 2), 9, "total")), randn(5, 3)
    blocks = [field[:4], field[4:], *field.reshape(-1, 1)]
    blocks += [field[i : i + 2, j : j + 2] for i in (0, 2, 4) for j in (0, 2)] + [field]
    expected = torch.stack([block.mean() for block in blocks])
    torch.testing.assert_close(family.rows(15).apply(field.flatten()), expected)
    assert family.names == ("blocks of 4 x 3", "cells", "blocks of 2 x 2", "total")  # 9 and "total" are the same
    assert family.group.tolist() == [0] * 2 + [1] * 15 + [2] * 6 + [3]


def test_levels_of_a_tree_are_sums_of_bottoms_by_distance_from_the_root():
    S = binary_tree(2)
    family, law = ph.Levels(ph.Hierarchy(S)), randn(7)
    torch.testing.assert_close(family.rows(7).apply(law), torch.from_numpy(S) @ law[3:])
    assert family.names == ("level 0", "level 1", "level 2")
    assert family.group.tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert ph.Levels(sp.csr_array(S)) == ph.Levels(torch.from_numpy(S)) == family
    assert ph.Levels(crossed(1, 2)).names == ("level 0", "level 1", "level 2")  # place and purpose are one level
    assert ph.Levels(crossed(1, 2)).group.tolist() == [0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_levels_by_tags():
    tags = {"country": ["all"], "state": ["n", "s"], "town": ["n1", "n2", "s1", "s2"]}
    hierarchy = ph.Hierarchy(binary_tree(2), [name for level in tags.values() for name in level], tags)
    assert ph.Levels(hierarchy).names == ("country", "state", "town")
    own = ph.Levels(hierarchy, {"top": ["all", 1, 2], "bottom": ["n1", "n2", "s1", "s2"]})
    assert own.group.tolist() == [0, 0, 0, 1, 1, 1, 1]
    for wrong in ({"top": [0]}, {"top": [0, 0]}, {"top": ["nowhere"]}, {"top": range(8)}):
        with pytest.raises(ParameterError, match="node"):
            ph.Levels(hierarchy, wrong)
    with pytest.raises(ShapeError, match="bottom"):
        ph.Levels(binary_tree(2).T)


def test_horizons_are_cumulative_sums():
    family, path = ph.Horizons(6, 2), randn(5, 6, 2)
    values = family.rows(12).apply(path.flatten(1)).reshape(5, 3, 2)
    torch.testing.assert_close(values, path.cumsum(1)[:, [1, 3, 5]])
    assert family.names == ("sum of 2 steps", "sum of 4 steps", "sum of all steps")
    assert ph.Horizons(8).sums == (2, 4, 8)
    assert ph.Horizons(1).sums == (1,)
    assert ph.Horizons(6, 2, (3, 1, 3)).sums == (3, 1)
    for wrong in ((0,), (4, 0), (4, 1, (5,)), (4, 1, ())):
        with pytest.raises(ParameterError, match="horizon"):
            ph.Horizons(*wrong)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_values_that_plain_records_restore(name):
    family = FAMILIES[name]
    again = ph.functionals_from_record(json.loads(json.dumps(family.record())))
    assert again == family
    assert hash(again) == hash(family)
    assert again != ph.Horizons(5, 5)
    assert (again.matrix != family.matrix).nnz == 0
    assert again.names == family.names
    assert len(family.group) == family.rows(family.variables).row_count == len(family.weight)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_make_every_group_a_mean_of_means(name):
    family = FAMILIES[name]
    size = dense_rows(family).abs().sum(1)
    values = randn(2, len(size))
    groups = [torch.stack([(values / size)[:, family.group == g].mean(1)]) for g in range(len(family.names))]
    torch.testing.assert_close((values * family.weight).sum(1), torch.cat(groups).sum(0))
    torch.testing.assert_close(family.means(values / size), torch.cat(groups).T)


def test_bad_families_say_what_is_wrong():
    for shape, sizes in (
        ((2, 2, 2, 2), (2,)),
        ((4,), (0,)),
        ((4,), (2.5,)),
        ((4, 4), ((2,),)),
        ((4,), ()),
        ((4,), ("all",)),
    ):
        with pytest.raises(ParameterError, match="BlockMeans"):
            ph.BlockMeans(shape, sizes)
    with pytest.raises(ShapeError, match="12 variables, the law has 11"):
        GRID.rows(11)
    with pytest.raises(ShapeError, match=r"\[7, 12\] variables"):
        GRID + ph.Levels(binary_tree(2))
    with pytest.raises(ShapeError, match="2 rows and 1 names"):
        ph.Directions(np.eye(2), ["a"])
    with pytest.raises(ShapeError, match="one matrix"):
        ph.Directions(torch.ones(2, 3, 4))
    for wrong in (np.zeros((0, 3)), np.full((1, 3), np.nan)):
        with pytest.raises(ParameterError, match="finite"):
            ph.Directions(wrong)
    for record in ({"kind": "wavelets"}, {"kind": "horizons"}, {}):
        with pytest.raises(ParameterError, match="build the family again"):
            ph.functionals_from_record(record)
