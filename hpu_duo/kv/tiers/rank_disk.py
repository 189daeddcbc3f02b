"""The KV tier on disk with several ranks: each stores its heads' records; a hit needs those of all ranks."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import platform
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from hpu_duo.kv.tiers.disk import NUM_READERS, Scanned, SegmentFolder, Written
from hpu_duo.kv.tiers.disk_index import DiskIndex
from hpu_duo.kv.tiers.host import Record, RecordKey
from hpu_duo.kv.tiers.link import DamagedRecord, DiskOrders, DiskRecord
from hpu_duo.kv.tiers.records import RecordMemory
from hpu_duo.kv.tiers.segments import StoredRecord, rank_folder, read_record
from hpu_duo.not_picklable import NotPicklable

_log = logging.getLogger(__name__)

T = TypeVar("T")
Exchange: TypeAlias = Callable[[Sequence[int]], list[list[int]]]
"""Gives integers of this rank, and returns those of all, rank 0 first."""

_FINE, _DAMAGED, _MISSING, _NOT_WRITTEN = 0, -1, -2, -3
"""Answers of a rank; others are numbers of the system's errors."""


class OwnFolder(NamedTuple):
    """The folder of one rank.

    Attributes:
        path: of the folders of all ranks.
        rank, size: number of this rank, and of all.
        limit: bytes of this rank's files.
        largest: payload of the largest record.
        block_size: tokens of a full block.
    """

    path: Path
    rank: int
    size: int
    limit: int
    largest: int
    block_size: int


class _FolderStatus(NamedTuple):
    """Status of the folder of one rank, which ranks exchange when they open their folders.

    Attributes:
        answer: ``_FINE``, or an error.
        filesystem: a number of its file system and its machine.
        is_writer: whether it has the lock.
        limit, used: bytes of its files.
        free: bytes of its file system.
    """

    answer: int
    filesystem: int
    is_writer: int = 0
    limit: int = 0
    used: int = 0
    free: int = 0

    @classmethod
    def of(cls, folder: SegmentFolder, limit: int) -> _FolderStatus:
        """Return the status of an open folder."""
        place = f"{platform.node()} {folder.path.stat().st_dev}".encode()
        filesystem = int.from_bytes(hashlib.sha256(place).digest()[:7], "big")
        free = shutil.disk_usage(folder.path).free
        return cls(_FINE, filesystem, int(folder.is_writer), limit, folder.num_bytes, free)


class _Worker:
    """A thread that runs one work after the other.

    The interpreter may exit while it waits for a rank, which it does with the threads of no executor.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._has_ended = False
        Thread(target=_run, args=(self._queue,), name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Queue work; returns the future of its result."""
        if self._has_ended:
            raise RuntimeError("the thread of the KV tier on disk has ended")
        future: Future[T] = Future()
        self._queue.put((future, partial(work, *arguments)))
        return future

    def end(self, *, drops_work: bool) -> None:
        """End the thread after what is queued, or drop that."""
        self._has_ended = True
        with suppress(Empty):
            while drops_work and (queued := self._queue.get_nowait()) is not None:
                queued[0].cancel()
        self._queue.put(None)


_Work: TypeAlias = tuple[Future[Any], Callable[[], Any]]


def _run(queue: SimpleQueue[_Work | None]) -> None:
    while (queued := queue.get()) is not None:
        future, work = queued
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        del queued, future, work


class _Read(NamedTuple):
    """A read that rank 0 orders: the record, its place on rank 0, and its seconds."""

    wanted: DiskRecord
    stored: StoredRecord
    future: Future[float]


