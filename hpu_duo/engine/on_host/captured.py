"""Attention on the host beside captured steps, whose graphs are cut for it.

All shapes are those of the bucket: what crosses the link, and what the device runs between graphs, is the
same whatever rows have blocks on the host.

Shapes: Q query tokens, N rows, M most tokens of a decode row, K key/value heads, G query heads of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from hpu_duo.device.runtime import DeviceRuntime
from hpu_duo.engine.on_host.attention import HostAttention, unit_bytes
from hpu_duo.engine.on_host.cut import CutAttention, places_of, register
from hpu_duo.engine.on_host.plans import WholeBlocks
from hpu_duo.engine.on_host.rows import Attending, HostContext, HostRow, HostTile
from hpu_duo.engine.on_host.worker import Worker
from hpu_duo.kv.row_state import Units
from kernels_ref import Blocks, Implementation, KVUnits, LayerCache, LayerSpec, NewKV, Partial, loops
from kernels_ref.impl import kernels
from kernels_ref.partial import FLOOR, empty, fold, packed, unfold
from kernels_ref.step import PartInputs
from kernels_ref.unified import Elsewhere

_NUM_LEAVING = 4
"""Blocks that an operator on the device gathers as they leave; fewer are padded with null blocks."""
_NOTHING = HostTile(HostRow(0, 0, 0, (), False), [], ())
"""A tile of no block."""


@runtime_checkable
class QueuesCopies(Protocol):
    """A runtime of a device whose queue of work also copies to the host and back."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return new memory of the host that the device reads, zeros, uint8 ``[num_bytes]``."""
        ...

    def mark(self) -> Callable[[], None]:
        """Mark the work launched so far; returns what waits for it on the host, in any thread."""
        ...


class EndedCopies:
    """Copies of a device that have ended when they return."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the host."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def mark(self) -> Callable[[], None]:
        """Return a function that does nothing."""
        return lambda: None


def copies_of(runtime: DeviceRuntime) -> QueuesCopies:
    """Return the copies of a device, of a CPU or a simulated one too."""
    return runtime if isinstance(runtime, QueuesCopies) else EndedCopies()


class BucketSizes(NamedTuple):
    """Sizes of what crosses the link in the largest bucket; other buckets use its first tokens.

    Attributes:
        num_tokens: query tokens (Q).
        num_rows: tokens of decode rows (N * M).
        kinds: shapes ``[K, G, D]`` of a token's queries, each with the elements of a value.
    """

    num_tokens: int
    num_rows: int
    kinds: frozenset[tuple[tuple[int, int, int], int]]

    @classmethod
    def of(cls, specs: Sequence[LayerSpec], num_tokens: int, num_rows: int) -> BucketSizes:
        """Return those of layers."""
        kinds = frozenset(
            ((group.num_heads, spec.group_size, spec.head_dim), spec.value_dim)
            for spec in specs
            for group in spec.groups
            if isinstance(group.kind, Blocks)
        )
        return cls(num_tokens, num_rows, kinds)

    @property
    def triples(self) -> frozenset[tuple[int, int, int]]:
        """Shapes ``[K, G, D + 2]`` of a token's triples."""
        return frozenset((heads, size, value_dim + 2) for (heads, size, _), value_dim in self.kinds)

    @property
    def on_device(self) -> int:
        """Bytes of the device: triples of decode rows, and empty ones of all tokens."""
        num_tokens = self.num_rows + max(self.num_tokens, self.num_rows)
        return torch.float32.itemsize * num_tokens * sum(map(math.prod, self.triples))

    def pinned(self, dtype_bytes: int) -> int:
        """Bytes of pinned memory: queries and triples of decode rows.

        Args:
            dtype_bytes: of an element of a query.
        """
        queries = dtype_bytes * sum(math.prod(shape) for shape in {shape for shape, _ in self.kinds})
        triples = torch.float32.itemsize * sum(map(math.prod, self.triples))
        return self.num_rows * (queries + triples)


