"""The parts on fused operators; portable where a device lacks one, or a layer needs what it does not support.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bias_builders import TopBlocks
from kernels_ref import reference
from kernels_ref.hpu import attention
from kernels_ref.hpu.attention import NO_OPERATORS, FusedOperators, attend_dense
from kernels_ref.partial import Partial, Scoring, attend, finish
from kernels_ref.reference import AddBlocks, merge_by_owner
from kernels_ref.sparse import MASK_BYTES
from kernels_ref.step import PartInputs
from kernels_ref.units import KVRecord, KVUnits, write_kv

if TYPE_CHECKING:
    from kernels_ref.groups.column_sums import ChunkStep
    from kernels_ref.sparse import TileStep
    from kernels_ref.step import BlockStep, RingStep


@dataclass(frozen=True)
class FusedKernels:
    """See ``kernels_ref.impl.Kernels``.

    Args:
        operators: those to call.
    """

    operators: FusedOperators = NO_OPERATORS

    def causal(self, inputs: PartInputs) -> Partial:
        """Tokens of prompt rows against the new keys of their own row."""
        if not self.fuses(inputs.scoring):
            return reference.causal(inputs)
        return reference.causal(inputs, self.dense, inputs.scoring.slices.masked_queries)

    def shared_blocks(self, inputs: PartInputs) -> Partial:
        """Every query against the blocks that several rows read, or a prompt row."""
        q_QKGD, units, scoring = inputs.q, inputs.units, inputs.scoring
        if not self.fuses(scoring):
            return reference.shared_blocks(inputs)
        key_bytes = units.key_bytes
        element_bytes = q_QKGD.element_size() + (0 if inputs.rule is None else MASK_BYTES)
        chunk = scoring.chunks.masked(len(q_QKGD), units.layout.num_slots, key_bytes, element_bytes)
        return reference.shared_blocks(inputs, self.dense, chunk)

    def chosen_blocks(self, inputs: PartInputs, tiles: TileStep, choice: TopBlocks) -> Partial:
        """Tokens of prompt rows against the blocks that are chosen for them: masks differ by head."""
        return reference.chosen_blocks(inputs, tiles, choice)

    def shared_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Tokens of prompt rows against their rings as of before the step."""
        if not self.fuses(inputs.scoring):
            return reference.shared_rings(inputs, ring)
        return reference.shared_rings(inputs, ring, self.dense, inputs.scoring.slices.masked_queries)

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

    def unique_with_weights(self, inputs: PartInputs, ring: RingStep) -> tuple[Partial, torch.Tensor]:
        """Decode rows against their own slots, with the weight of each slot; portable."""
        return reference.unique_with_weights(inputs, ring)

    def column_sums(
        self,
        inputs: PartInputs,
        lse_QKG: torch.Tensor,
        slots_PKCD: torch.Tensor | None,
        chunk: ChunkStep,
        num_observed: int | None,
    ) -> torch.Tensor:
        """Sums of the weights of prompt rows by slot and new key: portable for the same reason."""
        return reference.column_sums(inputs, lse_QKG, slots_PKCD, chunk, num_observed)

    def eviction_victims(
        self,
        score_NKC: torch.Tensor | None,
        position_NKC: torch.Tensor,
        is_protected: torch.Tensor | None,
    ) -> torch.Tensor:
        """The eviction victim of each head."""
        return reference.eviction_victims(score_NKC, position_NKC, is_protected)

    def write_kv(self, units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
        """Write the keys and values of new tokens."""
        write_kv(units, index, record)

    def finish(
        self,
        q_QKGD: torch.Tensor,
        of_tokens: list[Partial],
        of_rows: Partial | None,
        decode_slot: torch.Tensor,
        sinks_KG: torch.Tensor | None,
    ) -> torch.Tensor:
        """Merge, add sink logits, normalise."""
        return finish(q_QKGD, of_tokens, of_rows, decode_slot, sinks_KG)

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

    @property
    def add(self) -> AddBlocks:
        """Return the function that merges whole blocks into the partials of decode rows."""
        return attention.merge_by_owner if self.operators.block_softmax else merge_by_owner

    def attend(self, scores: torch.Tensor, visible: torch.Tensor | None, values: torch.Tensor) -> Partial:
        """The triple of scores; see ``kernels_ref.partial.attend``."""
        if not self.operators.softmax:
            return attend(scores, visible, values)
        return attention.attend(scores, visible, values, self.operators.line_bytes)
