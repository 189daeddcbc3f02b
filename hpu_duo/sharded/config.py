"""The configuration of one rank's share of a model."""

from __future__ import annotations

import copy
from typing import Any

from hpu_duo.modeling.experts import HELD
from hpu_duo.sharded.experts import ExpertShare

_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
"""Names of the widths of MLPs and experts."""
_HEADS = ("num_attention_heads", "num_attention_heads_per_layer")
"""Names of numbers of query heads: one, or one for each layer."""
_KV_HEADS = "num_key_value_heads"
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
"""Names of numbers of tokens, of which tables have a row each."""
_BY_LAYER = "per_layer_config"
"""Name of what single layers have instead of a value of all layers."""
NARROWED = (*_WIDTHS, *_HEADS, _KV_HEADS, *_VOCABULARIES, _BY_LAYER, "head_dim", "pad_token_id")
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


def narrowed_config(config: Any, head_dim: int, size: int, experts: ExpertShare | None = None) -> Any:
    """Return a copy of a configuration for a model with one rank's share of heads, widths and vocabulary.

    Args:
        config: transformers' configuration.
        head_dim: channels of a head, for configurations that do not say it: families derive it from the
            number of heads.
        size: number of ranks.
        experts: that a rank holds whole; None = a part of the width of each.

    Raises:
        ValueError: ranks cannot share heads or widths evenly, or transformers has no plan for the family.
    """
    check_plan(config)
    narrow = copy.deepcopy(config)
    text = narrow.get_text_config()
    values = text.to_dict()
    differing = values.get(_BY_LAYER)
    for name in (*_WIDTHS, *_HEADS, _KV_HEADS, *_VOCABULARIES):
        # Where layers differ, only the dictionary has what those have that are not named.
        value = values.get(name) if differing else getattr(text, name, None)
        if value:
            setattr(text, name, _narrowed(name, value, size))
    if differing:
        text.per_layer_config = {
            layer: {name: _narrowed(name, value, size) for name, value in own.items()}
            for layer, own in differing.items()
        }
    elif getattr(text, "head_dim", None) is None:
        text.head_dim = head_dim
    if experts is not None:
        setattr(text, HELD, experts.size)
    # Tables are built with a row of this token, which is zero before training, and is another token's here.
    text.pad_token_id = None
    return narrow


def _narrowed(name: str, value: Any, size: int) -> Any:
    """One rank's share of a value of a configuration; all of what ranks do not share."""
    if isinstance(value, list):
        # Of other lists nothing is known: slices that do not fit are refused by the shapes of parameters.
        return [_narrowed(name, each, size) for each in value] if name in _HEADS else value
    if name in (*_WIDTHS, *_HEADS):
        return _share(name, value, size)
    if name == _KV_HEADS:
        return _share(name, value, min(size, value))
    return padded_vocab(value, size) if name in _VOCABULARIES else value


def _share(name: str, value: int, size: int) -> int:
    if value % size:
        raise ValueError(f"expected {name} to be a multiple of tensor_parallel_size={size}, got {value}")
    return value // size
