"""Attention of a step's rows to their blocks in host memory, as partial triples.

Shapes: Q query tokens, N rows, M most tokens of a decode row, K key/value heads, G query heads of each.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from hpu_duo.engine.on_host.choice import HostContextSizes, HostRates, TimedTiles
from hpu_duo.engine.on_host.crossing import Crossing, Run, SameMemory, copy_runs, runs_of
from hpu_duo.engine.on_host.plans import WholeBlocks, ints, prompt_tensors, step_tensors
from hpu_duo.engine.on_host.rows import Attending, HostContext, HostRow, HostTile
from hpu_duo.engine.on_host.tiles import GroupAhead, NextTile, TilesAhead
from hpu_duo.engine.on_host.worker import TimedWorker, Worker
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.store import reserved_zeros
from hpu_duo.not_picklable import NotPicklable
from kernels_ref import (
    Blocks,
    Implementation,
    KVUnits,
    LayerCache,
    LayerSpec,
    NewKV,
    Partial,
    Rings,
    RowKind,
    Step,
    StepParts,
    UnitLayout,
    empty,
    merge,
)
from kernels_ref.impl import Kernels, kernels
from kernels_ref.partial import fold, packed, unfold, unpacked
from kernels_ref.step import PartInputs
from kernels_ref.unified import Elsewhere, ElsewherePartials, layer_kernels
from kernels_ref.units import Encoding, units_of

TILE_BYTES = 4 << 20
"""Bytes of keys and values that move at a time to a CPU as device: its caches hold them."""
FAR_TILE_BYTES = 16 << 20
"""The same for other devices, where launching the work of a tile takes longer than the work."""
_TRIAL_TILES = 16
"""Tiles of keys and values by which rates are measured: more than caches of CPUs hold."""
_TRIAL_ROWS, _NUM_TRIALS = 64, 3


@dataclass
class HostTraffic:
    """Bytes that have crossed the link.

    Attributes:
        blocks: of blocks that moved to the host.
        queries, triples: of attention there.
        contexts: of blocks that were copied to the device for one step.
    """

    blocks: int = 0
    queries: int = 0
    triples: int = 0
    contexts: int = 0


class HostAttention(NotPicklable):
    """Stores of blocks on the host, and attention to them.

    Decode rows attend there: their queries cross the link, and a triple for each comes back. The new tokens
    of a prompt are many for one context, so its blocks are copied to the device, a tile at a time, and its
    kernels attend to a tile while the next one is copied. Those of decode rows are copied likewise where that
    is chosen.

    Args:
        layers: stores of the device.
        specs: attention of each layer.
        num_blocks: blocks of the host.
        worker: does the work of the host.
        crossing: the way between device and host.
        ahead: the rows whose blocks are copied ahead; None = a tile is.

    Attributes:
        worker: as given; may be replaced between steps.
        moves_decodes: copy the blocks of decode rows to the device too, instead of attending there; None =
            in steps for which the measured rates predict that copying is faster.
        rates: that are measured; None = not yet.
        traffic: bytes so far.
        num_blocks: blocks of the host.
        num_bytes: of the stores on the host.
        staging_bytes: of the tiles on the device.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        specs: Sequence[LayerSpec],
        num_blocks: int,
        worker: Worker,
        crossing: Crossing | None = None,
        ahead: GroupAhead | None = None,
    ) -> None:
        self.worker, self.traffic = worker, HostTraffic()
        self._crossing = SameMemory() if crossing is None else crossing
        self.moves_decodes: bool | None = False
        self.rates: HostRates | None = None
        self.num_blocks = num_blocks
        self._device, self._host = dict[tuple[int, int], KVUnits](), dict[tuple[int, int], KVUnits]()
        self._tiles = dict[tuple[Encoding, int], tuple[KVUnits, ...]]()
        self._alike = defaultdict[tuple[Encoding, int, int], list[tuple[int, int]]](list)
        for number, (spec, cache) in enumerate(zip(specs, layers)):
            for place, (group, units) in enumerate(zip(spec.groups, cache)):
                if isinstance(group.kind, Blocks):
                    self._device[number, place] = units
                    host = self._host[number, place] = _like(units, num_blocks, torch.device("cpu"))
                    for tensor in host.tensors:
                        self._crossing.pin(tensor)
                    key = units.encoding, units.layout.num_heads
                    self._alike[(*key, spec.group_size)].append((number, place))
                    if key not in self._tiles:
                        device = units.tensors[0].device
                        is_apart = device.type != "cpu"
                        size, number = _tiles_of(num_blocks, unit_bytes(units), ahead, is_apart=is_apart)
                        self._tiles[key] = tuple(_like(units, size, device) for _ in range(number))
        self.num_bytes = sum(units.num_bytes for units in self._host.values())
        self.staging_bytes = sum(each.num_bytes for tiles in self._tiles.values() for each in tiles)
        self._now, self._groups = Attending(), list[Attending]()
        self._ahead = dict[tuple[Encoding, int], TilesAhead]()

    @torch.inference_mode()
    def begin(self, *contexts: HostContext) -> None:
        """Copy blocks to the host, and attend for the rows of a step from now on.

        Args:
            contexts: of each group of rows of the step, whose layers take turns; the first one's rows attend
                until ``enter`` is called.
        """
        for context in contexts:
            if context.copies.shape[1]:
                self._leave_blocks(*context.copies.tolist())
        self._serve([self._attending(context) for context in contexts], list(self._device))

    def _attending(self, context: HostContext) -> Attending:
        if not context.rows:
            return Attending()
        moves_decodes = self._moving_is_faster(context) if self.moves_decodes is None else self.moves_decodes
        moved = [row for row in context.rows if moves_decodes or not row.is_decode]
        there = [row for row in context.rows if row.is_decode and not moves_decodes]
        return Attending(there, moved)

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks of the step are copied to the device."""
        return any(group.moved for group in self._groups)

    def enter_group(self, number: int) -> None:
        """Attend for a group of rows of the step until another one is entered."""
        self._now = self._groups[number]

    def _serve(self, groups: Sequence[Attending], keys: Sequence[tuple[int, int]]) -> None:
        """Attend for groups of rows in some layers, one layer after the other; begins to copy their tiles."""
        self._now, self._groups = groups[0], list(groups)
        self._ahead = {kind: self._tiles_ahead(kind, groups, keys) for kind in self._tiles}

    def _tiles_ahead(
        self, kind: tuple[Encoding, int], groups: Sequence[Attending], keys: Sequence[tuple[int, int]]
    ) -> TilesAhead:
        buffers = self._tiles[kind]
        size = buffers[0].layout.num_units - 1
        order = (
            NextTile(key, tile)
            for key in keys
            if (self._host[key].encoding, self._host[key].layout.num_heads) == kind
            for group in groups
            for tile in group.tiles(size)
        )
        return TilesAhead(buffers, order, self._copy_tile, self._crossing, self.worker)

    def _copy_tile(self, following: NextTile, buffer: KVUnits) -> None:
        host, tile = self._host[following.key], following.tile
        num_bytes = len(tile.blocks) * unit_bytes(host)
        self.worker.move(num_bytes, partial(copy_runs, host.views, buffer.views, tile.runs))
        self.traffic.contexts += num_bytes

    def _leave_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._crossing.leave(partial(self._leave, runs_of(source, target)))

    def _leave(self, runs: Sequence[Run]) -> None:
        """Copy blocks of all layers to the host."""
        num_blocks = sum(each.length for each in runs)
        for key, units in self._device.items():
            copy_runs(units.views, self._host[key].views, runs)
            self.traffic.blocks += num_blocks * unit_bytes(units)

    @torch.inference_mode()
    def measure(self, specs: Sequence[LayerSpec], clock: Callable[[], float] = time.perf_counter) -> None:
        """Measure the rates, and choose by them from now on; overwrites blocks of the host.

        Both ways are timed as steps take them, with the group of heads that stores the most: one row with
        many blocks for the bytes a second, many rows of one block for the fixed cost. A device that runs
        behind its host takes in a tile while the host launches others, so these are timed together there.

        Args:
            specs: attention of each layer.
            clock: seconds, in any thread.
        """
        keys = max(self._alike.values(), key=lambda keys: len(keys) * unit_bytes(self._host[keys[0]]))
        key, host, size = keys[0], self._host[keys[0]], unit_bytes(self._host[keys[0]])
        num_tile = self._tiles[host.encoding, host.layout.num_heads][0].layout.num_units - 1
        num_blocks = min(self.num_blocks, _TRIAL_TILES * num_tile)
        for view in host.views:
            view[:num_blocks].zero_()  # memory that was never written is one page
        long = [HostRow(0, 0, 1, tuple(range(num_blocks)), True)]
        short = [HostRow(row, row, 1, (row,), True) for row in range(min(num_blocks, _TRIAL_ROWS))]
        timed = partial(self._timed, key, spec := specs[key[0]], clock)
        settle = None if isinstance(self._crossing, SameMemory) else self._crossing.settle
        _, link, _, device = timed(Attending((), long), settle)
        _, _, there, _ = timed(Attending(long), settle)
        seconds, *_ = timed(Attending((), short), None)
        rates = HostRates(*(num_blocks * size / each for each in (link, there, device)))
        if settle is None:
            call = seconds - HostContextSizes(len(short) * size, 0.0, 0.0, len(short)).moved(rates)
            rates = rates._replace(call=max(0.0, call) / len(short))
        else:
            whole, *_ = timed(Attending((), long), None)
            one, *_ = timed(Attending(short[:1]), None)
            heads = spec.groups[key[1]].num_heads * spec.group_size
            sizes = HostContextSizes.of(1, heads, host.encoding.dim, size, 1, host.encoding.dtype.itemsize)
            rates = rates._replace(call=max(0.0, one - sizes.attended(rates))).with_tiles(
                TimedTiles(num_blocks * size, -(-num_blocks // num_tile), whole),
                TimedTiles(len(short) * size, len(short), seconds),
            )
        self._forget()
        self.traffic = HostTraffic()
        self.rates, self.moves_decodes = rates, None

    def _timed(
        self,
        key: tuple[int, int],
        spec: LayerSpec,
        clock: Callable[[], float],
        rows: Attending,
        settle: Callable[[], None] | None,
    ) -> tuple[float, ...]:
        """Seconds of a group's attention to rows on the host: in all, and of link, host and device in it.

        Each is the least of some trials.

        Args:
            settle: see ``TimedWorker``; None = parts overlap as in a step, and only all of it is exact.
        """
        encoding, num_rows, worker = self._host[key].encoding, len(rows.there) + len(rows.moved), self.worker
        parts = StepParts(causal=False, shared=False, unique=True)
        device = self._device[key].tensors[0].device
        numbers = ints(num_rows, device=device)
        tensors = step_tensors(positions=numbers)
        step = Step(parts, tensors, 1, numbers, numbers, {})
        shape = num_rows, spec.groups[key[1]].num_heads, spec.group_size, encoding.dim
        q = torch.zeros(shape, dtype=encoding.dtype, device=device)
        inputs = PartInputs(q, NewKV(q[:0], q[:0]), self._device[key], tensors, spec.scoring)
        run = layer_kernels(spec, parts)
        trials = []
        for _ in range(_NUM_TRIALS):
            self.worker = timed = TimedWorker(worker, clock, settle)
            self._crossing.settle()
            began = clock()
            self._serve([rows], [key])
            join = self.begin_part(key, run, inputs, step)
            assert join is not None
            join()
            self._crossing.settle()
            trials.append((clock() - began, timed.link[1], timed.host[1], timed.device[1]))
        self.worker = worker
        return tuple(map(min, zip(*trials)))

    def _moving_is_faster(self, context: HostContext) -> bool:
        """Whether the blocks of decode rows are predicted to move faster than the host attends to them."""
        lengths = [len(row.blocks) for row in context.rows if row.is_decode]
        if not lengths:
            return False
        assert self.rates is not None, "expected measured rates"
        attended = moved = 0.0
        for (encoding, num_heads, group_size), keys in self._alike.items():
            num_tile = self._tiles[encoding, num_heads][0].layout.num_units - 1
            sizes = HostContextSizes.of(
                len(lengths) * context.decode_len,
                num_heads * group_size,
                encoding.dim,
                unit_bytes(self._host[keys[0]]) * sum(lengths),
                sum(math.ceil(length / num_tile) for length in lengths),
                encoding.dtype.itemsize,
            )
            attended += len(keys) * sizes.attended(self.rates)
            moved += len(keys) * sizes.moved(self.rates)
        return moved < attended

    def end(self) -> None:
        """Attend for no rows until the next step begins."""
        try:
            self.worker.drain()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._now, self._groups, self._ahead = Attending(), [], {}

    def of_layers(self, num_layers: int) -> list[Elsewhere]:
        """Return the host attention of each layer."""
        return [_OfLayer(self, number) for number in range(num_layers)]

    def begin_part(
        self, key: tuple[int, int], run: Kernels, inputs: PartInputs, step: Step
    ) -> Callable[[], ElsewherePartials] | None:
        """Begin the attention of a group of heads of a layer; returns what waits for it.

        Args:
            key: numbers of the layer and of the group.
            run: the kernels of the device.
        """
        now = self._now
        if not (now.there or now.moved) or key not in self._host:
            return None
        there = None
        if now.there:
            tokens = self._tokens(now, now.there, step)
            fetched = self._crossing.fetch(partial(inputs.q.index_select, 0, tokens))
            attend = partial(self._attend, now, self._host[key], inputs, step.decode_len, fetched)
            there = self.worker.begin(attend)
        moved = self._of_tiles(key, run, inputs, step) if now.moved else None

        def join() -> ElsewherePartials:
            of_tokens, of_rows = (None, None) if moved is None else moved()
            if there is not None:
                found = unpacked(self._crossing.bring(there()))
                of_rows = of_rows or _of_rows(inputs, step)
                _put(of_rows, self._places(now, now.there, step), found)
            return ElsewherePartials(of_tokens, of_rows)

        return join

    def _tokens(self, now: Attending, rows: tuple[HostRow, ...], step: Step) -> torch.Tensor:
        """See the function; on the device."""
        return now.once(("tokens", *_numbers(rows)), lambda: self._crossing.bring(_tokens(rows, step)))

    def _places(self, now: Attending, rows: tuple[HostRow, ...], step: Step) -> torch.Tensor:
        """See the function; on the device."""
        return now.once(
            ("places", *_numbers(rows)), lambda: self._crossing.bring(_places(rows, step.decode_len))
        )

    def _attend(
        self,
        now: Attending,
        host: KVUnits,
        inputs: PartInputs,
        decode_len: int,
        fetched: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Attend on the host for decode rows: the triples of their tokens, ``[n * M, K, G, D + 2]``."""
        worker, num_tokens = self.worker, len(now.there) * decode_len
        num_bytes = num_tokens * inputs.q[0].nbytes
        q = worker.move(num_bytes, fetched)
        self.traffic.queries += num_bytes
        self._crossing.has_left()
        plan = now.once(("whole", host.layout), partial(WholeBlocks.of, len(now.there), now.owner, host))
        found = plan.attend(kernels(Implementation.SDPA), host, inputs, fold(q, decode_len))
        worker.host_reads(now.num_blocks * unit_bytes(host))
        triple = packed(unfold(found, decode_len))
        self.traffic.triples += triple.nbytes
        return worker.move(triple.nbytes, triple.clone)

    def _of_tiles(
        self, key: tuple[int, int], run: Kernels, inputs: PartInputs, step: Step
    ) -> Callable[[], tuple[Partial | None, Partial | None]]:
        """Return what attends to the blocks of rows on the device, as they arrive there."""
        host, now = self._host[key], self._now
        kind = host.encoding, host.layout.num_heads
        ahead, size = self._ahead[kind], self._tiles[kind][0].layout.num_units - 1

        def join() -> tuple[Partial | None, Partial | None]:
            found = dict[int, Partial]()
            for tile in now.tiles(size):
                number, units = tile.row.ring_row, ahead.take(NextTile(key, tile))
                part = self._attend_tile(now, run, units, inputs, step, tile)
                self.worker.device_reads(len(tile.blocks) * unit_bytes(host))
                found[number] = merge(found[number], part) if number in found else part
            of_tokens = of_rows = None
            for row in now.moved:
                part = found[row.ring_row]
                if row.is_decode:
                    of_rows = of_rows or _of_rows(inputs, step)
                    _put(of_rows, self._places(now, (row,), step), part)
                else:
                    of_tokens = of_tokens or empty(inputs.q, host.encoding.value_dim)
                    for whole, some in zip(of_tokens, part):
                        whole[row.first : row.first + row.num_new] = some
            return of_tokens, of_rows

        return join

    def _attend_tile(
        self, now: Attending, run: Kernels, units: KVUnits, inputs: PartInputs, step: Step, tile: HostTile
    ) -> Partial:
        """The new tokens of a row against a tile of its blocks on the device, ``[num_new, K, G, ...]``."""
        row, num_blocks = tile.row, len(tile.blocks)
        key, device = ("tile", row.ring_row, num_blocks, units.layout), units.tensors[0].device
        if row.is_decode:
            owner = partial(ints, num_blocks, device=device)
            plan = now.once(key, lambda: WholeBlocks.of(1, owner(), units))
            q = inputs.q.index_select(0, self._tokens(now, (row,), step))
            found = plan.attend(run, units, inputs, fold(q, step.decode_len))
            return unfold(found, step.decode_len)
        tensors = now.once(
            key, lambda: prompt_tensors(row.num_new, num_blocks, units.layout.num_slots, device)
        )
        q = inputs.q[row.first : row.first + row.num_new]
        return run.shared_blocks(inputs._replace(q=q, units=units, tensors=tensors, rule=None))


