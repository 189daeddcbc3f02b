"""Units of keys and values, which attention reads and writes in a store by index."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from kernels_ref.formats import PLAIN, KVFormat, VectorPart


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
        """A tensor of a store as ``[X, K, S, D]``, to be read.

        Args:
            flat_VD: the tensor, ``[X * unit_stride, D]``.
        """
        return self.views([flat_VD])[0]

    def views(self, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All tensors of a store as ``[X, K, S, *]``, to be read."""
        end = self.offset + self.num_heads * self.head_stride
        return tuple(
            [
                flat.unflatten(0, (self.num_units, self.unit_stride))[:, self.offset : end].unflatten(
                    1, (self.num_heads, self.head_stride)
                )[:, :, : self.num_slots]
                for flat in tensors
            ]
        )


class Encoding(NamedTuple):
    """The format of a store, and what its vectors are decoded to.

    Attributes:
        format: of keys and values.
        dim, value_dim: elements of a decoded key, and of a decoded value.
        dtype: of decoded keys and values.
    """

    format: KVFormat
    dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def parts(self) -> tuple[VectorPart, ...]:
        """Tensors of a store, those of keys first."""
        return self.format.keys.parts(self.dim) + self.format.values.parts(self.value_dim)

    def decoded(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[..., D]`` from some vectors of each tensor of a store."""
        if self.format is PLAIN:
            k, v = tensors
            return k, v
        if self.format.is_plain:
            # One tensor of latents; else a copy of the format above.
            return tensors[0], tensors[0][..., : self.value_dim] if len(tensors) == 1 else tensors[1]
        keys, num = self.format.keys, self.format.keys.num_parts
        return keys.decode(tensors[:num], self.dtype), self.format.values.decode(tensors[num:], self.dtype)


class KVRecord(NamedTuple):
    """New keys and values as a store keeps them.

    Attributes:
        values: what the store gives back when it is read, which is what tokens attend to; the new ones
            themselves where the store keeps plain floats.
        tensors: what is written, ``[Q, K, *]`` for each tensor of the store.
    """

    values: NewKV
    tensors: tuple[torch.Tensor, ...]

    def followed_by(self, other: KVRecord) -> KVRecord:
        """This record, and the one of further tokens behind it."""
        tensors = tuple([torch.cat(pair) for pair in zip(self.tensors, other.tensors)])
        if self.values is self.tensors:
            return KVRecord(NewKV(*tensors), tensors)
        return KVRecord(NewKV(*[torch.cat(pair) for pair in zip(self.values, other.values)]), tensors)


class StoreTurn(Enum):
    """Place of a layer among those that read one store in a step.

    ``ONLY``: no other layer does, or the others do not change what is stored. ``FIRST``: the layer that
    stores the new tokens of decode rows. ``NEXT``: a reader. ``LAST``: the last reader, after which tokens
    are scored, and those of prompts stored, by what all these layers have observed.
    """

    ONLY = "only"
    FIRST = "first"
    NEXT = "next"
    LAST = "last"

    @property
    def is_first(self) -> bool:
        """Whether no layer before reads the store."""
        return self in (StoreTurn.ONLY, StoreTurn.FIRST)

    @property
    def is_last(self) -> bool:
        """Whether no layer behind adds to what is observed."""
        return self in (StoreTurn.ONLY, StoreTurn.LAST)


class KVUnits(NamedTuple):
    """Units of a store of keys and values: the one place that knows how they are stored.

    Attributes:
        tensors: the store as lists of vectors, ``[V, *]`` each, those of keys first, to be written; in plain
            floats keys and values themselves.
        views: the same as ``[X, K, S, *]``, to be read; vectors of a head are contiguous.
        layout: of the units, in all of them.
        encoding: of the vectors.
        scratch: units as they were before the step, for prompts to read, ``[C, K, S, *]`` for each tensor;
            None where a kind of heads needs none, or no prompt reads any.
        state: position and score of each slot, for kinds that evict by them; else None.
        regions: whole texts of partially computed prompts, for kinds that choose at the end of a prompt; else
            None.
        sums: where several layers read the units, and what they observe counts; else None.
        turn: of the layer that reads the units.
    """

    tensors: tuple[torch.Tensor, ...]
    views: tuple[torch.Tensor, ...]
    layout: UnitLayout
    encoding: Encoding
    scratch: tuple[torch.Tensor, ...] | None = None
    state: SlotState | None = None
    regions: PromptRegions | None = None
    sums: ReaderSums | None = None
    turn: StoreTurn = StoreTurn.ONLY

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return self.encoding.format.tensor_names(self.encoding.dim, self.encoding.value_dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, those beside the store included."""
        beside = (*(self.scratch or ()), *(self.state or ()), *(self.sums or ()))
        regions = self.regions.tensors if self.regions is not None else ()
        return sum(each.nbytes for each in (*self.tensors, *beside, *regions))

    @property
    def key_bytes(self) -> int:
        """Bytes of the decoded keys of one unit."""
        layout, encoding = self.layout, self.encoding
        return layout.num_heads * layout.num_slots * encoding.dim * encoding.dtype.itemsize

    @property
    def before(self) -> Scratch:
        """The scratch, decoded."""
        assert self.scratch is not None, "prompts with context read a scratch"
        return Scratch(*self.encoding.decoded(self.scratch))

    def encode(self, new: NewKV) -> KVRecord:
        """Encode new keys and values once, before anything reads or writes them."""
        if self.encoding.format.is_plain:
            return KVRecord(new, new)
        keys, values = self.encoding.format.keys, self.encoding.format.values
        tensors = (*keys.encode(new.k), *values.encode(new.v))
        return KVRecord(NewKV(*self.encoding.decoded(tensors)), tensors)

    def tile(self, index: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some units, decoded, ``[n, K, S, D]`` each: a view where that can be one.

        Args:
            index: int32 or int64 ``[n]``, or a slice of neighbours.
        """
        if isinstance(index, slice):
            return self.encoding.decoded([view[index] for view in self.views])
        return self.encoding.decoded([view.index_select(0, index) for view in self.views])

    def key_tile(self, index: torch.Tensor) -> torch.Tensor:
        """Keys of some units, decoded; see ``tile``."""
        keys = self.encoding.format.keys
        return keys.decode(
            [x.index_select(0, index) for x in self.views[: keys.num_parts]], self.encoding.dtype
        )

    def write(self, index: torch.Tensor, record: KVRecord) -> None:
        """Put new keys and values in place; see the function ``write``."""
        for flat, new in zip(self.tensors, record.tensors):
            flat.index_copy_(0, index, new.reshape(-1, flat.shape[-1]))

    def seen_anew(self) -> KVUnits:
        """The same units, with views of their own."""
        return self._replace(views=self.layout.views(self.tensors))


class SlotState(NamedTuple):
    """Position and score of each slot of each unit, with the slots of all heads of a unit concatenated.

    They are small beside keys and values, and are read and written in one graph. Kinds whose steps may take
    tokens back have V versions of them, else V is 1.

    Attributes:
        position: of the token in the slot, int32 ``[X, V * K * S]``.
        score: of that token, float32 ``[X, V * K * S]``.
    """

    position: torch.Tensor
    score: torch.Tensor


class ReaderSums(NamedTuple):
    """Sums over the layers that read one store, within a step: of weights, or of expected scores.

    Attributes:
        decode: of the slots of decode rows, float32 ``[N + 1, K * S]``; the last one is for rows without a
            token.
        chunk: of the candidates of prompt rows, float32 ``[P, K * n]``.
    """

    decode: torch.Tensor
    chunk: torch.Tensor

    def add_decode(self, turn: StoreTurn, row: torch.Tensor, own: torch.Tensor) -> torch.Tensor | None:
        """Add numbers of decode rows ``[N, K, S]``; see ``add_chunk``.

        Args:
            row: of each, any large number for rows without a token, int32 ``[N]``.
        """
        place = torch.clamp(row, max=len(self.decode) - 1).to(index_dtype(row.device))
        if not turn.is_first:
            own = own + gather(self.decode, place).view(own.shape)
        if turn.is_last:
            return own
        self.decode.index_copy_(0, place, own.flatten(1))
        return None

    def add_chunk(self, turn: StoreTurn, own: torch.Tensor) -> torch.Tensor | None:
        """Add numbers of candidates ``[P, K, S]``.

        Returns:
            The sums after the last layer; None before.
        """
        num_rows, num_heads, num = own.shape
        before = self.chunk.view(num_rows, num_heads, -1)
        if not turn.is_first:
            own = own + before[..., :num]
        if turn.is_last:
            return own
        rows = torch.arange(num_rows, dtype=index_dtype(own.device), device=own.device)
        whole = torch.nn.functional.pad(own, (0, before.shape[-1] - num))
        self.chunk.index_copy_(0, rows, whole.flatten(1))
        return None


class PromptRegions(NamedTuple):
    """Keys, values and scores of all tokens of partially computed prompts, a region for each prompt.

    They lie in plain floats, as the store would give them back.

    Attributes:
        store: keys and values as lists of vectors, ``[P * (1 + L) * K, D]``. A region begins with K vectors
            that only padding writes; L tokens of each head follow.
        score: float32 ``[P, K * L]``.
        layout: of the regions, with a slot for each token of a text.
    """

    store: tuple[torch.Tensor, ...]
    score: torch.Tensor
    layout: UnitLayout

    @staticmethod
    def layout_of(num_regions: int, num_heads: int, num_tokens: int) -> UnitLayout:
        """The layout of regions for texts of ``num_tokens`` tokens (L)."""
        size = num_heads * num_tokens
        return UnitLayout(num_regions, num_heads, num_tokens, num_tokens, size + num_heads, num_heads)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors."""
        return *self.store, self.score

    @property
    def units(self) -> KVUnits:
        """The regions as units, ``[P, K, L, D]``."""
        k, v = self.store
        return as_units(k, v, self.layout)


class Scratch(NamedTuple):
    """Keys and values of some units, decoded, for instance as they were before a step writes.

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
    """The units of two stores of plain floats ``[V, D]`` of one layout."""
    encoding = Encoding(PLAIN, k_flat.shape[-1], v_flat.shape[-1], k_flat.dtype)
    tensors = (k_flat, v_flat)
    return KVUnits(tensors, layout.views(tensors), layout, encoding, scratch, state, regions)


def units_of(tensors: tuple[torch.Tensor, ...], layout: UnitLayout, encoding: Encoding) -> KVUnits:
    """The units of a store of any format."""
    return KVUnits(tensors, layout.views(tensors), layout, encoding)


def of_stores(k_XKSD: torch.Tensor, v_XKSD: torch.Tensor) -> KVUnits:
    """The units of two contiguous stores of plain floats."""
    num_units, num_heads, num_slots, dim = k_XKSD.shape
    tensors = k_XKSD.view(-1, dim), v_XKSD.view(-1, v_XKSD.shape[-1])
    layout = UnitLayout.dense(num_units, num_heads, num_slots)
    encoding = Encoding(PLAIN, dim, v_XKSD.shape[-1], k_XKSD.dtype)
    return KVUnits(tensors, (k_XKSD, v_XKSD), layout, encoding)


def floats(units: KVUnits) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[X, K, S, D]`` where they lie, for kernels that read plain floats by pointer.

    Raises:
        ValueError: the units have another format.
    """
    if units.encoding.format is PLAIN:
        k, v = units.views
        return k, v
    check_plain(units)
    return units.encoding.decoded(units.views)


def stored_floats(units: KVUnits) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in the dtype of a store of floats, which may be narrower than the model's.

    Raises:
        ValueError: the units have another format.
    """
    kv_format = units.encoding.format
    if kv_format is PLAIN or (kv_format.is_floats and not kv_format.is_plain):
        k, v = units.views
        return k, v
    check_plain(units)
    return units.encoding.decoded(units.views)


def decoded_units(units: KVUnits) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[X, K, S, D]`` of all units in the model's dtype; views if they are stored so."""
    return units.encoding.decoded(units.views)


def check_plain(units: KVUnits) -> None:
    """Raise ValueError, which names the format, unless the units are plain floats."""
    if not units.encoding.format.is_plain:
        raise ValueError(
            f"these kernels read keys and values as plain floats, got format {units.encoding.format.name!r}"
        )


def copy_to_scratch(caches: Iterable[Iterable[KVUnits]], unit: torch.Tensor) -> None:
    """Copy units of every store that has a scratch there, before a step writes to the stores.

    Args:
        caches: units of each group of heads, of each layer.
        unit: units to copy, in the order of their places, int32 ``[C]``.
    """
    for cache in caches:
        for units in cache:
            if units.scratch is not None:
                copy_units(units.layout, unit, *units.tensors, *units.scratch)


SCRATCH_STORES = 16
"""Most stores that one region copies to the scratch, so that the host calls few and each compiles quickly."""


def copy_units(layout: UnitLayout, unit: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Copy units of a store into a scratch; see ``copy_to_scratch``.

    Args:
        tensors: those of the store, and behind them as many of the scratch.
    """
    num = len(tensors) // 2
    for copy, flat in zip(tensors[num:], tensors[:num]):
        copy.copy_(layout.view(flat).index_select(0, unit))


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


write_kv = KVUnits.write
"""The write as a kernel."""
