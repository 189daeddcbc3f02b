"""Retrieval heads whose blocks are dealt out over ranks, so that each rank reads its part of every one.

A block of the engine, a *super-block*, is as many blocks as there are ranks, one on each, under one number.
Which rank keeps a token follows from its position alone: rank ``r`` of ``t`` has the slots
``[r * B / t, (r + 1) * B / t)`` of each super-block. So tables and messages are the same on all ranks, and
each of them finds its slots in the step's tensors, on its device.

Shapes: Q query tokens, L tokens of decode rows, K heads of all ranks, O of them on this one, G query heads of
each, D head size, B slots of a super-block, t ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from bias_builders import Leading, leading_visible
from hpu_duo.sharded.head_exchange import HeadExchange
from kernels_ref import (
    Blocks,
    GroupKind,
    KVUnits,
    NewKV,
    Owner,
    Partial,
    Step,
    StepParts,
    StepTensors,
    UnitLayout,
)
from kernels_ref.groups import BlockStep, GroupInputs, HeadSizes, PartSizes
from kernels_ref.groups.transients import FLOAT32, causal_bytes
from kernels_ref.index import gather, write_indices
from kernels_ref.partial import fold, unfold

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels
    from kernels_ref.step import DecodeRows

_COPIES = 4
"""Copies of what ranks exchange: as computed or padded, packed, received, and in order."""


class DealtStep(NamedTuple):
    """Tensors that a step derives once for all stores of dealt blocks of one layout.

    Attributes:
        own: what blocks have, for this rank's slots: new tokens that other ranks keep go to the trash block,
            and tails are seen as far as they lie here.
        shared_start: position of this rank's first slot of each shared block, ``[NS]``.
    """

    own: BlockStep
    shared_start: torch.Tensor


@dataclass(frozen=True)
class DealtBlocks(GroupKind):
    """Heads that keep all tokens, in blocks that are dealt out over ranks.

    All ranks get the new keys, and the queries that meet the context, of all heads; each writes and reads its
    slots; and the rank that has a head merges what all ranks have found for it with the causal part, which it
    computes alone.

    Attributes:
        exchange: the heads on all ranks.
    """

    exchange: HeadExchange
    name: ClassVar[str] = "dealt blocks"
    owner: ClassVar[Owner] = Owner.BLOCK

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name, ranks and heads."""
        return self.name, self.exchange.num_ranks, self.exchange.num_heads

    @property
    def reach(self) -> int | None:
        """Return None: a token sees all tokens."""
        return None

    def describe(self) -> str:
        """Return an empty text: a token sees all tokens."""
        return ""

    def num_slots(self, block_size: int) -> int:
        """Return this rank's slots of a super-block."""
        return block_size // self.exchange.num_ranks

    def num_kept(self, num_heads: int) -> int:
        """Return the heads of all ranks."""
        return self.exchange.num_heads

    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> dict[UnitLayout, DealtStep]:
        """See ``DealtStep``."""
        t, layout = tensors, next(iter(layouts))
        num_slots, trash = layout.num_slots, layout.num_units - 1
        first = self.exchange.rank * num_slots
        slot = t.write_offset - first
        is_own = (slot >= 0) & (slot < num_slots)
        place = torch.where(is_own, t.write_block, trash), torch.where(is_own, slot, 0)
        index = write_indices(*place, layouts)
        tails = t.tail_start[:, :0, None]
        if parts.unique:
            tails = leading_visible((t.tail_start + first)[:, :, None], rows.end[:, None], num_slots)
        start = t.shared_start + first
        return {
            layout: DealtStep(BlockStep(index[layout], Leading(tails), rows.end), start) for layout in layouts
        }

    def attend(self, run: Kernels, inputs: GroupInputs, units: KVUnits, step: Step) -> torch.Tensor:
        """Write first: decode rows find their new keys in their blocks, on the rank that keeps them."""
        t, parts = step.tensors, step.parts
        plan: DealtStep = step.plans[self.key, units.layout]
        q_QOGD, new, sinks_OG, scoring = inputs
        has_shared = parts.shared and t.shared_block.shape[0] > 0
        asked = self._asked(q_QOGD, step, has_shared=has_shared)
        k_QKD, v_QKD, *queries = self.exchange.gather([*new, *asked])
        run.write_kv(units, plan.own.write_index, NewKV(k_QKD, v_QKD))
        of_tokens: list[Partial] = []
        decoded = None
        if parts.unique:
            q_LKGD = gather(queries[0], step.row_token) if has_shared else queries[0]
            decoded = run.unique_blocks(fold(q_LKGD, step.decode_len), units, t, plan.own, scoring)
            decoded = unfold(decoded, step.decode_len)
        if has_shared:
            shared_t = t._replace(shared_start=plan.shared_start)
            shared = run.shared_blocks(queries[0], units, shared_t, scoring)
            shared, decoded = self._merged(shared, decoded)
            of_tokens.append(shared)
        elif decoded is not None:
            decoded = self.exchange.merge_few(decoded)
        if not q_QOGD.shape[1]:
            return q_QOGD
        if parts.causal:
            of_tokens.append(run.causal(q_QOGD, new, t, None, scoring))
        return run.finish(q_QOGD, of_tokens, decoded, step.decode_slot, sinks_OG)

    @staticmethod
    def _asked(q_QOGD: torch.Tensor, step: Step, *, has_shared: bool) -> list[torch.Tensor]:
        """The queries that meet the context: those of all tokens, of decode rows, or none."""
        if has_shared:
            return [q_QOGD]
        return [gather(q_QOGD, step.row_token)] if step.parts.unique else []

    def _merged(self, shared: Partial, decoded: Partial | None) -> tuple[Partial, Partial | None]:
        """Both merged over ranks in one exchange."""
        if decoded is None:
            return self.exchange.merge_many(shared), None
        num_tokens = shared.max.shape[0]
        both = self.exchange.merge_many(Partial(*(torch.cat(list(each)) for each in zip(shared, decoded))))
        return Partial(*(each[:num_tokens] for each in both)), Partial(*(each[num_tokens:] for each in both))

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Intermediates of blocks, for the heads of all ranks and this rank's slots, beside what is sent."""
        parts, every = sizes.parts, heads._replace(num_heads=self.exchange.num_heads)
        context = replace(parts, causal=False)
        own = sizes._replace(block_size=self.num_slots(sizes.block_size), parts=context)
        has_shared = parts.shared and sizes.num_shared_blocks > 0
        num_rows = sizes.num_rows * sizes.decode_len if parts.unique else 0
        num_asked = sizes.query_len if has_shared else num_rows
        width = every.num_heads * every.head_dim
        sent = (2 * sizes.query_len + every.group_size * num_asked) * width * every.dtype_bytes
        num_merged = num_rows + (sizes.query_len if has_shared else 0)
        triples = num_merged * every.num_query_heads * (every.head_dim + 2) * FLOAT32
        met = max(causal_bytes(heads, sizes), Blocks().transient_bytes(every, own))
        return met + _COPIES * (sent + triples)
