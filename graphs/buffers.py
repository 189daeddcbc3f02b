"""Host inputs of a step, packed so that one copy moves them all to fixed device addresses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch

from graphs.shape import BatchShape

ALIGNMENT_BYTES = 64
"""Every field starts at a multiple of this: a cache line, and a full vector register."""

_ITEM_BYTES = 4
_ALIGNMENT_ITEMS = ALIGNMENT_BYTES // _ITEM_BYTES
_INT32 = np.iinfo(np.int32)
_MAX_CACHED_BUCKETS = 1024


@dataclass(frozen=True)
class FieldSpec:
    """One named int32 array of a step's host input.

    Args:
        name: key of the array in ``stage`` and ``copy_in``.
        shape_of: the array's shape at a bucket; an int stands for one dimension. It may depend on nothing
            else, since a captured graph holds the address of every field.
        pad: what ``fill`` puts where a step has nothing, for example a slot of the trash block.
    """

    name: str
    shape_of: Callable[[BatchShape], int | tuple[int, ...]]
    pad: int = 0

    def dims(self, bucket: BatchShape) -> tuple[int, ...]:
        """The array's shape at ``bucket``, as a tuple."""
        shape = self.shape_of(bucket)
        return shape if isinstance(shape, tuple) else (shape,)


@dataclass(frozen=True)
class FieldSlot:
    """Where a field lies: ``offset`` in int32 items from the start of the buffer, and its ``shape``."""

    offset: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Offset behind the field's last item."""
        return self.offset + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where all fields of a bucket lie; ``slots`` by name, in the order of the field specs."""

    slots: Mapping[str, FieldSlot]

    @cached_property
    def num_items(self) -> int:
        """Length of the prefix that holds every field, in int32 items."""
        return max((slot.stop for slot in self.slots.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Length of that prefix in bytes: what one step copies."""
        return self.num_items * _ITEM_BYTES


