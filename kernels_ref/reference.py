"""The parts in portable torch: what HPU runs, what CPU can always run, and the oracle of the rest.

Shapes: Q query tokens, N rows of up to M decoded tokens, C gathered rings, X blocks, B slots of a block, W
slots of a ring, T keys, K key/value heads, G query heads of each, H = M * G for all tokens of a row, D head
size: that of keys for queries, that of values for results. Queries arrive scaled.

Static shapes throughout: no index is negative, no size depends on data, no mask has an infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from bias_builders import causal_mask, leading_slots, ring_mask, seen_mask
from kernels_ref.groups.budget_slots import eviction_victims, unique_with_weights
from kernels_ref.groups.column_sums import column_sums
from kernels_ref.pages import chosen_pages, write_bounds
from kernels_ref.partial import FLOOR, Partial, Scoring, attend, empty, finish, merge, soften, widened
from kernels_ref.sparse import (
    as_keys,
    attend_dense,
    chosen_blocks,
    picked,
    reached_keys,
    shared_visible,
    tails_visible,
    whole_visible,
)
from kernels_ref.step import PartInputs, StepTensors
from kernels_ref.units import KVUnits, gather, write_kv

if TYPE_CHECKING:
    from kernels_ref.step import BlockStep, RingStep

AddBlocks: TypeAlias = Callable[[Partial, torch.Tensor, torch.Tensor, torch.Tensor], Partial]
"""``merge_by_owner``, or another one."""


def add_blocks(
    total: Partial,
    q_NKHD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    scoring: Scoring,
    add: AddBlocks,
    visible_XMB: torch.Tensor | None = None,
) -> Partial:
    """Decode rows against one chunk of whole blocks.

    Args:
        visible_XMB: slots that each token of the owner sees; None = all, and ``add`` adds them.
    """
    query = gather(q_NKHD, torch.clamp(owner, max=q_NKHD.shape[0] - 1))
    scores = soften(torch.matmul(query, k_XKBD.transpose(2, 3)), scoring)
    if visible_XMB is None:
        return add(total, scores, v_XKBD, owner)
    of_heads = visible_XMB.repeat_interleave(q_NKHD.shape[2] // visible_XMB.shape[1], dim=1)
    return merge_by_owner(total, scores, v_XKBD, owner, of_heads[:, None])


def merge_by_owner(
    total: Partial,
    scores_XKGB: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    visible: torch.Tensor | None = None,
) -> Partial:
    """Merge whole blocks into the partials of their owners.

    Weights are computed with the owner's new maximum at once, so that the blocks need no partial of their
    own, which would need twice as many operators.

    Args:
        total: of the N rows.
        scores_XKGB: of each block with the query of its owner; overwritten.
        owner: row of each block, ``N`` = none, with undefined scores and values; int32 ``[X]``.
        visible: slots that queries see, broadcast against the scores; None = all.
    """
    if visible is not None:
        scores_XKGB = torch.where(visible, scores_XKGB, FLOOR)
    num_rows, num_kv, group, dim = total.attn.shape
    num_blocks = owner.shape[0]
    row = torch.arange(num_rows, dtype=owner.dtype, device=owner.device)
    member_NX = row[:, None] == owner[None]
    # A masked maximum over all pairs: [N, chunk, H] is small, and it is native everywhere.
    largest = widened(scores_XKGB.amax(dim=-1))
    block_max = torch.where(member_NX[..., None, None], largest[None], FLOOR)
    row_max = torch.maximum(total.max, block_max.amax(dim=1))
    owned = (owner < num_rows)[:, None, None]
    # Far above any score if a block has no owner: its weights are 0, without infinities.
    reference = torch.where(owned, gather(row_max, torch.clamp(owner, max=num_rows - 1)), -FLOOR)
    weights = scores_XKGB.sub_(reference[..., None].to(scores_XKGB.dtype)).exp_()
    if visible is not None:
        # Without visible slots so far, hidden ones would have weights exp(FLOOR - FLOOR) = 1.
        weights = torch.where(visible, weights, 0)
    # Selecting, not multiplying, excludes a NaN of another owner's block from the product.
    attn = torch.where(
        owned[..., None], torch.matmul(weights.to(v_XKBD.dtype), v_XKBD).to(largest.dtype), 0.0
    )
    sums = torch.where(owned, weights.sum(dim=-1, dtype=largest.dtype), 0.0)
    member = member_NX.to(attn.dtype)
    decay = torch.exp(total.max - row_max)
    return Partial(
        torch.addcmul(
            torch.matmul(member, attn.view(num_blocks, -1)).view(num_rows, num_kv, group, dim),
            total.attn,
            decay[..., None],
        ),
        row_max,
        torch.addcmul(
            torch.matmul(member, sums.view(num_blocks, -1)).view(num_rows, num_kv, group), total.sum, decay
        ),
    )


__all__ = [
    "causal",
    "causal_of_some",
    "chosen_blocks",
    "chosen_pages",
    "column_sums",
    "eviction_victims",
    "finish",
    "rows_in_rings",
    "shared_blocks",
    "shared_rings",
    "unique_blocks",
    "unique_rings",
    "unique_with_weights",
    "write_bounds",
    "write_kv",
]

Dense: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Scoring], Partial]
"""Queries ``[Q, K, G, D]`` against a list of keys and values ``[T, K, D]`` under a mask ``[Q, T]``."""

Attend: TypeAlias = Callable[[torch.Tensor, "torch.Tensor | None", torch.Tensor], Partial]
"""``kernels_ref.partial.attend``, or another one."""


def causal(inputs: PartInputs, dense: Dense | None = None, query_slice: int | None = None) -> Partial:
    """Tokens of prompt rows against the new keys of their own row.

    Queries are cut into slices. Without a rule a slice attends to the keys up to its end; with one only those
    that it reaches by distance, plus the sink tokens of the one row that may have begun before them.

    Args:
        dense, query_slice: how a slice attends, and its queries; None = ``attend_dense``, ``scoring.slices``.
    """
    q_QKGD, new, _, t, scoring, rule, _ = inputs
    num_queries, step = q_QKGD.shape[0], query_slice or scoring.slices.queries
    dense = dense or attend_dense
    parts = []
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        places = reached_keys(rule, begin, end)
        first = places[0].start
        k_TKD, v_TKD = picked(new.k, places), picked(new.v, places)
        key_row, key_position = picked(t.causal_row, places), picked(t.positions, places)
        if rule is not None and rule.sink > 0 and first > 0:
            index, sink_row = _sinks_before(first, t, rule.sink)
            k_TKD = torch.cat([gather(new.k, index), k_TKD])
            v_TKD = torch.cat([gather(new.v, index), v_TKD])
            key_row = torch.cat([sink_row, key_row])
            key_position = torch.cat([gather(t.positions, index), key_position])
        visible_ST = causal_mask(
            t.causal_row[begin:end],
            t.positions[begin:end],
            key_row,
            key_position,
            no_row=t.row_start.shape[0],
            rule=rule,
        )
        parts.append(dense(q_QKGD[begin:end], k_TKD, v_TKD, visible_ST, scoring))
    return parts[0] if len(parts) == 1 else Partial(*(torch.cat(list(x)) for x in zip(*parts)))


def causal_of_some(
    inputs: PartInputs, keys: StepTensors, dense: Dense | None = None, query_slice: int | None = None
) -> Partial:
    """Some tokens of prompt rows, those of ``inputs.tensors``, against the new keys of their own row.

    Args:
        keys: the plan of all new tokens.
        dense, query_slice: see ``causal``.
    """
    t, new, scoring = inputs.tensors, inputs.new, inputs.scoring
    dense, step = dense or attend_dense, query_slice or scoring.slices.queries
    no_row, parts = t.row_start.shape[0], []
    for q, row, position in zip(inputs.q.split(step), t.causal_row.split(step), t.positions.split(step)):
        visible_ST = causal_mask(row, position, keys.causal_row, keys.positions, no_row, inputs.rule)
        parts.append(dense(q, new.k, new.v, visible_ST, scoring))
    return Partial(*(torch.cat(list(x)) for x in zip(*parts)))


def _sinks_before(first: int, t: StepTensors, num_sinks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat indices and rows of the sink tokens that lie before flat index ``first``.

    Rows are contiguous, so only the row that owns token ``first`` can reach back across it. Places without
    such a token get a row index that matches none.
    """
    no_row = t.row_start.shape[0]
    owner = t.causal_row[first : first + 1]
    begins = torch.cat([t.row_query_start, t.row_query_start.new_zeros(1)])
    index = gather(begins, owner) + torch.arange(num_sinks, dtype=owner.dtype, device=owner.device)
    sink_row = torch.where(index < first, owner, no_row)
    return torch.clamp(index, max=first - 1), sink_row


