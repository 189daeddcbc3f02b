"""The key and value tensors of all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.reserved import reserved_zeros
from hpu_duo.uncopied import Uncopied
from kernels_ref import KVUnits, LayerCache, UnitLayout, as_units
from kernels_ref.index import gather, index_dtype


class KVStore(Uncopied):
    """Block and ring stores, zeroed; see ``MemoryPlan`` for their shapes.

    They are allocated once. On a CPU a block takes memory from its first use on.

    Attributes:
        layers: one ``LayerCache`` per decoder layer.
    """

    def __init__(self, plan: MemoryPlan, dtype: torch.dtype, device: torch.device) -> None:
        assert dtype.itemsize == plan.dtype_bytes, f"plan is for {plan.dtype_bytes} bytes, not {dtype}"
        self.plan = plan
        self.layers = tuple(self._allocate(index, dtype, device) for index in range(len(plan.layers)))

    def _allocate(self, index: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        plan, layer = self.plan, self.plan.layers[index]
        num_blocks = plan.num_blocks + 1 if layer.num_retrieval_heads else 0
        num_rows = plan.max_num_seqs + 1 if layer.num_streaming_heads else 0
        blocks = UnitLayout.dense(num_blocks, layer.num_retrieval_heads, plan.block_size)
        rings = UnitLayout.dense(num_rows, layer.num_streaming_heads, layer.ring_slots)

        def units(layout: UnitLayout) -> KVUnits:
            shape = (layout.num_units * layout.unit_stride, layer.head_dim)
            k, v = (reserved_zeros(shape, dtype, device) for _ in range(2))
            return as_units(k, v, layout)

        return LayerCache(units(blocks), units(rings))

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.layers[0].blocks.k.device

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensors take."""
        return sum(flat.nbytes for layer in self.layers for units in layer for flat in _flat(units))

    def carry_out(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks and rows within the stores; every source is read before anything is written.

        Args:
            blocks, rows: int32 ``[2, n]``, on the device: sources, and the destinations below them. Only
                trash may be a destination twice.
        """
        if blocks.shape[1]:
            self._copy([layer.blocks for layer in self.layers], blocks)
        if rows.shape[1]:
            self._copy([layer.rings for layer in self.layers], rows)

    def _copy(self, units: Sequence[KVUnits], copies: torch.Tensor) -> None:
        source, target = copies.unbind()
        target = target.to(index_dtype(target.device))
        for each in units:
            for store in (each.k, each.v):
                if store.shape[0]:
                    store.index_copy_(0, target, gather(store, source))


def _flat(units: KVUnits) -> tuple[torch.Tensor, torch.Tensor]:
    return units.k_flat, units.v_flat
