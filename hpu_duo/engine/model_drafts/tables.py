"""The host's part of model drafts: the fields of each draft, in the message of the step that verifies them.

A draft is a decode of one token in each row. Over the stores of the model that verifies, its bucket has no
whole blocks: heads in blocks read those with a row's sinks and recent tokens as its tails, and rings are read
as ever. A model with its own stores reads all blocks of a row, whole ones and tails as they are in the step
that verifies. So do some heads where drafts have a sparsity of their own; the others read sinks and recent
tokens, from a second table. A draft writes keys of drafted tokens to the slots that this step writes, and
reads only what was verified or drafted before it.

Shapes: g drafts, N rows, R rows that draft, T tails, W blocks of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bias_builders import NOWHERE, tails_per_row
from graphs import BatchShape, BucketTable, Layout, Phase
from graphs.buffers import pack
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.step_input import StepInput, extra_places, message_fields, with_sources
from hpu_duo.engine.step_plan import FROM_DEVICE, ScheduledRow, StepPlan
from hpu_duo.request import Request


@dataclass(frozen=True)
class DraftWindow:
    """The part of a text that drafts see in heads that see all of it otherwise, in whole blocks.

    Attributes:
        sink, recent: first and newest tokens; every block with one of them is read whole.
    """

    sink: int
    recent: int

    def num_sinks(self, block_size: int) -> int:
        """Blocks with sinks."""
        return -(-self.sink // block_size)

    def num_tails(self, block_size: int) -> int:
        """Most blocks of a row that a draft reads (T or W)."""
        return self.num_sinks(block_size) + -(-(self.recent - 1) // block_size) + 1


class DraftTables:
    """Builds the fields of drafts.

    Args:
        geometry: of the engine's steps.
        window: what drafts see; None = all.
        uses_blocks: False for a model whose heads are all streaming.
        reads_all: whether some heads read all blocks in drafts, and the window is that of the others.

    Attributes:
        geometry: of drafts.
    """

    def __init__(
        self,
        geometry: StepGeometry,
        window: DraftWindow | None,
        uses_blocks: bool = True,
        reads_all: bool = False,
    ) -> None:
        self._window, self._uses_blocks, self._steps = window, uses_blocks, geometry
        self._reads_all = reads_all or window is None
        num_windowed = 0 if window is None else window.num_tails(geometry.block_size)
        num_tails = tails_per_row(geometry.decode_len)
        if not self._reads_all:
            num_tails, num_windowed = num_windowed if uses_blocks else 1, 0
        self.geometry = replace(
            geometry,
            decode_len=1,
            draft_lens=(),
            num_tails=num_tails,
            num_windowed=num_windowed,
            num_next=0,
            is_draft=True,
        )
        self.layout_of = lru_cache(1024)(self._layout)

    @property
    def description(self) -> str:
        """Blocks that drafts over the stores of the model read, for manifests of warm-ups."""
        windowed = f", windows of {self.geometry.num_windowed}" if self.geometry.num_windowed else ""
        return f"tails of {self.geometry.num_tails} blocks{windowed}"

    def bucket(self, step: BatchShape) -> BatchShape:
        """The bucket of drafts for a step; of the number of rows only, if no head reads all blocks."""
        if self._reads_all:
            return replace(step, query_len=step.num_logits)
        return BatchShape(Phase(unique=True), step.num_logits, 0, 0, step.num_logits)

    def table(self, table: BucketTable, row_len: Callable[[BatchShape], int]) -> BucketTable:
        """The buckets of drafts for a table of steps."""
        return BucketTable(tuple({self.bucket(step) for step in table if row_len(step) > 1}))

    def _layout(self, bucket: BatchShape) -> Layout:
        """Places of the fields of a draft in its bucket."""
        return pack(self.geometry.field_shapes(bucket))

    def num_items(self, bucket: BatchShape) -> int:
        """Items of a draft in a message, at a multiple of 64 bytes."""
        num_items = self.layout_of(bucket).num_items
        return num_items + -num_items % 16

    def num_extra(self, largest: BatchShape, decode_len: int) -> int:
        """Most items that drafts add to a message."""
        drafted = (decode_len - 1) * self.num_items(self.bucket(largest))
        return extra_places(0, largest, drafted)[-1] + 16

    def add_to(
        self, message: StepInput, plan: StepPlan, token_ids: npt.NDArray[np.int32], decode_len: int
    ) -> StepInput:
        """Return the message of a plan with the drafts of its rows, and the sources of its tokens.

        Args:
            token_ids: new tokens of all rows; ``FROM_DEVICE`` for those that are drafted.
            decode_len: tokens of a row in the bucket of the message.
        """
        rows = [row for row in plan.rows if drafts_of(row)]
        items = self._padding(message.bucket, decode_len - 1)
        fields = self._fields(items, message.bucket)
        self._fill(fields, message.bucket.num_logits, rows)
        if self._reads_all:
            slots = pack(message_fields(self._steps, message.bucket)).slots
            for name in _OF_STEPS:
                slot = slots[name]
                fields[name][:] = message.ints[slot.offset : slot.stop].reshape(slot.shape)
        return with_sources(message, _sources(plan, token_ids, message.bucket.num_logits), items)

    def can_begin(self, request: Request) -> bool:
        """Return True: such drafts need nothing of the step before."""
        return True

    def note(self, message: StepInput, plan: StepPlan, token_ids: npt.NDArray[np.int32]) -> None:
        """Do nothing: such drafts need nothing of the steps before them."""

    def add_padding(self, message: StepInput, decode_len: int) -> StepInput:
        """Return a message of padding with drafts of padding."""
        items = self._padding(message.bucket, decode_len - 1)
        return with_sources(message, np.zeros(0, np.int32), items)

    def _fields(self, items: npt.NDArray[np.int32], step: BatchShape) -> dict[str, npt.NDArray[np.int32]]:
        slots = self.layout_of(self.bucket(step)).slots.items()
        return {
            name: items[:, slot.offset : slot.stop].reshape(len(items), *slot.shape) for name, slot in slots
        }

    def _padding(self, step: BatchShape, num_drafts: int) -> npt.NDArray[np.int32]:
        """Drafts that read and write null units only, int32 ``[g, items]``."""
        items = np.zeros((num_drafts, self.num_items(self.bucket(step))), np.int32)
        fields, geometry, num_rows = self._fields(items, step), self.geometry, step.num_logits
        fields["shared_block"][:], fields["owner"][:] = geometry.null_block, num_rows
        fields["row"][:] = fields["causal_row"][:] = num_rows
        fields["row_query_start"][:] = fields["logit_index"][:] = np.arange(num_rows)
        fields["write_block"][:] = fields["tail_block"][:] = geometry.null_block
        fields["window_block"][:] = geometry.null_block
        fields["tail_start"][:] = fields["window_start"][:] = NOWHERE
        fields["chunk_row"][:] = geometry.null_row
        return items

    def _fill(
        self, fields: dict[str, npt.NDArray[np.int32]], num_rows: int, rows: list[ScheduledRow]
    ) -> None:
        """Write the rows that draft."""
        block_size, num_drafts = self.geometry.block_size, len(fields["row"])
        at = np.array([row.ring_row for row in rows])
        start = np.array([row.start for row in rows], np.int32)
        number = np.arange(num_drafts, dtype=np.int32)[:, None]
        is_live = number < np.array([drafts_of(row) for row in rows], np.int32)
        position = np.where(is_live, start + number, 0)
        fields["token_ids"][0, at] = [row.request.tokens[row.start] for row in rows]
        fields["positions"][:, at] = fields["row_start"][:, at] = position
        fields["row"][:, at] = np.where(is_live, at, num_rows)
        fields["row_num_new"][:, at] = is_live
        fields["write_offset"][:, at] = position % block_size
        if not self._uses_blocks:
            return
        tables = np.zeros((len(rows), max(row.request.num_blocks for row in rows)), np.int32)
        for table, row in zip(tables, rows):
            table[: row.request.num_blocks] = row.request.block_table[: row.request.num_blocks]
        each, last = np.arange(len(rows)), position // block_size
        fields["write_block"][:, at] = np.where(is_live, tables[each, last], self.geometry.null_block)
        window = self._window
        if window is None:
            return
        name = "window" if self.geometry.num_windowed else "tail"
        num_sinks, num_tails = window.num_sinks(block_size), fields[f"{name}_block"].shape[2]
        recent = np.maximum(np.maximum(position - window.recent + 1, 0) // block_size, num_sinks)
        tail = np.arange(num_tails, dtype=np.int32)
        # Blocks of a row by their places in its table: first those with sinks.
        place = np.where(tail < num_sinks, tail, recent[..., None] + tail - num_sinks)
        is_read = is_live[..., None] & (place <= last[..., None])
        place = np.where(is_read, place, 0)
        block = np.where(is_read, tables[each[:, None], place], self.geometry.null_block)
        fields[f"{name}_block"][:, at] = block
        fields[f"{name}_start"][:, at] = np.where(is_read, place * block_size, NOWHERE)


_OF_STEPS = (
    *("tail_block", "tail_start", "shared_block", "shared_start", "shared_reads"),
    *("owner", "owner_start"),
)
"""Fields that drafts that read all blocks have as the step that verifies them."""


def drafts_of(row: ScheduledRow) -> int:
    """Number of drafts that a model makes for a row; 0 for drafts of text, and for none."""
    if row.num_new_tokens < 2 or row.request.tokens[row.start + 1] != FROM_DEVICE:
        return 0
    return row.num_new_tokens - 1


def _sources(plan: StepPlan, token_ids: npt.NDArray[np.int32], num_rows: int) -> npt.NDArray[np.int32]:
    """``token_source`` of the new tokens of a step: drafts lie draft after draft, a token for each row."""
    num_new = [row.num_new_tokens for row in plan.rows]
    number = np.concatenate([np.arange(each, dtype=np.int32) for each in num_new])
    row = np.repeat(np.array([row.ring_row for row in plan.rows], np.int32), num_new)
    return np.where(token_ids == FROM_DEVICE, (number - 1) * num_rows + row, -1).astype(np.int32)
