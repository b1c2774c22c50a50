"""Numbers and settings as text, for the report page."""

from __future__ import annotations

import base64
import hashlib
import math
from typing import Any

MINUS = "\N{MINUS SIGN}"
MISSING = "\N{EN DASH}"  # in place of a number that is missing or not finite


def number(value: float | None) -> str:
    """Format a number with four significant digits and thousands separators; tiny and huge ones as powers of ten."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if not -5 < power < 12:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 3 - power)}f}"


def short(value: float | None) -> str:
    """Format a number with three significant digits."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:#.3g}"


def signed(value: float) -> str:
    """Format a number as ``number`` does, with its sign."""
    text = number(abs(value))
    return text if text == "0" else f"{'+' if value > 0 else MINUS}{text}"


def percent(value: float, unit: str = " %") -> str:
    """Format a share in percent with three significant digits and a unit."""
    if not math.isfinite(value):
        return MISSING
    power = math.floor(math.log10(abs(100 * value))) if value else 0
    return f"{100 * value:,.{min(4, max(0, 2 - power))}f}{unit}"


def count(value: int) -> str:
    """Format a whole number with thousands separators."""
    return f"{value:,}"


def words(value: Any) -> str:
    """Format a setting: lists by commas, booleans as yes and no."""
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {words(x)}" for name, x in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def digest(text: str) -> str:
    """Return the base64 SHA-256 of a script, for the page's content security policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
