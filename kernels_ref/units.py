"""Units of keys and values, which attention reads and writes in a store by index."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch


class UnitLayout(NamedTuple):
    """Places of units in a store, counted in vectors; fixed for a captured step.

    Attributes:
        num_units, num_heads, num_slots: X, K and S.
        head_stride: from a head to the next one, at least S.
        unit_stride: from a unit to the next one.
        offset: of the first vector of a unit; more than 0 if another store's vectors come first.
    """

    num_units: int
    num_heads: int
    num_slots: int
    head_stride: int
    unit_stride: int
    offset: int = 0

    @classmethod
    def dense(cls, num_units: int, num_heads: int, num_slots: int) -> UnitLayout:
        """Units without any room between them."""
        return cls(num_units, num_heads, num_slots, num_slots, num_heads * num_slots)

    def view(self, flat_VD: torch.Tensor) -> torch.Tensor:
        """A store as ``[X, K, S, D]``, to be read.

        Args:
            flat_VD: the store, ``[X * unit_stride, D]``.
        """
        units = flat_VD.unflatten(0, (self.num_units, self.unit_stride))
        heads = units[:, self.offset : self.offset + self.num_heads * self.head_stride]
        return heads.unflatten(1, (self.num_heads, self.head_stride))[:, :, : self.num_slots]


class KVUnits(NamedTuple):
    """Units of a store of keys and of one of values.

    Attributes:
        k, v: ``[X, K, S, D]``, views to be read; vectors of a head are contiguous.
        k_flat, v_flat: the stores as lists of vectors, ``[V, D]``, to be written.
        layout: of the units, in both.
        scratch: units as they were before the step, for prompts to read, ``[C, K, S, D]``; None where a kind
            of heads needs none, or no prompt reads any.
        state: position and score of each slot, for kinds that evict by them; else None.
        regions: whole texts of partially computed prompts, for kinds that choose at the end of a prompt; else
            None.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_flat: torch.Tensor
    v_flat: torch.Tensor
    layout: UnitLayout
    scratch: Scratch | None = None
    state: SlotState | None = None
    regions: PromptRegions | None = None

    def seen_anew(self) -> KVUnits:
        """The same units, with views of their own."""
        return as_units(self.k_flat, self.v_flat, self.layout, self.scratch, self.state, self.regions)


class SlotState(NamedTuple):
    """Position and score of each slot of each unit, with the slots of all heads of a unit concatenated.

    They are small beside keys and values, and are read and written in one graph.

    Attributes:
        position: of the token in the slot, int32 ``[X, K * S]``.
        score: of that token, float32 ``[X, K * S]``.
    """

    position: torch.Tensor
    score: torch.Tensor


class PromptRegions(NamedTuple):
    """Keys, values and scores of all tokens of partially computed prompts, a region for each prompt.

    Attributes:
        k_flat, v_flat: lists of vectors, ``[P * (1 + L) * K, D]``. A region begins with K vectors that only
            padding writes; L tokens of each head follow.
        score: float32 ``[P, K * L]``.
        layout: of the regions, with a slot for each token of a text.
    """

    k_flat: torch.Tensor
    v_flat: torch.Tensor
    score: torch.Tensor
    layout: UnitLayout

    @staticmethod
    def layout_of(num_regions: int, num_heads: int, num_tokens: int) -> UnitLayout:
        """The layout of regions for texts of ``num_tokens`` tokens (L)."""
        size = num_heads * num_tokens
        return UnitLayout(num_regions, num_heads, num_tokens, num_tokens, size + num_heads, num_heads)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All tensors."""
        return self.k_flat, self.v_flat, self.score

    @property
    def units(self) -> KVUnits:
        """The regions as units, ``[P, K, L, D]``."""
        return as_units(self.k_flat, self.v_flat, self.layout)


class Scratch(NamedTuple):
    """Copies of some units from before a step writes.

    Attributes:
        k, v: ``[C, K, S, D]``, dense.
    """

    k: torch.Tensor
    v: torch.Tensor


class NewKV(NamedTuple):
    """Keys and values of the new tokens of a step.

    Attributes:
        k, v: ``[Q, K, D]``.
    """

    k: torch.Tensor
    v: torch.Tensor


def as_units(
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    layout: UnitLayout,
    scratch: Scratch | None = None,
    state: SlotState | None = None,
    regions: PromptRegions | None = None,
) -> KVUnits:
    """The units of two stores ``[V, D]`` of one layout."""
    return KVUnits(layout.view(k_flat), layout.view(v_flat), k_flat, v_flat, layout, scratch, state, regions)


def of_stores(k_XKSD: torch.Tensor, v_XKSD: torch.Tensor) -> KVUnits:
    """The units of two contiguous stores."""
    num_units, num_heads, num_slots, dim = k_XKSD.shape
    layout = UnitLayout.dense(num_units, num_heads, num_slots)
    return KVUnits(k_XKSD, v_XKSD, k_XKSD.view(-1, dim), v_XKSD.view(-1, v_XKSD.shape[-1]), layout)


def copy_to_scratch(caches: Iterable[Iterable[KVUnits]], unit: torch.Tensor) -> None:
    """Copy units of every store that has a scratch there, before a step writes to the stores.

    Args:
        caches: units of each group of heads, of each layer.
        unit: units to copy, in the order of their places, int32 ``[C]``.
    """
    for cache in caches:
        for units in cache:
            if units.scratch is not None:
                copy_units(units.k_flat, units.v_flat, units.layout, *units.scratch, unit)


def copy_units(
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    layout: UnitLayout,
    k_copy: torch.Tensor,
    v_copy: torch.Tensor,
    unit: torch.Tensor,
) -> None:
    """Copy units of two stores into a scratch; see ``copy_to_scratch``."""
    for copy, flat in ((k_copy, k_flat), (v_copy, v_flat)):
        copy.copy_(layout.view(flat).index_select(0, unit))


def gather_units(units: KVUnits, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some units, ``[len(index), K, S, D]`` each."""
    return units.k.index_select(0, index), units.v.index_select(0, index)


