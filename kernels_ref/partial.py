"""Partial attention: the triple that every part returns, and its algebra.

Shapes: Q query tokens (or N rows), K key/value heads, G query heads of one key/value head,
D head size: that of values for results. Query head ``h`` is ``(h // G, h % G)``.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from kernels_ref.chunks import DEFAULT_BOUNDS, DEFAULT_SLICES, ChunkBounds, Slices

FLOOR = -1.0e30
"""Score of a hidden key, and the max of an empty partial: finite in float32 and bfloat16."""

SEEN = FLOOR / 2
"""Bound that the largest score of a query is above if the query sees a key."""


def hiding(dtype: torch.dtype) -> float:
    """A number that hides a key when it is added to its score: finite, and so is the sum."""
    return max(FLOOR, torch.finfo(dtype).min / 2)


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


def empty(q_QKGD: torch.Tensor, value_dim: int | None = None) -> Partial:
    """Return the partial of queries that see no key: neutral in ``merge``, zero in ``normalise``.

    Args:
        value_dim: elements of a value; None = as many as of a query.
    """
    # Contiguous however the queries lie: operators promise it to compilers.
    shape = q_QKGD.shape if value_dim is None else (*q_QKGD.shape[:-1], value_dim)
    attn = torch.zeros(shape, dtype=torch.float32, device=q_QKGD.device)
    return Partial(attn, torch.full_like(attn[..., 0], FLOOR), torch.zeros_like(attn[..., 0]))


def widened(x: torch.Tensor) -> torch.Tensor:
    """Convert bfloat16 to float32, the dtype of partials."""
    return x.float() if x.dtype == torch.bfloat16 else x


def attend(scores: torch.Tensor, visible: torch.Tensor | None, values: torch.Tensor) -> Partial:
    """The triple of already scaled scores.

    Args:
        scores: float32 or bfloat16 ``[..., T]``, anything (even NaN) where hidden.
        visible: bool, broadcast against ``scores``; None when every key is seen.
        values: ``[..., T, D]`` in the model's dtype, finite everywhere.
    Returns:
        attn float32 ``[..., D]``, max and sum float32 ``[...]``.
    """
    if visible is not None:
        scores = torch.where(visible, scores, FLOOR)
    largest = scores.amax(dim=-1)
    weights = torch.exp(scores - largest[..., None])
    largest = widened(largest)
    total = weights.sum(dim=-1, dtype=largest.dtype)
    attn = torch.matmul(weights.to(values.dtype), values).float()
    if visible is not None:
        # With no visible key every hidden one weighs exp(FLOOR - FLOOR) = 1.
        sees_any = largest > SEEN
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


def merge_all(partials: Partial) -> Partial:
    """Combine attention over several disjoint key sets, those along the first dimension; see ``merge``.

    Args:
        partials: ``[T, ...]`` each.
    """
    largest = partials.max.amax(dim=0)
    weights = torch.exp(partials.max - largest)
    attn = (partials.attn * weights[..., None]).sum(dim=0)
    return Partial(attn, largest, (partials.sum * weights).sum(dim=0))


def packed(partial: Partial) -> torch.Tensor:
    """A triple as one tensor ``[..., D + 2]``, for exchanges."""
    return torch.cat([partial.attn, partial.max[..., None], partial.sum[..., None]], dim=-1)


def unpacked(triple: torch.Tensor) -> Partial:
    """The triple of ``packed``."""
    return Partial(triple[..., :-2], triple[..., -2], triple[..., -1])


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
    """Rows of a partial by index; index ``N`` (one past the end) returns the empty partial.

    Args:
        partial: of one row at least.
    """
    num_rows = partial.max.shape[0]
    place = index.clamp(max=num_rows - 1)
    attn, largest, total = (part.index_select(0, place) for part in partial)
    exists = (index < num_rows)[:, None, None]
    return Partial(
        torch.where(exists[..., None], attn, 0.0),
        torch.where(exists, largest, FLOOR),
        torch.where(exists, total, 0.0),
    )


def placed(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor by index; index ``L`` (one past the end) returns zeros.

    Args:
        rows: ``[L, K, G, D]``.
        index: ``[Q]``.
    """
    return torch.constant_pad_nd(rows, (0, 0, 0, 0, 0, 0, 0, 1)).index_select(0, index)


def fold(q_LKGD: torch.Tensor, decode_len: int) -> torch.Tensor:
    """Queries of all tokens of a row as heads of one: ``[N * M, K, G, D]`` to ``[N, K, M * G, D]``."""
    if decode_len == 1:
        return q_LKGD
    return q_LKGD.unflatten(0, (-1, decode_len)).transpose(1, 2).flatten(2, 3)


def unfold(partial: Partial, decode_len: int) -> Partial:
    """The partial of each token from that of its row: ``[N, K, M * G, ...]`` to ``[N * M, K, G, ...]``."""
    return partial if decode_len == 1 else Partial(*(unfold_rows(x, decode_len) for x in partial))


def unfold_rows(rows: torch.Tensor, decode_len: int) -> torch.Tensor:
    """One tensor of ``unfold``."""
    if decode_len == 1:
        return rows
    return rows.unflatten(2, (decode_len, -1)).transpose(1, 2).flatten(0, 1).contiguous()


def finish(
    q_QKGD: torch.Tensor,
    of_tokens: list[Partial],
    of_rows: Partial | None,
    decode_slot: torch.Tensor,
    sinks_KG: torch.Tensor | None,
) -> torch.Tensor:
    """Merge the partials of tokens and of rows, add sink logits, normalise.

    Args:
        q_QKGD: the queries, for shape and type of the result.
        of_tokens: partials of all tokens over disjoint keys.
        of_rows: one of the L tokens of decode rows, in the order of their rows.
        decode_slot: place of each token among those, ``L`` for all others, ``[Q]``.
        sinks_KG: attention-sink logits, or None.
    Returns:
        ``[Q, K, G, D]``, zero for a token that sees no key.
    """
    if of_rows is not None:
        if not of_tokens:
            total = of_rows if sinks_KG is None else sink_logits(sinks_KG, of_rows)
            return placed(normalise(total, q_QKGD.dtype), decode_slot)
        of_tokens = [*of_tokens, select(of_rows, decode_slot)]
    total = of_tokens[0] if of_tokens else empty(q_QKGD)
    for partial in of_tokens[1:]:
        total = merge(total, partial)
    if sinks_KG is not None:
        total = sink_logits(sinks_KG, total)
    return normalise(total, q_QKGD.dtype)


class Softmax(str, Enum):
    """``exact``: scores and exponentials in float32. ``fast``: in bfloat16, where the model is."""

    EXACT = "exact"
    FAST = "fast"


class Scoring(NamedTuple):
    """Parameters of a layer's parts besides tensors; fixed for a captured step.

    Attributes:
        softcap: bound of the scores, None when the model has none.
        softmax: precision of scores and exponentials.
        slices: sizes of what is computed at a time.
        chunks: bounds of chunks of context, from which their sizes follow.
    """

    softcap: float | None = None
    softmax: Softmax = Softmax.EXACT
    slices: Slices = DEFAULT_SLICES
    chunks: ChunkBounds = DEFAULT_BOUNDS


def soften(products: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Scores, soft-capped to ``(-softcap, softcap)`` if the model does so.

    Returns:
        float32, or bfloat16 where the products are and ``scoring`` is fast.
    """
    stays = scoring.softmax is Softmax.FAST and products.dtype == torch.bfloat16
    scores = products if stays else products.float()
    cap = scoring.softcap
    return scores if cap is None else cap * torch.tanh(scores / cap)