class _OfLayer(NamedTuple):
    """The attention of one layer; see ``Elsewhere``."""

    attention: HostAttention
    number: int

    def begin(
        self, place: int, run: Kernels, inputs: PartInputs, step: Step
    ) -> Callable[[], ElsewherePartials] | None:
        """Begin the attention of a group of heads."""
        return self.attention.begin_part((self.number, place), run, inputs, step)


def check_specs(specs: Sequence[LayerSpec], states: Iterable[RowKind] = ()) -> None:
    """Raise ValueError unless all heads store all tokens, or a window on the device, and some all tokens.

    Args:
        states: of layers without attention.
    """
    kinds = {group.kind for spec in specs for group in spec.groups}
    # By type: heads that store latents are a kind of those that store keys.
    others = {
        kind.describe() if isinstance(kind, Blocks) and kind.rule is not None else kind.name
        for kind in kinds
        if not (type(kind) is Rings or (type(kind) is Blocks and kind.rule is None))
    }
    others |= {kind.name for rows in (states, *(spec.rows for spec in specs)) for kind in rows}
    others |= {"layers that read the keys of an earlier one" for spec in specs if not spec.writes}
    if not any(isinstance(kind, Blocks) for kind in kinds):
        others |= {"no head that stores all tokens"}
    if others:
        raise ValueError(
            "cpu_attention serves heads that store all tokens, and heads with a window beside them: got "
            f"{', '.join(sorted(others))}"
        )


