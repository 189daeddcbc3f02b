"""Kinds of state that requests have in the layers of a model besides keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from kernels_ref import RowKind

FindRowKind: TypeAlias = Callable[[Any, int], RowKind | None]
"""Returns the state of a layer, or None, from the configuration of the text model and the layer's number."""

ROW_KINDS: dict[str, FindRowKind] = {}
"""Functions that find the states of a model, by the names of their kinds."""


def row_kinds(text_config: Any, layer: int) -> tuple[RowKind, ...]:
    """Return the kinds of state that a layer has, in the order of ``ROW_KINDS``.

    Raises:
        ValueError: a kind has another name than it is registered under.
    """
    found = {name: kind for name, find in ROW_KINDS.items() if (kind := find(text_config, layer)) is not None}
    for name, kind in found.items():
        if kind.name != name:
            raise ValueError(f"expected a row state of kind {name!r}, as registered, got {kind.name!r}")
    return tuple(found.values())
