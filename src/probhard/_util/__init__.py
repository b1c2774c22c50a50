"""Helpers: compiled loops, an LRU cache, memory, atomic writes, shapes of tensors."""