class PlannedBytes(NamedTuple):
    """Bytes of blocks on the host, and of tiles on the device."""

    on_host: int
    in_tiles: int


def planned_bytes(
    memory: MemoryPlan, num_blocks: int, *, is_apart: bool, ahead: GroupAhead | None = None
) -> PlannedBytes:
    """Return the bytes that ``HostAttention`` allocates.

    Args:
        memory: stores of the device, of whatever number of blocks.
        num_blocks: blocks of the host.
        is_apart: the device is no CPU.
        ahead: see ``HostAttention``.
    """
    tiles = {
        (group.format, layer.head_dim, layer.value_dim, group.num_heads): layer.unit_bytes(
            group, memory.dtype_bytes, memory.block_size
        )
        for layer in memory.layers
        for group in layer.own_groups
        if isinstance(group.kind, Blocks)
    }
    in_tiles = 0
    for unit in tiles.values():
        size, number = _tiles_of(num_blocks, unit, ahead, is_apart=is_apart)
        in_tiles += number * (size + 1) * unit
    return PlannedBytes((num_blocks + 1) * memory.block_bytes, in_tiles)


def _tiles_of(
    num_blocks: int, unit_bytes: int, ahead: GroupAhead | None, *, is_apart: bool
) -> tuple[int, int]:
    """Blocks of a tile, and the number of tiles."""
    size = max(1, min(num_blocks, (FAR_TILE_BYTES if is_apart else TILE_BYTES) // unit_bytes))
    return (size, 2) if ahead is None else ahead.tiles(num_blocks, size)


def unit_bytes(units: KVUnits) -> int:
    """Bytes of the keys and values of a unit, as they are stored."""
    return sum(view[0].nbytes for view in units.views)


def _like(units: KVUnits, num_units: int, device: torch.device) -> KVUnits:
    """Units of the sizes and format of others, and one more, which padding reads."""
    layout = UnitLayout.dense(num_units + 1, units.layout.num_heads, units.layout.num_slots)
    num_vectors = layout.num_units * layout.unit_stride
    tensors = [reserved_zeros((num_vectors, each.shape[-1]), each.dtype, device) for each in units.tensors]
    return units_of(tuple(tensors), layout, units.encoding)


def _numbers(rows: Iterable[HostRow]) -> Iterator[int]:
    return (row.ring_row for row in rows)


def _tokens(rows: Sequence[HostRow], step: Step) -> torch.Tensor:
    """Flat index of each token of decode rows, any valid index where there is none, ``[n * M]``."""
    first = torch.tensor([row.first for row in rows])[:, None] + torch.arange(step.decode_len)
    return first.clamp(max=len(step.tensors.positions) - 1).view(-1)


def _places(rows: Sequence[HostRow], decode_len: int) -> torch.Tensor:
    """Places of these tokens among those of all decode rows, ``[n * M]``."""
    first = torch.tensor([row.ring_row * decode_len for row in rows])[:, None]
    return (first + torch.arange(decode_len)).view(-1)


def _of_rows(inputs: PartInputs, step: Step) -> Partial:
    """The partial of decode rows that see nothing, ``[N * M, K, G, ...]``."""
    q = inputs.q[:1].expand(len(step.row_token), *inputs.q.shape[1:])
    return empty(q, inputs.units.encoding.value_dim)


def _put(total: Partial, places: torch.Tensor, part: Partial) -> None:
    for whole, some in zip(total, part):
        whole.index_copy_(0, places, some)
