"""Hierarchies read from matrices, frames and tags, and the benchmark data sets."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse as sp
import torch

from constraints.hierarchies import DOUBLE, HIERARCHIES, close, expected, law, rows_of
from probhard import (
    DPPL,
    Diagonal,
    Hierarchy,
    LocationScale,
)

# --------------------------------------------------------------------------------------------------- reading S


def explicit_zeros(S: np.ndarray) -> sp.csr_array:
    n, m = S.shape
    row, column = np.divmod(np.arange(n * m), m)
    return sp.csr_array((S.ravel(), (row, column)), shape=S.shape)


def uncoalesced(S: np.ndarray) -> torch.Tensor:
    entries = torch.from_numpy(S).to_sparse_coo().coalesce()
    indices = torch.cat([entries.indices(), entries.indices()], 1)
    values = torch.cat([0.5 * entries.values(), 0.5 * entries.values()])
    return torch.sparse_coo_tensor(indices, values, S.shape, check_invariants=True)


FORMATS = {
    "torch": torch.from_numpy,
    "torch float32": lambda S: torch.from_numpy(S).float(),
    "torch int": lambda S: torch.from_numpy(S).long(),
    "torch coo": lambda S: torch.from_numpy(S).to_sparse_coo(),
    "torch csr": lambda S: torch.from_numpy(S).to_sparse_csr(),
    "uncoalesced coo": uncoalesced,
    "numpy": lambda S: S,
    "numpy bool": lambda S: S.astype(bool),
    "lists": lambda S: S.tolist(),
    "scipy csr": sp.csr_array,
    "scipy csc": sp.csc_matrix,
    "scipy coo": sp.coo_array,
    "explicit zeros": explicit_zeros,
    "pandas": lambda S: pd.DataFrame(S, index=[f"n{i}" for i in range(len(S))]),
    "polars": lambda S: pl.DataFrame(S),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["unequal depth", "large crossed"])
def test_every_format_of_s_gives_the_same(form, name):
    S, algorithms = HIERARCHIES[name]
    hierarchy = Hierarchy(FORMATS[form](S))
    dist = law(len(S), 11)
    assert hierarchy.algorithm.startswith(algorithms)
    assert (hierarchy.variables, hierarchy.bottoms, hierarchy.aggregates) == (*S.shape, S.shape[0] - S.shape[1])
    close(hierarchy.residual(dist.mean), rows_of(S) @ dist.mean.numpy(), 1e-13)
    close(hierarchy.A, rows_of(S), 0.0)
    close(hierarchy.sizes, S.sum(1), 0.0)
    W = np.diag(dist.variance.numpy())
    mean, spread = expected(rows_of(S), W, dist.mean.numpy(), W)
    projected = DPPL()(dist, hierarchy)
    close(projected.mean, mean)
    close(projected.variance, spread)


def test_aggregate_is_s_times_bottom():
    S, _ = HIERARCHIES["large crossed"]
    bottom = torch.randn(2, 3, S.shape[1], dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    close(Hierarchy(S).aggregate(bottom), bottom.numpy() @ S.T, 1e-13)
    weighted, _ = HIERARCHIES["weighted"]
    close(Hierarchy(weighted).aggregate(bottom[..., :4]), bottom.numpy()[..., :4] @ weighted.T, 1e-13)


SPECS = {
    "tree": [["Country"], ["Country", "State"], ["Country", "State", "Region"]],
    "crossed": [
        ["Country"],
        ["Country", "State"],
        ["Country", "Purpose"],
        ["Country", "State", "Region"],
        ["Country", "State", "Purpose"],
        ["Country", "State", "Region", "Purpose"],
    ],
}


def keys_table(spec: str, repeat: int = 2) -> pd.DataFrame:
    """Key columns with each series repeated in time, in no order, and regions of unequal number."""
    regions = {"NSW": ["Sydney", "Coast"], "VIC": ["Melbourne"], "NT": ["Darwin", "Alice", "Kakadu"]}
    rows = [
        ("Australia", state, region, purpose)
        for state, names in regions.items()
        for region in names
        for purpose in (["Business", "Holiday", "Visiting"] if spec == "crossed" else ["Any"])
    ]
    table = pd.DataFrame(rows, columns=["Country", "State", "Region", "Purpose"])
    table = pd.concat([table.assign(ds=pd.Timestamp(2020, 1, 1 + k), y=1.0) for k in range(repeat)])
    return table.sample(frac=1.0, random_state=0, ignore_index=True)


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("spec", SPECS)
def test_from_frame_and_from_tags_agree_with_nixtla(spec, library):
    utils = pytest.importorskip("hierarchicalforecast.utils")
    table = keys_table(spec)
    _, S_df, tags = utils.aggregate(table, SPECS[spec])
    truth = S_df.set_index("unique_id") if "unique_id" in S_df.columns else S_df
    truth = truth.astype(float)
    frame = table if library == "pandas" else pl.from_pandas(table)

    read = Hierarchy.from_frame(frame, SPECS[spec])
    assert sorted(read.names) == sorted(truth.index)
    bottoms = list(read.names[read.aggregates :])
    np.testing.assert_array_equal(read.summation.toarray(), truth.loc[list(read.names), bottoms].to_numpy())
    assert {k: sorted(v) for k, v in read.tags.items()} == {k: sorted(v) for k, v in tags.items()}

    named = Hierarchy.from_tags(tags)
    assert list(named.names) == list(truth.index)
    np.testing.assert_array_equal(named.summation.toarray(), truth.to_numpy())

    given_s = Hierarchy.from_tags(tags, S=truth)
    assert given_s.names == named.names
    np.testing.assert_array_equal(given_s.summation.toarray(), truth.to_numpy())
    assert given_s.tags == {level: tuple(nodes) for level, nodes in tags.items()}

    first, second = read.algorithm.split()[0], named.algorithm.split()[0]
    assert first == second
    assert first == ("tree" if spec == "tree" else "dense")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_projection_of_a_frame_is_the_same_up_to_order(library):
    utils = pytest.importorskip("hierarchicalforecast.utils")
    table = keys_table("crossed")
    _, _, tags = utils.aggregate(table, SPECS["crossed"])
    read = Hierarchy.from_frame(table if library == "pandas" else pl.from_pandas(table), SPECS["crossed"])
    named = Hierarchy.from_tags(tags)
    order = [named.index(name) for name in read.names]
    dist = law(len(order), 12)
    other = LocationScale(dist.mean[order], Diagonal(dist.variance[order]))
    first, second = DPPL()(dist, named), DPPL()(other, read)
    close(second.mean, first.mean[order].numpy())
    close(second.variance, first.variance[order].numpy())


def test_keys_that_are_not_strings():
    table = pl.DataFrame({"store": [10, 9, 10, 9], "item": [1, 1, 2, 2]})
    hierarchy = Hierarchy.from_frame(table, [["store"], ["store", "item"]])
    assert sorted(hierarchy.names) == ["10", "10/1", "10/2", "9", "9/1", "9/2"]
    for store in ("9", "10"):
        row = hierarchy.summation.toarray()[hierarchy.index(store)]
        members = {hierarchy.names[hierarchy.aggregates + int(i)] for i in np.flatnonzero(row)}
        assert members == {f"{store}/1", f"{store}/2"}


# --------------------------------------------------------------------------------------------- benchmark data

DATA = os.environ.get("PROBHARD_DATA")
DATA_SETS = {"labour": "tree", "tourism": "tree", "tourism_large": "sparse", "traffic": "tree", "wiki": "tree"}
needs_data = pytest.mark.skipif(DATA is None, reason="PROBHARD_DATA does not name the folder with the data sets")


@needs_data
@pytest.mark.parametrize("name", DATA_SETS)
def test_benchmark_data(name):
    folder = Path(DATA or "") / "hierarchical" / name
    S = pd.read_csv(folder / "agg_mat.csv", index_col=0)
    data = pd.read_csv(folder / "data.csv", index_col=0)
    hierarchy = Hierarchy(S, names=list(S.index))
    assert list(data.columns) == list(hierarchy.names)
    assert hierarchy.algorithm.startswith(DATA_SETS[name])
    series = torch.from_numpy(data.to_numpy(dtype=np.float64))
    assert float(hierarchy.relative_violation(series).max()) <= 1e-12
    assert float(hierarchy.violation(series + torch.eye(series.shape[1])[0]).min()) > 0.5  # a check that can fail

    n, A = len(S), rows_of(S.to_numpy(dtype=np.float64))
    dist = law(n, 24)
    projected = DPPL()(dist, hierarchy)
    W = np.diag(dist.variance.numpy())
    mean, spread = expected(A, W, dist.mean.numpy(), W)
    close(projected.mean, mean)
    close(projected.variance, spread)
    mean, spread = expected(A, np.eye(n), dist.mean.numpy(), W)
    projected = DPPL("orthogonal")(dist, hierarchy)
    close(projected.mean, mean)
    close(projected.variance, spread)


@needs_data
@pytest.mark.parametrize("name", DATA_SETS)
def test_benchmark_data_with_its_own_variances(name):
    folder = Path(DATA or "") / "hierarchical" / name
    S = pd.read_csv(folder / "agg_mat.csv", index_col=0).to_numpy(dtype=np.float64)
    series = torch.from_numpy(pd.read_csv(folder / "data.csv", index_col=0).to_numpy(dtype=np.float64))
    generator = torch.Generator().manual_seed(0)
    variance = series.var(0) + 1e-3 * series.var(0).mean()  # many orders of magnitude between top and bottom
    loc = series[-1] + variance.sqrt() * torch.randn(len(variance), dtype=DOUBLE, generator=generator)
    projected = DPPL()(LocationScale(loc, Diagonal(variance)), Hierarchy(S))
    W = np.diag(variance.numpy())
    mean, spread = expected(rows_of(S), W, loc.numpy(), W)
    close(projected.mean, mean, 1e-9)
    np.testing.assert_allclose(projected.variance.numpy(), spread, rtol=1e-6)
    draws = projected.sample((10,), generator)
    assert float(Hierarchy(S).relative_violation(draws).max()) < 1e-12
