"""Torch operators that public sources show on an HPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType

_TABLE = Path(__file__).with_name("operators.json")


class Engine(str, Enum):
    """Engine that an operator keeps busy.

    ``MATRIX``: the matrix engine. ``VECTOR``: whatever computes elements, on the programmable cores.
    ``MEMORY``: moves data and computes nothing, whichever unit does it. ``VIEW``: nothing at all.
    """

    MATRIX = "matrix"
    VECTOR = "vector"
    MEMORY = "memory"
    VIEW = "view"


@dataclass(frozen=True)
class NativeOperator:
    """An operator that public sources show on HPU.

    Attributes:
        name: without overload, such as ``index_copy_``.
        engine: assigned by this project, from the operator's computation.
        sources: keys of ``native_sources()``.
    """

    name: str
    engine: Engine
    sources: tuple[str, ...]


@cache
def native_operators() -> Mapping[str, NativeOperator]:
    """The operators of the table by name; the vendor's own are those that begin with ``hpu.``."""
    entries = json.loads(_TABLE.read_text(encoding="utf-8"))["operators"]
    return MappingProxyType(
        {
            name: NativeOperator(name, Engine(entry["engine"]), tuple(entry["sources"]))
            for name, entry in entries.items()
        }
    )


@cache
def native_sources() -> Mapping[str, str]:
    """Sources that show the operators of the table, by key."""
    sources: dict[str, str] = json.loads(_TABLE.read_text(encoding="utf-8"))["sources"]
    return MappingProxyType(sources)
