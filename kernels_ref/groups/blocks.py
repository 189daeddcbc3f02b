"""Heads that store every token of a request, in blocks; prompts read all or the top-k of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from bias_builders import Leading, Quest, Rule, TopBlocks, describe_rule, leading_visible, tails_per_row
from kernels_ref.chunks import QUERY_SLICE, unique_block_bytes
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
from kernels_ref.partial import Partial, unfold
from kernels_ref.sparse import MASK_BYTES, TileStep, num_tiles, tile_step
from kernels_ref.step import BlockStep, DecodeRows, PartInputs, SlotMasks, Step, StepParts, StepTensors
from kernels_ref.units import UnitLayout, write_indices

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels


@dataclass(frozen=True)
class Blocks(GroupKind):
    """Heads that store all tokens, in blocks: retrieval heads, and heads with sparse attention.

    The causal part covers new keys of the same prompt, the shared part blocks of several rows or of a prompt
    row, and the unique part the blocks of decode rows.

    Attributes:
        rule: which of the tokens before it a token sees; None = all of them.
        drafts_in_window: whether drafts of the model itself read a window of the blocks only, where other
            heads read all: ``StepTensors.window_block``. Other steps read all in both.
    """

    rule: Rule | None = None
    drafts_in_window: bool = field(default=False, kw_only=True)
    name: ClassVar[str] = "blocks"
    owner: ClassVar[Owner] = Owner.BLOCK

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Return the name, that of the rule, and whether drafts read a window."""
        rule = () if self.rule is None else (self.rule.key,)
        return (self.name, *rule, *([True] if self.drafts_in_window else []))

    @property
    def reach(self) -> int | None:
        """Return None: no number of tokens bounds what a token sees."""
        return None

    def describe(self) -> str:
        """Describe the rule; empty if a token sees all tokens."""
        return "" if self.rule is None else describe_rule(self.rule)

    @property
    def shares_units(self) -> bool:
        """Return True: attention changes nothing but what it writes first."""
        return True

    @property
    def attends_for_some(self) -> bool:
        """Whether a token sees all tokens: kernels of rules find tokens by their places in the step."""
        return self.rule is None and not self.drafts_in_window

    @property
    def needs_block_positions(self) -> bool:
        """Whether there is a rule."""
        return self.rule is not None

    def num_slots(self, block_size: int) -> int:
        """Return the slots of a block."""
        return block_size

    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> dict[UnitLayout, BlockStep]:
        """See ``BlockStep``."""
        t, num_slots = tensors, next(iter(layouts)).num_slots
        start = t.window_start if self._reads_window(t) else t.tail_start
        tails = start[:, :0, None]
        if parts.unique:
            tails = leading_visible(start[:, :, None], rows.end[:, None], num_slots)
        index = write_indices(t.write_block, t.write_offset, layouts)
        return {layout: BlockStep(index[layout], Leading(tails), rows.end) for layout in layouts}

    def _reads_window(self, tensors: StepTensors) -> bool:
        return self.drafts_in_window and tensors.window_block.shape[1] > 0

    def masked(
        self, plans: Mapping[UnitLayout, BlockStep], dtype: torch.dtype
    ) -> dict[UnitLayout, BlockStep]:
        """Return the plans with masks of tails."""
        layout, first = next(iter(plans.items()))
        masks = SlotMasks.of(first.tails, layout.num_slots)
        return {layout: plan._replace(masks=masks) for layout, plan in plans.items()}

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Writes first: decode rows read their new keys from their blocks."""
        parts, units = step.parts, inputs.units
        plan: BlockStep = step.plans[self.key, units.layout]
        record = units.encode(inputs.new)
        run.write_kv(units, plan.write_index, record)
        inputs = inputs._replace(new=record.values, rule=self.rule)
        if self._reads_window(inputs.tensors):
            inputs = inputs.of_window
        of_tokens: list[Partial] = []
        if parts.causal:
            of_tokens.append(run.causal(inputs))
        if parts.shared and inputs.tensors.shared_block.shape[0]:
            of_tokens.append(run.shared_blocks(inputs))
        decoded = None
        if parts.unique:
            decoded = run.unique_blocks(inputs.of_rows(step), plan)
            if step.decode_len > 1:
                decoded = unfold(decoded, step.decode_len)
        return run.finish(inputs.q, of_tokens, decoded, step.decode_slot, inputs.sinks)

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Scores of one chunk of blocks, and the keys and values gathered for it."""
        rule = 0 if self.rule is None else _rule_bytes(heads, sizes)
        return rule + max(
            causal_bytes(heads, sizes), _shared_bytes(heads, sizes), _unique_bytes(heads, sizes)
        )


