"""The experiments behind the tables in ``results/``; not part of the package."""
