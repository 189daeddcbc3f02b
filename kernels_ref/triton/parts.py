"""The parts of unified attention by Triton kernels; see ``kernels_ref.reference`` for what each computes.

Shapes: as in ``kernels_ref.reference``. Bad shapes, types, devices and layouts raise ``ValueError``; so
does a device on which Triton cannot run.
"""

from __future__ import annotations

import torch

from bias_builders import Held, Window, encode_rule
from kernels_ref import units as portable
from kernels_ref.groups.budget_slots import eviction_victims
from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.pages import chosen_pages, write_bounds
from kernels_ref.partial import Partial
from kernels_ref.reference import causal_of_some, rows_in_rings
from kernels_ref.sparse import chosen_blocks
from kernels_ref.step import BlockStep, PartInputs, RingStep
from kernels_ref.triton import operators
from kernels_ref.triton.launch import (
    check_flat,
    check_leading,
    check_numbers,
    check_plan,
    check_queries,
    check_rings,
    check_scratch,
    check_sinks,
    check_store,
    check_stored,
    check_triple,
    check_vectors,
)
from kernels_ref.units import KVRecord, KVUnits

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

_NO_WINDOW = Window(0, 0)


def causal(inputs: PartInputs) -> Partial:
    """Tokens of prompt rows against the new keys of their own row."""
    q_QKGD, new, _, t, scoring, rule, _ = inputs
    check_queries("q_QKGD", q_QKGD)
    num_queries, num_heads, _, dim = q_QKGD.shape
    check_vectors("new.k", new.k, (num_queries, num_heads, dim), q_QKGD)
    check_vectors("new.v", new.v, (num_queries, num_heads, dim), q_QKGD)
    check_plan("causal_row", t.causal_row, (num_queries,), q_QKGD.device)
    check_plan("positions", t.positions, (num_queries,), q_QKGD.device)
    check_plan("row_query_start", t.row_query_start, (None,), q_QKGD.device)
    plan, softcap = (t.causal_row, t.positions, t.row_query_start), scoring.softcap or 0.0
    if rule is not None and not isinstance(rule, Window):
        return Partial(*operators.sparse_causal(q_QKGD, new.k, new.v, *plan, encode_rule(rule), softcap))
    return Partial(*operators.causal(q_QKGD, new.k, new.v, *plan, *(rule or _NO_WINDOW), softcap))


def shared_blocks(inputs: PartInputs) -> Partial:
    """Every query against the blocks that several rows read, or a prompt row."""
    q_QKGD, _, units, t, scoring, rule, _ = inputs
    check_queries("q_QKGD", q_QKGD)
    stored = check_stored(units, q_QKGD)
    num_rows, num_blocks = t.row_start.shape[0], t.shared_block.shape[0]
    check_plan("row", t.row, (q_QKGD.shape[0],), q_QKGD.device)
    check_plan("shared_block", t.shared_block, (None,), q_QKGD.device)
    check_plan("shared_start", t.shared_start, (num_blocks,), q_QKGD.device)
    check_plan("shared_reads", t.shared_reads, (num_rows + 1, num_blocks), q_QKGD.device)
    check_plan("row_start", t.row_start, (None,), q_QKGD.device)
    plan = (t.row_start, t.shared_block, t.shared_start, t.shared_reads)
    if rule is not None:
        check_plan("positions", t.positions, (q_QKGD.shape[0],), q_QKGD.device)
        ruled = (t.row, t.positions, *plan, encode_rule(rule), scoring.softcap or 0.0)
        return Partial(*operators.sparse_shared(q_QKGD, *stored[:2], *ruled, *stored.kinds))
    numbers = (t.row, *plan, scoring.softcap or 0.0)
    return Partial(*operators.shared_blocks(q_QKGD, *stored[:2], *numbers, *stored.kinds))


def shared_rings(inputs: PartInputs, ring: RingStep) -> Partial:
    """Tokens of prompt rows against their rings as of before the step."""
    q_QKGD, t, scratch = inputs.q, inputs.tensors, inputs.scratch
    check_queries("q_QKGD", q_QKGD)
    check_scratch(scratch, q_QKGD)
    num_queries, device = q_QKGD.shape[0], q_QKGD.device
    check_plan("causal_row", t.causal_row, (num_queries,), device)
    check_plan("positions", t.positions, (num_queries,), device)
    check_plan("row_start", t.row_start, (None,), device)
    check_plan("chunk_row", t.chunk_row, (scratch.k.shape[0],), device)
    check_plan("chunk_position", ring.chunk_position, (t.chunk_row.shape[0], scratch.k.shape[2]), device)
    plan = (t.causal_row, t.positions, t.row_start, t.chunk_row, ring.chunk_position)
    return Partial(
        *operators.shared_rings(q_QKGD, *scratch, *plan, *inputs.window, inputs.scoring.softcap or 0.0)
    )


