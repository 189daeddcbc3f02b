"""Rotary embeddings whose frequencies depend on a text's length: allowed lengths, and choice of frequencies.

transformers changes all frequencies of a sequence with its length: ``longrope`` has a second set of factors
for sequences beyond the original training length, ``dynamic`` stretches the base for each length beyond
``max_position_embeddings``. Keys that are cached have the frequencies of when they were computed, and a
batch has no single length. So the frequencies are chosen once, for the longest request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_LENGTH_DEPENDENT = {"dynamic", "longrope"}
_LONGEST = 2**31 - 1
"""Largest position: positions are int32 on the device."""


def rope_types(config: Any) -> set[str]:
    """The rotary embedding types in a configuration, in its old form or its new one."""
    return {_type(entry) for entry in _entries(config)}


class NoPositionsError(ValueError):
    """A configuration without the number of positions of the model."""


def positions_served(config: Any) -> int:
    """Return the length that a model is served up to by default, from its configuration.

    Raises:
        NoPositionsError: the configuration has no number of positions.
    """
    limit = getattr(config, "max_position_embeddings", None)
    # Some have -1 for no limit.
    if not isinstance(limit, int) or limit < 1:
        raise NoPositionsError(
            "expected max_model_len, since the configuration has no number of positions of the model "
            f"(max_position_embeddings: {limit!r})"
        )
    # PhiMoE scales queries and keys by the longest text of a batch in every step; it serves short ones only.
    bounds = [_original(config, entry) for entry in _entries(config) if "short_mscale" in entry]
    return min(limit, *bounds) if bounds else limit


def longest_served(config: Any) -> int:
    """Return the largest length that may be set: ``dynamic`` stretches the positions by its factor.

    Raises:
        ValueError: see ``positions_served``.
    """
    served = positions_served(config)
    factors = [entry.get("factor") or 1.0 for entry in _entries(config) if _type(entry) == "dynamic"]
    return min(_LONGEST, int(served * max(1.0, min(factors, default=1.0))))


def served_len(config: Any, wanted: int | None) -> int:
    """Return the longest request that a model is to serve.

    Args:
        wanted: ``max_model_len``, or None for ``positions_served``.

    Raises:
        NoPositionsError: see ``positions_served``; ``max_model_len`` is not set.
        ValueError: it is more than ``longest_served``.
    """
    if wanted is None:
        return positions_served(config)
    try:
        longest = longest_served(config)
    except NoPositionsError:
        longest = _LONGEST
    if wanted > longest:
        raise ValueError(
            f"expected max_model_len of at most {longest}, the positions this model serves, got {wanted}"
        )
    return wanted


def short_len(config: Any) -> int | None:
    """Return the longest ``max_model_len`` with which a model uses the frequencies of short texts.

    Returns:
        None when its frequencies do not depend on the length.
    """
    bounds = [_original(config, entry) for entry in _entries(config) if _type(entry) in _LENGTH_DEPENDENT]
    return min(bounds) if bounds else None


def frequencies_note(config: Any, max_len: int) -> tuple[str, ...]:
    """Return a note for the user if ``fix_frequencies`` changes the frequencies of short texts."""
    short = short_len(config)
    if short is None or max_len <= short:
        return ()
    return (
        f"rotary frequencies are those of texts of {max_len} tokens, for shorter texts too; "
        f"a max_model_len of at most {short} keeps those of short texts",
    )


def fix_frequencies(model: nn.Module, max_len: int) -> None:
    """Fix the frequencies of rotary embeddings, in place, to those of transformers for ``max_len`` tokens.

    Otherwise embeddings that depend on a sequence's length compare it in every step: transformers reads the
    largest position on the host, or copies frequencies.
    """
    for module in model.modules():
        kept = getattr(module, "rope_type", None)
        if isinstance(kept, str) and kept in _LENGTH_DEPENDENT:
            _choose(module, kept, None, max_len)
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kept, dict) and _LENGTH_DEPENDENT & set(kept.values()):
            changing = {layer_type: kind for layer_type, kind in kept.items() if kind in _LENGTH_DEPENDENT}
            for layer_type, kind in changing.items():
                _choose(module, kind, layer_type, max_len)
            module.rope_type = {**kept, **dict.fromkeys(changing, "default")}  # type: ignore[assignment]


def _choose(module: Any, kind: str, layer_type: str | None, max_len: int) -> None:
    """Set the frequencies of one kind of layer; a model may have seen a text of another length before."""
    # Slow to import, and not needed for lengths.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    name = f"{prefix}inv_freq"
    current: torch.Tensor = getattr(module, name)
    # What the module has computed itself, which is more than the common rule in some families.
    chosen: torch.Tensor = getattr(module, f"{prefix}original_inv_freq", current)
    entry = next(e for e in _entries(module.config, layer_type) if _type(e) == kind)
    if max_len > _original(module.config, entry):
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        chosen, _ = ROPE_INIT_FUNCTIONS[kind](module.config, current.device, seq_len=max_len, **of_layer)
    setattr(module, name, chosen.to(current.device))


def _original(config: Any, entry: dict[str, Any]) -> int:
    """The longest text that has the frequencies of short ones."""
    if _type(entry) == "dynamic":
        limit: int = config.max_position_embeddings
        return limit
    # Older versions of transformers have it in the configuration itself, and look nowhere else.
    own = getattr(config, "original_max_position_embeddings", None)
    original = entry.get("original_max_position_embeddings") or own or config.max_position_embeddings
    return int(original)


def _type(entry: dict[str, Any]) -> str:
    return str(entry.get("rope_type", entry.get("type", "default")))


def _entries(config: Any, layer_type: str | None = None) -> list[dict[str, Any]]:
    """The parameters of all layers, or of one kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"expected rotary embedding parameters to be an object, got {parameters!r}")
    if layer_type is not None:
        return [parameters[layer_type]]
    return [parameters, *(entry for entry in parameters.values() if isinstance(entry, dict))]