def shared_blocks(inputs: PartInputs, dense: Dense | None = None, chunk: int | None = None) -> Partial:
    """Every query against every shared block, a bounded chunk of blocks at a time.

    Visibility is derived for each chunk too: a mask of rows by blocks would grow with the context.

    Args:
        dense, chunk: how a chunk is attended to, and its blocks; None = ``attend_dense``, ``scoring.chunks``.
    """
    q_QKGD, _, units, t, scoring, rule, _ = inputs
    num_queries, num_kv, group, _ = q_QKGD.shape
    block_size = units.layout.num_slots
    key_bytes = units.key_bytes
    chunk = chunk or scoring.chunks.shared(num_queries * num_kv * group, block_size, key_bytes)
    dense = dense or attend_dense
    # One more entry, for the row index of padding.
    stored = torch.cat([t.row_start, t.row_start.new_zeros(1)])[:, None]
    total = empty(q_QKGD, units.encoding.value_dim)
    for begin in range(0, t.shared_block.shape[0], chunk):
        some = slice(begin, begin + chunk)
        # Leading slots; below 0 for none, and beyond the block for all of it.
        visible_row_X = (stored - t.shared_start[some]) * t.shared_reads[:, some]
        seen = t.shared_block[some], visible_row_X, t.row
        ruled = None if rule is None else shared_visible(rule, t.positions, t.shared_start[some], block_size)
        partial = some_shared_blocks(q_QKGD, units, *seen, scoring, dense, ruled)
        total = merge(total, partial)
    return total