def unique_blocks(inputs: PartInputs, blocks: BlockStep) -> Partial:
    """Decode rows against the blocks that only they read."""
    q_NKHD, _, units, t, scoring, rule, _ = inputs
    check_queries("q_NKHD", q_NKHD)
    stored = check_stored(units, q_NKHD)
    num_stored = stored.k.shape[0]
    num_rows, num_tails = q_NKHD.shape[0], t.tail_block.shape[-1]
    check_plan("owner", t.owner, (None,), q_NKHD.device)
    check_plan("tail_block", t.tail_block, (num_rows, num_tails), q_NKHD.device)
    check_plan("tails.visible", blocks.tails.visible, (num_rows, num_tails, None), q_NKHD.device)
    _check_tokens("tails.visible", blocks.tails.visible.shape[2], q_NKHD)
    if t.owner.shape[0] > num_stored:
        raise ValueError(
            f"expected owner to have at most {num_stored} entries, the blocks of units.k, "
            f"got {t.owner.shape[0]}"
        )
    if rule is not None:
        check_plan("owner_start", t.owner_start, (t.owner.shape[0],), q_NKHD.device)
        check_plan("tail_start", t.tail_start, (num_rows, num_tails), q_NKHD.device)
        check_plan("end", blocks.end, (num_rows, blocks.tails.visible.shape[2]), q_NKHD.device)
        tails = (t.tail_block, t.tail_start, blocks.tails.visible)
        numbers = (t.owner, t.owner_start, *tails, blocks.end, encode_rule(rule), scoring.softcap or 0.0)
        return Partial(*operators.sparse_unique(q_NKHD, *stored[:2], *numbers, *stored.kinds))
    plan = (t.owner, t.tail_block, blocks.tails.visible, scoring.softcap or 0.0)
    return Partial(*operators.unique_blocks(q_NKHD, *stored[:2], *plan, *stored.kinds))


def unique_rings(inputs: PartInputs, ring: RingStep) -> Partial:
    """Decode rows against their own ring."""
    q_NKHD, units, scoring = inputs.q, inputs.units, inputs.scoring
    stored = check_rings(q_NKHD, units)
    num_rows, device, seen = q_NKHD.shape[0], q_NKHD.device, ring.seen
    if not isinstance(seen, Held):
        plan = (check_leading(ring, q_NKHD), scoring.softcap or 0.0)
        return Partial(*operators.leading_rings(q_NKHD, *stored[:2], *plan, *stored.kinds))
    num_heads = seen.position.shape[1] if seen.position.dim() == 3 else 1
    check_plan("seen.position", seen.position, (num_rows, num_heads, stored.k.shape[2]), device)
    if num_heads not in (1, q_NKHD.shape[1]):
        raise ValueError(f"expected seen.position of 1 or {q_NKHD.shape[1]} heads, got {num_heads}")
    check_plan("seen.begin", seen.begin, (num_rows, None), device)
    check_plan("seen.end", seen.end, tuple(seen.begin.shape), device)
    _check_tokens("seen.end", seen.end.shape[1], q_NKHD)
    numbers = (*seen, scoring.softcap or 0.0, *stored.kinds)
    return Partial(*operators.held_rings(q_NKHD, *stored[:2], *numbers))


def unique_with_weights(inputs: PartInputs, ring: RingStep) -> tuple[Partial, torch.Tensor]:
    """Decode rows against their own slots, with the weight of each slot."""
    q_NKGD, _, units, _, scoring, _, sinks_KG = inputs
    stored = check_rings(q_NKGD, units)
    visible = check_leading(ring, q_NKGD)
    sinks = _checked_sinks(sinks_KG, q_NKGD)
    numbers = (visible, sinks, scoring.softcap or 0.0, *stored.kinds)
    *triple, mass = operators.rings_with_weights(q_NKGD, *stored[:2], *numbers)
    return Partial(*triple), mass


