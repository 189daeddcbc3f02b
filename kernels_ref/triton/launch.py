"""Sizes of the kernels' tiles, and checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

from bias_builders import Leading
from kernels_ref.formats.base import Floats, Rounded, VectorFormat
from kernels_ref.formats.fp8 import Fp8, ScaledFp8
from kernels_ref.formats.int4 import Int4
from kernels_ref.formats.int8 import Int8
from kernels_ref.step import RingStep
from kernels_ref.triton.availability import DTYPES, MAX_HEAD_DIM
from kernels_ref.units import KVUnits, Scratch, check_plain, floats

MIN_TILE = 16
"""Least rows and columns of a product of tiles."""


@dataclass(frozen=True)
class Launch:
    """One way to run a kernel.

    Attributes:
        rows: query rows of a tile, a row being one query head of one token; a power of two.
        keys: keys of a tile; a power of two.
        num_warps: warps of a program.
        num_stages: depth of the pipeline of loads.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def for_lines(self, num_lines: int) -> Launch:
        """The same with query tiles no larger than ``num_lines`` lines need."""
        return replace(self, rows=min(self.rows, max(MIN_TILE, next_power_of_two(num_lines))))

    def for_keys(self, num_keys: int, stored: torch.dtype | None = None) -> Launch:
        """The same with tiles of keys no larger than ``num_keys`` keys need, ``stored`` in that."""
        least = MIN_TILE if stored is None or stored.itemsize > 1 else LEAST_CODES
        return replace(self, keys=max(least, min(self.keys, next_power_of_two(num_keys))))

    def constants(self, queries: torch.Tensor) -> dict[str, int | bool]:
        """Sizes that a model fixes and tiles, for queries ``[*, K, G, D]``, with ``options``, by name."""
        num_heads, group, dim = queries.shape[1:]
        sizes = {"NUM_HEADS": num_heads, "GROUP": group, "D": dim, "P": padded_dim(dim)}
        return {**sizes, "M": self.rows, "T": self.keys, **self.options}

    @property
    def options(self) -> dict[str, int | bool]:
        """Options for Triton's compiler, as keywords of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@dataclass(frozen=True)
class DeviceLimits:
    """Properties of a device that choices depend on.

    Attributes:
        num_processors: streaming multiprocessors.
        shared_bytes: most shared memory of one program.
        tiles_of_a_split: least tiles of keys of a ring that are worth a program of their own.
    """

    num_processors: int
    shared_bytes: int
    tiles_of_a_split: int = 8

    @property
    def is_large(self) -> bool:
        """Whether it is a device for data centres: 163 KiB or more, where the others have 99 KiB."""
        return self.shared_bytes >= 160 << 10


INTERPRETER = DeviceLimits(num_processors=2, shared_bytes=227 << 10)
"""Properties for Triton's interpreter: few processors, hence few programs."""


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Return the properties of a CUDA device, or those for the interpreter on CPU."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    # Older torch does not report it; every device since compute capability 8.0 has at least 99 KiB.
    shared = getattr(properties, "shared_memory_per_block_optin", 99 << 10)
    return DeviceLimits(properties.multi_processor_count, shared)


LEAST_CODES = 32
"""Least codes of a tile along the side that a product sums over, as many bytes as one of floats has."""


