"""Made-up daily sales in the shape of the M5 competition: crossed places and products, counts that are mostly small.

    places:    total, 3 states, 10 stores            products:  all, 3 categories, 7 departments, items

    y_(i,s,t) ~ NegativeBinomial(mean m, dispersion r),
    m = rate_i  share_s  week_(d(t), i)  year_t  drift_(i,t)  [item i is on the shelf of store s at t]

All pairs of a place and a product are levels, 12 of them: with 3,049 items 30,490 bottoms and 42,840 nodes. Rates are
log-normal, so that most bottoms sell nothing on most days. Items are launched late or stay away for weeks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probhard.errors import optional

KEYS = "state,store * category,department,item"
STORES = {"CA": 4, "TX": 3, "WI": 3}
DEPARTMENTS = {  # items of each, by category
    "HOBBIES": (416, 149),
    "HOUSEHOLD": (532, 515),
    "FOODS": (216, 398, 823),
}
ITEMS = sum(sum(sizes) for sizes in DEPARTMENTS.values())
FIRST_DAY = "2011-01-29"
LEVEL, SPREAD = -0.9, 1.3  # of log rates
DISPERSION = 1.2
WEEK = np.array([0.92, 0.86, 0.86, 0.9, 1.03, 1.25, 1.18])  # Monday to Sunday
LATE, AWAY = 0.3, 0.15  # shares of items launched late, and of rows away in an item that has absences


@dataclass(frozen=True)
class Sales:
    """Made-up sales.

    Args:
        items: Number of items; departments keep their shares.
        days: Number of days.
        seed: Seed of all numbers.
    """

    items: int = ITEMS
    days: int = 1941
    seed: int = 0

    @property
    def departments(self) -> list[tuple[str, str]]:
        """Category and department of every item."""
        names = [(c, f"{c}_{k + 1}") for c, sizes in DEPARTMENTS.items() for k in range(len(sizes))]
        sizes = [size for group in DEPARTMENTS.values() for size in group]
        ends = np.round(np.cumsum(sizes) * self.items / ITEMS).astype(int)
        counts = np.diff(np.concatenate([[0], ends]))
        return [name for name, count in zip(names, counts) for _ in range(count)]

    @property
    def stores(self) -> list[tuple[str, str]]:
        """State and name of every store."""
        return [(state, f"{state}_{k + 1}") for state, count in STORES.items() for k in range(count)]

    def counts(self, store: int) -> np.ndarray:
        """Sales of a store, (days, items), whole numbers."""
        shared, own = np.random.default_rng([self.seed, 0]), np.random.default_rng([self.seed, 1 + store])
        rate = np.exp(LEVEL + SPREAD * shared.standard_normal(self.items))
        week = WEEK[:, None] ** shared.uniform(0.3, 1.7, self.items)
        launch = np.where(shared.random(self.items) < LATE, shared.integers(0, self.days // 2, self.items), 0)
        drift = np.cumsum(0.004 * shared.standard_normal((self.days, self.items)), axis=0)
        day = np.arange(self.days)
        year = 1 + 0.08 * np.sin(2 * np.pi * day / 365.25) + 0.0001 * day
        mean = rate * np.exp(0.4 * own.standard_normal(self.items)) * np.exp(drift)
        mean = mean * week[(day + 5) % 7] * year[:, None]  # the first day is a Saturday
        closed = self._away(own) | (day[:, None] < launch)
        drawn = own.negative_binomial(DISPERSION, DISPERSION / (DISPERSION + mean))
        return np.where(closed, 0, drawn).astype(np.int32)

    def _away(self, random: np.random.Generator) -> np.ndarray:
        """Runs of about six weeks in which an item is not on the shelf, (days, items)."""
        blocks = -(-self.days // 42)
        often = random.random(self.items) < 0.5
        gone = random.random((blocks, self.items)) < AWAY * often
        return np.repeat(gone, 42, axis=0)[: self.days]

    def frame(self, store: int) -> Any:
        """Rows of a store as a polars frame: keys, day and sales."""
        polars = optional("polars", "frames", "Made-up sales")
        state, name = self.stores[store]
        items = [f"{department}_{k:04d}" for k, (_, department) in enumerate(self.departments)]
        stamps = np.datetime64(FIRST_DAY) + np.arange(self.days)
        columns = {
            "category": [category for category, _ in self.departments],
            "department": [department for _, department in self.departments],
            "item": items,
        }
        table = polars.DataFrame(columns).select(
            polars.lit(state).alias("state"), polars.lit(name).alias("store"), polars.all()
        )
        long = table.select(polars.all().repeat_by(self.days).explode())
        return long.with_columns(
            polars.Series("date", np.tile(stamps, self.items)), polars.Series("sales", self.counts(store).T.ravel())
        )

    def write(self, path: Path) -> Path:
        """Write all rows to a CSV or Parquet file, store by store."""
        polars = optional("polars", "frames", "Made-up sales")
        frames = (self.frame(store) for store in range(len(self.stores)))
        if path.suffix == ".parquet":
            polars.concat(list(frames)).write_parquet(path)
            return path
        with path.open("wb") as file:
            for number, frame in enumerate(frames):
                frame.write_csv(file, include_header=number == 0)
        return path