def _rule_bytes(heads: HeadSizes, sizes: PartSizes) -> int:
    """The mask of a rule for one slice or chunk, and its intermediates."""
    parts, block_size = sizes.parts, sizes.block_size
    causal = parts.causal * sizes.query_slice * sizes.query_len
    shared = parts.shared * sizes.query_len * _shared_chunk(heads, sizes) * block_size
    num_blocks = max(_unique_chunk(heads, sizes), sizes.num_rows * tails_per_row(sizes.decode_len))
    unique = parts.unique * num_blocks * sizes.decode_len * block_size
    return MASK_BYTES * max(causal, shared, unique)


def _shared_chunk(heads: HeadSizes, sizes: PartSizes) -> int:
    query_heads, block_size = sizes.query_len * heads.num_query_heads, sizes.block_size
    key_bytes = heads.unit_bytes(block_size)
    if sizes.is_fused:
        most = sizes.chunks.masked(sizes.query_len, block_size, key_bytes, heads.dtype_bytes)
    else:
        most = sizes.chunks.shared(query_heads, block_size, key_bytes)
    return min(sizes.num_shared_blocks, most)


def _unique_chunk(heads: HeadSizes, sizes: PartSizes) -> int:
    row_heads, block_size = sizes.decode_len * heads.num_query_heads, sizes.block_size
    key_bytes = heads.unit_bytes(block_size)
    most = sizes.chunks.unique(sizes.num_rows, row_heads, block_size, heads.head_dim, key_bytes)
    return min(sizes.num_unique_blocks, most)


def _shared_bytes(heads: HeadSizes, sizes: PartSizes) -> int:
    if not (sizes.parts.shared and sizes.num_shared_blocks):
        return 0
    chunk = _shared_chunk(heads, sizes)
    met = dense_bytes(heads, sizes, chunk * sizes.query_len * sizes.block_size)
    # The operator takes heads first, which is a further copy of both.
    turned = 2 * chunk * heads.unit_bytes(sizes.block_size) if sizes.is_fused else 0
    return met + _gathered_bytes(chunk, heads, sizes) + turned


def _unique_bytes(heads: HeadSizes, sizes: PartSizes) -> int:
    if not sizes.parts.unique:
        return 0
    # Whole blocks are read in place; tails, a block or two of each row, are gathered.
    rows, block_size = sizes.num_rows, sizes.block_size
    row_heads = sizes.decode_len * heads.num_query_heads
    per_slot = row_heads * FLOAT32
    each = unique_block_bytes(rows, row_heads, block_size, heads.head_dim)
    blocks = _unique_chunk(heads, sizes) * each
    num_tails = rows * tails_per_row(sizes.decode_len)
    tails = SCORE_COPIES * num_tails * per_slot * block_size + _gathered_bytes(num_tails, heads, sizes)
    return max(blocks, tails)


def _gathered_bytes(num_blocks: int, heads: HeadSizes, sizes: PartSizes) -> int:
    """Keys and values of some blocks, once as they were stored and once with unused slots cleared."""
    return 4 * num_blocks * heads.unit_bytes(sizes.block_size)


_ESTIMATE_COPIES = 8
"""Scores, weights, ranks and positions of blocks, as they are compared."""
_MASK_COPIES = 4


class ChosenStep(NamedTuple):
    """Tensors that a step derives once for all stores of one layout.

    Attributes:
        blocks: those of heads that see all tokens.
        tiles: of prompt rows; None where the causal part does not run.
    """

    blocks: BlockStep
    tiles: TileStep | None


_KEPT = Blocks()


