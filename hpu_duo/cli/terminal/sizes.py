"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = ("", "K", "M", "G", "T")
_TEXT = re.compile(
    r"\s*(?P<number>\d+(\.\d+)?)\s*((?P<unit>[KMGT]?)(?P<binary>i?)B)?\s*", re.IGNORECASE | re.ASCII
)


def parse_bytes(text: str) -> int:
    """Bytes of ``4GiB`` (1024 each), ``4GB`` (1000 each) or ``4294967296``.

    Raises:
        ValueError: something else; ``4G`` too, which people read in both ways.
    """
    match = _TEXT.fullmatch(text)
    if match is not None and not (match["binary"] and not match["unit"]):
        factor = (1024 if match["binary"] else 1000) ** _UNITS.index((match["unit"] or "").upper())
        size = Decimal(match["number"]) * factor
        if size == int(size):
            return int(size)
    raise ValueError(f"expected a size in bytes such as 4GiB, 500MB or 4294967296, got {text!r}")


def show_bytes(num_bytes: float) -> str:
    """About three digits and a binary unit: ``1.50 MiB``."""
    power = 0
    while num_bytes >= 1024 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    if power == 0:
        return f"{num_bytes:.0f} B"
    digits = 2 if num_bytes < 10 else 1 if num_bytes < 100 else 0
    return f"{num_bytes:.{digits}f} {_UNITS[power]}iB"
