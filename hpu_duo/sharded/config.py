"""The configuration of one rank's share of a model."""

from __future__ import annotations

import copy
from typing import Any

_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
"""Names of the widths of MLPs and experts."""
NARROWED = (*_WIDTHS, "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "pad_token_id")
"""Names of what a share has another value of than the whole model."""


def check_plan(config: Any) -> None:
    """Refuse a family that transformers has no tensor-parallel plan for.

    Raises:
        ValueError: it has none; the message names the family.
    """
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"{text.model_type!r} cannot be served by several ranks: transformers has no tensor-parallel "
            "plan for it (base_model_tp_plan)"
        )


def padded_vocab(vocab_size: int, size: int) -> int:
    """Rows of the vocabulary that each of ``size`` ranks holds, padding included."""
    return -(-vocab_size // size)


def narrowed_config(config: Any, head_dim: int, size: int) -> Any:
    """Return a copy of a configuration for a model with one rank's share of heads, widths and vocabulary.

    Args:
        config: transformers' configuration.
        head_dim: channels of a head, which families may derive from the number of heads.
        size: number of ranks.

    Raises:
        ValueError: ranks cannot share heads or widths evenly, or transformers has no plan for the family.
    """
    check_plan(config)
    narrow = copy.deepcopy(config)
    text = narrow.get_text_config()
    text.num_attention_heads = _share("num_attention_heads", text.num_attention_heads, size)
    num_kv_heads = getattr(text, "num_key_value_heads", None)
    if num_kv_heads is not None:
        text.num_key_value_heads = _share("num_key_value_heads", num_kv_heads, min(size, num_kv_heads))
    text.head_dim = head_dim
    for name in _WIDTHS:
        width = getattr(text, name, None)
        if width:
            setattr(text, name, _share(name, width, size))
    text.vocab_size = padded_vocab(text.vocab_size, size)
    # Only says which row training leaves at zero.
    text.pad_token_id = None
    return narrow


def _share(name: str, value: int, size: int) -> int:
    if value % size:
        raise ValueError(f"expected {name} to be a multiple of tensor_parallel_size={size}, got {value}")
    return value // size