def column_sums(
    inputs: PartInputs,
    lse_QKG: torch.Tensor,
    slots_PKCD: torch.Tensor | None,
    chunk: ChunkStep,
    num_observed: int | None,
) -> torch.Tensor:
    """Sums of the weights of prompt rows by slot and new key; see ``kernels_ref.groups.column_sums``."""
    q_QKGD, k_QKD = inputs.q, inputs.new.k
    check_queries("q_QKGD", q_QKGD)
    num_queries, num_heads, group, dim = q_QKGD.shape
    check_vectors("k_QKD", k_QKD, (num_queries, num_heads, dim), q_QKGD)
    lse_QKG = lse_QKG.contiguous()
    check_numbers("lse_QKG", lse_QKG, (num_queries, num_heads, group), q_QKGD.device)
    num_rows, most_new = chunk.token.shape
    for name in ("start", "num_new"):
        check_plan(f"chunk.{name}", getattr(chunk, name), (num_rows,), q_QKGD.device)
    check_plan("chunk.token", chunk.token, (num_rows, most_new), q_QKGD.device)
    if slots_PKCD is not None:
        check_store("slots_PKCD", slots_PKCD, num_rows, q_QKGD)
    if num_observed is None:
        num_observed = most_new
    if num_observed < 1:
        raise ValueError(f"expected num_observed of 1 query or more, got {num_observed}")
    rows = (chunk.start, chunk.num_new, chunk.token, num_observed)
    sums: torch.Tensor = operators.column_sums(
        q_QKGD, lse_QKG, k_QKD, slots_PKCD, *rows, inputs.scoring.softcap or 0.0
    )
    return sums


def write_kv(units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
    """Write the keys and values of new tokens; see ``kernels_ref.units.write_kv``.

    Codes are written as the portable parts write them.
    """
    if not units.encoding.format.is_plain:
        portable.write_kv(units, index, record)
        return
    new = record.values
    check_queries("new.k", new.k[:, :, None])
    check_vectors("new.v", new.v, tuple(new.k.shape), new.k)
    k_flat, v_flat = check_flat(units, new.k)
    if index.dtype not in (torch.int32, torch.int64) or not index.is_contiguous():
        raise ValueError(f"expected index to be contiguous int32 or int64, got {index.dtype}")
    if index.shape != (new.k.shape[0] * new.k.shape[1],):
        raise ValueError(
            f"expected index to have shape [{new.k.shape[0] * new.k.shape[1]}], got {list(index.shape)}"
        )
    if index.device != new.k.device:
        raise ValueError(f"expected index on {new.k.device}, got {index.device}")
    operators.write_kv(k_flat, v_flat, index, new.k, new.v)


def finish(
    q_QKGD: torch.Tensor,
    of_tokens: list[Partial],
    of_rows: Partial | None,
    decode_slot: torch.Tensor,
    sinks_KG: torch.Tensor | None,
) -> torch.Tensor:
    """Merge the partials of tokens and of rows, add sink logits, normalise; see ``kernels_ref.partial``."""
    check_queries("q_QKGD", q_QKGD)
    if len(of_tokens) > 3:
        raise ValueError(f"expected of_tokens to have at most 3 partials, got {len(of_tokens)}")
    check_plan("decode_slot", decode_slot, (q_QKGD.shape[0],), q_QKGD.device)
    for partial in of_tokens:
        check_triple("of_tokens", partial, q_QKGD, q_QKGD.shape[0])
    if of_rows is not None:
        check_triple("of_rows", of_rows, q_QKGD, None)
    sinks_KG = _checked_sinks(sinks_KG, q_QKGD)
    flat = [tensor for partial in of_tokens for tensor in partial]
    return operators.finish(q_QKGD, flat, list(of_rows or ()), decode_slot, sinks_KG)


def _checked_sinks(sinks_KG: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Sink logits as a contiguous vector."""
    if sinks_KG is None:
        return None
    check_sinks("sinks_KG", sinks_KG, q)
    return sinks_KG.contiguous()


def _check_tokens(name: str, num_tokens: int, q_NKHD: torch.Tensor) -> None:
    if not num_tokens or q_NKHD.shape[2] % num_tokens:
        raise ValueError(
            f"expected {name} of a number of tokens that divides the {q_NKHD.shape[2]} query heads of a row, "
            f"got {num_tokens}"
        )
