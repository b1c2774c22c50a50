from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _quiet():
    """Keep Lightning's remarks out of the output."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
