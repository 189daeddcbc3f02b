"""Kernels whose long loops are operators in the graph of a compiled layer; see ``kernels_ref.loops``.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bias_builders import Window
from kernels_ref import bodies
from kernels_ref.hpu.operators import FusedOperators
from kernels_ref.hpu.parts import FusedKernels
from kernels_ref.loops import How, as_operator, loop, run_body
from kernels_ref.partial import Partial, empty
from kernels_ref.scoring import Scoring
from kernels_ref.step import StepParts, StepTensors
from kernels_ref.units import KVUnits, NewKV, Scratch

if TYPE_CHECKING:
    from kernels_ref.groups import BlockStep, RingStep
    from kernels_ref.impl import Kernels


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
    # Beside new keys a graph would be too large even if both parts are short, so it is cut between them.
    most_shared = 0 if parts.causal else most
    most_unique = 0 if parts.causal and not parts.shared else most
    return LoopedKernels(run, FusedKernels(operators), most, most_shared, most_unique)


@dataclass(frozen=True)
class LoopedKernels:
    """Kernels whose parts stay in the graph only if they are a few slices or chunks long.

    Args:
        inner: kernels of the parts that stay.
        fused: the fused operators, or none.
        most: slices of the causal part that stay.
        most_shared, most_unique: slices or chunks of the shared and of the unique part that stay.
    """

    inner: Kernels
    fused: FusedKernels
    most: int
    most_shared: int
    most_unique: int

    def causal(
        self, q_QKGD: torch.Tensor, new: NewKV, t: StepTensors, window: Window | None, scoring: Scoring
    ) -> Partial:
        """Tokens of prompt rows against the new keys of their own row."""
        size = self._slice(scoring)
        if _count(q_QKGD.shape[0], size) <= self.most:
            return self.inner.causal(q_QKGD, new, t, window, scoring)
        how = How(scoring, self.fused.operators, size, t.row_start.shape[0], window)
        plan = (t.causal_row, t.positions, t.row_query_start)
        return as_operator("causal", q_QKGD, (*new, *plan), how)

    def shared_blocks(
        self, q_QKGD: torch.Tensor, units: KVUnits, t: StepTensors, scoring: Scoring
    ) -> Partial:
        """Every query against the blocks that several rows read, or a prompt row."""
        num_queries, num_kv, group, _ = q_QKGD.shape
        slots, key_bytes = units.layout.num_slots, units.k[0].numel() * units.k.element_size()
        if self.fused.fuses(scoring):
            size = scoring.chunks.masked(num_queries, slots, key_bytes, q_QKGD.element_size())
        else:
            size = scoring.chunks.shared(num_queries * num_kv * group, slots, key_bytes)
        if _count(t.shared_block.shape[0], size) <= self.most_shared:
            return self.inner.shared_blocks(q_QKGD, units, t, scoring)
        how = How(scoring, self.fused.operators, size, layout=units.layout)
        plan = (t.row_start, t.row, t.shared_block, t.shared_start, t.shared_reads)
        return as_operator("shared_blocks", q_QKGD, (units.k_flat, units.v_flat, *plan), how)

    def shared_rings(
        self,
        q_QKGD: torch.Tensor,
        scratch: Scratch,
        t: StepTensors,
        ring: RingStep,
        window: Window,
        scoring: Scoring,
    ) -> Partial:
        """Tokens of prompt rows against what their ring held before the step."""
        size = self._slice(scoring)
        if _count(q_QKGD.shape[0], size) <= self.most_shared:
            return self.inner.shared_rings(q_QKGD, scratch, t, ring, window, scoring)
        how = How(scoring, self.fused.operators, size, window=window)
        plan = (t.causal_row, t.positions, t.chunk_row, ring.chunk_position)
        return as_operator("shared_rings", q_QKGD, (*scratch, *plan), how)

    def unique_blocks(
        self, q_NKHD: torch.Tensor, units: KVUnits, t: StepTensors, blocks: BlockStep, scoring: Scoring
    ) -> Partial:
        """Decode rows against the blocks that only they read."""
        num_rows, num_kv, heads, dim = q_NKHD.shape
        key_bytes = units.k[0].numel() * units.k.element_size()
        size = scoring.chunks.unique(num_rows, num_kv * heads, units.layout.num_slots, dim, key_bytes)
        if _count(t.owner.shape[0], size) <= self.most_unique:
            return self.inner.unique_blocks(q_NKHD, units, t, blocks, scoring)
        none = t._replace(owner=t.owner[:0])
        total = self.inner.unique_blocks(q_NKHD, units, none, blocks, scoring)
        how = How(scoring, self.fused.operators, size, layout=units.layout)
        return as_operator("unique_blocks", q_NKHD, (*total, units.k_flat, units.v_flat, t.owner), how)

    def unique_rings(self, q_NKHD: torch.Tensor, units: KVUnits, ring: RingStep, scoring: Scoring) -> Partial:
        """Decode rows against their own ring."""
        return self.inner.unique_rings(q_NKHD, units, ring, scoring)

    def write_kv(self, units: KVUnits, index: torch.Tensor, new: NewKV) -> None:
        """Put the keys and values of new tokens in place."""
        self.inner.write_kv(units, index, new)

    def finish(
        self,
        q_QKGD: torch.Tensor,
        of_tokens: list[Partial],
        of_rows: Partial | None,
        decode_slot: torch.Tensor,
        sinks_KG: torch.Tensor | None,
    ) -> torch.Tensor:
        """Merge, add sink logits, normalise."""
        return self.inner.finish(q_QKGD, of_tokens, of_rows, decode_slot, sinks_KG)

    def _slice(self, scoring: Scoring) -> int:
        slices = scoring.slices
        return slices.masked_queries if self.fused.fuses(scoring) else slices.queries


def _count(total: int, size: int) -> int:
    return -(-total // size)


@loop
def causal(q_QKGD: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Each slice of queries against the slices of keys that it can reach, and the sinks before them."""
    k_QKD, v_QKD, causal_row, positions, row_query_start = tensors
    q_QKGD, k_QKD, v_QKD = (x.contiguous() for x in (q_QKGD, k_QKD, v_QKD))
    size, window, parts = how.size, how.window, []
    sinks = None
    if window is not None and window.sink:
        sinks = run_body(bodies.sinks_before_slices, how, causal_row, positions, row_query_start)
    for number, queries in enumerate(_slices(len(q_QKGD), size)):
        first = 0 if window is None else max(0, queries.start - window.recent + 1) // size * size
        asking = q_QKGD[queries], causal_row[queries], positions[queries]
        total = empty(asking[0])
        if sinks is not None and first:
            total = run_body(
                bodies.listed_keys, how, *asking, *total, k_QKD, v_QKD, *(x[number] for x in sinks)
            )
        for keys in _slices(queries.stop, size, first):
            told = k_QKD[keys], v_QKD[keys], causal_row[keys], positions[keys]
            total = run_body(bodies.own_keys, how, *asking, *total, *told)
        parts.append(total)
    return Partial(*(torch.cat(list(x)) for x in zip(*parts)))


