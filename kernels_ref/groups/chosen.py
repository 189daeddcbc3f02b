"""Heads that keep every token of a request, in blocks, and whose prompts read blocks of their choice."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from bias_builders import TopBlocks
from kernels_ref.chosen import TileStep, num_tiles, tile_step
from kernels_ref.groups.blocks import Blocks
from kernels_ref.groups.kind import GroupInputs, GroupKind, Owner
from kernels_ref.groups.transients import FLOAT32, HeadSizes, PartSizes
from kernels_ref.partial import Partial, unfold
from kernels_ref.slices import QUERY_SLICE
from kernels_ref.step import BlockStep, DecodeRows, Step, StepParts, StepTensors, of_rows
from kernels_ref.units import KVUnits, UnitLayout

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels

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
class ChosenBlocks(GroupKind):
    """Heads whose prompts see some blocks, chosen by estimation; their decodes see all tokens.

    Attributes:
        choice: blocks that a tile of a prompt sees.
        chunk: most new tokens of a prompt row in a step, a multiple of the tokens of a block. What tokens see
            does not depend on it, only on chunks ending at borders of blocks.
    """

    choice: TopBlocks
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
        """Tiles are whole where chunks end."""
        return self.chunk

    def describe(self) -> str:
        """Describe the choice."""
        return self.choice.describe()

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

    def attend(self, run: Kernels, inputs: GroupInputs, units: KVUnits, step: Step) -> torch.Tensor:
        """Write first: decode rows, and prompts on a CPU, find new keys in their blocks."""
        t, parts = step.tensors, step.parts
        plan: ChosenStep = step.plans[self.key, units.layout]
        q_QKGD, new, sinks_KG, scoring = inputs
        run.write_kv(units, plan.blocks.write_index, new)
        of_tokens: list[Partial] = []
        if plan.tiles is not None:
            of_tokens.append(run.chosen_blocks(q_QKGD, new, units, t, plan.tiles, self.choice, scoring))
        decoded = None
        if parts.unique:
            decoded = run.unique_blocks(of_rows(q_QKGD, step), units, t, plan.blocks, scoring)
            if step.decode_len > 1:
                decoded = unfold(decoded, step.decode_len)
        if parts.unique and parts.shared and t.shared_block.shape[0]:
            reads = t.shared_reads if plan.tiles is None else plan.tiles.decode_reads
            of_tokens.append(run.shared_blocks(q_QKGD, units, t._replace(shared_reads=reads), scoring))
        return run.finish(q_QKGD, of_tokens, decoded, step.decode_slot, sinks_KG)

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Those of heads that see all tokens, with a mask for each head, and estimates."""
        met = _KEPT.transient_bytes(heads, sizes)
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
