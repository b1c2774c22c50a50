"""Speed against named peers, in one process, on the same inputs; run ``python -m benchmarks [name ...]``."""