def index_dtype(device: torch.device) -> torch.dtype:
    """The dtype of indices on a device: int64 on CPU and CUDA, int32 elsewhere.

    Plans are int32 because a Gaudi has no native int64; torch's CPU and CUDA kernels accept
    only int64 in ``index_copy_``.
    """
    return torch.int64 if device.type in ("cpu", "cuda") else torch.int32


def gather(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Entries of dimension 0: ``[len(index), ...]``."""
    return source.index_select(0, index)


def part_places(number: torch.Tensor, size: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of one part of ``total`` entries, for ``gather``.

    The index is on the device, so that the part is not a view with an offset of its own.

    Args:
        number: of the part, int32 ``[1]``.
        size: entries of a part; the last part may have fewer.
    Returns:
        int32 ``[size]``, the last entry again past the end; and whether there is such an entry.
    """
    place = number * size + torch.arange(size, dtype=number.dtype, device=number.device)
    return torch.clamp(place, max=total - 1), place < total


def write_indices(
    unit: torch.Tensor, slot: torch.Tensor, layouts: Collection[UnitLayout]
) -> dict[UnitLayout, torch.Tensor]:
    """Places, among the vectors of a store, of every (token, head).

    Args:
        unit: block (or ring row) of each token, int32 ``[Q]``.
        slot: slot inside it, int32 ``[Q]``.
        layouts: of every store wanted.
    Returns:
        ``[Q * K]`` by layout, tokens outermost, of ``index_dtype``.
    """
    # What layouts share is computed once: a step on a CPU waits for every operator.
    most: dict[int, int] = {}
    for layout in layouts:
        most[layout.head_stride] = max(layout.num_heads, most.get(layout.head_stride, 0))
    unit = unit[:, None]
    starts = {
        stride: slot[:, None]
        + torch.arange(0, num_heads * stride, stride, dtype=index_dtype(unit.device), device=unit.device)
        for stride, num_heads in most.items()
    }
    found = {}
    for layout in layouts:
        start = starts[layout.head_stride][:, : layout.num_heads]
        # The sum has the wider of both types, which saves a conversion.
        index = torch.add(start, unit, alpha=layout.unit_stride)
        found[layout] = (index + layout.offset if layout.offset else index).view(-1)
    return found


def unit_places(unit: torch.Tensor, layout: UnitLayout) -> torch.Tensor:
    """Places, among the vectors of a store, of all vectors of some units.

    Args:
        unit: int32 ``[n]``.
    Returns:
        ``[n * K * S]``, in the order of units, heads and slots, of ``index_dtype``.
    """
    device, dtype = unit.device, index_dtype(unit.device)
    head = torch.arange(layout.num_heads, dtype=dtype, device=device) * layout.head_stride
    slot = torch.arange(layout.offset, layout.offset + layout.num_slots, dtype=dtype, device=device)
    return (unit[:, None, None] * layout.unit_stride + head[:, None] + slot).view(-1)


def write(flat_VD: torch.Tensor, index: torch.Tensor, new_QKD: torch.Tensor) -> None:
    """Write one vector per token and head.

    Args:
        flat_VD: a store as a list of vectors; changed in place by one ``index_copy_``.
        index: of ``write_indices`` or ``unit_places``. Only places in null units may repeat.
        new_QKD: the vectors, in the order of the index.
    """
    flat_VD.index_copy_(0, index, new_QKD.reshape(-1, flat_VD.shape[-1]))


def write_kv(units: KVUnits, index: torch.Tensor, new: NewKV) -> None:
    """Write the keys and the values of new tokens; see ``write``."""
    for flat, values in ((units.k_flat, new.k), (units.v_flat, new.v)):
        flat.index_copy_(0, index, values.reshape(-1, flat.shape[-1]))
