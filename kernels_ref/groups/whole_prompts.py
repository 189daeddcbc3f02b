"""Heads with a budget that read prompts in chunks with full attention, and choose when a prompt is there.

Shapes: Q query tokens, P prompt rows of up to T new tokens, K key/value heads, C slots, L tokens of a region,
S leading tokens of it that a step reads.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels_ref.groups.budget import Budget, BudgetStep, DecodeSlots
from kernels_ref.groups.budget_chunks import Held, Kept, chosen, scored_tokens, turned, turns
from kernels_ref.groups.budget_slots import assign_slots, look_up
from kernels_ref.groups.budget_versions import DecodeTurns
from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.groups.kind import PartSizes
from kernels_ref.partial import Partial, merge
from kernels_ref.step import PartInputs, Step, StepTensors
from kernels_ref.units import (
    KVRecord,
    KVUnits,
    NewKV,
    PromptRegions,
    Scratch,
    SlotState,
    UnitLayout,
    floats,
    gather,
    index_dtype,
)

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels

_SCORE_BYTES = 4


@dataclass(frozen=True)
class WholePrompts(Budget):
    """Heads with a budget that choose once, from all tokens of a prompt, independent of its chunks.

    Until a prompt is computed, its keys and values are stored in a region, in the order of the text: the
    step's prompt row ``i`` has region ``i``. A chunk is written there, and attends to all tokens before it.
    Scores of tokens are stored with them if a policy sums the weights of all queries, or marks tokens. After
    every chunk the slots have the tokens that the policy would retain of the text so far, so the last chunk
    leaves the final ones, and decodes need no regions.

    Attributes:
        prompt_len: tokens of the longest prompt (L).
        block_size: tokens per shared block of the bucket, the unit of S.
    """

    prompt_len: int = 1
    block_size: int = 1

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Numbers of the kind and of its policy."""
        numbers = self.budget, self.chunk, self.prompt_len, self.block_size
        return f"whole {self.name}", *numbers, self.policy.key, self.frequencies, self.versions

    def describe(self) -> str:
        """Describe the policy, its slots and its candidates."""
        return f"{super().describe()} of whole prompts"

    def num_read(self, num_shared_blocks: int) -> int:
        """Return the tokens of these blocks, the unit for the longest text before a chunk."""
        return min(self.prompt_len, num_shared_blocks * self.block_size)

    @property
    def keeps_scratch(self) -> bool:
        """Return False: prompts read their region, which is written before it is read."""
        return False

    @property
    def reads_text(self) -> bool:
        """Return True: a prompt is read with full attention."""
        return True

    @property
    def region_len(self) -> int:
        """The longest prompt."""
        return self.prompt_len

    @property
    def _keeps_scores(self) -> bool:
        """Whether scores of earlier chunks count."""
        return self.policy.num_observed is None or self.policy.marks_tokens

    def _chunk(self, t: StepTensors, place: torch.Tensor) -> tuple[ChunkStep, torch.Tensor]:
        """The prompt rows. The table of places has the null unit for their tokens, which regions store."""
        return super()._chunk(t, place)[0], place

    def _read_prompts(
        self, run: Kernels, inputs: PartInputs, step: Step
    ) -> tuple[list[Partial], Kept | None]:
        plan: BudgetStep = step.plans[self.key, inputs.units.layout]
        regions = inputs.units.regions
        assert regions is not None, "expected units with regions"
        if inputs.units.turn.is_first:
            places = _region_places(regions.layout, plan.chunk, step.tensors)
            run.write_kv(regions.units, places, regions.units.encode(inputs.new))
        text_units = regions.units
        num_read = self.num_read(step.tensors.shared_block.shape[0]) if step.parts.shared else 0
        of_tokens = [run.causal(inputs)]
        if num_read:
            of_tokens.append(self._of_text(run, inputs, text_units, plan))
        held = self._held(regions, num_read)
        slots = scored_tokens(run, self.policy, self.budget, held, plan.chunk, inputs, of_tokens, plan.turns)
        if slots is None:
            return of_tokens, None
        if self._keeps_scores:
            score = self._summed(regions, plan.chunk, slots.score, num_read)
            rows = torch.arange(len(score), dtype=index_dtype(score.device), device=score.device)
            regions.score.index_copy_(0, rows, score)
        nothing = torch.zeros_like(slots.score[..., :1], dtype=torch.bool).expand(-1, -1, self.budget)
        source = assign_slots(nothing, chosen(self.policy, slots)).source
        is_kept = source < slots.score.shape[-1]
        state = SlotState(
            *(torch.where(is_kept, look_up(x, source), 0) for x in (slots.position, slots.score))
        )
        number = torch.arange(self.budget, dtype=torch.int32, device=source.device)
        kept = torch.where(is_kept, number, self.budget)
        text = _of_positions(regions, state.position)
        if self.policy.positions_in_cache:
            text = text._replace(k=self._unturned(text.k, state.position))
        return of_tokens, Kept(kept, state, text)

    def _unturned(self, k_XKD: torch.Tensor, position_PKC: torch.Tensor) -> torch.Tensor:
        """Keys ``[P * C, K, D]`` without the rotation of their positions."""
        position = position_PKC.transpose(1, 2).flatten(0, 1)
        return turned(k_XKD, turns(-position, self.frequencies)).to(k_XKD.dtype)

    def _of_text(self, run: Kernels, inputs: PartInputs, text: KVUnits, plan: BudgetStep) -> Partial:
        """Attention of prompt rows over the text before the chunk, a segment at a time."""
        position, total, size = plan.ring.chunk_position, None, inputs.scoring.chunks.key_slots
        k, v = floats(text)
        for begin in range(0, position.shape[1], size):
            end = min(begin + size, position.shape[1])
            segment = Scratch(k[:, :, begin:end], v[:, :, begin:end])
            ring = plan.ring._replace(chunk_position=position[:, begin:end].contiguous())
            of_segment = inputs._replace(units=text._replace(scratch=segment))
            partial = run.shared_rings(of_segment, ring)
            total = partial if total is None else merge(total, partial)
        assert total is not None, "expected text before the chunk"
        return total

    def _held(self, regions: PromptRegions, num_read: int) -> Held:
        """The leading tokens of all regions."""
        layout = regions.layout
        shape = layout.num_units, layout.num_heads, num_read
        number = torch.arange(num_read, dtype=torch.int32, device=regions.score.device)
        score = regions.score.view(*shape[:2], -1)[..., :num_read]
        if not self._keeps_scores:
            score = torch.zeros_like(score)
        kv = Scratch(*(x[:, :, :num_read] for x in floats(regions.units))) if num_read else None
        return Held(SlotState(number.expand(shape), score), kv)

    def _summed(
        self, regions: PromptRegions, chunk: ChunkStep, score: torch.Tensor, num_read: int
    ) -> torch.Tensor:
        """Scores of all tokens of the regions, ``[P, K * L]``; those without a chunk are unchanged."""
        before = regions.score.view(*score.shape[:2], -1)
        number = torch.arange(self.prompt_len, dtype=torch.int32, device=score.device)
        start, num_new = chunk.start[:, None], chunk.num_new[:, None]
        new = num_read + torch.clamp(number - start, min=0)
        source = torch.where(number < start, number, new)[:, None].expand(-1, score.shape[1], -1)
        is_there = (number < start + num_new) & (num_new > 0)
        scores = torch.where(is_there[:, None], look_up(score, source), 0.0)
        return torch.where((num_new > 0)[..., None], scores, before).flatten(1)

    def _written(
        self,
        units: KVUnits,
        plan: BudgetStep,
        kept: Kept | None,
        taken: DecodeSlots | DecodeTurns | None,
        stored: KVRecord,
    ) -> tuple[torch.Tensor, KVRecord]:
        """Vectors of decode rows, and of the retained tokens of prompts."""
        if kept is None:
            return super()._written(units, plan, None, taken, stored)
        assert kept.text is not None, "expected retained tokens of regions"
        text = units.encode(kept.text)
        index = self._kept_places(units.layout, plan.chunk.row, kept.slot).reshape(-1)
        if taken is None:
            return index, text
        decoded, of_rows = super()._written(units, plan, None, taken, stored)
        return torch.cat([decoded, index]), of_rows.followed_by(text)

    @property
    def _most_read(self) -> int:
        return self.prompt_len

    def region_bytes(self, num_heads: int, token_bytes: int) -> int:
        """A region, with the vectors that padding writes, and its scores."""
        return num_heads * ((self.prompt_len + 1) * token_bytes + self.prompt_len * _SCORE_BYTES)

    def _most_met(self, sizes: PartSizes) -> int:
        return sizes.chunks.key_slots


