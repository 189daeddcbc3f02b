"""How many positions a model's rotary embedding serves the same way whoever else is in the batch."""

from __future__ import annotations

from typing import Any

_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def rope_types(config: Any) -> set[str]:
    """The rotary embedding types in a configuration, in its old form or its new one."""
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in _entries(config)}


def depends_on_length(config: Any) -> bool:
    """Whether frequencies change with a sequence's length: transformers then asks the host in each step."""
    return bool(rope_types(config) & _LENGTH_DEPENDENT)


def positions_served(config: Any) -> int:
    """The longest request that can be served.

    Some rotary embeddings change all frequencies once a sequence is longer than the original
    training length. In a batch of requests there is no such single length, so these models are
    served up to it, where the frequencies are fixed.

    Raises:
        ValueError: the configuration does not say how many positions the model has.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise ValueError(f"expected max_position_embeddings in the configuration, got {limit!r}")
    if not depends_on_length(config):
        return limit
    original = getattr(config, "original_max_position_embeddings", None)
    for entry in _entries(config):
        original = entry.get("original_max_position_embeddings", original)
    return min(limit, original) if isinstance(original, int) else limit


def _entries(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [parameters, *(entry for entry in parameters.values() if isinstance(entry, dict))]
