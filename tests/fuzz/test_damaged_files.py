"""Files with changed bytes: every reader reads them or rejects them in three parts."""

from __future__ import annotations

import numpy as np
import pytest
from experiments.reliability.readers import READERS, attempt, damaged

COUNT = {"zarr": 15, "parquet": 20}  # 40 for the others


@pytest.mark.parametrize("name", READERS)
def test_readers_read_or_reject(name, tmp_path):
    ended = []
    for number in range(COUNT.get(name, 40)):
        folder = tmp_path / str(number)
        folder.mkdir()
        record = attempt(name, number, folder)
        assert record["ended"] in ("read", "rejected"), (name, number, record)
        ended.append(record["ended"])
    assert "rejected" in ended  # the damage is felt


@pytest.mark.parametrize("name", READERS)
def test_whole_files_are_read(name, tmp_path):
    path = tmp_path / f"f{READERS[name].suffix}"
    READERS[name].write(path)
    READERS[name].read(path)


def test_damage_is_reproducible():
    content = bytes(range(256))
    first, second = (damaged(content, np.random.default_rng(3)) for _ in range(2))
    assert first == second != content