def _region_places(layout: UnitLayout, chunk: ChunkStep, t: StepTensors) -> torch.Tensor:
    """Places of the new tokens in the regions of their rows, ``[Q * K]``; in the null unit for all others."""
    dtype, no_row = index_dtype(t.row.device), t.row_start.shape[0]
    number = torch.arange(len(chunk.row), dtype=torch.int32, device=t.row.device)
    is_own = (chunk.row[:, None] == t.causal_row) & (t.causal_row < no_row)
    region = torch.where(is_own, number[:, None], -1).amax(dim=0)[:, None].to(dtype)
    head = torch.arange(layout.num_heads, dtype=dtype, device=t.row.device)
    place = layout.offset + region * layout.unit_stride + head * layout.head_stride + t.positions[:, None]
    return torch.where(region >= 0, place, head).view(-1)


def _of_positions(regions: PromptRegions, position: torch.Tensor) -> NewKV:
    """Keys and values of tokens of the regions, ``[P * C, K, D]``.

    Args:
        position: int32 ``[P, K, C]``, 0 or more.
    """
    layout, dtype, device = regions.layout, index_dtype(position.device), position.device
    region = torch.arange(layout.num_units, dtype=dtype, device=device)[:, None, None]
    head = torch.arange(layout.num_heads, dtype=dtype, device=device)[:, None]
    place = layout.offset + region * layout.unit_stride + head * layout.head_stride + position
    index = place.transpose(1, 2).reshape(-1)
    return NewKV(*(gather(x, index).unflatten(0, (-1, layout.num_heads)) for x in regions.store))
