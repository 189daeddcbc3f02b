"""Heads that store every token of a request, in blocks; decodes read the best of them by bounds of keys."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from bias_builders import Quest
from kernels_ref.groups.blocks import Blocks, ChoosingBlocks
from kernels_ref.groups.kind import FLOAT32, HeadSizes, PartSizes
from kernels_ref.pages import (
    PageStep,
    as_rows,
    clear_choices,
    keys_only,
    num_further_slots,
    of_heads,
    page_step,
    store_choices,
    stored_choices,
)
from kernels_ref.partial import Partial
from kernels_ref.step import BlockStep, DecodeRows, PartInputs, Step, StepParts, StepTensors
from kernels_ref.units import UnitLayout

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels

_KEPT = Blocks()
_MOST_PAGES = 1 << 15
"""Pages of a text whose numbers, and -1, are stored in two bytes."""


class QuestStep(NamedTuple):
    """Tensors that a step derives once for all stores of one layout.

    Attributes:
        blocks: those of heads that see all tokens.
        pages: blocks of the rows.
    """

    blocks: BlockStep
    pages: PageStep


@dataclass(frozen=True)
class QuestBlocks(ChoosingBlocks):
    """Heads whose prompts see all tokens, and whose decodes see pages that they choose.

    Chunks end at block borders, so what is decoded is decoded again in a recomputation, and is no prefix of
    a prompt.
    """

    choice: Quest

    @property
    def takes_any_format(self) -> bool:
        """Return False: bounds and choices lie among keys and values."""
        return False

    @property
    def shares_units(self) -> bool:
        """Whether bounds are all that lies behind keys: choices are those of one layer."""
        return self.choice.every == 1

    @property
    def needs_block_positions(self) -> bool:
        """Return True: pages are numbered by their position."""
        return True

    def num_slots(self, block_size: int) -> int:
        """Return the slots of a block, those behind its keys included."""
        return block_size + num_further_slots(self.choice)

    def stored_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Return the elements of a stored key and value.

        Raises:
            ValueError: they differ, or the numbers of the pages do not fit into both.
        """
        if head_dim != value_dim:
            raise ValueError(
                f"{self.describe()!r} stores minima of keys as a key and maxima as a value: expected "
                f"keys and values of one size, got {head_dim} and {value_dim}"
            )
        if self.choice.every > 1 and self.choice.num_pages > 2 * head_dim:
            raise ValueError(
                f"{self.describe()!r} stores the numbers of pages as a key and a value: expected pages of at "
                f"most {2 * head_dim} for heads of {head_dim} with every > 1, got {self.choice.num_pages}"
            )
        return head_dim, value_dim

    def check_length(self, max_len: int, block_size: int) -> None:
        """Raise ValueError for texts of ``max_len`` tokens if two bytes do not number their pages."""
        most = _MOST_PAGES * block_size
        if self.choice.every > 1 and max_len > most:
            raise ValueError(
                f"{self.describe()!r} stores numbers of pages in two bytes: expected max_model_len up to "
                f"{most} for block_size={block_size} with every > 1, got {max_len}"
            )

    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> dict[UnitLayout, QuestStep]:
        """See ``QuestStep``."""
        first = next(iter(layouts))
        size, null = first.num_slots - num_further_slots(self.choice), first.num_units - 1
        pages = page_step(parts, tensors, rows, size, null, self.choice.every)
        no_tails = replace(parts, unique=False)
        blocks = _KEPT.prepare(no_tails, tensors, rows, layouts)
        return {layout: QuestStep(plan, pages) for layout, plan in blocks.items()}

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Writes first: decode rows read their new keys from their blocks, and bounds are of all keys."""
        parts, store, t = step.parts, inputs.units, inputs.tensors
        plan: QuestStep = step.plans[self.key, store.layout]
        size = store.layout.num_slots - num_further_slots(self.choice)
        record = store.encode(inputs.new)
        run.write_kv(store, plan.blocks.write_index, record)
        run.write_bounds(store, plan.pages, size)
        inputs = inputs._replace(new=record.values, units=keys_only(store, size))
        of_tokens: list[Partial] = []
        if parts.causal:
            if self.choice.every > 1:
                clear_choices(store, plan.pages, size)
            of_tokens.append(run.causal(inputs))
        if parts.causal and parts.shared and t.shared_block.shape[0]:
            shared = t._replace(shared_reads=plan.pages.prompt_reads)
            of_tokens.append(run.shared_blocks(inputs._replace(tensors=shared)))
        decoded = None
        if parts.unique:
            of_rows, most, stored = inputs.of_rows(step), self.choice.num_pages - 1, None
            if self.choice.every > 1:
                stored = stored_choices(store, plan.pages, size, most)
            low, high = (view[:, :, size] for view in store.views)
            number = run.chosen_pages(of_rows.q, low, high, plan.pages, stored, most)
            if stored is not None:
                store_choices(store, plan.pages, size, number)
            decoded = run.unique_blocks(*as_rows(of_rows, plan.pages, number, plan.blocks))
            decoded = of_heads(decoded, of_rows.q.shape[1])
        return run.finish(inputs.q, of_tokens, decoded, step.decode_slot, inputs.sinks)

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Those of heads that see all tokens, bounds of the blocks of a text, and copies of pages.

        ``sdpa`` ranks the blocks of one row at a time.
        """
        met, rows = _KEPT.transient_bytes(heads, sizes), sizes.num_rows
        written = sizes.query_len // sizes.block_size + 2 * min(sizes.query_len, rows)
        bounds = written * heads.unit_bytes(sizes.block_size)
        if not sizes.parts.unique:
            return met + bounds
        num_blocks = sizes.num_shared_blocks + sizes.num_unique_blocks
        of_block = heads.num_heads * heads.head_dim + heads.num_query_heads
        ranks = FLOAT32 * num_blocks * (4 * of_block + rows)
        pages = 4 * rows * (1 + min(self.choice.num_pages, num_blocks)) * heads.unit_bytes(sizes.block_size)
        return met + bounds + ranks + pages
