"""The prefix cache's tier in host memory: what leaves the device, and what comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpu_duo.kv.prefix_tree import PrefixNode, PrefixTree, digest_of
from hpu_duo.kv.tiers.disk import MOST_READS, DiskTier
from hpu_duo.kv.tiers.host import HostTier, Record, RecordKey
from hpu_duo.kv.tiers.link import Landed, Transfers
from hpu_duo.kv.tiers.loads import Load, Piece
from hpu_duo.kv.tiers.policy import LoadPiece, LoadPolicy, WritePolicy
from hpu_duo.kv.tiers.segments import StoredRecord
from hpu_duo.kv.tiers.stage import Stage
from hpu_duo.kv.tiers.swap import SwapSpace
from hpu_duo.request import Request

_log = logging.getLogger(__name__)


@dataclass
class TierCounters:
    """Totals of a tier.

    Attributes:
        num_stored, num_loaded: records that have landed on the host, and on the device.
        stored_bytes, loaded_bytes: of them.
        stored_s, loaded_s: seconds of their transfers.
        num_queried_tokens: tokens of requests that were looked for because the device did not have them.
        num_hit_tokens: tokens that were loaded for requests, and need not be computed.
        num_busy: units that were evicted without a record, because the link or all slots were busy.
        num_computed: prefixes that were predicted to be computed faster than loaded.
        num_abandoned: loads that ended early, for lack of blocks, or because a record was lost.
        num_damaged: records on the host that did not have their checksum, and were dropped.
    """

    num_stored: int = 0
    num_loaded: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    stored_s: float = 0.0
    loaded_s: float = 0.0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_busy: int = 0
    num_computed: int = 0
    num_abandoned: int = 0
    num_damaged: int = 0


_LEFT = 8
"""One of so many units is left for what requests evict: a quarter of those that go to the host."""


class RecordSizes(NamedTuple):
    """Sizes of records.

    Attributes:
        block_bytes, row_bytes: of a block, and of a row; 0 where the cache has none of them.
        slot_bytes: of a slot, which a block fills.
        slots_per_row: slots of a row.
    """

    block_bytes: int
    row_bytes: int
    slot_bytes: int
    slots_per_row: int


class PrefixTiers:
    """Copies what the prefix cache evicts to host memory, and loads prefixes for waiting requests.

    Some blocks and snapshot rows are reserved for transfers, half of them for each direction. What is evicted
    is copied there with the other copies of the next step, so its unit is free at once, and from there to the
    host while that step runs. A record that is loaded arrives in such a unit, and is copied to its place in
    the cache with the copies of a later step. No step waits for a transfer; without a free unit, or a free
    slot, what is evicted is lost.

    A request whose prefix is loaded waits, and others may be admitted before it. What has been loaded for it
    may be evicted again like everything else in the cache; the request then computes it.

    Args:
        host: the index of records.
        stage: of transfers; an attribute too.
        sizes: of records; an attribute too.
        write_policy: when to store.
        load_policy: when to load.
        most_waits: steps in all that a load waits for a unit for what it evicts, which is lost then.
        min_tokens: of texts that are stored by ``WRITE_THROUGH_COST``.

    Attributes:
        disk: what has landed on the host is written there too; None = nowhere.
        swap: room for preempted requests, by the same transfers; None = there is none.
    """

    def __init__(
        self,
        host: HostTier,
        stage: Stage,
        sizes: RecordSizes,
        write_policy: WritePolicy = WritePolicy.WRITE_BACK,
        load_policy: LoadPolicy | None = None,
        most_waits: int = 64,
        min_tokens: int = 1,
    ) -> None:
        self.host, self.stage, self.write_policy = host, stage, write_policy
        self.load_policy = LoadPolicy() if load_policy is None else load_policy
        self.counters, self.sizes = TierCounters(), sizes
        self.disk: DiskTier | None = None
        self.swap: SwapSpace | None = None
        self._most_waits, self._min_tokens = most_waits, min_tokens
        self._record_bytes, self._num_slots = sizes[:2], (1, sizes.slots_per_row)
        self._reset()

    def _reset(self) -> None:
        self._storing: set[Record] = set()
        # Cached prefixes that are still to be written through, the first one first.
        self._unwritten: dict[PrefixNode, None] = {}
        # By record that is read from the disk.
        self._reading: dict[Record, Piece] = {}
        self._loads: dict[Request, Load] = {}
        self._asked: set[Request] = set()
        # Records with another checksum, until nothing needs their slots.
        self._damaged: set[Record] = set()
        self._bytes_ahead = 0

    @property
    def has_loads(self) -> bool:
        """Whether any request waits for records, or for its swapped blocks."""
        return bool(self._loads) or (self.swap is not None and self.swap.is_moving)

    @property
    def num_leaving(self) -> int:
        """Number of records that are on their way from the device to the host."""
        return len(self._storing)

    @property
    def num_loading(self) -> int:
        """Number of records that are on their way to the device, or wait there for a place in the cache."""
        return sum(load.num_begun for load in tuple(self._loads.values()))

    @property
    def has_stores(self) -> bool:
        """Whether anything waits for a step: copies to the host, or what ranks do with their folders."""
        has_orders = self.disk is not None and self.disk.has_orders
        return bool(self._unwritten) or self.stage.has_begun or has_orders

    def wait_any(self) -> None:
        """Wait until a transfer, or the work of a thread of the disk, has ended, if any is on its way."""
        self.stage.link.wait_any(() if self.disk is None else self.disk.futures)

    def settle(self) -> bool:
        """Wait for a transfer, or for the disk, while there are no steps; whether any was on its way."""
        if not (self.stage.is_moving or (self.disk is not None and self.disk.futures)):
            return False
        self.wait_any()
        self._land()
        return True

    def is_loading(self, request: Request) -> bool:
        """Whether a request waits for records."""
        return request in self._loads

    def leave(self, node: PrefixNode, *, is_evicted: bool = True) -> None:
        """Store the last block of a prefix and its snapshot, if it has them.

        Args:
            is_evicted: what cannot be stored now is lost, and counted; otherwise a later step stores it.
        """
        if is_evicted and self._is_cheap(node):
            return
        is_stored = not self._record_bytes[False] or self._store(
            node, is_row=False, unit=node.block, is_evicted=is_evicted
        )
        if node.snapshot is not None:
            is_stored &= self._store(node, is_row=True, unit=node.snapshot, is_evicted=is_evicted)
        needed = bool(self._record_bytes[False]) + (node.snapshot is not None) * self._num_slots[True]
        fits = needed <= self.host.num_slots
        if not is_stored and not is_evicted and fits:
            self._unwritten[node] = None

    def write_through(self, nodes: Iterable[PrefixNode], policy: WritePolicy) -> None:
        """Store prefixes that stay cached, if that is the policy."""
        if self.write_policy is policy:
            for node in nodes:
                self.leave(node, is_evicted=False)
        elif self.write_policy is WritePolicy.WRITE_THROUGH_COST and policy is WritePolicy.WRITE_THROUGH:
            for node in nodes:
                if node.num_tokens >= self._min_tokens:
                    _mark_costly(node)
                    for each in self._unknown(node):
                        self.leave(each, is_evicted=False)

    def _unknown(self, node: PrefixNode) -> list[PrefixNode]:
        """A prefix and those that it begins with, the shortest first, from the last known one on."""
        found: list[PrefixNode] = []
        for each in node.path:
            if found and (
                not self._record_bytes[False]
                or each in self._unwritten
                or self.host.knows(RecordKey(each.digest, is_row=False))
            ):
                break
            found.append(each)
        return found[::-1]

    def _is_cheap(self, node: PrefixNode) -> bool:
        """Whether the policy stores no text like this prefix, with which no longer one has begun."""
        is_short = node.num_tokens < self._min_tokens and not node.is_costly
        return self.write_policy is WritePolicy.WRITE_THROUGH_COST and is_short

    def _write_more(self) -> None:
        """Store what is still to be written through, and is still cached, while units are free.

        Waiting loads may have to evict, so some units are left for what they evict. Requests that are swapped
        have all units first, since others wait for their blocks.
        """
        if self.swap is not None and self.swap.leaving:
            return
        is_row = not self._record_bytes[False]
        least = self.stage.num_units(is_row=is_row) // _LEFT + 1 if self._loads else 0
        for node in tuple(self._unwritten) if self._unwritten else ():
            if self.stage.num_free(is_load=False, is_row=is_row) <= least:
                return
            del self._unwritten[node]
            if node.parent is not None and node.parent.children.get(node.key) is node:
                self.leave(node, is_evicted=False)

    def leave_row(self, node: PrefixNode, row: int) -> None:
        """Store the snapshot of a prefix, before its row is filled with another one."""
        if self._is_cheap(node):
            return
        self._store(node, is_row=True, unit=row, is_evicted=True)

    def _store(self, node: PrefixNode, *, is_row: bool, unit: int, is_evicted: bool) -> bool:
        key = RecordKey(node.digest, is_row)
        if self.host.knows(key):
            self.host.use((key,))
            return True
        assert node.parent is not None, "expected a prefix with a block"
        record = None
        if self.stage.num_free(is_load=False, is_row=is_row):
            record = self.host.reserve(
                *(key, node.parent.digest, node.num_own_tokens, node.num_tokens, self._num_slots[is_row])
            )
        if record is None:
            self.counters.num_busy += is_evicted
            return False
        self._storing.add(record)
        self.stage.store(unit, record.slots, partial(self._stored, record), is_row=is_row)
        return True

    def _stored(self, record: Record, landed: Landed) -> None:
        counters, num_bytes = self.counters, self._record_bytes[record.key.is_row]
        counters.num_stored += 1
        counters.stored_bytes += num_bytes
        counters.stored_s += landed.seconds
        self._storing.remove(record)
        record.is_present = True
        if self.disk is not None:
            self.disk.offer(record)

    def fetches(
        self, request: Request, start: int, path: Sequence[PrefixNode], most: int, tree: PrefixTree
    ) -> bool:
        """Whether a waiting request should wait for records; begins to load them if there are any.

        Each request is considered once while it waits.

        Args:
            start: tokens of the prefix that it can begin with now.
            path: its cached blocks.
            most: tokens that it may reuse.
        """
        if request in self._loads:
            return True
        if request in self._asked:
            return False
        self._asked.add(request)
        self.counters.num_queried_tokens += most - start
        load = Load(request, path[-1] if path else tree.root(request.namespace), start)
        if self.disk is not None:
            self.disk.refresh()
        for source, end in self._find(request.tokens[:most], path, load, tree):
            load.pieces.append(Piece(source, end, load, source if isinstance(source, Record) else None))
        if not load.pieces or load.pieces[-1].end <= start:
            return False
        number = self.load_policy.front(self._priced(load), self._bytes_ahead)
        if not number:
            self.counters.num_computed += 1
            return False
        while len(load.pieces) > number:
            load.pieces.pop()
        num_bytes = sum(self._record_bytes[piece.is_row] for piece in load.pieces)
        for piece in load.pieces:
            if piece.record is not None:
                piece.record.num_readers += 1
        self.host.use(piece.source.key for piece in reversed(load.pieces))
        self._bytes_ahead += num_bytes
        self._loads[request] = load
        return True

    def _priced(self, load: Load) -> list[LoadPiece]:
        """Records of a load; with rows a request begins behind the last one only, a snapshot."""
        last = load.pieces[-1]
        return [
            LoadPiece(
                piece.end - load.start,
                self._record_bytes[piece.is_row],
                piece.record is None,
                piece is last or not self._record_bytes[True],
            )
            for piece in load.pieces
        ]

    def admitted(self, request: Request) -> None:
        """Consider the request again when it waits the next time; also for one that has ended."""
        self._asked.discard(request)
        if (load := self._loads.get(request)) is not None:
            self._abandon(load)

    def _find(
        self, tokens: npt.NDArray[np.int32], path: Sequence[PrefixNode], load: Load, tree: PrefixTree
    ) -> Iterator[tuple[Record | StoredRecord, int]]:
        """Yield records, with the tokens of the prefixes that they end, from which a request can go on."""
        size = tree.block_size
        has_blocks, has_rows = (bool(each) for each in self._record_bytes)
        nodes = [tree.root(load.request.namespace), *path]
        digests = [node.digest for node in nodes]
        blocks: list[Record | StoredRecord] = []
        for ordinal in range(len(path), len(tokens) // size):
            digest = digest_of(digests[-1], tree.key(tokens, ordinal))
            block = self._get(RecordKey(digest, is_row=False))
            if has_blocks:
                if block is None:
                    break
                blocks.append(block)
            digests.append(digest)
        if not has_rows:
            yield from ((each, (len(path) + 1 + place) * size) for place, each in enumerate(blocks))
            return
        for depth in range(len(digests) - 1, -1, -1):
            ending = self._ending(digests[depth], tokens, depth, size)
            if depth and depth < len(nodes) and nodes[depth].snapshot is not None and not ending:
                return  # the device has it
            if not ending:
                continue
            load.node = nodes[min(depth, len(path))]
            yield from (
                (each, (len(path) + 1 + place) * size)
                for place, each in enumerate(blocks[: max(0, depth - len(path))])
            )
            for record in ending:
                yield record, depth * size + record.num_own_tokens % size
            return

    def _get(self, key: RecordKey) -> Record | StoredRecord | None:
        """Return a record that is on the host, or else on disk."""
        record = self.host.get(key)
        return self.disk.get(key) if record is None and self.disk is not None else record

    def _ending(
        self, digest: bytes, tokens: npt.NDArray[np.int32], depth: int, size: int
    ) -> list[Record | StoredRecord]:
        """Return the last records of a prefix of whole blocks, or of one that ends in the next block."""
        best: list[Record | StoredRecord] = []
        found: list[Record | StoredRecord] = list(self.host.partial_blocks(digest))
        if self.disk is not None:
            found += self.disk.partial_blocks(digest)
        for each in found:
            own = each.num_own_tokens
            key = tokens[depth * size : depth * size + own].tobytes()
            if len(key) < own * tokens.itemsize or digest_of(digest, key) != each.key.digest:
                continue
            pair = [self._get(RecordKey(each.key.digest, is_row)) for is_row in (False, True)]
            if not self._record_bytes[False]:
                pair = pair[1:]
            records = [record for record in pair if record is not None]
            if len(records) == len(pair) and (not best or best[0].num_own_tokens < own):
                best = records
        if best or not depth:
            return best
        snapshot = self._get(RecordKey(digest, is_row=True))
        return [] if snapshot is None else [snapshot]

    def take(self) -> Transfers | None:
        """Return the transfers of the next step; None if there are none."""
        for load in list(self._loads.values()):
            self._read(load)
            while load.num_begun < load.num_read and not load.is_abandoned:
                piece = load.pieces[load.num_begun]
                is_free = self.stage.num_free(is_load=True, is_row=piece.is_row)
                if not is_free or piece.record is None or not piece.record.is_present:
                    break
                piece.unit = self.stage.load(
                    piece.record.slots, partial(self._loaded, piece), is_row=piece.is_row
                )
                load.num_begun += 1
        transfers = self.stage.take()
        if self.disk is not None and (orders := self.disk.take_orders()) is not None:
            transfers = replace(transfers or Transfers(), disk=orders)
        return transfers

    def _loaded(self, piece: Piece, landed: Landed) -> None:
        counters, num_bytes = self.counters, self._record_bytes[piece.is_row]
        counters.num_loaded += 1
        counters.loaded_bytes += num_bytes
        counters.loaded_s += landed.seconds
        self.load_policy.loaded(num_bytes, landed.seconds)
        piece.has_landed = True
        if piece.load.is_abandoned:
            self._release(piece)
        if landed.is_damaged and piece.record is not None:
            self._note_damage(piece.record)

    def _note_damage(self, record: Record) -> None:
        """Drop a record of the host that does not have its checksum; who waits for it computes its prefix."""
        if record in self._damaged or not self.host.has(record):
            return
        _log.warning("a record in host memory does not have its checksum, so it is dropped")
        self.counters.num_damaged += 1
        self._damaged.add(record)
        record.is_present = False  # nothing finds it, or evicts it
        for load in tuple(self._loads.values()):
            if any(piece.record is record for piece in load.pieces):
                self._give_up(load)

    def _read(self, load: Load) -> None:
        """Begin to read the next records of a load that are on disk."""
        while load.num_read < len(load.pieces):
            piece = load.pieces[load.num_read]
            if piece.record is None and not self._read_piece(piece):
                return
            load.num_read += 1

    def _read_piece(self, piece: Piece) -> bool:
        """Begin to read a record, unless it is on the host; whether it is, or will be."""
        source, disk = piece.source, self.disk
        assert disk is not None, "expected a disk"
        assert isinstance(source, StoredRecord), "expected a record on disk"
        record = self.host.get(source.key)
        if record is None:
            if disk.num_reads >= MOST_READS or self.host.knows(source.key):
                return False  # another load reads it, or it is on its way from the device
            num_slots = self._num_slots[source.key.is_row]
            record = self.host.reserve(source.key, source.parent, source.num_own_tokens, piece.end, num_slots)
            if record is None:
                if not (self.stage.is_busy or disk.futures):
                    self._give_up(piece.load)
                return False
            if not disk.read(source, record):
                self.host.drop(record)
                self._give_up(piece.load)
                return False
            self._reading[record] = piece
        piece.record = record
        record.num_readers += 1
        return True

    def _give_up(self, load: Load) -> None:
        self.counters.num_abandoned += 1
        self._abandon(load)

    def _land_reads(self, disk: DiskTier) -> None:
        """Take in what has been read from the disk."""
        for record, stored, seconds in disk.poll():
            piece = self._reading.pop(record)
            if seconds is not None:
                record.is_present = True
                self.load_policy.read(stored.num_bytes, seconds)
                disk.counters.num_hit_tokens += 0 if stored.key.is_row else stored.num_own_tokens
            if piece.load.is_abandoned:
                self._release(piece)
            elif seconds is None:
                self._give_up(piece.load)
            if seconds is None:
                self.host.drop(record)

    def advance(
        self, place: Callable[[Piece], PrefixNode | None], has_free_block: Callable[[], bool]
    ) -> None:
        """Take in what has landed.

        Args:
            place: brings a piece of its load into the tree, with a copy from its unit; returns the prefix
                that it ends, None if there is no room.
            has_free_block: whether nothing is evicted for a block. Otherwise pieces wait for a unit that
                what is evicted can be copied to.
        """
        self._land()
        self._write_more()
        for load in list(self._loads.values()):
            self._place(load, place, has_free_block)

    def _land(self) -> None:
        try:
            self.stage.poll()
        except Exception as error:
            self._lose_records(error)
            return
        if self.disk is not None:
            self._land_reads(self.disk)
            for record in self.disk.damaged:
                self._note_damage(record)
            self.disk.damaged.clear()
        for record in [each for each in self._damaged if not each.num_readers]:
            self._damaged.remove(record)
            self.host.drop(record)

    def _place(
        self,
        load: Load,
        place: Callable[[Piece], PrefixNode | None],
        has_free_block: Callable[[], bool],
    ) -> None:
        while load.pieces and load.pieces[0].has_landed:
            # Some units are left for what requests evict in the same step.
            num_free = self.stage.num_free(is_load=False, is_row=False)
            is_busy = num_free <= self.stage.num_units(is_row=False) // _LEFT
            may_wait = is_busy and self._storing and load.num_waits < self._most_waits
            if may_wait and not load.pieces[0].is_row and not has_free_block():
                load.num_waits += 1
                return
            node = place(load.pieces[0])
            if node is None:
                self._give_up(load)
                return
            load.node = node
            _mark_costly(node)  # it would not have been stored otherwise
            self._release(piece := load.pieces.popleft())
            load.num_read, load.num_begun = load.num_read - 1, load.num_begun - 1
            if not load.pieces:
                self.counters.num_hit_tokens += piece.end - load.start
                del self._loads[load.request]

    def _abandon(self, load: Load) -> None:
        """End a load; what is on its way is released when it has landed."""
        del self._loads[load.request]
        load.is_abandoned = True
        for piece in load.pieces:
            if piece.has_landed or (piece.unit is None and piece.record not in self._reading):
                self._release(piece)

    def _release(self, piece: Piece) -> None:
        if piece.record is not None:
            piece.record.num_readers -= 1
        self._bytes_ahead -= self._record_bytes[piece.is_row]
        if piece.unit is not None:
            self.stage.release(piece.unit, is_row=piece.is_row)

    def _lose_records(self, error: Exception) -> None:
        """Drop all records and transfers after one has failed: who waits for them computes its prefix."""
        _log.warning("a transfer between host and device failed, so records are dropped: %r", error)
        self.forget()
        for record in tuple(self.host):
            self.host.drop(record)

    def forget(self) -> None:
        """Drop all transfers, because the content of the stores is unknown; records stay."""
        self.stage.forget()
        if self.swap is not None:
            self.swap.forget()
        if self.disk is not None:
            self.disk.drain()
        for record in (*self._storing, *self._reading, *self._damaged):
            if self.host.has(record):
                self.host.drop(record)
        for record in self.host:
            record.num_readers = 0
        self._reset()


def _mark_costly(node: PrefixNode) -> None:
    """Mark a prefix, and those that it begins with."""
    for each in node.path:
        if each.is_costly:
            return
        each.is_costly = True