def some_shared_blocks(
    q_QKGD: torch.Tensor,
    units: KVUnits,
    block: torch.Tensor,
    visible_row_X: torch.Tensor,
    row: torch.Tensor,
    scoring: Scoring,
    dense: Dense,
    sparse_QXB: torch.Tensor | None = None,
) -> Partial:
    """Every query against one chunk of the shared blocks; gathered copies are freed on return.

    Args:
        sparse_QXB: slots that a rule shows each query; None = all.
    """
    block_size = units.layout.num_slots
    visible_QXB = leading_slots(gather(visible_row_X, row), block_size)
    if sparse_QXB is not None:
        visible_QXB = visible_QXB & sparse_QXB
    used_XB = leading_slots(visible_row_X.amax(dim=0), block_size)
    k_TKD, v_TKD = as_keys(*units.tile(block), used_XB)
    return dense(q_QKGD, k_TKD, v_TKD, visible_QXB.flatten(1), scoring)


def shared_rings(
    inputs: PartInputs, ring: RingStep, dense: Dense | None = None, query_slice: int | None = None
) -> Partial:
    """Tokens of prompt rows against their rings as of before the step.

    Args:
        dense, query_slice: see ``causal``.
    """
    t, window, scoring = inputs.tensors, inputs.window, inputs.scoring
    dense, step = dense or attend_dense, query_slice or scoring.slices.queries
    used_CW = ring.chunk_position >= 0
    k_TKD, v_TKD = as_keys(*inputs.scratch, used_CW)
    parts = []
    for q, row, position in zip(inputs.q.split(step), t.causal_row.split(step), t.positions.split(step)):
        visible_QCW = ring_mask(row, position, t.chunk_row, ring.chunk_position, window)
        parts.append(dense(q, k_TKD, v_TKD, visible_QCW.flatten(1), scoring))
    return Partial(*(torch.cat(list(x)) for x in zip(*parts)))


def unique_blocks(
    inputs: PartInputs, blocks: BlockStep, attend: Attend = attend, add: AddBlocks | None = None
) -> Partial:
    """Decode rows against the blocks that only they read, a bounded chunk of blocks at a time.

    Whole blocks come from the contiguous slice ``[0, NU)`` without a mask: each block is attended to by the
    queries of its owner, and the results are summed by owner. Blocks without an owner are excluded, so their
    content cannot leak. Tails are gathered and masked. A rule masks whole blocks too.

    Args:
        attend: for the tails.
        add: for the whole blocks, without a rule; None = ``merge_by_owner``.
    """
    q_NKHD, _, units, t, scoring, rule, _ = inputs
    add = add or merge_by_owner
    num_rows, num_kv, heads, dim = q_NKHD.shape
    key_bytes = units.key_bytes
    chunk = scoring.chunks.unique(num_rows, num_kv * heads, units.layout.num_slots, dim, key_bytes)
    total = tails(inputs, blocks, attend)
    for begin in range(0, t.owner.shape[0], chunk):
        owner = t.owner[begin : begin + chunk]
        k, v = units.tile(slice(begin, begin + len(owner)))
        visible = None
        if rule is not None:
            start = t.owner_start[begin : begin + chunk]
            visible = whole_visible(rule, blocks.end, owner, start, units.layout.num_slots)
        total = add_blocks(total, q_NKHD, k, v, owner, scoring, add, visible)
    return total


