"""The parts on fused operators; portable where a device lacks one, or a layer needs what it does not support.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bias_builders import Window
from kernels_ref import reference
from kernels_ref.hpu import attention
from kernels_ref.hpu.attention import NO_OPERATORS, FusedOperators, attend_dense
from kernels_ref.partial import Partial, Scoring, attend
from kernels_ref.reference import AddBlocks, merge_by_owner
from kernels_ref.sparse import MASK_BYTES, band
from kernels_ref.step import PartInputs, StepTensors

if TYPE_CHECKING:
    from kernels_ref.step import BlockStep, RingStep


def causal_slice(inputs: PartInputs) -> int:
    """Queries of a slice of fused causal attention."""
    q_QKGD, scoring, least = inputs.q, inputs.scoring, inputs.scoring.slices.masked_queries
    if inputs.rule is not None:
        return least
    return scoring.chunks.causal_slice(len(q_QKGD), least, q_QKGD.element_size())


def ring_slice(inputs: PartInputs, ring: RingStep) -> int:
    """Queries of a slice of fused attention to the rings of prompts."""
    scoring, element_bytes = inputs.scoring, inputs.q.element_size()
    least = scoring.slices.masked_queries
    return scoring.chunks.ring_slice(ring.chunk_position.numel(), least, element_bytes)


@dataclass(frozen=True)
class FusedKernels:
    """See ``kernels_ref.impl.Kernels``.

    Args:
        operators: those to call.
    """

    operators: FusedOperators = NO_OPERATORS

    # No operator computes these. Masks of chosen blocks differ by head.
    chosen_blocks = staticmethod(reference.chosen_blocks)
    chosen_pages = staticmethod(reference.chosen_pages)
    write_bounds = staticmethod(reference.write_bounds)
    unique_with_weights = staticmethod(reference.unique_with_weights)
    column_sums = staticmethod(reference.column_sums)
    eviction_victims = staticmethod(reference.eviction_victims)
    write_kv = staticmethod(reference.write_kv)
    finish = staticmethod(reference.finish)

    def causal(self, inputs: PartInputs) -> Partial:
        """Tokens of prompt rows against the new keys of their own row."""
        if not self.fuses(inputs.scoring):
            return reference.causal(inputs)
        if self.has_one_band(inputs):
            return band(inputs, inputs.scoring.slices.masked_queries, self._tiles)
        return reference.causal(inputs, self.dense, causal_slice(inputs))

    def causal_of_some(self, inputs: PartInputs, keys: StepTensors) -> Partial:
        """Some tokens of prompt rows against the new keys of their own row."""
        if not self.fuses(inputs.scoring):
            return reference.causal_of_some(inputs, keys)
        return reference.causal_of_some(inputs, keys, self.dense, inputs.scoring.slices.masked_queries)

    def shared_blocks(self, inputs: PartInputs) -> Partial:
        """Every query against the blocks that several rows read, or a prompt row."""
        q_QKGD, units, scoring = inputs.q, inputs.units, inputs.scoring
        if not self.fuses(scoring):
            return reference.shared_blocks(inputs)
        key_bytes = units.key_bytes
        element_bytes = q_QKGD.element_size() + (0 if inputs.rule is None else MASK_BYTES)
        chunk = scoring.chunks.masked(len(q_QKGD), units.layout.num_slots, key_bytes, element_bytes)
        return reference.shared_blocks(inputs, self.dense, chunk)

    def shared_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Tokens of prompt rows against their rings as of before the step."""
        if not self.fuses(inputs.scoring):
            return reference.shared_rings(inputs, ring)
        return reference.shared_rings(inputs, ring, self.dense, ring_slice(inputs, ring))

    def unique_blocks(self, inputs: PartInputs, blocks: BlockStep) -> Partial:
        """Decode rows against the blocks that only they read."""
        return reference.unique_blocks(inputs, blocks, self.attend, self.add)

    def unique_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Decode rows against their own ring."""
        return reference.unique_rings(inputs, ring, self.attend)

    def rows_in_rings(self, inputs: PartInputs, ring: RingStep) -> torch.Tensor:
        """Attention of decode rows whose ring is all that they see, as one operator."""
        if not (self.operators.row_attention and inputs.scoring.softcap is None):
            return reference.rows_in_rings(inputs, ring)
        assert ring.masks is not None, "expected masks of rings"
        k, v = inputs.units.tile(slice(0, inputs.q.shape[0]))
        return attention.attend_rows(inputs.q, k, v, ring.masks, inputs.scoring.softmax)

    def has_one_band(self, inputs: PartInputs) -> bool:
        """Whether the causal part is one product of all slices: see ``ChunkBounds.has_one_band``."""
        q_QKGD, rule, scoring = inputs.q, inputs.rule, inputs.scoring
        if not (self.fuses(scoring) and isinstance(rule, Window)):
            return False
        sizes = len(q_QKGD), scoring.slices.masked_queries, rule.size, q_QKGD.element_size()
        return scoring.chunks.has_one_band(*sizes)

    def fuses(self, scoring: Scoring) -> bool:
        """Whether attention is one operator, which has no soft cap."""
        return self.operators.attention and scoring.softcap is None

    def dense(
        self,
        q_QKGD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        visible_QT: torch.Tensor,
        scoring: Scoring,
    ) -> Partial:
        """Queries against one list of keys, as one operator."""
        scale = self.operators.inverse_scale
        return attend_dense(q_QKGD, k_TKD, v_TKD, visible_QT, scoring.softmax, scale)

    def _tiles(
        self,
        q_XQKGD: torch.Tensor,
        k_XTKD: torch.Tensor,
        v_XTKD: torch.Tensor,
        visible_XQT: torch.Tensor,
        scoring: Scoring,
    ) -> Partial:
        scale = self.operators.inverse_scale
        return attention.attend_tiles(q_XQKGD, k_XTKD, v_XTKD, visible_XQT, scoring.softmax, scale)

    @property
    def add(self) -> AddBlocks:
        """Return the function that merges whole blocks into the partials of decode rows."""
        return attention.merge_by_owner if self.operators.block_softmax else merge_by_owner

    def attend(self, scores: torch.Tensor, visible: torch.Tensor | None, values: torch.Tensor) -> Partial:
        """The triple of scores; see ``kernels_ref.partial.attend``."""
        if not self.operators.softmax:
            return attend(scores, visible, values)
        return attention.attend(scores, visible, values, self.operators.line_bytes)
