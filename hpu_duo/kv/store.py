"""The tensors of keys and values of all layers, and copies of their units to the host and back."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import NamedTuple

import torch

from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.kv.row_state import HeadRows, KindRows, RowState, UnitCopies, Units
from hpu_duo.not_picklable import NotPicklable
from kernels_ref import (
    Encoding,
    GroupKind,
    HeadGroup,
    KVUnits,
    LayerCache,
    Owner,
    PromptRegions,
    ReaderSums,
    RowKind,
    SlotState,
    UnitLayout,
)


def reserved_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU in an anonymous mapping, whose pages are allocated at their first write.

    ``torch.zeros`` writes, and so allocates, every page at once.

    Raises:
        MemoryError: the system has no such range of addresses.
    """
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = count * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"expected room for {num_bytes:,} bytes of keys or values: {error}") from error
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def mark_null(store: torch.Tensor, begin: int, end: int, *, is_state: bool = False) -> None:
    """Let entries ``[begin, end)`` of a store be written twice where a device checks writes.

    Args:
        store: its entries are those of dimension 0.
        is_state: it is small relative to keys and values, so that a compiler may copy it to write it.
    """
    mark = getattr(store, "mark_null", None)
    if mark is not None:
        mark(begin, end, is_state)


class KVStore(NotPicklable):
    """The stores of all groups of heads, zeroed; see ``MemoryPlan`` for their shapes.

    They are allocated once. On a CPU a block uses memory from its first write on.

    Attributes:
        layers: one ``LayerCache`` per layer of the plan, that of its source where it has one.
        row_tensors: of each such layer, the tensors ``[R + 1, ...]`` of each of its kinds of row states.
        row_states: all that rows own, in the order of the layers: rings, slots of budgets, and those kinds.
    """

    def __init__(self, plan: MemoryPlan, dtype: torch.dtype, device: torch.device) -> None:
        assert dtype.itemsize == plan.dtype_bytes, f"plan is for {plan.dtype_bytes} bytes, not {dtype}"
        self.plan = plan
        caches: list[LayerCache] = []
        for number, layer in enumerate(plan.layers):
            own = tuple(self._allocate(layer, group, dtype, device) for group in layer.own_groups)
            if number in plan.read_layers:
                own = tuple(
                    units._replace(sums=self._sums(group, device))
                    for group, units in zip(layer.own_groups, own)
                )
            caches.append(own if layer.source is None else caches[layer.source])
        self.layers = tuple(caches)
        self.row_tensors = tuple(
            tuple(self._allocate_rows(kind, device) for kind in layer.rows) for layer in plan.layers
        )
        self.row_states = tuple(
            state for number in range(len(plan.layers)) for state in self._row_states(number)
        )
        self._blocks = [
            units
            for layer, cache in zip(plan.layers, self.layers)
            for group, units in zip(layer.own_groups, cache)
            if group.kind.owner is Owner.BLOCK
        ]

    def _row_states(self, number: int) -> Iterator[RowState]:
        """Yield what rows own in one layer, in the order of ``LayerKV.row_state_bytes``."""
        name, layer = f"layers.{number}", self.plan.layers[number]
        for place, (group, units) in enumerate(zip(layer.own_groups, self.layers[number])):
            if group.kind.owner is Owner.ROW:
                yield HeadRows(f"{name}.groups.{place}", group, units)
        for kind, tensors in zip(layer.rows, self.row_tensors[number]):
            yield KindRows(name, kind, tensors)

    def _allocate_rows(self, kind: RowKind, device: torch.device) -> tuple[torch.Tensor, ...]:
        null = self.plan.null_row
        found = tuple(reserved_zeros((null + 1, *each.shape), each.dtype, device) for each in kind.tensors)
        for tensor in found:
            mark_null(tensor, null, null + 1, is_state=True)
        return found

    def _allocate(
        self, layer: LayerKV, group: HeadGroup, dtype: torch.dtype, device: torch.device
    ) -> KVUnits:
        num_units = self.plan.num_units(group.kind)
        layout = group.kind.layout(num_units, group.num_heads, self.plan.block_size)
        dims = group.kind.stored_dims(layer.head_dim, layer.value_dim)
        encoding = Encoding(group.format, *dims, dtype)
        null = self.plan.null_unit(group.kind)
        store, scratch = [], []
        for part in encoding.parts:
            shape = (layout.num_units * layout.unit_stride, part.width)
            store.append(reserved_zeros(shape, part.dtype or dtype, device))
            mark_null(store[-1], null * layout.unit_stride, (null + 1) * layout.unit_stride)
            if group.kind.keeps_scratch:
                copies = (self.plan.max_chunk_rows, layout.num_heads, layout.num_slots, part.width)
                scratch.append(reserved_zeros(copies, part.dtype or dtype, device))
        return KVUnits(
            tuple(store),
            layout.views(store),
            layout,
            encoding,
            tuple(scratch) or None,
            self._state(group, layout, device) if group.kind.state_bytes else None,
            self._regions(layer, group, dtype, device) if group.kind.region_len else None,
        )

    def _regions(
        self, layer: LayerKV, group: HeadGroup, dtype: torch.dtype, device: torch.device
    ) -> PromptRegions:
        num_regions, num_tokens = self.plan.max_chunk_rows, group.kind.region_len
        layout = PromptRegions.layout_of(num_regions, group.num_heads, num_tokens)
        num_vectors = layout.num_units * layout.unit_stride
        dims = layer.head_dim, layer.value_dim
        k, v = (reserved_zeros((num_vectors, dim), dtype, device) for dim in dims)
        for flat in (k, v):
            mark_null(flat, 0, layout.offset)
        score = reserved_zeros((num_regions, group.num_heads * num_tokens), torch.float32, device)
        return PromptRegions((k, v), score, layout)

    def _state(self, group: HeadGroup, layout: UnitLayout, device: torch.device) -> SlotState:
        num_slots = group.kind.state_versions * layout.num_heads * layout.num_slots
        shape = layout.num_units, num_slots
        null = self.plan.null_unit(group.kind)
        state = SlotState(*(reserved_zeros(shape, dtype, device) for dtype in (torch.int32, torch.float32)))
        for each in state:
            mark_null(each, null, null + 1, is_state=True)
        return state

    def _sums(self, group: HeadGroup, device: torch.device) -> ReaderSums | None:
        if not group.kind.num_summed:
            return None
        shapes = self.plan.sum_shapes(group)
        sums = ReaderSums(*(reserved_zeros(shape, torch.float32, device) for shape in shapes))
        mark_null(sums.decode, self.plan.max_num_seqs, self.plan.max_num_seqs + 1, is_state=True)
        return sums

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.layers[0][0].tensors[0].device

    @property
    def num_bytes(self) -> int:
        """Total bytes of the tensors."""
        of_units = (
            units.num_bytes
            for layer, cache in zip(self.plan.layers, self.layers)
            for _, units in zip(layer.own_groups, cache)
        )
        of_kinds = (each.nbytes for layer in self.row_tensors for kind in layer for each in kind)
        return sum(of_units) + sum(of_kinds)

    def carry_out(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks and rows within the stores; all sources are read before anything is written.

        Args:
            blocks, rows: int32 ``[2, n]``, on the device: sources, and the destinations below them. Only
                null units may be a destination twice.
        """
        if blocks.shape[1]:
            of_blocks = UnitCopies(blocks)
            for units in self._blocks:
                of_blocks.copy_units(units)
        if rows.shape[1]:
            of_rows = UnitCopies(rows)
            for state in self.row_states:
                state.copy(of_rows)


class UnitTensor(NamedTuple):
    """A tensor of a group of heads of a layer that stores blocks: its keys, its values, or a part of either.

    Attributes:
        name: distinct in a model.
        flat: the store as a list of vectors, ``[V, D]``.
        layout: of the units in the store.
        kind: of the group.
    """

    name: str
    flat: torch.Tensor
    layout: UnitLayout
    kind: GroupKind

    @property
    def unit_shape(self) -> tuple[int, int, int]:
        """Heads, slots and elements of a vector: the shape of a unit."""
        return self.layout.num_heads, self.layout.num_slots, self.flat.shape[-1]

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        heads, slots, dim = self.unit_shape
        return heads * slots * dim * self.flat.element_size()

    @torch.inference_mode()
    def read(self, units: Sequence[int]) -> torch.Tensor:
        """Copy units to the host, ``[n, K, S, D]``."""
        data = torch.empty((len(units), *self.unit_shape), dtype=self.flat.dtype)
        for place, begin, end in self._runs(units):
            data.view(-1, data.shape[-1])[place : place + end - begin].copy_(self.flat[begin:end])
        return data

    @torch.inference_mode()
    def write(self, units: Sequence[int], data: torch.Tensor) -> None:
        """Copy units ``[n, K, S, D]`` from the host to the store."""
        vectors = data.reshape(-1, data.shape[-1])
        for place, begin, end in self._runs(units):
            self.flat[begin:end].copy_(vectors[place : place + end - begin])

    def _runs(self, units: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield runs of neighbouring units: their first vector on the host, and their range in the store."""
        size = self.layout.unit_stride
        dense = UnitLayout.dense(self.layout.num_units, self.layout.num_heads, self.layout.num_slots)
        assert self.layout == dense, f"expected contiguous units of {self.name}"
        order, place = count(), 0
        for _, run in groupby(units, lambda unit: unit - next(order)):
            taken = list(run)
            begin, end = taken[0] * size, (taken[-1] + 1) * size
            yield place, begin, end
            place += end - begin


def block_units(store: KVStore) -> list[Units]:
    """Return all tensors of blocks, in order of the layers."""
    return [Units(tensor.flat, tensor.layout) for tensor in block_tensors(store)]


def row_units(store: KVStore) -> list[Units]:
    """Return all tensors of rows, in order of the layers."""
    return [units for state in store.row_states for units in state.units]


def block_tensors(store: KVStore) -> Iterator[UnitTensor]:
    """Yield the stores of blocks, in order of the layers."""
    for number, (layer, cache) in enumerate(zip(store.plan.layers, store.layers)):
        for place, (group, units) in enumerate(zip(layer.own_groups, cache)):
            if group.kind.owner is Owner.BLOCK:
                for name, flat in zip(units.names, units.tensors):
                    yield UnitTensor(f"layers.{number}.groups.{place}.{name}", flat, units.layout, group.kind)