def num_tiles(number: int, tile: int) -> int:
    """Number of tiles for ``number`` items."""
    return -(-number // tile)


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """Columns of a tile of vectors of ``head_dim``: enough for a product over half of them."""
    return max(MIN_TILE, next_power_of_two(head_dim))


def stored_constants(head_dim: int, keys: int, values: int) -> dict[str, int]:
    """Constants of kernels that read stores, by name: kinds of vectors, and columns of their tiles.

    Half of the columns of 4-bit codes are a tile of a product for four warps.
    """
    least = 4 * MIN_TILE if KINDS[Int4] in (keys, values) else MIN_TILE
    return {"KEYS": keys, "VALUES": values, "P": max(least, padded_dim(head_dim))}


def group_rows(group_size: int) -> int:
    """Rows of the query tile of one decoded token: its query heads of one key/value head."""
    return max(MIN_TILE, next_power_of_two(group_size))


def decode(
    group_size: int,
    head_dim: int,
    dtype: torch.dtype,
    limits: DeviceLimits,
    keys_XKSD: torch.Tensor | None = None,
) -> Launch:
    """Tiles of the decode kernels: bound by reading keys and values.

    The tiles of a stage have 32 KiB, so that several programs share a processor and overlap their starts and
    ends; those of codes have less, since scales are read without a pipeline and more programs hide that.

    Args:
        dtype: of queries; tiles of float32 stay in registers whole.
        keys_XKSD: as they are stored, None = like the queries.
    """
    rows, size, most, least = group_rows(group_size), dtype.itemsize, 64, MIN_TILE
    if keys_XKSD is not None and keys_XKSD.dtype.itemsize == 1:
        size = 1 if size == 2 else size
        most, least = 128 if keys_XKSD.shape[3] < head_dim else 64, LEAST_CODES
    keys = max(least, min(most, (16 << 10) // (padded_dim(head_dim) * size)))
    return Launch(rows, keys, num_warps=4, num_stages=3 if limits.is_large else 2)


def blocks_per_program(num_blocks: int, num_heads: int, limits: DeviceLimits) -> int:
    """Blocks that one program of the unique part reads: two programs for each processor.

    At most ``MAX_BLOCKS`` so that the owners of a program's blocks fit into one vector.
    """
    programs = max(1, 2 * limits.num_processors // num_heads)
    return min(MAX_BLOCKS, max(1, -(-num_blocks // programs)))


MAX_BLOCKS = 512
"""Most blocks of one program of the unique part."""

MERGED_SLOTS = 32
"""Triples that a merge adds up at a time."""

MERGED_LINES = 16
"""Lines (query heads of tokens, or vectors) of a program without products."""

LISTED_BLOCKS = 256
"""Shared blocks that are put on lists at a time."""


MERGE = Launch(rows=1, keys=MERGED_SLOTS, num_warps=4, num_stages=2)
"""Launch of kernels without products."""

Triple: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``attn``, ``max``, ``sum``: what operators return, since they do not support named tuples."""


def partials(queries: torch.Tensor, num: int) -> Triple:
    """Allocate the triples of ``num`` rows: float32 ``[num, K, G, D]``, ``[num, K, G]`` twice."""
    attn = queries.new_empty((num, *queries.shape[1:]), dtype=torch.float32)
    return attn, attn.new_empty(attn.shape[:-1]), attn.new_empty(attn.shape[:-1])


def prefill(head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> Launch:
    """Tiles of the prefill kernels: bound by products.

    A query tile of float32 stays in registers whole, so its products are on smaller tiles.
    """
    dim = padded_dim(head_dim)
    if dtype == torch.float32:
        if dim > 128:
            return Launch(rows=16, keys=16, num_warps=4, num_stages=2)
        return Launch(rows=32, keys=32, num_warps=4, num_stages=2)
    if dim <= 128:
        return Launch(rows=128, keys=64, num_warps=8, num_stages=3 if limits.is_large else 2)
    return Launch(rows=64, keys=32, num_warps=8, num_stages=3 if limits.is_large else 2)


def ruled(head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> Launch:
    """Tiles of the kernels that compute a mask for each tile: smaller, since masks need registers too."""
    tiles = prefill(head_dim, dtype, limits)
    if tiles.rows == MIN_TILE:
        return tiles
    return replace(tiles, rows=tiles.rows // 2, keys=max(MIN_TILE, tiles.keys // 2), num_stages=1)


def columns(head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> Launch:
    """Tiles of the kernel that sums weights by key, of which a program has one tile.

    Keys are fewer than queries, so tiles are small to have enough programs.
    """
    tiles = prefill(head_dim, dtype, limits)
    if dtype == torch.float32:
        return tiles
    return replace(tiles, rows=64 if padded_dim(head_dim) <= 128 else 32, keys=64, num_warps=4)


def strides(store_XKSD: torch.Tensor) -> dict[str, int]:
    """Strides of the units and of the heads of a store, in vectors, for kernels."""
    dim = store_XKSD.shape[3]
    return {"UNIT": store_XKSD.stride(0) // dim, "HEAD": store_XKSD.stride(1) // dim}


def num_splits(num_programs: int, num_units: int, limits: DeviceLimits) -> int:
    """Return how many ranges of keys a kernel is split into, if its query tiles do not fill the device.

    Args:
        num_programs: programs that one range would have.
        num_units: most units of keys (blocks, tiles) that there may be; no range is left without one.
    """
    return max(1, min(num_units, 2 * limits.num_processors // max(1, num_programs)))


def shared_slots() -> int:
    """Return how many slots of a budget are processed at a time."""
    return 256


class Stored(NamedTuple):
    """Stores of keys and values, as operators get them behind queries.

    Attributes:
        k, v: floats or codes, ``[X, K, S, *]``.
        k_meta, v_meta: scales, or scales and zeros, ``[X, K, S, *]``; None where vectors have none.
        keys, values: kinds of vectors.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_meta: torch.Tensor | None = None
    v_meta: torch.Tensor | None = None
    keys: int = 0
    values: int = 0

    @property
    def kinds(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
        """The last arguments of operators."""
        return self[2:]


KINDS: dict[type[VectorFormat], int] = {Floats: 0, Rounded: 0, Int8: 1, Int4: 2, Fp8: 3, ScaledFp8: 4}
"""Numbers of the kinds of vectors that kernels read, by the class of their format."""


NATIVE_KINDS = {3: 5, 4: 6}
"""The same for devices that convert 8-bit floats."""


def kind_on(kind: int, device: torch.device) -> int:
    """Return a number of ``KINDS``, or that of the same codes which a device converts itself.

    Devices without 8-bit floats, before compute capability 8.9, and the interpreter do as well by bits.
    """
    is_native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return NATIVE_KINDS.get(kind, kind) if is_native else kind


def pointers(
    k: torch.Tensor, k_meta: torch.Tensor | None, v: torch.Tensor, v_meta: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Return pointers of a store as kernels take them; those that they do not read are any."""
    return k, k if k_meta is None else k_meta, v, v if v_meta is None else v_meta


Size = int | None
"""An expected size, or None for any."""


def check_queries(name: str, q: torch.Tensor) -> None:
    """Queries, or new keys' pattern of them: ``[*, K, G, D]`` of a type and head size that kernels know."""
    check_vectors(name, q, (None, None, None, None))
    _check_dtype(name, q)
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"expected {name} to have a head size of 1 to {MAX_HEAD_DIM}, got {q.shape[-1]}")


def check_vectors(
    name: str, x: torch.Tensor, shape: Sequence[Size], like: torch.Tensor | None = None
) -> None:
    """Vectors with contiguous elements, and otherwise in any layout."""
    _check(name, x, shape, like)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"expected {name} to have contiguous vectors, got strides {tuple(x.stride())}")


def check_units(units: KVUnits, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Units of the heads, type and device of the queries ``[*, K, G, D]``, keys and values alike.

    Vectors of a head are contiguous; strides of heads and units may be larger, in whole vectors.

    Returns:
        keys and values, ``[X, K, S, D]``.
    """
    k, v = floats(units)
    _check_stores("units", k, v, q)
    return k, v


def check_stored(units: KVUnits, q: torch.Tensor) -> Stored:
    """Units in any format that kernels read, of the heads and the device of the queries ``[*, K, G, D]``.

    Vectors of a head are contiguous in all tensors, which have the same strides, in whole vectors.
    """
    encoding = units.encoding
    if encoding.format.is_plain:
        return Stored(*check_units(units, q))
    formats = encoding.format.keys, encoding.format.values
    if not all(type(each) in KINDS for each in formats):
        raise ValueError(f"these kernels do not read format {encoding.format.name!r}")
    if (encoding.dim, encoding.value_dim) != (q.shape[-1],) * 2:
        raise ValueError(
            f"expected keys and values of {q.shape[-1]} elements like the queries, got {encoding.dim} and "
            f"{encoding.value_dim}"
        )
    first = units.views[0]
    for name, view, part in zip(units.names, units.views, encoding.parts):
        _check(f"units.{name}", view, (first.shape[0], q.shape[1], first.shape[2], part.width), None)
        _check_device(f"units.{name}", view, q.device)
        unit, head = (stride // first.shape[3] for stride in first.stride()[:2])
        if view.stride() != (unit * part.width, head * part.width, part.width, 1):
            raise ValueError(
                f"expected units.{name} to have strides of {unit} and {head} vectors, got {view.stride()}"
            )
    num = encoding.format.keys.num_parts
    (k, *k_meta), (v, *v_meta) = units.views[:num], units.views[num:]
    kinds = (kind_on(KINDS[type(each)], q.device) for each in formats)
    return Stored(k, v, k_meta[0] if k_meta else None, v_meta[0] if v_meta else None, *kinds)


def check_scratch(scratch: Scratch, q: torch.Tensor) -> None:
    """Copies of units, see ``check_units``."""
    _check_stores("scratch", *scratch, q)


def check_rings(q: torch.Tensor, units: KVUnits) -> Stored:
    """Queries of decode rows ``[N, K, *, D]``, and a ring for each row; see ``check_stored``."""
    check_queries("q_NKHD", q)
    stored = check_stored(units, q)
    if q.shape[0] > (num_rings := stored.k.shape[0]):
        raise ValueError(f"expected units.k to have at least {q.shape[0]} rings, got {num_rings}")
    return stored


def check_leading(ring: RingStep, q: torch.Tensor) -> torch.Tensor:
    """Leading slots that queries ``[N, K, *, D]`` see; returns how many, ``[N, 1, 1]``."""
    if not isinstance(ring.seen, Leading):
        raise ValueError(f"expected leading slots to be visible, got {type(ring.seen).__name__}")
    check_plan("seen.visible", ring.seen.visible, (q.shape[0], 1, 1), q.device)
    return ring.seen.visible


def check_store(name: str, store: torch.Tensor, num_units: Size, q: torch.Tensor) -> None:
    """Keys or values of units alone, see ``check_units``."""
    _check(name, store, (num_units, q.shape[1], None, q.shape[-1]), q)
    dim, strides = store.shape[3], store.stride()
    if strides[2:] != (dim, 1) or strides[0] % dim or strides[1] % dim:
        raise ValueError(f"expected the vectors of a head of {name} to be contiguous, got strides {strides}")


def _check_stores(what: str, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> None:
    for name, store in ((f"{what}.k", k), (f"{what}.v", v)):
        check_store(name, store, None, q)
    if k.shape != v.shape or k.stride() != v.stride():
        raise ValueError(
            f"expected {what}.v to lie like {what}.k, {list(k.shape)} with strides {k.stride()}, "
            f"got {list(v.shape)} with strides {v.stride()}"
        )


def check_flat(units: KVUnits, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stores of keys and values as contiguous lists of vectors like those of ``new [*, D]``."""
    check_plain(units)
    k, v = units.tensors
    for name, flat in (("units.k_flat", k), ("units.v_flat", v)):
        _check(name, flat, (None, new.shape[-1]), new)
        if not flat.is_contiguous():
            raise ValueError(f"expected {name} to be contiguous, got strides {tuple(flat.stride())}")
    return k, v


def check_plan(name: str, plan: torch.Tensor, shape: Sequence[Size], device: torch.device) -> None:
    """An array of a step: int32, contiguous."""
    if plan.dtype != torch.int32:
        raise ValueError(f"expected {name} to be torch.int32, got {plan.dtype}")
    _check_shape(name, plan, shape)
    _check_device(name, plan, device)
    if not plan.is_contiguous():
        raise ValueError(f"expected {name} to be contiguous, got strides {tuple(plan.stride())}")


def check_triple(name: str, triple: Sequence[torch.Tensor], like: torch.Tensor, num: Size) -> None:
    """A partial of ``num`` tokens or rows over the heads of ``like [*, K, G, D]``: float32, contiguous."""
    for part, x in zip(("attn", "max", "sum"), triple):
        shape = (num, *like.shape[1:]) if part == "attn" else (num, *like.shape[1:-1])
        check_numbers(f"{name}.{part}", x, shape, like.device)
        num = x.shape[0]


def check_numbers(name: str, x: torch.Tensor, shape: Sequence[Size], device: torch.device) -> None:
    """Results of other parts: float32, contiguous."""
    _check_shape(name, x, shape)
    _check_device(name, x, device)
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"expected {name} to be contiguous torch.float32, got {x.dtype} with strides {tuple(x.stride())}"
        )


def check_sinks(name: str, sinks: torch.Tensor, q: torch.Tensor) -> None:
    """A logit for each query head of ``q [*, K, G, D]``, of any type that kernels know."""
    _check_shape(name, sinks, q.shape[1:3])
    _check_device(name, sinks, q.device)
    _check_dtype(name, sinks)


def _check_dtype(name: str, x: torch.Tensor) -> None:
    if x.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"expected {name} to be of one of {known}, got {x.dtype}")


def _check(name: str, x: torch.Tensor, shape: Sequence[Size], like: torch.Tensor | None) -> None:
    _check_shape(name, x, shape)
    if like is None:
        return
    if x.dtype != like.dtype:
        raise ValueError(f"expected {name} to be {like.dtype} like the queries, got {x.dtype}")
    _check_device(name, x, like.device)


def _check_shape(name: str, x: torch.Tensor, shape: Sequence[Size]) -> None:
    fits = x.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"expected {name} to have shape [{wanted}], got {list(x.shape)}")


def _check_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"expected {name} on {device}, got {x.device}")