def tails(inputs: PartInputs, blocks: BlockStep, attend: Attend = attend) -> Partial:
    """Decode rows against the blocks that not every token of them sees whole."""
    q_NKHD, _, units, t, scoring, rule, _ = inputs
    k, v = units.tile(t.tail_block.view(-1))
    num_tails = t.tail_block.shape[1]
    k_NKSD, v_NKSD = side_by_side(k, num_tails), side_by_side(v, num_tails)
    num_slots = units.layout.num_slots
    visible, unused, _ = blocks.masks or (seen_mask(blocks.tails, num_slots), None, None)
    if rule is not None:
        visible = visible & tails_visible(rule, blocks.end, t.tail_start, num_slots)
    return own_units(q_NKHD, k_NKSD, v_NKSD, visible, scoring, attend, unused)


def side_by_side(x_XKSD: torch.Tensor, num: int) -> torch.Tensor:
    """Units, ``num`` after ``num``, as one each: ``[X / num, K, num * S, D]``."""
    return x_XKSD if num == 1 else x_XKSD.unflatten(0, (-1, num)).transpose(1, 2).flatten(2, 3)


def unique_rings(inputs: PartInputs, ring: RingStep, attend: Attend = attend) -> Partial:
    """Decode rows against their ring, which is the contiguous slice ``[0, N)`` of the store."""
    units, num_rows = inputs.units, inputs.q.shape[0]
    visible, unused, _ = ring.masks or (seen_mask(ring.seen, units.layout.num_slots), None, None)
    tiles = units.tile(slice(0, num_rows))
    return own_units(inputs.q, *tiles, visible, inputs.scoring, attend, unused)


def rows_in_rings(inputs: PartInputs, ring: RingStep) -> torch.Tensor:
    """Attention of decode rows whose ring is all that they see: ``[N, K, M * G, D]``.

    No partial is made, since nothing is merged. A token that sees no slot gets any finite result: no decode
    row has one.
    """
    assert ring.masks is not None, "expected masks of rings"
    q_NKHD, (visible_NKMS, unused_NKS1, _) = inputs.q, ring.masks
    k_NKSD, v_NKSD = inputs.units.tile(slice(0, q_NKHD.shape[0]))
    scores = soften(torch.matmul(q_NKHD, k_NKSD.transpose(2, 3)), inputs.scoring)
    decode_len = visible_NKMS.shape[2]
    if decode_len == 1:
        scores = scores.masked_fill(unused_NKS1.transpose(2, 3), FLOOR)
    else:
        visible = visible_NKMS.repeat_interleave(q_NKHD.shape[2] // decode_len, dim=2)
        scores = torch.where(visible, scores, FLOOR)
    weights = torch.softmax(scores, dim=-1).to(v_NKSD.dtype)
    return torch.matmul(weights, v_NKSD.masked_fill(unused_NKS1, 0))


def own_units(
    q_NKHD: torch.Tensor,
    k_NKSD: torch.Tensor,
    v_NKSD: torch.Tensor,
    visible_NKMS: torch.Tensor,
    scoring: Scoring,
    attend: Attend = attend,
    unused_NKS1: torch.Tensor | None = None,
) -> Partial:
    """The tokens of row ``n`` against the slots of unit ``n`` that each of them sees.

    Args:
        unused_NKS1: slots that no token of the row sees; None = derived.
    """
    decode_len = visible_NKMS.shape[2]
    scores = soften(torch.matmul(q_NKHD, k_NKSD.transpose(2, 3)), scoring)
    if unused_NKS1 is not None:
        values = v_NKSD.masked_fill(unused_NKS1, 0)
    elif decode_len == 1:
        values = torch.where(visible_NKMS[:, :, 0, :, None], v_NKSD, 0)
    else:
        values = torch.where(visible_NKMS.any(dim=2)[..., None], v_NKSD, 0)
    if decode_len > 1:
        visible_NKMS = visible_NKMS.repeat_interleave(q_NKHD.shape[2] // decode_len, dim=2)
    return attend(scores, visible_NKMS, values)
