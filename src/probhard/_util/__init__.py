"""What only serves: compiled loops, an LRU cache, memory, atomic writes."""
