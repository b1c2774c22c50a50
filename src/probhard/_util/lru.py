"""What is dear to make and often asked for again, remembered as long as it is among the last in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """The values of the keys used last; a key's objects live as long as its value.

    Args:
        size: Number of values that are kept.
    """

    def __init__(self, size: int = 32) -> None:
        self.size = size
        self._known: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made where it is not known."""
        if key not in self._known:
            self._known[key] = make()
            if len(self._known) > self.size:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]
