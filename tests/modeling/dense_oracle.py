"""The definition of a head pattern: transformers' model with one dense mask per key/value head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface

from hpu_duo import HeadPattern

NAME = "dense_oracle"

Mask: TypeAlias = torch.Tensor | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Keys that each query sees in each KV head of a layer, bool ``[K, L, L]``, or how to find them from scaled
queries ``[H, L, D]`` and keys ``[K, L, D]``."""


def sees(query: int, key: int, sink: int, recent: int) -> bool:
    """The token rule of a streaming head, one pair at a time."""
    return key <= query and (key < sink or query - recent < key)


def head_masks(pattern: HeadPattern, layer: int, length: int) -> torch.Tensor:
    """Keys that each query sees in each key/value head of a layer, bool ``[K, length, length]``."""
    streaming = [[sees(q, k, pattern.sink, pattern.recent) for k in range(length)] for q in range(length)]
    retrieval = [[k <= q for k in range(length)] for q in range(length)]
    return torch.tensor([retrieval if keeps else streaming for keeps in pattern.mask[layer]])


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    oracle_masks: Sequence[Mask],
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    mask = oracle_masks[module.layer_idx]
    if not isinstance(mask, torch.Tensor):
        mask = mask(query[0] * scaling, key[0])
    group = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        scores = (query[0, head] @ key[0, head // group].T * scaling).float()
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = torch.exp(scores).where(mask[head // group], 0)
        total = weights.sum(-1, keepdim=True) + (0 if s_aux is None else s_aux[head].float().exp())
        outputs.append((weights / total).to(value.dtype) @ value[0, head // group])
    return torch.stack(outputs, dim=1)[None], None


AttentionInterface.register(NAME, _attention)


def oracle_logits(model: Any, pattern: HeadPattern, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each token of one text, float ``[len(tokens), V]``, with heads masked by the pattern."""
    masks = [head_masks(pattern, layer, len(tokens)) for layer in range(pattern.num_layers)]
    return masked_logits(model, masks, tokens)


@torch.inference_mode()
def masked_logits(model: Any, masks: Sequence[Mask], tokens: Sequence[int]) -> torch.Tensor:
    """The same with masks as given, of each layer."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        output = model(
            input_ids=torch.tensor([list(tokens)]),
            attention_mask=torch.zeros(1, 1, 1, 1),
            use_cache=False,
            oracle_masks=masks,
        )
    finally:
        model.set_attn_implementation(before)
    logits: torch.Tensor = output.logits[0].float()
    return logits