@loop
def shared_blocks(q_QKGD: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Every query against one chunk of shared blocks after the other."""
    k_flat, v_flat, row_start, row, block, start, reads_NX = tensors
    q_QKGD, reads_XN = q_QKGD.contiguous(), reads_NX.t().contiguous()
    total = empty(q_QKGD)
    for some in _slices(len(block), how.size):
        told = row_start, row, block[some], start[some], reads_XN[some]
        total = run_body(bodies.shared_chunk, how, q_QKGD, *total, k_flat, v_flat, *told)
    return total


@loop
def shared_rings(q_QKGD: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Each slice of queries against the rings of prompts."""
    k_CKWD, v_CKWD, causal_row, positions, chunk_row, chunk_position = tensors
    q_QKGD = q_QKGD.contiguous()
    parts = []
    for some in _slices(len(q_QKGD), how.size):
        asking = q_QKGD[some], causal_row[some], positions[some]
        parts.append(run_body(bodies.rings, how, *asking, k_CKWD, v_CKWD, chunk_row, chunk_position))
    return Partial(*(torch.cat(list(x)) for x in zip(*parts)))


@loop
def unique_blocks(q_NKHD: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Decode rows against one chunk of whole blocks after the other, added to what they have seen."""
    *seen, k_flat, v_flat, owner = tensors
    assert how.layout is not None, "blocks have a layout"
    q_NKHD, stride = q_NKHD.contiguous(), how.layout.unit_stride
    # As the body returns them, so that one region serves all chunks.
    total = Partial(*(x.contiguous() for x in seen))
    for some in _slices(len(owner), how.size):
        layout = how.layout._replace(num_units=some.stop - some.start)
        vectors = slice(some.start * stride, some.stop * stride)
        told = k_flat[vectors], v_flat[vectors], owner[some]
        total = run_body(bodies.unique_chunk, how._replace(layout=layout), q_NKHD, *total, *told)
    return total


def _slices(total: int, size: int, begin: int = 0) -> list[slice]:
    return [slice(first, min(first + size, total)) for first in range(begin, total, size)]
