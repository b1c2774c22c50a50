"""LRU cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """A cache of the values used last; it keeps the keys' objects alive too.

    Args:
        size: Number of values to keep.
    """

    def __init__(self, size: int = 32) -> None:
        self.size = size
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key.

        Args:
            key: The key.
            make: Makes the value if it is not cached.
        """
        if key not in self._values:
            self._values[key] = make()
            if len(self._values) > self.size:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]
