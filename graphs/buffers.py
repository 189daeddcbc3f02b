"""Inputs of a step, packed into one array: one copy moves them to fixed device addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from graphs.shape import BatchShape

ALIGNMENT_BYTES = 64
"""Alignment of fields in bytes: a cache line, and a full vector register."""

_ITEM_BYTES = 4
_ALIGNMENT_ITEMS = ALIGNMENT_BYTES // _ITEM_BYTES
_MAX_CACHED_BUCKETS = 1024
"""Bound of cached layouts: shapes that missed the table have layouts too, in any number."""

FieldShapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shape of each array by name, in the order in which they are laid out."""

ShapesOf: TypeAlias = Callable[[BatchShape], FieldShapes]
"""Fields of a step in a bucket. Layouts are a function of the bucket, since graphs store addresses."""


@dataclass(frozen=True)
class FieldSlot:
    """Place of a field: ``offset`` in items from the start of the array, and its ``shape``."""

    offset: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Offset after the field's last item."""
        return self.offset + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Places of all fields of a bucket; ``slots`` by name, in order."""

    slots: Mapping[str, FieldSlot]

    @cached_property
    def num_items(self) -> int:
        """Length of the array of all fields, in items of four bytes."""
        return max((slot.stop for slot in self.slots.values()), default=0)

    @cached_property
    def num_bytes(self) -> int:
        """Length of that array in bytes: what one step copies."""
        return self.num_items * _ITEM_BYTES


def pack(shapes: FieldShapes) -> Layout:
    """Pack fields, each at the next aligned offset."""
    slots = {}
    offset = 0
    for name, shape in shapes.items():
        slot = slots[name] = FieldSlot(offset, shape)
        offset = -(-slot.stop // _ALIGNMENT_ITEMS) * _ALIGNMENT_ITEMS
    return Layout(slots)


class HostInputs:
    """The host side: arrays of a step that are views of one array.

    Args:
        shapes_of: the arrays of a bucket.
        largest: the arrays with the most items.
    """

    def __init__(self, shapes_of: ShapesOf, largest: FieldShapes) -> None:
        self._items = np.zeros(pack(largest).num_items, np.int32)
        self._views_of = lru_cache(_MAX_CACHED_BUCKETS)(partial(_host_views, self._items, shapes_of))

    def stage(self, bucket: BatchShape) -> dict[str, npt.NDArray[np.int32]]:
        """Return views of the bucket's fields, all of which have to be written.

        Returns:
            int32 arrays by field name. They share memory with those of every other bucket, and are not
            initialized.

        Raises:
            ValueError: the bucket exceeds the array.
        """
        return self._views_of(bucket).fields

    def take(self, bucket: BatchShape) -> npt.NDArray[np.int32]:
        """Return a copy of what has been written for a bucket, ``[num_items]``."""
        return self._views_of(bucket).items.copy()


class DeviceInputs:
    """The device side: one buffer of the largest size, shared by all buckets.

    A step copies exactly its bucket's array, also on CPU.

    Args:
        shapes_of, largest: as the ``HostInputs`` that fill the arrays have them.
        device: of the inputs of captured steps.
        num_extra: most items behind the fields of a step, see ``copy_in``.
    """

    def __init__(
        self,
        shapes_of: ShapesOf,
        largest: FieldShapes,
        device: torch.device | str = "cpu",
        num_extra: int = 0,
    ) -> None:
        num_items = pack(largest).num_items + num_extra
        self.device = torch.device(device)
        self._another = partial(DeviceInputs, shapes_of, largest, self.device, num_extra)
        self.num_copies = 0
        self.bytes_copied = 0
        self._has_extra = num_extra > 0
        self._items = torch.zeros(num_items, dtype=torch.int32, device=self.device)
        # CUDA copies fastest from pinned memory; ``copy_in`` returns when that may be overwritten.
        self._pinned = torch.zeros(num_items, dtype=torch.int32, pin_memory=True) if self._is_cuda else None
        self._views_of = lru_cache(_MAX_CACHED_BUCKETS)(partial(_device_views, self._items, shapes_of))

    def another(self) -> DeviceInputs:
        """Return inputs of the same layout, with a buffer of their own."""
        return self._another()

    @property
    def buffer(self) -> torch.Tensor:
        """The buffer of all buckets, int32; each step's array starts at offset 0."""
        return self._items

    def layout(self, bucket: BatchShape) -> Layout:
        """Return the places of the fields of a bucket in its array."""
        return self._views_of(bucket).layout

    def fields(self, bucket: BatchShape) -> dict[str, torch.Tensor]:
        """Return what ``copy_in`` does, without copying anything."""
        return self._views_of(bucket).fields

    def copy_in(self, bucket: BatchShape, items: npt.NDArray[np.int32]) -> dict[str, torch.Tensor]:
        """Copy a step to the device in one transfer.

        Args:
            items: what ``HostInputs.take`` returned for the bucket, and further items that captured steps do
                not read.

        Returns:
            int32 device tensors by field name, at addresses that depend on the bucket only. Repeated calls
            for a bucket return the same objects (as long as it is among the last 1,024 different ones).

        Raises:
            ValueError: the array is of another bucket, or larger than the buffer.
        """
        views = self._views_of(bucket)
        target = views.items
        if items.dtype != np.int32 or items.shape != (views.layout.num_items,):
            target = self._with_extra(bucket, items)
        source = torch.from_numpy(items)
        if self._pinned is not None:
            source = self._pinned[: len(items)].copy_(source)
        target.copy_(source)
        self.num_copies += 1
        self.bytes_copied += items.nbytes
        return views.fields

    def _with_extra(self, bucket: BatchShape, items: npt.NDArray[np.int32]) -> torch.Tensor:
        """The part of the buffer for an array with further items behind the fields."""
        num_items = self._views_of(bucket).layout.num_items
        fits = items.dtype == np.int32 and items.ndim == 1 and num_items < len(items) <= len(self._items)
        if not (fits and self._has_extra):
            raise ValueError(f"{bucket}: expected int32 [{num_items}], got {items.dtype} {list(items.shape)}")
        return self._items[: len(items)]

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class _HostViews:
    items: npt.NDArray[np.int32]
    fields: dict[str, npt.NDArray[np.int32]]


@dataclass(frozen=True)
class _DeviceViews:
    layout: Layout
    items: torch.Tensor
    fields: dict[str, torch.Tensor]


def _host_views(items: npt.NDArray[np.int32], shapes_of: ShapesOf, bucket: BatchShape) -> _HostViews:
    layout = _fitting(items.nbytes, shapes_of, bucket)
    slots = layout.slots.items()
    return _HostViews(
        items[: layout.num_items],
        {name: items[slot.offset : slot.stop].reshape(slot.shape) for name, slot in slots},
    )


def _device_views(items: torch.Tensor, shapes_of: ShapesOf, bucket: BatchShape) -> _DeviceViews:
    layout = _fitting(items.nbytes, shapes_of, bucket)
    slots = layout.slots.items()
    return _DeviceViews(
        layout,
        items[: layout.num_items],
        {name: items[slot.offset : slot.stop].view(slot.shape) for name, slot in slots},
    )


def _fitting(num_bytes: int, shapes_of: ShapesOf, bucket: BatchShape) -> Layout:
    layout = pack(shapes_of(bucket))
    if layout.num_bytes > num_bytes:
        raise ValueError(
            f"expected a bucket whose inputs fit into {num_bytes} bytes, "
            f"got {bucket}, which needs {layout.num_bytes}"
        )
    return layout