class RankDisk(NotPicklable):
    """Reads and writes the records of one rank, as rank 0 orders.

    A thread runs one order after the other, and ranks exchange the results: a record is read if each of them
    has read its own. No step waits for that.

    Args:
        own: folder of this rank.
        memory: of records on the host.
        exchange: see ``Exchange``; all ranks call it equally often.
    """

    def __init__(self, own: OwnFolder, memory: RecordMemory, exchange: Exchange) -> None:
        self._own, self._memory, self._exchange = own, memory, exchange
        # Rank 0 orders reads of records that its tier knows.
        self._index = DiskIndex(own.block_size) if own.rank else None
        self._worker = _Worker("hpu-duo-kv-disk")
        self._readers = ThreadPoolExecutor(NUM_READERS, "hpu-duo-kv-disk-read")
        self._folder: SegmentFolder | None = None
        self._last: Future[None] | None = None

    @property
    def folder(self) -> SegmentFolder:
        """The segments of this rank, once it is open."""
        assert self._folder is not None, "expected an open folder"
        return self._folder

    def open(self, fingerprint: bytes) -> str | None:
        """Open the folders of all ranks, which do so at the same time; returns the error of one of them.

        Args:
            fingerprint: SHA-256 of all that records of all ranks depend on.
        """
        own, status = self._own, _FolderStatus(_FINE, filesystem=0)
        try:
            self._folder = SegmentFolder(
                rank_folder(own.path, own.rank, own.size),
                # So that no rank reads files of another one.
                hashlib.sha256(fingerprint + f"{own.rank} of {own.size}".encode()).digest(),
                own.limit,
                own.largest,
                may_write=not own.rank,
            )
            weakref.finalize(self, SegmentFolder.release, self._folder)
            status = _FolderStatus.of(self._folder, own.limit)
        except Exception as error:
            status = status._replace(answer=_answer_to(error))
        ranks = [_FolderStatus(*each) for each in self._exchange(status)]
        refused = self._refused([each.answer for each in ranks]) or _lack_of_space(own.path, ranks)
        if refused is None:
            refused = self._refused([answer for [answer] in self._exchange([self._join(ranks[0])])])
        if refused is not None and self._folder is not None:
            self._folder.release()
        return refused

    def _join(self, leader: _FolderStatus) -> int:
        """Find the records of this rank, and take its lock if rank 0 has its own; returns an answer."""
        if not self._own.rank:
            return _FINE  # its tier scans
        try:
            self.folder.may_write = bool(leader.is_writer)
            self._scan()
        except Exception as error:
            return _answer_to(error)
        return _FINE

    def _refused(self, answers: list[int]) -> str | None:
        error = _error_in(answers)
        expected = "expected kv_offloading_disk to be a folder that can be read and written, got"
        return None if error is None else f"{expected} {self._own.path}: {error}"

    def begin(self, orders: DiskOrders) -> None:
        """Begin an order."""
        self._last = self._worker.submit(self._carry_out, orders)

    def _carry_out(self, orders: DiskOrders) -> None:
        try:
            self._work(orders)
        except Exception as error:  # a rank does not answer, for instance
            self._on_failure(orders, error)

    def _work(self, orders: DiskOrders) -> None:
        began = time.perf_counter()
        if orders.reads:
            try:
                found = self._read_all(orders)
            except Exception as error:
                found = [self._logged_answer(error)] * len(orders.reads)
            answers = self._exchange([orders.number, *found])
            self._on_read(orders, answers, time.perf_counter() - began)
        if orders.writes:
            try:
                written, answer = self._write(orders.writes)
            except Exception as error:
                written, answer = Written(), self._logged_answer(error)
            self._on_written(orders, self._exchange([orders.number, answer]), written)

    def _logged_answer(self, error: Exception) -> int:
        """Log an error and return its number, which ranks exchange."""
        _log.warning("the KV tier on disk of rank %d: %r", self._own.rank, error)
        return _answer_to(error)

    def _read_all(self, orders: DiskOrders) -> list[int]:
        """Read records to their slots; returns an answer to each."""
        found = self._find(orders)
        answers = list(self._readers.map(self._read, orders.reads, found))
        for stored, answer in zip(found, answers):
            if answer and stored is not None and self._index is not None:
                self._index.drop(stored)
        return answers

    def _find(self, orders: DiskOrders) -> Sequence[StoredRecord | None]:
        """Return the places of records to read; None where this rank does not have one."""
        index = self._index
        assert index is not None, "expected a rank that finds its records"
        if any(index.get(each.key) is None for each in orders.reads):
            self._scan()  # another process may have written them
        return [index.get(each.key) for each in orders.reads]

    def _read(self, wanted: DiskRecord, stored: StoredRecord | None) -> int:
        places, slots = list(wanted.slots), self._memory.slots
        if stored is None or stored.num_bytes != len(places) * slots.shape[1]:
            return _MISSING
        try:
            data = np.frombuffer(read_record(self.folder.path, stored), np.uint8)
            slots[places] = data.reshape(len(places), -1)
            self._memory.seal(places, is_row=wanted.key.is_row)
        except FileNotFoundError:
            return _MISSING if self.folder.path.is_dir() else errno.ENOENT
        except Exception as error:
            return _answer_to(error)
        return _FINE

    def _write(self, wanted: Sequence[DiskRecord]) -> tuple[Written, int]:
        self.folder.may_write = True  # no other process orders it: rank 0 has the lock
        if not self.folder.is_writer:
            self._scan()
        if not self.folder.is_writer:
            return Written(), _NOT_WRITTEN  # that process is about to end
        if not all(self._memory.is_sound(each.slots, is_row=each.key.is_row) for each in wanted):
            _log.warning("rank %d: a record in host memory does not have its checksum", self._own.rank)
            return Written(), _NOT_WRITTEN
        written = self.folder.write(
            [(each.key, each.parent, each.num_own_tokens, self._bytes(each.slots)) for each in wanted]
        )
        if self._index is not None:
            self._index.drop_segments(written.dropped)
            self._index.add(written.stored)
        return written, _FINE

    def _bytes(self, slots: Sequence[int]) -> bytes:
        return self._memory.slots[list(slots)].tobytes()

    def _scan(self) -> Scanned:
        scanned = self.folder.scan()
        if self._index is not None:
            self._index.keep_segments(scanned.names)
            self._index.add(scanned.stored)
        return scanned

    def _on_read(self, orders: DiskOrders, answers: list[list[int]], seconds: float) -> None:
        """Handle the answers of all ranks to reads."""

    def _on_written(self, orders: DiskOrders, answers: list[list[int]], written: Written) -> None:
        """Handle the answers of all ranks to writes."""

    def _on_failure(self, orders: DiskOrders, error: Exception) -> None:
        """Handle an order whose answers ranks could not exchange."""
        _log.warning("the KV tier on disk of rank %d: order %d: %r", self._own.rank, orders.number, error)

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for the end of all that has begun, on all ranks at the same time.

        Args:
            timeout_s: of a rank that does not answer; whoever stops the ranks ends it.
        """
        done, _ = wait([] if self._last is None else [self._last], timeout_s)
        # An order that has not begun waits for the same rank.
        self._worker.end(drops_work=not done)


class LeadingDisk(RankDisk):
    """The folder of rank 0, which queues reads and writes for all ranks; see ``DiskAccess``.

    Queued reads and writes start on all ranks with the next step. See ``RankDisk`` for the arguments.
    """

    def __init__(self, own: OwnFolder, memory: RecordMemory, exchange: Exchange) -> None:
        super().__init__(own, memory, exchange)
        self.path = own.path
        self._number = 0
        self._queued: list[_Read] = []
        self._written: tuple[tuple[DiskRecord, ...], Future[Written]] | None = None
        # Orders by number: those in the message of a step, and those that a thread runs.
        self._sent: dict[int, tuple[list[_Read], Future[Written] | None]] = {}
        self._running: dict[int, tuple[list[_Read], Future[Written] | None]] = {}

    @property
    def is_writer(self) -> bool:
        """See ``DiskAccess``."""
        return self.folder.is_writer

    def scan(self) -> Future[Scanned]:
        """See ``DiskAccess``."""
        return self._worker.submit(self._scan)

    def write(self, batch: Sequence[Record]) -> Future[Written]:
        """See ``DiskAccess``."""
        assert self._written is None, "expected the end of the batch before"
        future: Future[Written] = Future()
        self._written = tuple(map(_order_of, batch)), future
        return future

    def read(self, stored: StoredRecord, record: Record) -> Future[float]:
        """See ``DiskAccess``."""
        future: Future[float] = Future()
        self._queued.append(_Read(_order_of(record), stored, future))
        return future

    def _find(self, orders: DiskOrders) -> Sequence[StoredRecord | None]:
        return [each.stored for each in self._running[orders.number][0]]

    @property
    def has_orders(self) -> bool:
        """See ``DiskAccess``."""
        return bool(self._queued) or self._written is not None

    def take_orders(self) -> DiskOrders | None:
        """See ``DiskAccess``."""
        if not self.has_orders:
            return None
        self._number += 1
        queued, self._queued = self._queued, []
        (writes, written), self._written = self._written or ((), None), None
        self._sent[self._number] = queued, written
        return DiskOrders(self._number, tuple(each.wanted for each in queued), writes)

    def forget(self) -> None:
        """See ``DiskAccess``."""
        self.take_orders()
        for reads, written in self._sent.values():
            for each in reads:
                each.future.set_result(0.0)
            if written is not None:
                written.set_result(Written())
        self._sent.clear()

    def begin(self, orders: DiskOrders) -> None:
        """Begin an order here; the others get it with the step."""
        self._running[orders.number] = self._sent.pop(orders.number)
        super().begin(orders)

    def _carry_out(self, orders: DiskOrders) -> None:
        super()._carry_out(orders)
        del self._running[orders.number]

    def _on_failure(self, orders: DiskOrders, error: Exception) -> None:
        reads, written = self._running[orders.number]
        futures: list[Future[Any]] = [each.future for each in reads]
        for future in futures if written is None else (*futures, written):
            if not future.done():
                future.set_exception(error)

    def _on_read(self, orders: DiskOrders, answers: list[list[int]], seconds: float) -> None:
        _check_numbers(orders, answers)
        for place, read in enumerate(self._running[orders.number][0], 1):
            error = _error_in([each[place] for each in answers])
            if error is None:
                read.future.set_result(seconds / len(orders.reads))
            else:
                read.future.set_exception(error)

    def _on_written(self, orders: DiskOrders, answers: list[list[int]], written: Written) -> None:
        _check_numbers(orders, answers)
        _, future = self._running[orders.number]
        assert future is not None, "expected a batch"
        found = [each[1] for each in answers]
        error = _error_in(found)
        if error is None:
            # A record that one rank did not write is not stored.
            future.set_result(replace(written, stored=()) if _NOT_WRITTEN in found else written)
        else:
            future.set_exception(error)


def _order_of(record: Record) -> DiskRecord:
    return DiskRecord(
        RecordKey(record.key.digest, record.key.is_row), record.parent, record.num_own_tokens, record.slots
    )


def _check_numbers(orders: DiskOrders, answers: list[list[int]]) -> None:
    if numbers := [each[0] for each in answers if each[0] != orders.number]:
        raise RuntimeError(f"expected answers of all ranks to order {orders.number}, got one to {numbers[0]}")


def _answer_to(error: Exception) -> int:
    if isinstance(error, DamagedRecord):
        return _DAMAGED
    return (isinstance(error, OSError) and error.errno) or errno.EIO


def _error_in(answers: list[int]) -> Exception | None:
    """Return the error of a rank, by an answer of each; None if there is none."""
    for rank, answer in enumerate(answers):
        if answer > 0:
            return OSError(f"rank {rank}: {os.strerror(answer)}")
    if _DAMAGED in answers:
        return DamagedRecord(f"the record of rank {answers.index(_DAMAGED)} is damaged")
    return FileNotFoundError() if _MISSING in answers else None


def _lack_of_space(path: Path, ranks: Sequence[_FolderStatus]) -> str | None:
    """Return an error if the files of all ranks on one file system would fill it."""
    for rank, each in enumerate(ranks):
        beside = [other for other in ranks if other.filesystem == each.filesystem]
        limit, free = sum(other.limit for other in beside), each.free + sum(other.used for other in beside)
        if limit > free:
            return (
                f"expected kv_offloading_disk_size within the free space of {path}: {free:,} bytes for rank "
                f"{rank} and those on the same disk, got {limit:,} bytes"
            )
    return None
