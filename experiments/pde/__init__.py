"""Tables of PDE surrogates."""
