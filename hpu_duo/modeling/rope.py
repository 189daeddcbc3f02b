"""How many positions a model's rotary embedding serves the same way whoever else is in the batch."""

from __future__ import annotations

from typing import Any

from torch import nn

_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def rope_types(config: Any) -> set[str]:
    """The rotary embedding types in a configuration, in its old form or its new one."""
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in _entries(config)}


def depends_on_length(config: Any) -> bool:
    """Whether frequencies change with a sequence's length."""
    return bool(rope_types(config) & _LENGTH_DEPENDENT)


def fix_frequencies(model: nn.Module) -> None:
    """Let rotary embeddings keep the frequencies of short texts, in place.

    Those that depend on a sequence's length compare it in every step: transformers reads the largest position
    on the host, or copies frequencies. No request is longer than ``positions_served``, so that the outcome
    is always the same.
    """
    for module in model.modules():
        kept = getattr(module, "rope_type", None)
        if isinstance(kept, str) and kept in _LENGTH_DEPENDENT:
            _restore(module, "")
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kept, dict) and _LENGTH_DEPENDENT & set(kept.values()):
            changing = {layer_type for layer_type, kind in kept.items() if kind in _LENGTH_DEPENDENT}
            for layer_type in changing:
                _restore(module, f"{layer_type}_")
            module.rope_type = {**kept, **dict.fromkeys(changing, "default")}  # type: ignore[assignment]


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


def _restore(module: nn.Module, prefix: str) -> None:
    """A model that has seen a longer text has other frequencies since."""
    frequencies = getattr(module, f"{prefix}inv_freq")
    original = getattr(module, f"{prefix}original_inv_freq", None)
    if original is not None:
        setattr(module, f"{prefix}inv_freq", original.to(frequencies.device))


def _entries(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"expected rotary embedding parameters to be an object, got {parameters!r}")
    return [parameters, *(entry for entry in parameters.values() if isinstance(entry, dict))]
