"""Amounts of memory as people write them; imports no mxnet."""

from __future__ import annotations

import re
from typing import Optional

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> Optional[int]:
    """The number of bytes that a text such as "500MB", "1.5GB" or "2GiB" says, from 1 on; None for any other text.

    A plain number is none, since its unit is not said.
    """
    found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) *([A-Za-z]+)", str(text).strip())
    factor = _UNITS.get(found[2].upper()) if found else None
    return int(float(found[1]) * factor) or None if factor else None


def format_bytes(number: float) -> str:
    """Three digits and a decimal unit: "1.53 GB"."""
    for unit in ("TB", "GB", "MB", "kB"):
        size = _UNITS[unit.upper()]
        if abs(number) >= 0.9995 * size:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number:.0f} B"


def _three_digits(number: float) -> str:
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{decimals}f}"
