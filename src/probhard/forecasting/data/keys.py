"""Key columns of a hierarchy, nested and crossed: one notation for all commands.

    state,region              nested:   Total, Total/state, Total/state/region
    state,region * purpose    crossed:  every level of the first part, with and without every level of the second

A list of lists is Nixtla's ``spec``: each inner list holds the keys of one level. A total is added if there is none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from probhard.errors import ParameterError

Spec = tuple[tuple[str, ...], ...]
CROSS = "*"


@dataclass(frozen=True)
class Keys:
    """Levels of a hierarchy as groups of key columns.

    Args:
        levels: Key columns of each level, coarse to fine; the last level has all of them, () is the total.
    """

    levels: Spec

    @property
    def columns(self) -> tuple[str, ...]:
        """All key columns, in the order of the labels."""
        return self.levels[-1]

    @classmethod
    def of(cls, keys: Any) -> Keys:
        """Read keys in any notation.

        Args:
            keys: Text, a list of columns (nested), or a list of levels.

        Raises:
            ParameterError: If a key is empty or repeated, or the last level does not have all keys.
        """
        if isinstance(keys, Keys):
            return keys
        if isinstance(keys, str):
            return cls.crossed([part.split(",") for part in keys.split(CROSS)])
        if all(isinstance(key, str) for key in keys):
            if any(CROSS in key for key in keys):
                return cls.of(",".join(keys))
            return cls.crossed([keys])
        levels = tuple(tuple(map(str, [level] if isinstance(level, str) else level)) for level in keys)
        if not all(levels) or {key for level in levels for key in level} - set(levels[-1]):
            raise ParameterError(
                f"The levels {[list(level) for level in levels]} are empty or do not end with all keys.",
                "Each level lists its key columns; the last one is the bottom level.",
                "Write [[state], [state, region]], as in Nixtla's spec.",
            )
        return cls(levels)

    @classmethod
    def crossed(cls, parts: Sequence[Sequence[str]]) -> Keys:
        """Cross several nested parts; a single part is nested.

        Raises:
            ParameterError: If a key is empty or repeated.
        """
        names = [[key.strip() for key in part] for part in parts]
        flat = [key for part in names for key in part]
        if not flat or not all(flat) or len(set(flat)) < len(flat):
            raise ParameterError(
                f"Got keys={parts[0] if len(parts) == 1 else names}.",
                "They are the columns that identify a series, from coarse to fine.",
                f"Name each of them once, such as 'state,region' or 'state,region {CROSS} purpose'.",
            )
        depths = product(*(range(len(part) + 1) for part in names))
        levels = [tuple(key for part, depth in zip(names, chosen) for key in part[:depth]) for chosen in depths]
        return cls(tuple(sorted(levels, key=lambda level: (len(level), [flat.index(key) for key in level]))))

    def within(self, constant: Collection[str]) -> Keys:
        """Leave out levels that repeat another one, given the columns that hold one value only.

        A total is dropped if a constant first key has its place, and added if no level is a single node.
        """
        tops = [key for key in constant if (key,) in self.levels]
        kept = tuple(level for level in self.levels if not set(tops) - set(level))
        if len(kept) < 2 or () not in self.levels:
            kept = self.levels
        single = any(set(level) <= set(constant) for level in kept[:-1])
        return Keys(kept if single else ((), *kept))
