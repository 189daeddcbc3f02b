"""The key and value tensors of all layers."""

from __future__ import annotations

import torch

from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.kv.reserved import reserved_zeros
from hpu_duo.rules import mark_trash
from hpu_duo.uncopied import Uncopied
from kernels_ref import HeadGroup, KVUnits, Owner, PromptRegions, Scratch, SlotState, UnitLayout, as_units
from kernels_ref.index import gather, index_dtype, unit_places, write


class KVStore(Uncopied):
    """The stores of all groups of heads, zeroed; see ``MemoryPlan`` for their shapes.

    They are allocated once. On a CPU a block takes memory from its first use on.

    Attributes:
        layers: one ``LayerCache`` per decoder layer.
    """

    def __init__(self, plan: MemoryPlan, dtype: torch.dtype, device: torch.device) -> None:
        assert dtype.itemsize == plan.dtype_bytes, f"plan is for {plan.dtype_bytes} bytes, not {dtype}"
        self.plan = plan
        self.layers = tuple(
            tuple(self._allocate(layer, group, dtype, device) for group in layer.groups)
            for layer in plan.layers
        )
        self._units: dict[Owner, list[KVUnits]] = {owner: [] for owner in Owner}
        for layer, cache in zip(plan.layers, self.layers):
            for group, units in zip(layer.groups, cache):
                self._units[group.kind.owner].append(units)

    def _allocate(
        self, layer: LayerKV, group: HeadGroup, dtype: torch.dtype, device: torch.device
    ) -> KVUnits:
        num_units = self.plan.num_units(group.kind)
        layout = group.kind.layout(num_units, group.num_heads, self.plan.block_size)
        shape = (layout.num_units * layout.unit_stride, layer.head_dim)
        k, v = (reserved_zeros(shape, dtype, device) for _ in range(2))
        trash = self.plan.trash_unit(group.kind)
        for flat in (k, v):
            mark_trash(flat, trash * layout.unit_stride, (trash + 1) * layout.unit_stride)
        state = self._state(group, layout, device) if group.kind.state_bytes else None
        if not group.kind.keeps_scratch:
            regions = self._regions(layer, group, dtype, device) if group.kind.region_len else None
            return as_units(k, v, layout, state=state, regions=regions)
        copies = (self.plan.max_chunk_rows, group.num_heads, layout.num_slots, layer.head_dim)
        scratch = Scratch(*(reserved_zeros(copies, dtype, device) for _ in range(2)))
        return as_units(k, v, layout, scratch, state)

    def _regions(
        self, layer: LayerKV, group: HeadGroup, dtype: torch.dtype, device: torch.device
    ) -> PromptRegions:
        num_regions, num_tokens = self.plan.max_chunk_rows, group.kind.region_len
        layout = PromptRegions.layout_of(num_regions, group.num_heads, num_tokens)
        shape = (layout.num_units * layout.unit_stride, layer.head_dim)
        k, v = (reserved_zeros(shape, dtype, device) for _ in range(2))
        for flat in (k, v):
            mark_trash(flat, 0, layout.offset)
        score = reserved_zeros((num_regions, group.num_heads * num_tokens), torch.float32, device)
        return PromptRegions(k, v, score, layout)

    def _state(self, group: HeadGroup, layout: UnitLayout, device: torch.device) -> SlotState:
        shape = layout.num_units, layout.num_heads * layout.num_slots
        trash = self.plan.trash_unit(group.kind)
        state = SlotState(*(reserved_zeros(shape, dtype, device) for dtype in (torch.int32, torch.float32)))
        for each in state:
            mark_trash(each, trash, trash + 1, is_state=True)
        return state

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.layers[0][0].k_flat.device

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensors take."""
        return sum(
            flat.nbytes
            for layer in self.layers
            for units in layer
            for flat in (
                *(units.k_flat, units.v_flat, *(units.scratch or ()), *(units.state or ())),
                *(units.regions.tensors if units.regions is not None else ()),
            )
        )

    def carry_out(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks and rows within the stores; every source is read before anything is written.

        Args:
            blocks, rows: int32 ``[2, n]``, on the device: sources, and the destinations below them. Only
                trash may be a destination twice.
        """
        for owner, copies in ((Owner.BLOCK, blocks), (Owner.ROW, rows)):
            if copies.shape[1]:
                self._copy(owner, copies)

    def _copy(self, owner: Owner, copies: torch.Tensor) -> None:
        source, target = copies.unbind()
        places: dict[UnitLayout, torch.Tensor] = {}
        for units in self._units[owner]:
            layout = units.layout
            if layout not in places:
                places[layout] = unit_places(target, layout)
            for flat, unit in ((units.k_flat, units.k), (units.v_flat, units.v)):
                write(flat, places[layout], gather(unit, source))
            for each in units.state or ():
                each.index_copy_(0, target.to(index_dtype(target.device)), gather(each, source))
