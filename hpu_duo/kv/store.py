"""The key and value tensors of all layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from hpu_duo.kv.copies import BlockCopy, Copy, RowCopy
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.reserved import reserved_zeros
from hpu_duo.uncopied import Uncopied
from kernels_ref import KVUnits, LayerCache, UnitLayout, as_units
from kernels_ref.index import gather, index_dtype

_COPY_SIZES = (8, 4, 2, 1)
"""Blocks or rows that move at a time: few sizes, because a device compiles each one."""


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

    def carry_out(self, copies: Iterable[Copy]) -> None:
        """Copy blocks and rows within the stores, as if one after the other."""
        for part in split_copies(tuple(copies)):
            self._carry_out_at_once(part)

    def warm_up(self) -> None:
        """Run every size of copy once, from trash to trash."""
        for size in _COPY_SIZES:
            self._carry_out_at_once([BlockCopy(self.plan.num_blocks, self.plan.num_blocks)] * size)
            self._carry_out_at_once([RowCopy(self.plan.max_num_seqs, self.plan.max_num_seqs)] * size)

    def _carry_out_at_once(self, copies: Sequence[Copy]) -> None:
        index = torch.tensor(
            [[copy.src for copy in copies], [copy.dst for copy in copies]], dtype=torch.int32
        )
        source, target = index.to(self.device).unbind()
        for layer in self.layers:
            units = layer.blocks if isinstance(copies[0], BlockCopy) else layer.rings
            for store in (units.k, units.v):
                if store.shape[0]:
                    store.index_copy_(0, target.to(index_dtype(target.device)), gather(store, source))


def _flat(units: KVUnits) -> tuple[torch.Tensor, torch.Tensor]:
    return units.k_flat, units.v_flat


def split_copies(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    """Cut copies into runs of one kind and of few sizes, each of which may be carried out at once.

    Within a run, no copy reads or overwrites what an earlier one wrote.
    """
    begin = 0
    while begin < len(copies):
        first, end = copies[begin], begin + 1
        written = {first.dst}
        while end < len(copies) and type(copies[end]) is type(first):
            copy = copies[end]
            if copy.src in written or copy.dst in written:
                break
            written.add(copy.dst)
            end += 1
        size = next(size for size in _COPY_SIZES if size <= end - begin)
        yield copies[begin : begin + size]
        begin += size
