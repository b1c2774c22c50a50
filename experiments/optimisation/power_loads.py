"""Random loads of a power network and their optimal power flow by PYPOWER, by the recipe of DC3.

    load_i = base_i f_i,    f ~ N(1, C) truncated to 1 +- 0.7 in all coordinates,
    C = (0.7 / 1.645)^2 (0.5 + 0.5 I),    reactive load_i = sign(base_i) load_i tan(arccos(c_i)),    c_i ~ U(0.8, 1).

In the published data, of case57, no line limits are in effect. Loads that PYPOWER cannot serve are left out. The
published file itself is drawn by MATLAB, so its instances differ from these; their law is the same.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

CHANGE, QUANTILE, CORRELATION = 0.7, 1.645, 0.5
LEAST_FACTOR, MOST_FACTOR = 0.8, 1.0  # power factors
SEED = 17
PD, QD, VM, VA = 2, 3, 7, 8  # columns of buses in the format of MATPOWER
PG, QG = 1, 2  # of generators
RATES = (5, 6, 7)  # of branches
NO_LIMIT = 9900.0  # MVA; the rate of all lines in case57, and PYPOWER fails where no line has one


@dataclass(frozen=True)
class Loads:
    """Served loads with their optimal power flow; powers in MW and MVAr, angles in radians."""

    active: np.ndarray  # (k, buses)
    reactive: np.ndarray  # (k, buses)
    solution: np.ndarray  # (k, 2 generators + 2 buses): Pg, Qg, V, theta
    cost: np.ndarray  # (k,)
    seconds: np.ndarray  # (k,) of processor time that PYPOWER took


def drawn(case: dict[str, Any], seed: int = SEED, block: int = 2000) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Draw active and reactive loads (buses,) without end.

    Args:
        case: A case of PYPOWER.
        seed: Of the random numbers.
        block: Factors that are drawn at once, of which those outside the bounds are rejected.
    """
    random = np.random.default_rng(seed)
    base, reactive = case["bus"][:, PD], case["bus"][:, QD]
    loaded = np.flatnonzero(base > 0)
    count = len(loaded)
    deviation = CHANGE / QUANTILE
    cov = deviation**2 * (CORRELATION * np.ones((count, count)) + (1 - CORRELATION) * np.eye(count))
    while True:
        factors = random.multivariate_normal(np.ones(count), cov, size=block)
        for factor in factors[(np.abs(factors - 1) < CHANGE).all(1)]:
            power_factor = random.uniform(LEAST_FACTOR, MOST_FACTOR, size=count)
            p, q = base.copy(), reactive.copy()
            p[loaded] = base[loaded] * factor
            q[loaded] = p[loaded] * np.tan(np.arccos(power_factor)) * np.sign(reactive[loaded])
            yield p, q


def solved(case: dict[str, Any], active: np.ndarray, reactive: np.ndarray, limits: bool = False) -> dict[str, Any]:
    """The optimal power flow of one load by PYPOWER.

    Args:
        case: A case of PYPOWER.
        active: Active load, (buses,).
        reactive: Reactive load, (buses,).
        limits: Whether line limits count.

    Returns:
        Whether it was found, the solution as in ``Loads``, its cost and the processor time.
    """
    from pypower.api import opf, ppoption

    case = deepcopy(case)
    case["bus"][:, PD], case["bus"][:, QD] = active, reactive
    if not limits:
        case["branch"][:, RATES] = NO_LIMIT
    with redirect_stdout(io.StringIO()):
        start = time.process_time()
        found = opf(case, ppoption(VERBOSE=0, OUT_ALL=0))
        seconds = time.process_time() - start
    bus, gen = found["bus"], found["gen"]
    point = np.concatenate([gen[:, PG], gen[:, QG], bus[:, VM], np.deg2rad(bus[:, VA])])
    return {"found": bool(found["success"]), "solution": point, "cost": float(found["f"]), "seconds": seconds}


def made(case: dict[str, Any], path: Path, count: int, limits: bool = False, seed: int = SEED) -> Loads:
    """The first ``count`` served loads; each is appended to a file, from which an interrupted run goes on.

    Args:
        case: A case of PYPOWER.
        path: The file, one JSON object for each load.
        count: Number of served loads.
        limits: Whether line limits count.
        seed: Of the random numbers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _read(path)
    served = sum(line["found"] for line in lines)
    with open(path, "a") as file, tqdm(total=count, initial=served, unit="load", mininterval=30) as bar:
        for number, (active, reactive) in enumerate(drawn(case, seed)):
            if served >= count:
                break
            if number < len(lines):
                continue
            line = {"active": active, "reactive": reactive, **solved(case, active, reactive, limits)}
            lines.append(line)
            file.write(json.dumps(line, default=np.ndarray.tolist) + "\n")
            file.flush()
            served += line["found"]
            bar.update(int(line["found"]))
    kept = [line for line in lines if line["found"]][:count]
    names = ("active", "reactive", "solution", "cost", "seconds")
    return Loads(*(np.array([line[name] for line in kept]) for name in names))


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; the rest of a line whose writer died is removed."""
    if not path.exists():
        return []
    whole, _, tail = path.read_text().rpartition("\n")
    if tail:
        path.write_text(whole + "\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]
