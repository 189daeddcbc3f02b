"""Kernels that read floats, for stores of other formats.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bias_builders import TopBlocks
from kernels_ref import reference
from kernels_ref import units as portable
from kernels_ref.partial import Partial
from kernels_ref.sparse import TileStep
from kernels_ref.step import BlockStep, PartInputs, RingStep
from kernels_ref.units import KVRecord, KVUnits

if TYPE_CHECKING:
    from kernels_ref.impl import Implementation, Kernels


@dataclass(frozen=True)
class DecodingKernels:
    """Kernels whose parts that read or write a store are portable where they do not read its format.

    Chunks of units are decoded and attended to. New keys and values, copies of rings and partials are plain
    floats in any case.

    Args:
        inner: kernels that read floats by pointer.
        impl: which these are.
    """

    inner: Kernels
    impl: Implementation

    def shared_blocks(self, inputs: PartInputs) -> Partial:
        """Every query against the blocks that several rows read, or a prompt row."""
        return self._reading(inputs.units).shared_blocks(inputs)

    def chosen_blocks(self, inputs: PartInputs, tiles: TileStep, choice: TopBlocks) -> Partial:
        """Tokens of prompt rows against the blocks that are chosen for them."""
        return self._reading(inputs.units).chosen_blocks(inputs, tiles, choice)

    def unique_blocks(self, inputs: PartInputs, blocks: BlockStep) -> Partial:
        """Decode rows against the blocks that only they read."""
        return self._reading(inputs.units).unique_blocks(inputs, blocks)

    def unique_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Decode rows against their own ring."""
        return self._reading(inputs.units).unique_rings(inputs, ring)

    def unique_with_weights(self, inputs: PartInputs, ring: RingStep) -> tuple[Partial, torch.Tensor]:
        """Decode rows against their own slots, with the weight of each slot."""
        return self._reading(inputs.units).unique_with_weights(inputs, ring)

    def write_kv(self, units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
        """Write the keys and values of new tokens."""
        write = self.inner.write_kv if self.impl.serves(units.encoding.format) else portable.write_kv
        write(units, index, record)

    def _reading(self, units: KVUnits) -> Kernels:
        return self.inner if self.impl.serves(units.encoding.format) else reference

    def __getattr__(self, name: str) -> Any:
        """Return a kernel of ``inner``."""
        return getattr(self.inner, name)