class CapturedHostAttention(HostAttention):
    """The same between the graphs of captured steps.

    The device has one queue of work. A layer's first graph ends with the queries of all decode rows of the
    bucket, which are copied to the host; the device goes on with its own attention, the host's thread waits
    for the copy and attends, and the last graph begins with the triples, empty ones for rows without blocks
    there. Blocks of prompts move in tiles of one size, to which a graph of its own attends. Outside of steps
    of requests the same runs without rows, so that everything is compiled in a warm-up.

    Args:
        copies: of the device.
        largest: sizes of the largest bucket.
        layers, specs, num_blocks, worker: see ``HostAttention``.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        specs: Sequence[LayerSpec],
        num_blocks: int,
        worker: Worker,
        copies: QueuesCopies,
        largest: BucketSizes,
    ) -> None:
        super().__init__(layers, specs, num_blocks, worker)
        self._copies, self._specs = copies, tuple(specs)
        self._made = dict[Hashable, torch.Tensor]()
        self._sent = dict[Hashable, Callable[[], None]]()
        self._is_serving = False
        self._layer = 0
        self._leaving = list[Callable[[], None]]()
        self._coming: Callable[[], torch.Tensor] | None = None
        self._number = register(self)
        self._largest = largest
        self._whole = dict[tuple[str, tuple[int, ...]], torch.Tensor]()
        self._views = dict[tuple[str, tuple[int, ...]], torch.Tensor]()
        device = next(iter(self._device.values())).tensors[0].device
        for shape in largest.triples:
            none = torch.zeros(max(largest.num_tokens, largest.num_rows), *shape)
            none[..., -2] = FLOOR
            self._whole["empty", shape] = none.to(device, copy=True)
            self._whole["triples", shape] = none[: largest.num_rows].to(device, copy=True)

    def of_layers(self, num_layers: int) -> list[Elsewhere]:
        """Return the cuts of each layer."""
        keys = list(self._device)
        return [CutAttention(self._number, places_of(keys, layer)) for layer in range(num_layers)]

    def enter(self, layer: int) -> None:
        """Say which layer runs."""
        self._layer = layer

    @torch.inference_mode()
    def begin(self, *contexts: HostContext) -> None:
        """Copy blocks to the host, and attend for the rows of a step from now on."""
        self._is_serving = True
        super().begin(*contexts)

    def _serve(self, groups: Sequence[Attending], keys: Sequence[tuple[int, int]]) -> None:
        """Attend for the rows of a step, whose tiles are copied when a layer reads them."""
        [self._now] = groups

    def end(self) -> None:
        """Attend for no rows until the next step begins."""
        self._is_serving, self._coming = False, None
        try:
            super().end()
            self._wait_for_leaving()
        finally:
            self._leaving.clear()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run what the device does between steps once, from null blocks."""
        self._leave_some([], [])
        self._wait_for_leaving()

    def _leave_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        for begin in range(0, len(source), _NUM_LEAVING):
            some = slice(begin, begin + _NUM_LEAVING)
            self._leave_some(source[some], target[some])

    def _leave_some(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Gather blocks of all layers on the device, and have the host's thread store them."""
        for place, (key, units) in enumerate(self._device.items()):
            null = units.layout.num_units - 1
            padded = torch.tensor([*source, *[null] * (_NUM_LEAVING - len(source))], dtype=torch.int32)
            index = self._send(("leaving", null), padded, units.tensors[0].device)
            staged = []
            for number, tensor in enumerate(units.tensors):
                part = Units(tensor, units.layout).read(index)
                # No step begins before the host's thread has stored what the last one left.
                name = ("leaving", len(self._leaving), place, number)
                on_host = self._staging(name, part.shape, part.dtype)
                staged.append(on_host.copy_(part, non_blocking=True))
            store = partial(self._store, self._host[key], staged, target, self._copies.mark())
            self._leaving.append(self.worker.begin(store))
            self.traffic.blocks += len(source) * unit_bytes(units)

    def _store(
        self,
        host: KVUnits,
        staged: Sequence[torch.Tensor],
        target: Sequence[int],
        arrived: Callable[[], None],
    ) -> None:
        arrived()
        for view, part in zip(host.views, staged):
            view[list(target)] = part[: len(target)]

    def _wait_for_leaving(self) -> None:
        """Wait until blocks are on the host."""
        while self._leaving:
            self._leaving.pop(0)()

    # Between the graphs of a layer

    def begin_rows(self, q: torch.Tensor, place: int, decode_len: int) -> None:
        """See ``MeetsHost``."""
        self._coming = None
        if self._is_serving and not self._now.there:
            return
        on_host = self._staged_rows("q", q.shape, q.dtype)
        on_host.copy_(q, non_blocking=True)
        key, arrived = (self._layer, place), self._copies.mark()
        self._coming = self.worker.begin(partial(self._attend_rows, key, on_host, decode_len, arrived))

    def _attend_rows(
        self, key: tuple[int, int], q: torch.Tensor, decode_len: int, arrived: Callable[[], None]
    ) -> torch.Tensor:
        """Attend on the host: triples of all rows in memory of the host, ``[N * M, K, G, D + 2]``."""
        arrived()
        host, now, dim = self._host[key], self._now, self._host[key].encoding.value_dim
        # Its copy for the layer before has ended, as it was queued before that of the queries.
        found = self._staged_rows("triples", (*q.shape[:-1], dim + 2), torch.float32)
        found.zero_()[..., dim] = FLOOR
        if not now.there:
            return found
        places = [row.ring_row * decode_len + token for row in now.there for token in range(decode_len)]
        some = q[places]
        plan = now.once(("whole", host.layout), partial(WholeBlocks.of, len(now.there), now.owner, host))
        inputs = PartInputs(some, NewKV(some[:0], some[:0]), host, plan.tensors, self._specs[key[0]].scoring)
        triple = plan.attend(kernels(Implementation.SDPA), host, inputs, fold(some, decode_len))
        found[places] = packed(unfold(triple, decode_len))
        self.worker.host_reads(now.num_blocks * unit_bytes(host))
        self.traffic.queries += q.nbytes
        self.traffic.triples += found.nbytes
        return found

    def of_rows(self, q: torch.Tensor, place: int) -> torch.Tensor:
        """See ``MeetsHost``."""
        if self._coming is None:
            return self._empty(q, place)
        found, self._coming = self._coming(), None
        return self._first("triples", found.shape).copy_(found, non_blocking=True)

    def of_tokens(
        self, q: torch.Tensor, row: torch.Tensor, row_start: torch.Tensor, place: int
    ) -> torch.Tensor:
        """See ``MeetsHost``."""
        if self._is_serving and not self._now.moved:
            return self._empty(q, place)
        self._wait_for_leaving()
        host, spec = self._host[self._layer, place], self._specs[self._layer]
        buffers = self._tiles[host.encoding, host.layout.num_heads]
        size, begun = buffers[0].layout.num_units - 1, dict[int, int]()
        how = loops.How(
            spec.scoring,
            spec.operators,
            size,
            layout=buffers[0].layout,
            format=host.encoding.format,
            value_dim=host.encoding.value_dim,
        )
        q, numbers = q.contiguous(), self._numbers(size, q.device)
        total: Sequence[torch.Tensor] = empty(q, host.encoding.value_dim)
        for number, tile in enumerate(self._now.tiles(size) if self._is_serving else [_NOTHING] * 2):
            ring_row, blocks, units = tile.row.ring_row, tile.blocks, buffers[number % 2]
            first = begun.get(ring_row, 0)
            begun[ring_row] = first + len(blocks)
            self._fill(host, units, blocks, number % 2)
            # Of the rows and of padding, only one sees these blocks.
            reads = torch.zeros(len(row_start) + 1, size, dtype=torch.int32)
            reads[ring_row, : len(blocks)] = 1
            start = (first + torch.arange(size, dtype=torch.int32)) * host.layout.num_slots
            plan = (
                self._send((each, number % 2), values, q.device)
                for each, values in (("start", start), ("reads", reads))
            )
            tensors = (*units.tensors, row_start, row, numbers, *plan)
            *total, _ = loops.run_body(loops.shared_chunk, how, numbers[:1].clone(), *total, q, *tensors)
            self.worker.device_reads(len(blocks) * unit_bytes(host))
        return packed(Partial(*total))

    def _fill(self, host: KVUnits, units: KVUnits, blocks: Sequence[int], number: int) -> None:
        """Copy blocks of the host to the first units of a tile, whose others keep what they have."""
        for place, (view, tensor) in enumerate(zip(host.views, units.tensors)):
            staged = self._free_staging(("tile", number, place), tensor.shape, tensor.dtype)
            units.layout.view(staged)[: len(blocks)] = view[list(blocks)]
            tensor.copy_(staged, non_blocking=True)
            self._sent["tile", number, place] = self._copies.mark()
        self.traffic.contexts += len(blocks) * unit_bytes(host)

    # Memory that is made once for each shape

    def _staging(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory of the host, zero at first."""
        key = name, tuple(shape), dtype
        if key not in self._made:
            num_bytes = math.prod(shape) * dtype.itemsize
            self._made[key] = self._copies.pinned(num_bytes).view(dtype).view(*shape)
        return self._made[key]

    def _free_staging(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The same, which the device has read what was sent from."""
        if (sent := self._sent.pop(name, None)) is not None:
            sent()
        return self._staging(name, shape, dtype)

    def _buffer(self, name: Hashable, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Memory of the device."""
        key = name, like.shape, like.dtype, device
        if key not in self._made:
            self._made[key] = like.to(device, copy=True)
        return self._made[key]

    def _send(self, name: Hashable, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a few numbers to the device, by way of pinned memory."""
        staged = self._free_staging(name, values.shape, values.dtype).copy_(values)
        on_device = self._buffer(name, values, device).copy_(staged, non_blocking=True)
        self._sent[name] = self._copies.mark()
        return on_device

    def _numbers(self, size: int, device: torch.device) -> torch.Tensor:
        return self._buffer("numbers", torch.arange(size, dtype=torch.int32), device)

    def _staged_rows(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory of decode rows: the first of those of the largest bucket."""
        return self._staging(name, (self._largest.num_rows, *shape[1:]), dtype)[: shape[0]]

    def _first(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The same of the device, of triples of tokens."""
        num_tokens, *each = shape
        key = name, tuple(shape)
        if key not in self._views:
            self._views[key] = self._whole[name, tuple(each)][:num_tokens]
        return self._views[key]

    def _empty(self, q: torch.Tensor, place: int) -> torch.Tensor:
        """Triples of queries that see nothing, on the device."""
        dim = self._host[self._layer, place].encoding.value_dim
        return self._first("empty", (*q.shape[:-1], dim + 2))
