"""Copies inside the KV stores that a plan asks the device for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class BlockCopy:
    """Copy block ``src`` onto block ``dst``, keys and values, in every layer with retrieval heads."""

    src: int
    dst: int


@dataclass(frozen=True)
class RowCopy:
    """Copy ring row ``src`` onto ring row ``dst``, keys and values, in every layer with streaming heads."""

    src: int
    dst: int


Copy: TypeAlias = BlockCopy | RowCopy
