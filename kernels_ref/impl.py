"""Implementations of the kernels that compute the parts.

Where a compiler traces them, their long loops are operators in its graph; see ``kernels_ref.loops``.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from bias_builders import TopBlocks
from kernels_ref import loops
from kernels_ref.chunks import MOST_CAUSAL, MOST_RINGS, QUERY_STEP, even_size, looped_rounds, num_parts
from kernels_ref.hpu.attention import NO_OPERATORS, FusedOperators
from kernels_ref.hpu.parts import FusedKernels, causal_slice, ring_slice
from kernels_ref.loops import How, as_operator, loop, run_body
from kernels_ref.partial import Partial, Scoring, empty
from kernels_ref.sparse import MASK_BYTES
from kernels_ref.step import PartInputs, StepParts, StepTensors
from kernels_ref.units import KVRecord, KVUnits

if TYPE_CHECKING:
    from kernels_ref.formats import KVFormat
    from kernels_ref.groups.column_sums import ChunkStep
    from kernels_ref.pages import PageStep
    from kernels_ref.sparse import TileStep
    from kernels_ref.step import BlockStep, RingStep


class Implementation(str, Enum):
    """``reference``: portable torch. ``sdpa``: torch's fused CPU attention. ``triton``: CUDA kernels.
    ``hpu``: the fused operators of Gaudi's software.
    """

    REFERENCE = "reference"
    SDPA = "sdpa"
    TRITON = "triton"
    HPU = "hpu"

    @property
    def reads_floats(self) -> bool:
        """Whether its kernels read keys and values by pointer, hence floats only."""
        return self in (Implementation.SDPA, Implementation.TRITON)

    def serves(self, kv_format: KVFormat) -> bool:
        """Whether its kernels take units of a format; those of ``sdpa`` decode what they do not read."""
        if kv_format.is_plain or self is not Implementation.TRITON:
            return True
        from kernels_ref.triton.launch import KINDS

        return type(kv_format.keys) in KINDS and type(kv_format.values) in KINDS

    @property
    def reads_masks(self) -> bool:
        """Whether its kernels for decode rows read masks of slots, which a step derives once."""
        return not self.reads_floats


class Kernels(Protocol):
    """The parts; see ``kernels_ref.reference`` for what each one computes.

    An implementation reads stores through ``KVUnits``, and visibility from the step: leading slots where
    positions are in order, else an interval of positions for each query. ``inputs.rule`` hides more by
    position.
    """

    def causal(self, inputs: PartInputs) -> Partial:
        """Tokens of prompt rows against the new keys of their own row."""
        ...

    def causal_of_some(self, inputs: PartInputs, keys: StepTensors) -> Partial:
        """Some tokens of prompt rows against the new keys of their own row, whose plan is ``keys``."""
        ...

    def shared_blocks(self, inputs: PartInputs) -> Partial:
        """Every query against the blocks that several rows read, or a prompt row."""
        ...

    def chosen_blocks(self, inputs: PartInputs, tiles: TileStep, choice: TopBlocks) -> Partial:
        """Tokens of prompt rows against the blocks that are chosen for them; see ``kernels_ref.sparse``."""
        ...

    def chosen_pages(
        self,
        q_NKGD: torch.Tensor,
        low_XKD: torch.Tensor,
        high_XKD: torch.Tensor,
        plan: PageStep,
        kept: tuple[torch.Tensor, torch.Tensor] | None,
        most: int,
    ) -> torch.Tensor:
        """Blocks that decode rows read, chosen by bounds of keys; see ``kernels_ref.pages``."""
        ...

    def write_bounds(self, units: KVUnits, plan: PageStep, block_size: int) -> None:
        """Write the bounds of the keys of blocks with new tokens; see ``kernels_ref.pages``."""
        ...

    def shared_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Tokens of prompt rows against their rings as of before the step, by ``tensors.chunk_row``."""
        ...

    def unique_blocks(self, inputs: PartInputs, blocks: BlockStep) -> Partial:
        """Decode rows against the blocks that only they read."""
        ...

    def unique_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Decode rows against their own ring."""
        ...

    def rows_in_rings(self, inputs: PartInputs, ring: RingStep) -> torch.Tensor:
        """Attention of decode rows whose ring is all that they see: ``[N, K, M * G, D]``, by masks."""
        ...

    def unique_with_weights(self, inputs: PartInputs, ring: RingStep) -> tuple[Partial, torch.Tensor]:
        """Decode rows against their own slots, with weights; see ``kernels_ref.groups.budget_slots``."""
        ...

    def column_sums(
        self,
        inputs: PartInputs,
        lse_QKG: torch.Tensor,
        slots_PKCD: torch.Tensor | None,
        chunk: ChunkStep,
        num_observed: int | None,
    ) -> torch.Tensor:
        """Sums of the weights of prompt rows by slot and new key; see ``kernels_ref.groups.column_sums``."""
        ...

    def eviction_victims(
        self,
        score_NKC: torch.Tensor | None,
        position_NKC: torch.Tensor,
        is_protected: torch.Tensor | None,
    ) -> torch.Tensor:
        """The eviction victim of each head; see ``kernels_ref.groups.budget_slots``."""
        ...

    def write_kv(self, units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
        """Write the keys and values of new tokens; see ``kernels_ref.units.write_kv``."""
        ...

    def finish(
        self,
        q_QKGD: torch.Tensor,
        of_tokens: list[Partial],
        of_rows: Partial | None,
        decode_slot: torch.Tensor,
        sinks_KG: torch.Tensor | None,
    ) -> torch.Tensor:
        """Merge, add sink logits, normalise; see ``kernels_ref.partial.finish``."""
        ...


def kernels(impl: Implementation, operators: FusedOperators = NO_OPERATORS) -> Kernels:
    """Return an implementation; optional packages are imported only here.

    Args:
        operators: fused operators for ``hpu``.
    """
    match impl:
        case Implementation.REFERENCE:
            from kernels_ref import reference

            return reference
        case Implementation.SDPA:
            from kernels_ref import sdpa

            return sdpa
        case Implementation.TRITON:
            from kernels_ref.triton import parts

            return parts
        case Implementation.HPU:
            from kernels_ref.hpu.parts import FusedKernels

            return FusedKernels(operators)


def looped(run: Kernels, scoring: Scoring, operators: FusedOperators, parts: StepParts) -> Kernels:
    """Return kernels whose loops are operators where a compiler traces them; ``run`` itself otherwise.

    Args:
        run: portable kernels, or those on fused operators.
        operators: that ``run`` calls.
        parts: that the step runs.
    """
    most = scoring.chunks.most_inline
    if most is None or not torch.compiler.is_dynamo_compiling():
        return run
    # With new keys a graph would be too large even if both parts are short, so it is cut between them.
    most_shared = 0 if parts.causal else most
    most_unique = 0 if parts.causal and not parts.shared else most
    return LoopedKernels(operators, most, most_shared, min(most, MOST_RINGS), most_unique)


@dataclass(frozen=True)
class LoopedKernels(FusedKernels):
    """Kernels whose parts stay in the graph only if they are a few slices or chunks long.

    Args:
        operators: the fused operators, or none.
        most: slices of the causal part that stay.
        most_shared, most_rings, most_unique: chunks of the shared part, slices that read rings, and chunks of
            the unique part that stay.
    """

    most: int = 0
    most_shared: int = 0
    most_rings: int = 0
    most_unique: int = 0

    def causal(self, inputs: PartInputs) -> Partial:
        """Tokens of prompt rows against the new keys of their own row."""
        t, num_queries, scoring = inputs.tensors, inputs.q.shape[0], inputs.scoring
        most, most_slices = scoring.slices.queries, self.most
        if self.fuses(scoring):
            most = causal_slice(inputs)
            most_slices = MOST_CAUSAL if inputs.rule is None else self.most
        if num_parts(num_queries, most) <= most_slices or self.has_one_band(inputs):
            return super().causal(inputs)
        size = even_size(num_queries, most, QUERY_STEP)
        value_dim = inputs.new.v.shape[-1]
        how = How(scoring, self.operators, size, t.row_start.shape[0], rule=inputs.rule, value_dim=value_dim)
        plan = (t.causal_row, t.positions, t.row_query_start)
        return as_operator("causal", inputs.q, (*inputs.new, *plan), how)

    def shared_blocks(self, inputs: PartInputs) -> Partial:
        """Every query against the blocks that several rows read, or a prompt row."""
        q_QKGD, _, units, t, scoring, rule, _ = inputs
        num_queries, num_kv, group, _ = q_QKGD.shape
        slots, key_bytes = units.layout.num_slots, units.key_bytes
        if self.fuses(scoring):
            element_bytes = q_QKGD.element_size() + (0 if rule is None else MASK_BYTES)
            size = scoring.chunks.masked(num_queries, slots, key_bytes, element_bytes)
        else:
            size = scoring.chunks.shared(num_queries * num_kv * group, slots, key_bytes)
        num_blocks = t.shared_block.shape[0]
        num_chunks = num_parts(num_blocks, size)
        if num_chunks <= self.most_shared:
            return super().shared_blocks(inputs)
        rounds = looped_rounds(num_chunks)
        size = num_parts(num_blocks, num_parts(num_chunks, rounds) * rounds)
        how = How(
            scoring,
            self.operators,
            size,
            rounds=rounds,
            layout=units.layout,
            rule=rule,
            format=units.encoding.format,
            value_dim=units.encoding.value_dim,
        )
        plan = [t.row_start, t.row, t.shared_block, t.shared_start, t.shared_reads]
        plan += [] if rule is None else [t.positions]
        return as_operator("shared_blocks", q_QKGD, (*units.tensors, *plan), how)

    def shared_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Tokens of prompt rows against their rings as of before the step."""
        t, num_queries, scoring = inputs.tensors, inputs.q.shape[0], inputs.scoring
        most = ring_slice(inputs, ring) if self.fuses(scoring) else scoring.slices.queries
        if num_parts(num_queries, most) <= self.most_rings:
            return super().shared_rings(inputs, ring)
        size = even_size(num_queries, most, QUERY_STEP)
        value_dim = inputs.new.v.shape[-1]
        how = How(scoring, self.operators, size, rule=inputs.window, value_dim=value_dim)
        plan = (t.causal_row, t.positions, t.chunk_row, ring.chunk_position)
        return as_operator("shared_rings", inputs.q, (*inputs.scratch, *plan), how)

    def unique_blocks(self, inputs: PartInputs, blocks: BlockStep) -> Partial:
        """Decode rows against the blocks that only they read."""
        q_NKHD, _, units, t, scoring, rule, _ = inputs
        num_rows, num_kv, heads, dim = q_NKHD.shape
        key_bytes = units.key_bytes
        size = scoring.chunks.unique(num_rows, num_kv * heads, units.layout.num_slots, dim, key_bytes)
        num_blocks = t.owner.shape[0]
        if num_parts(num_blocks, size) <= self.most_unique:
            return super().unique_blocks(inputs, blocks)
        if num_parts(num_blocks, size) > 1:
            # Several chunks outside the graph are gathered, as in the shared part.
            size = even_size(num_blocks, scoring.chunks.gathered(size, key_bytes))
        none = inputs._replace(tensors=t._replace(owner=t.owner[:0]))
        total = super().unique_blocks(none, blocks)
        encoding = units.encoding
        how = How(
            scoring,
            self.operators,
            size,
            rule=rule,
            layout=units.layout,
            format=encoding.format,
            value_dim=encoding.value_dim,
        )
        plan = (t.owner,) if rule is None else (t.owner, t.owner_start, blocks.end)
        return as_operator("unique_blocks", q_NKHD, (*total, *units.tensors, *plan), how)


