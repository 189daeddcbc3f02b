"""Partial attention: the triple that every part returns, and its algebra.

Shapes: Q query tokens (or N rows), K key/value heads, G query heads of one key/value head,
D head size. Query head ``h`` is ``(h // G, h % G)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOOR = -1.0e30
"""Score of a hidden key, and the max of an empty partial: finite in float32 and bfloat16."""

_SEEN = FLOOR / 2


class Partial(NamedTuple):
    """Attention over one set of keys, before division by the sum of its weights.

    Attributes:
        attn: sum of ``exp(score - max) * value``, float32 ``[Q, K, G, D]``.
        max: largest score, or ``FLOOR`` where a query sees no key, float32 ``[Q, K, G]``.
        sum: sum of ``exp(score - max)``, float32 ``[Q, K, G]``.
    """

    attn: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor


def empty(q_QKGD: torch.Tensor) -> Partial:
    """What queries see that see nothing: neutral in ``merge``, zero in ``normalise``."""
    # Contiguous however the queries lie: operators promise it to compilers.
    attn = torch.zeros(q_QKGD.shape, dtype=torch.float32, device=q_QKGD.device)
    return Partial(attn, torch.full_like(attn[..., 0], FLOOR), torch.zeros_like(attn[..., 0]))


def attend(scores: torch.Tensor, visible: torch.Tensor | None, values: torch.Tensor) -> Partial:
    """The triple of already scaled scores.

    Args:
        scores: float32 ``[..., T]``, anything (even NaN) where hidden.
        visible: bool, broadcast against ``scores``; None when every key is seen.
        values: ``[..., T, D]`` in the model's dtype, finite everywhere.
    Returns:
        attn float32 ``[..., D]``, max and sum float32 ``[...]``.
    """
    if visible is not None:
        scores = torch.where(visible, scores, FLOOR)
    largest = scores.amax(dim=-1)
    weights = torch.exp(scores - largest[..., None])
    total = weights.sum(dim=-1)
    attn = torch.matmul(weights.to(values.dtype), values).float()
    if visible is not None:
        # With no visible key every hidden one weighs exp(FLOOR - FLOOR) = 1.
        sees_any = largest > _SEEN
        total = torch.where(sees_any, total, 0.0)
        attn = torch.where(sees_any[..., None], attn, 0.0)
    return Partial(attn, largest, total)


def merge(a: Partial, b: Partial) -> Partial:
    """Combine attention over two disjoint key sets into attention over their union.

    Commutative, and associative up to rounding. An empty partial is neutral: its max is finite,
    so a query that sees no key in either set stays empty instead of becoming NaN.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    largest = torch.maximum(a.max, b.max)
    weight_a = torch.exp(a.max - largest)
    weight_b = torch.exp(b.max - largest)
    return Partial(
        a.attn * weight_a[..., None] + b.attn * weight_b[..., None],
        largest,
        a.sum * weight_a + b.sum * weight_b,
    )


def normalise(partial: Partial, dtype: torch.dtype) -> torch.Tensor:
    """Divide by the sum of weights: ``[Q, K, G, D]`` in ``dtype``, zero for empty queries."""
    tiny = torch.finfo(torch.float32).tiny
    return (partial.attn / torch.clamp(partial.sum, min=tiny)[..., None]).to(dtype)


def sink_logits(logits: torch.Tensor, partial: Partial) -> Partial:
    """Add one key per head whose value is zero and whose score is learned.

    Args:
        logits: ``[K, G]``, the attention-sink parameter of the layer.
    Source: gpt-oss attention sinks; the same as a softmax with one more column that is dropped.
    """
    score = logits.float().expand(partial.max.shape)
    return merge(partial, Partial(torch.zeros_like(partial.attn), score, torch.ones_like(partial.sum)))


def select(partial: Partial, index: torch.Tensor) -> Partial:
    """Rows of a partial by index; index ``N`` (one past the end) gives the empty partial.

    Args:
        partial: of one row at least.
    """
    num_rows = partial.max.shape[0]
    attn, largest, total = (part.index_select(0, index.clamp(max=num_rows - 1)) for part in partial)
    exists = (index < num_rows)[:, None, None]
    return Partial(
        torch.where(exists[..., None], attn, 0.0),
        torch.where(exists, largest, FLOOR),
        torch.where(exists, total, 0.0),
    )


def finish(
    q_QKGD: torch.Tensor,
    of_tokens: list[Partial],
    of_rows: Partial | None,
    single_row: torch.Tensor,
    sinks_KG: torch.Tensor | None,
) -> torch.Tensor:
    """Merge what tokens and what rows have seen, add sink logits, normalise.

    Args:
        q_QKGD: the queries, for shape and type of the result.
        of_tokens: partials of all tokens over disjoint keys.
        of_rows: one of the N rows with one new token.
        single_row: row of each token that is alone in its row, ``N`` for all others, ``[Q]``.
        sinks_KG: attention-sink logits, or None.
    Returns:
        ``[Q, K, G, D]``, zero for a token that has seen nothing.
    """
    if of_rows is not None:
        of_tokens = [*of_tokens, select(of_rows, single_row)]
    total = of_tokens[0] if of_tokens else empty(q_QKGD)
    for partial in of_tokens[1:]:
        total = merge(total, partial)
    if sinks_KG is not None:
        total = sink_logits(sinks_KG, total)
    return normalise(total, q_QKGD.dtype)
