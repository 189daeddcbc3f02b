"""Reads and writes by index, in the forms that every device takes natively.

Shapes: Q tokens, K heads, D head size, V vectors of a store.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels_ref.units import KVUnits, NewKV, UnitLayout


def index_dtype(device: torch.device) -> torch.dtype:
    """The integers that a device takes as indices: int64 on CPU and CUDA, int32 elsewhere.

    Plans are int32 because a Gaudi has no native int64; torch's CPU and CUDA kernels accept
    only int64 in ``index_copy_``.
    """
    return torch.int64 if device.type in ("cpu", "cuda") else torch.int32


def gather(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Entries of dimension 0: ``[len(index), ...]``."""
    return source.index_select(0, index)


def part_places(number: torch.Tensor, size: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of one part of ``total`` entries, for ``gather``.

    The number is on the device, so that the part is no view at an offset of its own.

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
    # What layouts share comes first: a step on a CPU waits for every operator.
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
    """Put one vector per token and head in place.

    Args:
        flat_VD: a store as a list of vectors; changed in place by one ``index_copy_``.
        index: of ``write_indices`` or ``unit_places``. Only places in trash may repeat.
        new_QKD: the vectors, in the order of the index.
    """
    flat_VD.index_copy_(0, index, new_QKD.reshape(-1, flat_VD.shape[-1]))


def write_kv(units: KVUnits, index: torch.Tensor, new: NewKV) -> None:
    """Put the keys and the values of new tokens in place; see ``write``."""
    for flat, values in ((units.k_flat, new.k), (units.v_flat, new.v)):
        flat.index_copy_(0, index, values.reshape(-1, flat.shape[-1]))
