"""The key and value tensors of all layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpu_duo.kv.copies import BlockCopy, Copy
from hpu_duo.kv.plan import MemoryPlan
from kernels_ref import LayerCache


class KVStore:
    """Block and ring stores, allocated once and zeroed; see ``MemoryPlan`` for their shapes.

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
        blocks = (num_blocks, layer.num_retrieval_heads, plan.block_size, layer.head_dim)
        ring = (num_rows, layer.num_streaming_heads, layer.ring_size, layer.head_dim)
        return LayerCache(
            *(torch.zeros(shape, dtype=dtype, device=device) for shape in (blocks, blocks, ring, ring))
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensors take."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def carry_out(self, copies: Iterable[Copy]) -> None:
        """Copy blocks and rows within the stores, one after the other."""
        for copy in copies:
            for layer in self.layers:
                stores = layer[:2] if isinstance(copy, BlockCopy) else layer[2:]
                for store in stores:
                    if store.shape[0]:
                        store[copy.dst].copy_(store[copy.src])