@dataclass(frozen=True)
class ChoosingBlocks(GroupKind):
    """Heads that store every token and read blocks that they choose by an estimate.

    Attributes:
        choice: how they choose.
        chunk: most new tokens of a prompt row in a step, a multiple of the tokens of a block.
    """

    choice: TopBlocks | Quest
    chunk: int
    name: ClassVar[str] = Blocks.name
    owner: ClassVar[Owner] = Blocks.owner

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"expected chunk >= 1, got {self.chunk}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Return the name, that of the choice, and the chunk."""
        return self.name, self.choice.key, self.chunk

    @property
    def reach(self) -> int | None:
        """Return None: no number of tokens bounds what a token sees."""
        return None

    @property
    def chunk_grid(self) -> int:
        """Chunks end at borders of blocks."""
        return self.chunk

    def describe(self) -> str:
        """Describe the choice."""
        return self.choice.describe()


@dataclass(frozen=True)
class ChosenBlocks(ChoosingBlocks):
    """Heads with top-k blocks for prompts, chosen by estimation; their decodes see all tokens.

    Visibility does not depend on ``chunk``, as long as chunks end at block borders.
    """

    choice: TopBlocks

    def num_slots(self, block_size: int) -> int:
        """Return the slots of a block."""
        return _KEPT.num_slots(block_size)

    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> dict[UnitLayout, ChosenStep]:
        """See ``ChosenStep``."""
        tiles = tile_step(tensors, next(iter(layouts)).num_slots) if parts.causal else None
        blocks = _KEPT.prepare(parts, tensors, rows, layouts)
        return {layout: ChosenStep(plan, tiles) for layout, plan in blocks.items()}

    def masked(
        self, plans: Mapping[UnitLayout, ChosenStep], dtype: torch.dtype
    ) -> dict[UnitLayout, ChosenStep]:
        """Return the plans with masks of tails."""
        blocks = _KEPT.masked({layout: plan.blocks for layout, plan in plans.items()}, dtype)
        return {layout: plan._replace(blocks=blocks[layout]) for layout, plan in plans.items()}

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Writes first: decode rows, and prompts on a CPU, read new keys from their blocks."""
        parts, units, t = step.parts, inputs.units, inputs.tensors
        plan: ChosenStep = step.plans[self.key, units.layout]
        record = units.encode(inputs.new)
        run.write_kv(units, plan.blocks.write_index, record)
        inputs = inputs._replace(new=record.values)
        of_tokens: list[Partial] = []
        if plan.tiles is not None:
            of_tokens.append(run.chosen_blocks(inputs, plan.tiles, self.choice))
        decoded = None
        if parts.unique:
            decoded = run.unique_blocks(inputs.of_rows(step), plan.blocks)
            if step.decode_len > 1:
                decoded = unfold(decoded, step.decode_len)
        if parts.unique and parts.shared and t.shared_block.shape[0]:
            reads = t.shared_reads if plan.tiles is None else plan.tiles.decode_reads
            shared = inputs._replace(tensors=t._replace(shared_reads=reads))
            of_tokens.append(run.shared_blocks(shared))
        return run.finish(inputs.q, of_tokens, decoded, step.decode_slot, inputs.sinks)

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Those of heads that see all tokens, with a mask for each head, and estimates."""
        met = _KEPT.transient_bytes(heads, sizes._replace(is_fused=False))
        if not sizes.parts.causal:
            return met
        tiles = num_tiles(sizes.query_len, sizes.num_rows, sizes.block_size)
        num_blocks = tiles + sizes.parts.shared * sizes.num_shared_blocks
        estimates = _ESTIMATE_COPIES * FLOAT32 * tiles * heads.num_query_heads * num_blocks
        means = FLOAT32 * heads.head_dim * (tiles * heads.num_query_heads + num_blocks * heads.num_heads)
        shares = FLOAT32 * tiles * sizes.query_len
        key_slots = min(num_blocks * sizes.block_size, sizes.chunks.key_slots)
        masks = max(min(QUERY_SLICE, sizes.query_len) * sizes.query_len, sizes.query_len * key_slots)
        return met + estimates + means + shares + _MASK_COPIES * heads.num_heads * masks
