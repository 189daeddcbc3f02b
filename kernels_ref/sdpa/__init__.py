"""The parts on CPU: torch's fused flash attention for prompts, batched products for decodes.

On CPU the host is the device, so these kernels may read the plan: each prompt row attends to exactly its own
keys, mostly without a mask, with no cost for padding or other rows; decodes read exactly the blocks they own.
This is encapsulated in operators of static output shape, so captured steps stay static, and a compiled layer
does not depend on the length of the context.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch

from bias_builders import Held, Leading, TopBlocks, Window, encode_rule, seen_mask
from kernels_ref import reference
from kernels_ref import units as index
from kernels_ref.decoding import DecodingKernels
from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.pages import PageStep, write_bounds
from kernels_ref.partial import Partial, Scoring, finish
from kernels_ref.reference import causal_of_some, rows_in_rings
from kernels_ref.sdpa import decode, prefill, sparse
from kernels_ref.sdpa import prefill as shared
from kernels_ref.sdpa import prefill as sums
from kernels_ref.sparse import TileStep
from kernels_ref.step import BlockStep, PartInputs, RingStep, StepTensors
from kernels_ref.units import KVRecord, KVUnits, decoded_units, floats, stored_floats
from kernels_ref.x86 import codes
from kernels_ref.x86 import library as x86

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

_NAMESPACE = "hpu_duo_kernels"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def register(
    name: str, arguments: str, function: Callable[..., Any], *, weighs: bool = False
) -> Callable[..., Any]:
    """Register a CPU operator that returns a partial of its first argument.

    Args:
        arguments: its schema; the first are the queries ``[*, K, G, D]``, keys and values.
        function: called with CPU tensors; may read them.
        weighs: whether it also returns a weight for each slot of its second argument, ``[*, K, S]``.
    """
    returned = f"(Tensor, Tensor, Tensor{', Tensor' if weighs else ''})"
    return define(name, arguments, returned, function, _shapes_with_weights if weighs else _shapes)


def define(
    name: str, arguments: str, returned: str, function: Callable[..., Any], shapes: Callable[..., Any]
) -> Callable[..., Any]:
    """Register a CPU operator.

    Args:
        arguments, returned: its schema.
        function: called with CPU tensors; may read them.
        shapes: the same, with empty tensors.
    """
    _library.define(f"{name}({arguments}) -> {returned}")
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shapes, lib=_library)
    operator: Callable[..., Any] = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return operator


def _shapes(
    queries: torch.Tensor, _: object, values: torch.Tensor, *__: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    attn = queries.new_empty((*queries.shape[:-1], values.shape[-1]), dtype=torch.float32)
    return attn, attn.new_empty(attn.shape[:-1]), attn.new_empty(attn.shape[:-1])


def _shapes_with_weights(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object
) -> tuple[torch.Tensor, ...]:
    return *_shapes(queries, keys, values), queries.new_empty(
        *queries.shape[:2], keys.shape[2], dtype=torch.float32
    )


def _write(
    k_flat: torch.Tensor, v_flat: torch.Tensor, place: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    index.write(k_flat, place, k)
    index.write(v_flat, place, v)


_store_library = torch.library.Library("hpu_duo_kernels", "FRAGMENT")
_store_library.define(
    "write_kv(Tensor(a!) k_flat, Tensor(b!) v_flat, Tensor place, Tensor k, Tensor v) -> ()"
)
_store_library.impl("write_kv", _write, "CPU")
torch.library.register_fake("hpu_duo_kernels::write_kv", lambda *_: None, lib=_store_library)


def write_as_operator(units: KVUnits, place: torch.Tensor, record: KVRecord) -> None:
    """``kernels_ref.units.write_kv``, of stores of two tensors as an operator that declares its mutations."""
    if len(units.tensors) == 2:
        torch.ops.hpu_duo_kernels.write_kv.default(*units.tensors, place, *record.tensors)
    else:
        index.write_kv(units, place, record)


# The compilers of torch 2.7 and 2.9 may copy a whole store that is written. That of 2.13 writes in place, and
# fuses the write into an existing loop.
write_kv = write_as_operator if torch.__version__ < "2.13" else index.write_kv

_ROWS = "Tensor row_start, Tensor row_num_new, Tensor row_query_start, Tensor causal_row"
_QKV = "Tensor q, Tensor k, Tensor v"
_causal = register("causal", f"{_QKV}, {_ROWS}, int sink, int recent, int band_queries", prefill.causal)
_shared_blocks = register(
    "shared_blocks",
    f"{_QKV}, Tensor row_start, Tensor row_num_new, Tensor row_query_start, Tensor shared_block, "
    "Tensor shared_start, Tensor shared_reads, int context_blocks",
    shared.shared_blocks,
)
_chosen_blocks = register(
    "chosen_blocks",
    f"{_QKV}, {_ROWS}, Tensor write_block, Tensor shared_block, Tensor shared_start, Tensor shared_reads, "
    "int num_blocks, int context_blocks",
    sparse.chosen_blocks,
)
_chosen_pages = define(
    "chosen_pages",
    "Tensor q, Tensor low, Tensor high, Tensor table, Tensor number, Tensor? stored, Tensor? due, int most",
    "Tensor",
    sparse.chosen_pages,
    lambda q, *others: q.new_empty((*q.shape[:2], others[-1]), dtype=torch.int32),
)
_shared_rings = register(
    "shared_rings",
    f"{_QKV}, {_ROWS}, Tensor chunk_row, Tensor chunk_position, int sink, int recent",
    prefill.shared_rings,
)
_unique_blocks = register(
    "unique_blocks",
    f"{_QKV}, Tensor owner, Tensor tail_block, Tensor tail_visible, float softcap, int decode_slots",
    decode.unique_blocks,
)
_sparse_causal = register(
    "sparse_causal", f"{_QKV}, {_ROWS}, int[] rule, int band_queries", sparse.sparse_causal
)
_sparse_shared = register(
    "sparse_shared",
    f"{_QKV}, Tensor row_start, Tensor row_num_new, Tensor row_query_start, Tensor shared_block, "
    "Tensor shared_start, Tensor shared_reads, int[] rule, int band_queries, int context_blocks",
    sparse.sparse_shared,
)
_sparse_unique = register(
    "sparse_unique",
    f"{_QKV}, Tensor owner, Tensor owner_start, Tensor tail_block, Tensor tail_start, Tensor tail_visible, "
    "Tensor end, int[] rule, float softcap, int decode_slots",
    sparse.sparse_unique,
)
_leading_rings = register("leading_rings", f"{_QKV}, Tensor visible, float softcap", decode.leading_rings)
_column_sums = define(
    "column_sums",
    "Tensor q, Tensor lse, Tensor k, Tensor? slots, Tensor start, Tensor num_new, Tensor token, "
    "int? num_observed",
    "Tensor",
    sums.column_sums,
    sums.shapes,
)
_rings_with_weights = register(
    "rings_with_weights",
    f"{_QKV}, Tensor visible, Tensor? sinks, float softcap",
    decode.rings_with_weights,
    weighs=True,
)
_held_rings = register(
    "held_rings",
    f"{_QKV}, Tensor position, Tensor begin, Tensor end, int sink, float softcap",
    decode.held_rings,
)


def causal(inputs: PartInputs) -> Partial:
    """Tokens of prompt rows against the new keys of their own row."""
    q_QKGD, new, _, t, scoring, rule, _ = inputs
    _refuse(scoring)
    if rule is not None and not isinstance(rule, Window):
        plan = (*_row_plan(t), encode_rule(rule), scoring.slices.band_queries)
        return Partial(*_sparse_causal(q_QKGD, new.k, new.v, *plan))
    sizes = (*(rule or (0, 0)), scoring.slices.band_queries)
    return Partial(*_causal(q_QKGD, new.k, new.v, *_row_plan(t), *sizes))


def shared_blocks(inputs: PartInputs) -> Partial:
    """Every row against the shared blocks that it sees."""
    q_QKGD, _, units, t, scoring, rule, _ = inputs
    _refuse(scoring)
    tokens = t.row_start, t.row_num_new, t.row_query_start
    plan = (*tokens, t.shared_block, t.shared_start, t.shared_reads)
    kv_format = units.encoding.format
    if not (kv_format.is_floats if rule is None else kv_format.is_plain):
        return _on_decoded_chunks.shared_blocks(inputs)
    if rule is not None:
        kv = floats(units)
        sizes = encode_rule(rule), scoring.slices.band_queries, scoring.slices.context_blocks
        return Partial(*_sparse_shared(q_QKGD, *kv, *plan, *sizes))
    return Partial(*_shared_blocks(q_QKGD, *stored_floats(units), *plan, scoring.slices.context_blocks))


def chosen_blocks(inputs: PartInputs, tiles: TileStep, choice: TopBlocks) -> Partial:
    """Tokens of prompt rows against their chosen blocks; others are not read."""
    q_QKGD, _, units, t, scoring, _, _ = inputs
    _refuse(scoring)
    if not units.encoding.format.is_plain:
        return _on_decoded_chunks.chosen_blocks(inputs, tiles, choice)
    shared = t.shared_block, t.shared_start, t.shared_reads
    sizes = choice.num_blocks, scoring.slices.context_blocks
    return Partial(*_chosen_blocks(q_QKGD, *floats(units), *_row_plan(t), t.write_block, *shared, *sizes))


def chosen_pages(
    q_NKGD: torch.Tensor,
    low_XKD: torch.Tensor,
    high_XKD: torch.Tensor,
    plan: PageStep,
    stored: tuple[torch.Tensor, torch.Tensor] | None,
    most: int,
) -> torch.Tensor:
    """Pages of all rows; bounds are read only of rows that choose."""
    numbers = plan.table, plan.number, *(stored or (None, None))
    found: torch.Tensor = _chosen_pages(q_NKGD, low_XKD, high_XKD, *numbers, most)
    return found


def shared_rings(inputs: PartInputs, ring: RingStep) -> Partial:
    """Tokens of prompt rows against their rings as of before the step."""
    t = inputs.tensors
    _refuse(inputs.scoring)
    plan = (*_row_plan(t), t.chunk_row, ring.chunk_position, *inputs.window)
    return Partial(*_shared_rings(inputs.q, *inputs.scratch, *plan))


def unique_blocks(inputs: PartInputs, blocks: BlockStep) -> Partial:
    """Decode rows against the blocks that only they read.

    Without a native kernel, a short slice costs less as plain tensor code, which a compiler fuses, than as an
    operator.
    """
    q_NKHD, _, units, t, scoring, rule, _ = inputs
    plan, kv_format = (t.owner, t.tail_block, blocks.tails.visible), units.encoding.format
    if not kv_format.is_floats and rule is None and scoring.softcap is None and codes.fits(q_NKHD, units):
        return codes.attend_blocks(q_NKHD, units, *plan)
    if not (kv_format.is_floats if rule is None else kv_format.is_plain):
        return _on_decoded_chunks.unique_blocks(inputs, blocks)
    if rule is not None:
        k, v = floats(units)
        tails = (t.tail_block, t.tail_start, blocks.tails.visible)
        sizes = encode_rule(rule), scoring.softcap or 0.0, scoring.slices.decode_slots
        numbers = (t.owner, t.owner_start, *tails, blocks.end, *sizes)
        return Partial(*_sparse_unique(q_NKHD, k, v, *numbers))
    k, v = stored_floats(units)
    if scoring.softcap is None and x86.fits_rows(q_NKHD, k, v):
        return x86.attend_blocks(q_NKHD, k, v, *plan)
    if not kv_format.is_plain:
        return _on_decoded_chunks.unique_blocks(inputs, blocks)
    if decode.is_short(q_NKHD, blocks.tails, (t.owner.shape[0] + 1) * units.layout.num_slots):
        return decode.short_blocks(inputs, blocks)
    if t.owner.shape[0] <= scoring.slices.short_blocks:
        return reference.unique_blocks(inputs, blocks)
    bounds = scoring.softcap or 0.0, scoring.slices.decode_slots
    return Partial(*_unique_blocks(q_NKHD, k, v, *plan, *bounds))


def unique_rings(inputs: PartInputs, ring: RingStep) -> Partial:
    """Decode rows against their rings."""
    q_NKHD, units, scoring = inputs.q, inputs.units, inputs.scoring
    if not units.encoding.format.is_floats:
        # Codes are read in order of their slots only.
        if isinstance(ring.seen, Leading) and scoring.softcap is None and codes.fits(q_NKHD, units):
            return codes.attend_rings(q_NKHD, units, ring.seen.visible)
        return reference.unique_rings(inputs, ring)
    k, v = stored_floats(units)
    seen, is_ours = ring.seen, scoring.softcap is None and x86.fits_rows(q_NKHD, k, v)
    if not (is_ours or units.encoding.format.is_plain):
        k, v = decoded_units(units)
    if isinstance(seen, Held):
        run = x86.attend_held if is_ours else _held_rings
        cap = () if is_ours else (scoring.softcap or 0.0,)
        return Partial(*run(q_NKHD, k, v, *seen, *cap))
    if is_ours:
        return x86.attend_rings(q_NKHD, k, v, seen.visible)
    if decode.is_short(q_NKHD, seen, units.layout.num_slots):
        visible = seen_mask(seen, units.layout.num_slots)[:, 0, 0]
        return decode.attend_units(q_NKHD, k[:1], v[:1], visible, scoring)
    return Partial(*_leading_rings(q_NKHD, k, v, seen.visible, scoring.softcap or 0.0))


def unique_with_weights(inputs: PartInputs, ring: RingStep) -> tuple[Partial, torch.Tensor]:
    """Decode rows against their own slots, with the weight of each slot."""
    assert isinstance(ring.seen, Leading), "expected leading slots of a budget to be visible"
    q_NKGD, _, units, _, scoring, _, sinks_KG = inputs
    if not units.encoding.format.is_floats:
        return reference.unique_with_weights(inputs, ring)
    visible, (k, v) = ring.seen.visible, stored_floats(units)
    if scoring.softcap is None and x86.fits_rows(q_NKGD, k, v):
        return x86.attend_with_weights(q_NKGD, k, v, visible, sinks_KG)
    *partial, mass = _rings_with_weights(
        q_NKGD, *decoded_units(units), visible, sinks_KG, scoring.softcap or 0.0
    )
    return Partial(*partial), mass


def column_sums(
    inputs: PartInputs,
    lse_QKG: torch.Tensor,
    slots_PKCD: torch.Tensor | None,
    chunk: ChunkStep,
    num_observed: int | None,
) -> torch.Tensor:
    """Sums of the weights of prompt rows by slot and new key."""
    q_QKGD, k_QKD = inputs.q, inputs.new.k
    if inputs.scoring.softcap is not None or not x86.fits_tiles(q_QKGD, k_QKD):
        return reference.column_sums(inputs, lse_QKG, slots_PKCD, chunk, num_observed)
    plan = chunk.start, chunk.num_new, chunk.token
    total: torch.Tensor = _column_sums(q_QKGD, lse_QKG, k_QKD, slots_PKCD, *plan, num_observed)
    return total


def eviction_victims(
    score_NKC: torch.Tensor | None, position_NKC: torch.Tensor, is_protected: torch.Tensor | None
) -> torch.Tensor:
    """The eviction victim of each head."""
    run = x86.eviction_victims if x86.fits_slots(position_NKC) else reference.eviction_victims
    return run(score_NKC, position_NKC, is_protected)


def _row_plan(t: StepTensors) -> tuple[torch.Tensor, ...]:
    return t.row_start, t.row_num_new, t.row_query_start, t.causal_row


def _refuse(scoring: Scoring) -> None:
    if scoring.softcap is not None:
        raise ValueError(f"torch's fused attention has no soft cap, got softcap={scoring.softcap}")


_on_decoded_chunks = DecodingKernels(cast("Any", sys.modules[__name__]), tile=codes.tile)
"""These kernels where they do not read a format in place: torch's operators would widen whole stores."""
