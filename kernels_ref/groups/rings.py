"""Heads that store the first and the newest tokens of a request, in a ring buffer of its row."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from bias_builders import Held, Leading, Ring, Seen, Window, ring_slot, slot_position, stays_in_ring
from kernels_ref.chunks import DEFAULT_SLICES, band_keys, num_parts
from kernels_ref.groups.kind import (
    FLOAT32,
    SCORE_COPIES,
    GroupKind,
    HeadSizes,
    Owner,
    PartSizes,
    causal_bytes,
    dense_bytes,
)
from kernels_ref.partial import Partial, fold, placed, unfold, unfold_rows
from kernels_ref.step import DecodeRows, PartInputs, RingStep, SlotMasks, Step, StepParts, StepTensors
from kernels_ref.units import UnitLayout, gather, write_indices

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels


@dataclass(frozen=True)
class Rings(GroupKind):
    """Heads that store the tokens of a window, in a ring buffer: streaming heads and sliding windows.

    The unique part covers the rings of decode rows, the shared part those of prompt rows as they were before
    the step, in the scratch, and the causal part the new keys of the same prompt.

    Attributes:
        window: the window of a token.
        slack: further slots, hence tokens that can be rolled back.
    """

    window: Window
    slack: int = 0
    name: ClassVar[str] = "rings"
    owner: ClassVar[Owner] = Owner.ROW

    def __post_init__(self) -> None:
        self.window.validate()
        if self.slack < 0:
            raise ValueError(f"expected a slack of 0 slots or more, got {self.slack}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Window and slack, with the name of the kind."""
        return self.name, self.window, self.slack

    @property
    def ring(self) -> Ring:
        """The slots, for ``bias_builders``."""
        return Ring(self.window, self.slack)

    @property
    def reach(self) -> int | None:
        """The size of the window."""
        return self.window.size

    def describe(self) -> str:
        """Describe the window."""
        return f"sink {self.window.sink}, recent {self.window.recent}"

    def num_slots(self, block_size: int) -> int:
        """Return the slots of the window and of the slack."""
        return self.window.size + self.slack

    @property
    def shares_units(self) -> bool:
        """Return True: attention changes nothing but what it writes first."""
        return True

    @property
    def attends_for_some(self) -> bool:
        """Return True: rings have the newest tokens, and slack for as many as a row may want."""
        return True

    @property
    def keeps_scratch(self) -> bool:
        """Return True: the new tokens of a prompt overwrite what it still has to read."""
        return True

    def seen_slots(self, num_tokens: int, num_slots: int) -> torch.Tensor:
        """Slots of the sinks, and of the tokens that the next token sees."""
        position = slot_position(torch.tensor([num_tokens]), self.ring)[0]
        is_recent = position > num_tokens - self.window.recent
        return (position >= 0) & (is_recent | (position < self.window.sink))

    @property
    def without_slack(self) -> GroupKind:
        """Return the ring without slack."""
        return replace(self, slack=0)

    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> dict[UnitLayout, RingStep]:
        """See ``RingStep``."""
        t, ring = tensors, self.ring
        no_row, null_row = t.row_start.shape[0], next(iter(layouts)).num_units - 1
        seen = self._seen(rows.end) if parts.unique else Leading(rows.end[:0, None])
        chunk_position = t.row_start.new_empty(0, ring.size)
        is_kept = t.row < no_row
        if parts.causal:
            # One more entry, for the row index of padding.
            start, num_new = (torch.cat([x, x.new_zeros(1)]) for x in (t.row_start, t.row_num_new))
            is_kept &= stays_in_ring(t.positions, gather(start + num_new, t.row), ring)
            if parts.shared:
                chunk_position = slot_position(gather(start, torch.clamp(t.chunk_row, max=no_row)), ring)
        index = write_indices(torch.where(is_kept, t.row, null_row), ring_slot(t.positions, ring), layouts)
        return {layout: RingStep(index[layout], seen, chunk_position) for layout in layouts}

    def _seen(self, end: torch.Tensor) -> Seen:
        """Visibility of rings to the newest tokens of their rows.

        Args:
            end: position after each token, 0 where there is none, ``[N, M]``.
        """
        ring = self.ring
        if end.shape[1] == 1 and not ring.slack:
            # A ring then has exactly the tokens that its new token sees.
            return Leading(torch.clamp(end, max=ring.size)[:, None])
        stored = torch.clamp(end.amax(dim=1), min=0)
        begin = torch.clamp(end - ring.window.recent, min=0)
        return Held(slot_position(stored, ring)[:, None], begin, end, ring.window.sink)

    def masked(self, plans: Mapping[UnitLayout, RingStep], dtype: torch.dtype) -> dict[UnitLayout, RingStep]:
        """Return the plans with masks of rings."""
        layout, first = next(iter(plans.items()))
        masks = SlotMasks.of(first.seen, layout.num_slots, dtype)
        return {layout: plan._replace(masks=masks) for layout, plan in plans.items()}

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Writes first: decode rows read their new keys from their rings, and prompts read the scratch."""
        parts, units = step.parts, inputs.units
        plan: RingStep = step.plans[self.key, units.layout]
        if step.keys is not None and step.wanted is not None:
            # An earlier layer has written the newest tokens, those of prompts too.
            newest = plan._replace(seen=self._seen(step.wanted.end), masks=None)
            rows = inputs._replace(q=fold(inputs.q, step.decode_len), rule=self.window)
            found = unfold(run.unique_rings(rows, newest), step.decode_len)
            return run.finish(inputs.q, [found], None, step.decode_slot, inputs.sinks)
        record = units.encode(inputs.new)
        run.write_kv(units, plan.write_index, record)
        inputs = inputs._replace(new=record.values, rule=self.window)
        if plan.masks is not None and parts.unique and not parts.causal and inputs.sinks is None:
            out = unfold_rows(run.rows_in_rings(inputs.of_rows(step), plan), step.decode_len)
            return out if step.keeps_rows else placed(out, step.decode_slot)
        of_tokens: list[Partial] = []
        decoded = None
        if parts.unique:
            decoded = run.unique_rings(inputs.of_rows(step), plan)
            if step.decode_len > 1:
                decoded = unfold(decoded, step.decode_len)
        if parts.causal:
            of_tokens.append(run.causal(inputs))
            if parts.shared:
                of_tokens.append(run.shared_rings(inputs, plan))
        return run.finish(inputs.q, of_tokens, decoded, step.decode_slot, inputs.sinks)

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Scores of one slice of prompts, or of all decode rows."""
        num_slots, per_slot = self.num_slots(sizes.block_size), heads.num_query_heads * FLOAT32
        size, least = sizes.query_slice, DEFAULT_SLICES.masked_queries
        if sizes.is_fused:
            size = sizes.chunks.ring_slice(num_slots, least, heads.dtype_bytes)
        shared = sizes.parts.shared * dense_bytes(heads, sizes, min(size, sizes.query_len) * num_slots)
        unique = sizes.parts.unique * sizes.num_rows * sizes.decode_len * num_slots * per_slot
        return max(self._causal_bytes(heads, sizes), shared, SCORE_COPIES * unique)

    def _causal_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        size, num_queries = DEFAULT_SLICES.masked_queries, sizes.query_len
        is_joined = sizes.is_fused and sizes.chunks.has_one_band(
            num_queries, size, self.window.size, heads.dtype_bytes
        )
        if not (sizes.parts.causal and is_joined):
            return causal_bytes(heads, sizes)
        num_keys = num_parts(num_queries, size) * band_keys(size, self.window.size)
        # Keys and values of a slice are gathered, and turned for the operator.
        return dense_bytes(heads, sizes, size * num_keys) + 4 * heads.unit_bytes(num_keys)
