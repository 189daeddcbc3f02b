"""Full and streaming attention with gradients, in memory that grows linearly with the text.

Nothing here holds scores of all pairs of tokens: plain layers go through PyTorch's fused attention, layers
with a soft cap or sink logits are computed block by block, and again in the backward pass, and streaming
attention reads the sink and the band of recent tokens only.

Legend: B texts, T tokens, H query heads, K KV heads, G query heads of a KV head, D head size, C queries of a
block, S keys that the block sees. Queries are ``[B, H, T, D]``, keys and values ``[B, K, T, D]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK = 256
"""Queries of a block. A larger one reads more keys that are masked, a smaller one copies more of them."""


@dataclass(frozen=True)
class Weighing:
    """The rule by which a layer turns products of queries and keys into weights.

    Attributes:
        scale: factor of the products.
        softcap: bound of the scores, or None.
        sinks: logits ``[H]`` that take part in the softmax without a value, or None.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch's fused attention can compute the rule."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class Band:
    """Keys that a token ``p`` sees: ``k < sink``, or ``p - recent < k <= p``, itself included."""

    sink: int
    recent: int

    def holds(self, num_tokens: int) -> bool:
        """Whether each of ``num_tokens`` tokens sees all tokens before it."""
        return self.recent >= num_tokens


@dataclass(frozen=True)
class QueryBlock:
    """Consecutive queries, and the smallest range of keys that holds all they see.

    Attributes:
        start, end: queries ``[start, end)``.
        num_sink: keys ``[0, num_sink)`` that come before the band; all of these queries see them.
        first: keys ``[first, end)`` are the band, of which a query sees a part.
    """

    start: int
    end: int
    num_sink: int
    first: int

    def keys(self, x: Tensor) -> Tensor:
        """The keys, or values, of the block: ``[..., S, D]``."""
        band = x[..., self.first : self.end, :]
        return band if self.num_sink == 0 else torch.cat([x[..., : self.num_sink, :], band], dim=-2)

    def visible(self, band: Band, device: torch.device) -> Tensor:
        """Mask of the keys that each query sees, bool ``[C, S]``."""
        query = torch.arange(self.start, self.end, device=device).unsqueeze(1)
        key = torch.arange(self.first, self.end, device=device)
        in_band = (key <= query) & ((key > query - band.recent) | (key < band.sink))
        return F.pad(in_band, (self.num_sink, 0), value=True)


def query_blocks(num_tokens: int, band: Band, size: int = QUERY_BLOCK) -> Iterator[QueryBlock]:
    """The blocks of a text, of ``size`` queries but for the last one, in order."""
    for start in range(0, num_tokens, size):
        first = max(0, start - band.recent + 1)
        end = min(start + size, num_tokens)
        yield QueryBlock(start, end, min(band.sink, first), first)


def full_attention(q: Tensor, k: Tensor, v: Tensor, weighing: Weighing) -> Tensor:
    """Causal attention over the whole text: ``[B, H, T, D]``."""
    num_tokens = q.shape[2]
    if not weighing.is_plain:
        return banded_attention(q, k, v, weighing, Band(0, num_tokens))
    group = q.shape[1] // k.shape[1]
    # Fused kernels for long texts want as many KV heads as query heads.
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v)) if group > 1 else (k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=weighing.scale)


def banded_attention(q: Tensor, k: Tensor, v: Tensor, weighing: Weighing, band: Band) -> Tensor:
    """Attention to what ``band`` shows, at a cost that grows with T and not with its square.

    Returns:
        ``[B, H, T, D]``.
    """
    if weighing.is_plain and band.holds(q.shape[2]):
        return full_attention(q, k, v, weighing)
    attend: Callable[..., Tensor] = _fused if weighing.is_plain else _explicit
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if is_trained:
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    parts = [
        attend(q[:, :, block.start : block.end], k, v, weighing, band, block)
        for block in query_blocks(q.shape[2], band)
    ]
    return torch.cat(parts, dim=2)


def _fused(q: Tensor, k: Tensor, v: Tensor, weighing: Weighing, band: Band, block: QueryBlock) -> Tensor:
    num_kv_heads = k.shape[1]
    group = q.shape[1] // num_kv_heads
    # The queries of a group side by side, as more queries of their KV head.
    q_side = q.unflatten(1, (num_kv_heads, group)).flatten(2, 3)
    visible = block.visible(band, q.device).repeat(group, 1)
    out = F.scaled_dot_product_attention(
        q_side, block.keys(k), block.keys(v), attn_mask=visible, scale=weighing.scale
    )
    return out.unflatten(2, (group, -1)).flatten(1, 2)


def _explicit(q: Tensor, k: Tensor, v: Tensor, weighing: Weighing, band: Band, block: QueryBlock) -> Tensor:
    group = q.shape[1] // k.shape[1]
    scores = block_scores(q, block.keys(k), weighing)
    scores = scores.masked_fill(~block.visible(band, q.device), torch.finfo(torch.float32).min)
    weights = torch.softmax(with_sinks(scores, weighing), dim=-1)[..., : scores.shape[-1]]
    weights = weights.to(q.dtype).unflatten(1, (-1, group))
    return (weights @ block.keys(v).unsqueeze(2)).flatten(1, 2)


def block_scores(q: Tensor, k: Tensor, weighing: Weighing) -> Tensor:
    """Scores of every pair before masking: float32 ``[B, H, C, S]``."""
    group = q.shape[1] // k.shape[1]
    products = q.unflatten(1, (-1, group)) @ k.unsqueeze(2).transpose(-1, -2)
    scores = products.flatten(1, 2).float() * weighing.scale
    if weighing.softcap is not None:
        scores = weighing.softcap * torch.tanh(scores / weighing.softcap)
    return scores


def with_sinks(scores: Tensor, weighing: Weighing) -> Tensor:
    """The scores with the sink logits as a last column, if there are any."""
    if weighing.sinks is None:
        return scores
    column = weighing.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1)


def causal_weights(q: Tensor, k: Tensor, positions: Tensor, weighing: Weighing) -> Tensor:
    """Attention of some queries to all keys: float32 ``[B, H, C, S]``, 0 where a key comes later.

    Args:
        q: ``[B, H, C, D]``, queries at ``positions``.
        k: ``[B, K, S, D]``, the first S keys.
        positions: int64 ``[C]``.

    Returns:
        Rows that sum to 1, or to less with sink logits.
    """
    key = torch.arange(k.shape[2], device=k.device)
    scores = block_scores(q, k, weighing)
    scores = scores.masked_fill(key > positions.unsqueeze(1), torch.finfo(torch.float32).min)
    return torch.softmax(with_sinks(scores, weighing), dim=-1)[..., : len(key)]
