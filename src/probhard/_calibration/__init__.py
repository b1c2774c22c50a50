"""Parts of ``probhard.calibration``: the record, the search of its numbers, norms and sets."""
