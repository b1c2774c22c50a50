"""Parts of ``probhard.comparison``: rows, their frame and their picture."""
