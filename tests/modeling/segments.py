"""A kind of head group that the package does not have: heads that see their own segment of the text."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from bias_builders import Held, Window, slot_position
from kernels_ref import Owner, Partial, Rings, Step, StepParts, StepTensors, UnitLayout
from kernels_ref.groups import GroupKind, HeadSizes, PartInputs, PartSizes, RingStep
from kernels_ref.impl import Kernels
from kernels_ref.partial import attend, soften, unfold
from kernels_ref.step import DecodeRows


@dataclass(frozen=True)
class Segments(GroupKind):
    """Block-local attention: token ``p`` sees ``k <= p`` with ``k // size == p // size``.

    The newest ``size`` tokens are kept, where a ring would keep them. Decode rows have an interval of
    positions of their own, which kernels of rings understand; for prompts the rule is written out.
    """

    size: int
    slack: int = 0
    name: ClassVar[str] = "segments"
    owner: ClassVar[Owner] = Owner.ROW

    @property
    def key(self) -> tuple[Hashable, ...]:
        return self.name, self.size, self.slack

    @property
    def reach(self) -> int | None:
        return self.size

    def describe(self) -> str:
        return f"segments of {self.size} tokens"

    def num_slots(self, block_size: int) -> int:
        return self.size + self.slack

    @property
    def keeps_scratch(self) -> bool:
        return True

    @property
    def _store(self) -> Rings:
        return Rings(Window(0, self.size), self.slack)

    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> dict[UnitLayout, RingStep]:
        own = torch.clamp(rows.end - 1, min=0)
        position = slot_position(torch.clamp(rows.end.amax(dim=1), min=0), self._store.ring)
        seen = Held(position[:, None], own - torch.remainder(own, self.size), rows.end, 0)
        plans = self._store.prepare(parts, tensors, rows, layouts)
        return {layout: plan._replace(seen=seen) for layout, plan in plans.items()}

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        t, units = step.tensors, inputs.units
        plan = step.plans[self.key, units.layout]
        decoded, of_tokens = None, []
        record = units.encode(inputs.new)
        run.write_kv(units, plan.write_index, record)
        if step.parts.unique:
            decoded = run.unique_rings(inputs.of_rows(step), plan)
            decoded = unfold(decoded, step.decode_len)
        if step.parts.causal:
            of_tokens.append(self._dense(inputs, *record.values, t.causal_row, t.positions, t))
            if step.parts.shared:
                k, v = (x.transpose(1, 2).flatten(0, 1) for x in units.before)
                row = t.chunk_row.repeat_interleave(units.layout.num_slots)
                of_tokens.append(self._dense(inputs, k, v, row, plan.chunk_position.flatten(), t))
        return run.finish(inputs.q, of_tokens, decoded, step.decode_slot, inputs.sinks)

    def _dense(
        self,
        inputs: PartInputs,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        row_T: torch.Tensor,
        position_T: torch.Tensor,
        t: StepTensors,
    ) -> Partial:
        """Tokens of prompt rows against one list of keys, whose unused places have position -1."""
        row, own = t.causal_row[:, None], t.positions[:, None]
        visible = (row == row_T) & (row < t.row_start.shape[0]) & (position_T >= 0) & (position_T <= own)
        segment = torch.div(own, self.size, rounding_mode="floor")
        visible &= segment == torch.div(position_T, self.size, rounding_mode="floor")
        scores = soften(torch.einsum("qkgd,tkd->kqgt", inputs.q, k_TKD), inputs.scoring)
        partial = attend(scores, visible[None, :, None], v_TKD.transpose(0, 1)[:, None])
        return Partial(*(x.transpose(0, 1) for x in partial))

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        num_keys = max(sizes.query_len, self.num_slots(sizes.block_size))
        return 16 * sizes.query_len * num_keys * heads.num_query_heads