@loop
def causal(q_QKGD: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Each slice of queries against the slices of keys that it can reach, and the sinks before them."""
    k_QKD, v_QKD, causal_row, positions, row_query_start = tensors
    new = *(x.contiguous() for x in (q_QKGD, k_QKD, v_QKD)), causal_row, positions
    num_slices, rule = num_parts(len(q_QKGD), how.size), how.rule
    num_reached = num_slices if rule is None else loops.slices_reached(rule, how.size, num_slices)
    has_sinks = rule is not None and rule.sink > 0
    nothing = empty(q_QKGD.new_empty(how.size, *q_QKGD.shape[1:]), how.value_dim or None)
    zero = _zero(q_QKGD)
    number, parts = zero, []
    for place in range(num_slices):
        total: Sequence[torch.Tensor] = nothing
        if has_sinks and place > num_reached:
            total = run_body(loops.sinks_before, how, number, *new, row_query_start)
        back = zero
        for _ in range(min(place, num_reached) + 1):
            *total, back = run_body(loops.own_keys, how, number, back, *total, *new)
        parts.append(total)
        number = number + 1
    return _joined(parts, len(q_QKGD))


@loop
def shared_blocks(q_QKGD: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Every query against some chunks of shared blocks after the other."""
    q_QKGD, number = q_QKGD.contiguous(), _zero(q_QKGD)
    num, has_rule = how.format.num_tensors, how.rule is not None
    block, rest = tensors[num + 2], (q_QKGD, *(tensors if has_rule else tensors[: num + 5]))
    total: Sequence[torch.Tensor] = empty(q_QKGD, how.value_dim or None)
    for _ in range(num_parts(len(block), how.size * how.rounds)):
        *total, number = run_body(loops.shared_chunk, how, number, *total, *rest)
    return Partial(*total)


@loop
def shared_rings(q_QKGD: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Each slice of queries against the rings of prompts."""
    rest, number, parts = (q_QKGD.contiguous(), *tensors), _zero(q_QKGD), []
    for _ in range(num_parts(len(q_QKGD), how.size)):
        *part, number = run_body(loops.rings, how, number, *rest)
        parts.append(part)
    return _joined(parts, len(q_QKGD))


@loop
def unique_blocks(q_NKHD: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Decode rows against one chunk of whole blocks after the other, merged into their partials."""
    seen, plan = tensors[:3], tensors[3:]
    owner, rest, number = plan[how.format.num_tensors], (q_NKHD.contiguous(), *plan), _zero(q_NKHD)
    # With the strides that the body returns, so that one region serves all chunks.
    total: Sequence[torch.Tensor] = loops.in_order(seen)
    for _ in range(num_parts(len(owner), how.size)):
        *total, number = run_body(loops.unique_chunk, how, number, *total, *rest)
    return Partial(*total)


def _zero(like: torch.Tensor) -> torch.Tensor:
    """Number of the first round of a loop, on the device; a body returns the next one."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def _joined(parts: Sequence[Sequence[torch.Tensor]], num_queries: int) -> Partial:
    """The partial of all queries from those of slices; the last one may have queries past the end."""
    return Partial(*(torch.cat(list(each))[:num_queries] for each in zip(*parts)))