def pack(fields: Sequence[FieldSpec], bucket: BatchShape) -> Layout:
    """Lay fields out back to back, each at the next aligned offset."""
    slots = {}
    offset = 0
    for field in fields:
        slot = FieldSlot(offset, field.dims(bucket))
        slots[field.name] = slot
        offset = -(-slot.stop // _ALIGNMENT_ITEMS) * _ALIGNMENT_ITEMS
    return Layout(slots)


class StagedInputs:
    """One host buffer and one device buffer of the largest size needed, shared by all buckets.

    A step fills the host buffer (``stage`` or ``fill``) and then copies exactly the bucket's prefix
    (``copy_in``), also on CPU, so that every device follows one protocol. There is a single host buffer:
    the copy returns when the buffer may be filled again, and a bucket staged last is the only one that can
    be copied.

    Args:
        fields: what a step needs, in the order in which it is laid out; names are unique.
        shapes: buckets that must fit, for example a whole table, or ``[limits.largest]`` to have room for
            misses as well.
        device: where the inputs of captured steps live.

    Raises:
        ValueError: repeated names, or no shapes.
    """

    def __init__(
        self, fields: Sequence[FieldSpec], shapes: Iterable[BatchShape], device: torch.device | str = "cpu"
    ) -> None:
        names = [field.name for field in fields]
        if len(set(names)) != len(names):
            raise ValueError(f"expected unique field names, got {names}")
        sizes = [pack(fields, shape).num_items for shape in shapes]
        if not sizes:
            raise ValueError("expected at least one shape to size the buffers for, got none")
        self.fields = tuple(fields)
        self.device = torch.device(device)
        self.num_copies = 0
        self.bytes_copied = 0
        self._host = torch.zeros(max(sizes), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._device = torch.zeros(max(sizes), dtype=torch.int32, device=self.device)
        self._views: dict[BatchShape, _BucketViews] = {}
        self._staged: BatchShape | None = None

    @property
    def capacity_bytes(self) -> int:
        """Bytes of each of the two buffers."""
        return self._host.numel() * _ITEM_BYTES

    def layout(self, bucket: BatchShape) -> Layout:
        """Where the fields of ``bucket`` lie.

        Raises:
            ValueError: the bucket needs more than the buffers hold.
        """
        return self._views_of(bucket).layout

    def stage(self, bucket: BatchShape) -> dict[str, np.ndarray]:
        """Return host views of the bucket's fields, to write in place, pads included.

        Returns:
            int32 arrays by field name. They share memory with those of every other bucket and hold whatever
            earlier steps wrote there.

        Raises:
            ValueError: the bucket needs more than the buffers hold.
        """
        host = self._views_of(bucket).host
        self._staged = bucket
        return host

    def fill(self, bucket: BatchShape, arrays: Mapping[str, np.ndarray]) -> None:
        """Stage a bucket and write each array into the leading corner of its field, and pads around it.

        Args:
            bucket: the bucket that the step will run in.
            arrays: integer arrays by field name. A field of size 0 may be left out.

        Raises:
            ValueError: an unknown or missing name, an array larger than its field or of another rank, or
                values that are no int32. No field is staged then.
        """
        slots = self._views_of(bucket).layout.slots
        needed = {name for name, slot in slots.items() if prod(slot.shape)}
        if not needed <= arrays.keys() <= slots.keys():
            raise ValueError(f"{bucket}: expected fields {sorted(needed)}, got {sorted(arrays)}")
        for name, array in arrays.items():
            _check_fits(f"{bucket}: field {name!r}", array, slots[name].shape)
        views = self.stage(bucket)
        for field in self.fields:
            views[field.name].fill(field.pad)
        for name, array in arrays.items():
            views[name][tuple(slice(size) for size in array.shape)] = array

    def copy_in(self, bucket: BatchShape) -> dict[str, torch.Tensor]:
        """Copy the staged prefix to the device in one transfer.

        Returns:
            int32 device tensors by field name, at addresses that depend on the bucket only. Repeated calls
            for a bucket return the same objects (as long as it is among the last 1,024 different ones).

        Raises:
            ValueError: ``bucket`` is not the one that was staged last.
        """
        if bucket != self._staged:
            raise ValueError(f"expected the bucket staged last, {self._staged}, got {bucket}")
        views = self._views_of(bucket)
        prefix = slice(views.layout.num_items)
        self._device[prefix].copy_(self._host[prefix])
        self.num_copies += 1
        self.bytes_copied += views.layout.num_bytes
        return views.device

    def _views_of(self, bucket: BatchShape) -> "_BucketViews":
        views = self._views.pop(bucket, None) or self._make_views(bucket)
        # Shapes that missed the table come here too, and there may be any number of them: the dict is kept
        # in order of last use and bounded.
        self._views[bucket] = views
        if len(self._views) > _MAX_CACHED_BUCKETS:
            del self._views[next(iter(self._views))]
        return views

    def _make_views(self, bucket: BatchShape) -> "_BucketViews":
        layout = pack(self.fields, bucket)
        if layout.num_bytes > self.capacity_bytes:
            raise ValueError(
                f"expected a bucket whose inputs fit into {self.capacity_bytes} bytes, "
                f"got {bucket}, which needs {layout.num_bytes}"
            )
        slots = layout.slots.items()
        host = self._host.numpy()
        return _BucketViews(
            layout,
            {name: host[slot.offset : slot.stop].reshape(slot.shape) for name, slot in slots},
            {name: self._device[slot.offset : slot.stop].view(slot.shape) for name, slot in slots},
        )


@dataclass(frozen=True)
class _BucketViews:
    layout: Layout
    host: dict[str, np.ndarray]
    device: dict[str, torch.Tensor]


def _check_fits(what: str, array: np.ndarray, dims: tuple[int, ...]) -> None:
    # Plain slice assignment would not do: numpy broadcasts one item into an empty slice and drops it.
    if array.ndim != len(dims) or any(size > room for size, room in zip(array.shape, dims)):
        raise ValueError(f"{what}: expected a shape of at most {dims}, got {array.shape}")
    if array.dtype == np.int32:
        return
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{what}: expected integers, got {array.dtype}")
    if array.size and not np.can_cast(array.dtype, np.int32):
        low, high = int(array.min()), int(array.max())
        if low < _INT32.min or high > _INT32.max:
            raise ValueError(f"{what}: expected int32 values, got values from {low} to {high}")
