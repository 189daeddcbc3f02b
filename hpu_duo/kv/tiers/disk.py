"""The tier on disk: records of host memory in files, for later and for other processes."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from hpu_duo.kv.tiers.disk_index import DiskIndex
from hpu_duo.kv.tiers.host import HostTier, Record, RecordKey
from hpu_duo.kv.tiers.link import DamagedRecord, DiskOrders
from hpu_duo.kv.tiers.records import RecordMemory
from hpu_duo.kv.tiers.segments import (
    PAGE,
    FolderLock,
    StoredRecord,
    create_segment,
    model_name,
    number_of,
    read_record,
    record_bytes,
    scan,
    segment_bytes,
    segments_of,
    write_record,
)
from hpu_duo.not_picklable import NotPicklable

_log = logging.getLogger(__name__)
_now = time.monotonic

_BATCH_BYTES = 8 << 20
_REFRESH_S = 2.0
NUM_READERS = 4
"""Threads that read records."""
MOST_READS = 64
"""Most records that are read at the same time."""


@dataclass
class DiskCounters:
    """Totals of a tier on disk.

    Attributes:
        num_written, num_read: records.
        written_bytes, read_bytes: of them.
        written_s, read_s: seconds of threads.
        num_hit_tokens: tokens of blocks that were read for requests.
        num_dropped: records of segments that were dropped for later ones.
        num_late: records that left host memory before they were written.
        num_damaged: records with another checksum; they are not used.
        num_foreign: files of other models in the folder, which are ignored.
        num_failures: errors of the disk: after one the tier is off.
    """

    num_written: int = 0
    num_read: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    written_s: float = 0.0
    read_s: float = 0.0
    num_hit_tokens: int = 0
    num_dropped: int = 0
    num_late: int = 0
    num_damaged: int = 0
    num_foreign: int = 0
    num_failures: int = 0


@dataclass
class Written:
    """Changes of the folder by a thread.

    Attributes:
        stored: records that were written.
        dropped: names of segments that were dropped for them.
        seconds: of the thread.
        damaged: records on the host without their checksum, which were not written.
    """

    stored: Sequence[StoredRecord] = ()
    dropped: Sequence[str] = ()
    seconds: float = 0.0
    damaged: Sequence[Record] = ()


@dataclass
class Scanned:
    """Records that a thread has found in the folder."""

    stored: Sequence[StoredRecord] = ()
    names: frozenset[str] = frozenset()
    num_damaged: int = 0
    num_foreign: int = 0


class SegmentFolder:
    """The segments of one model in a folder; reads and writes block.

    One process writes, the first one that has the lock; others read what it has written. A process never
    appends to segments of an earlier one. Each method runs in one thread at a time.

    Args:
        path: of the folder.
        fingerprint: SHA-256 of all that records depend on.
        limit: bytes of all segments.
        largest: payload of the largest record.
        may_write: whether to write if no other process does; an attribute too.

    Attributes:
        is_writer: whether this process writes.

    Raises:
        ValueError: not even one record fits.
        OSError: the folder cannot be written.
    """

    def __init__(
        self, path: Path, fingerprint: bytes, limit: int, largest: int, *, may_write: bool = True
    ) -> None:
        self.path, self._fingerprint, self._limit, self.may_write = path, fingerprint, limit, may_write
        self._segment_bytes = segment_bytes(limit, largest)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock = FolderLock(path, model_name(fingerprint))
        self.is_writer = may_write and self.lock.acquire()
        # Bytes of segments, and where their next record begins.
        self._sizes: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._damaged, self._has_trimmed = set[str](), False
        self._current: str | None = None
        self._file, self._end = -1, PAGE

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments of the model."""
        own = (each for each in segments_of(self.path) if each.fingerprint == self._fingerprint)
        return sum(each.num_bytes for each in own)

    def scan(self) -> Scanned:
        """Return records that were written since the last call."""
        self.is_writer = self.may_write and self.lock.acquire()
        found, num_damaged, num_foreign = list[StoredRecord](), 0, 0
        segments = segments_of(self.path)
        if self.is_writer:
            # Of a process that was killed while it created it.
            for each in segments:
                if each.fingerprint is None and each.name.startswith(model_name(self._fingerprint)):
                    (self.path / each.name).unlink(missing_ok=True)
        own = {each.name: each.num_bytes for each in segments if each.fingerprint == self._fingerprint}
        num_foreign = len(segments) - len(own)
        for name in own:
            if name == self._current:
                continue
            end, before = self._ends.get(name, PAGE), num_damaged
            try:
                for stored in scan(self.path, name, end):
                    if stored is None:
                        num_damaged += 1
                    else:
                        end = stored.end
                        found.append(stored)
            except FileNotFoundError:
                continue
            self._ends[name] = end
            if num_damaged > before:
                self._damaged.add(name)
            if self.is_writer and not self._has_trimmed and name not in self._damaged:
                os.truncate(self.path / name, end)  # nothing follows in the segment of an earlier process
                own[name] = end
        self._sizes, self._has_trimmed = own, self.is_writer
        self._ends = {name: end for name, end in self._ends.items() if name in own}
        return Scanned(found, frozenset(own), num_damaged, num_foreign)

    def write(self, records: Sequence[tuple[RecordKey, bytes, int, bytes]]) -> Written:
        """Append records: key, parent, tokens of the last block, payload."""
        began, stored, dropped = time.perf_counter(), list[StoredRecord](), list[str]()
        for key, parent, num_own, data in records:
            size = record_bytes(len(data))
            if self._current is None or self._end + size > self._segment_bytes:
                dropped += self._begin_segment()
            assert self._current is not None, "expected a segment"
            stored.append(write_record(self._file, self._current, self._end, key, parent, num_own, [data]))
            self._end += size
        return Written(stored, dropped, time.perf_counter() - began)

    def _begin_segment(self) -> list[str]:
        """Create a segment, and drop the oldest ones for it."""
        self.end_segment()
        dropped = list[str]()
        while self._sizes and sum(self._sizes.values()) + self._segment_bytes > self._limit:
            name = min(self._sizes, key=number_of)
            (self.path / name).unlink(missing_ok=True)
            del self._sizes[name]
            dropped.append(name)
        number = 1 + max((number_of(each.name) for each in segments_of(self.path)), default=0)
        name = self._current = create_segment(self.path, number, self._fingerprint, self._segment_bytes)
        self._sizes[name] = self._segment_bytes
        self._file = os.open(self.path / name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._end = PAGE
        return dropped

    def end_segment(self) -> None:
        """Free the bytes of the last segment that no record has filled."""
        if self._current is not None:
            name, self._current = self._current, None
            self._sizes[name] = self._ends[name] = self._end
            os.truncate(self._file, self._end)
            os.close(self._file)

    def release(self) -> None:
        """End the last segment, and let another process write."""
        with suppress(OSError):
            self.end_segment()
        self.lock.release()


class DiskAccess(Protocol):
    """Reads and writes records of slots in threads.

    Attributes:
        path: of the folder.
        is_writer: whether this process writes; otherwise it reads what another one writes.
    """

    path: Path

    @property
    def is_writer(self) -> bool:
        """See above."""
        ...

    def scan(self) -> Future[Scanned]:
        """Return records that were written since the last call."""
        ...

    def write(self, batch: Sequence[Record]) -> Future[Written]:
        """Write records, which stay on the host meanwhile."""
        ...

    def read(self, stored: StoredRecord, record: Record) -> Future[float]:
        """Read a record to its slots; returns seconds.

        Raises:
            DamagedRecord: by the future: it has other bytes.
            FileNotFoundError: by the future: its segment was dropped.
        """
        ...

    @property
    def has_orders(self) -> bool:
        """Whether any work waits for the next step."""
        ...

    def take_orders(self) -> DiskOrders | None:
        """Return the work that all ranks begin with the next step."""
        ...

    def forget(self) -> None:
        """End work that has not begun: writes without records, reads without bytes."""
        ...


class DiskThreads(NotPicklable):
    """The folder of a single rank; see ``DiskAccess``.

    Args:
        folder: of the segments.
        memory: of records on the host.
    """

    def __init__(self, folder: SegmentFolder, memory: RecordMemory) -> None:
        self._folder, self.path, self._memory = folder, folder.path, memory
        self._writer = ThreadPoolExecutor(1, "hpu-duo-kv-disk-write")
        self._readers = ThreadPoolExecutor(NUM_READERS, "hpu-duo-kv-disk-read")
        # Threads that write or read refer to this object, so none runs then.
        weakref.finalize(self, SegmentFolder.release, folder)

    @property
    def is_writer(self) -> bool:
        """See ``DiskAccess``."""
        return self._folder.is_writer

    def scan(self) -> Future[Scanned]:
        """See ``DiskAccess``."""
        return self._writer.submit(self._folder.scan)

    def write(self, batch: Sequence[Record]) -> Future[Written]:
        """See ``DiskAccess``."""
        return self._writer.submit(self._write, batch)

    def _write(self, batch: Sequence[Record]) -> Written:
        sound, damaged = list[tuple[RecordKey, bytes, int, bytes]](), list[Record]()
        for each in batch:
            if self._memory.is_sound(each.slots, is_row=each.key.is_row):
                data = self._memory.slots[list(each.slots)].tobytes()
                sound.append((each.key, each.parent, each.num_own_tokens, data))
            else:
                damaged.append(each)
        return replace(self._folder.write(sound), damaged=damaged)

    def read(self, stored: StoredRecord, record: Record) -> Future[float]:
        """See ``DiskAccess``."""
        return self._readers.submit(self._read, stored, record)

    def _read(self, stored: StoredRecord, record: Record) -> float:
        began = time.perf_counter()
        data = np.frombuffer(read_record(self.path, stored), np.uint8)
        self._memory.slots[list(record.slots)] = data.reshape(len(record.slots), -1)
        self._memory.seal(record.slots, is_row=record.key.is_row)
        return time.perf_counter() - began

    @property
    def has_orders(self) -> bool:
        """False: threads have begun."""
        return False

    def take_orders(self) -> None:
        """Return None."""

    def forget(self) -> None:
        """Do nothing: threads have begun."""


class DiskTier(NotPicklable):
    """Records on disk by key; threads write what has landed on the host, and read what requests wait for.

    A failure of the disk switches the tier off, and a damaged record is dropped: no request ends for either.

    Args:
        access: reads and writes.
        host: records in host memory; they stay there while they are written or read.
        slot_bytes: of these records.
        block_size: tokens of a full block.

    Attributes:
        is_off: whether the disk has failed.
        damaged: records on the host that do not have their checksum; whoever drops them clears it.
    """

    def __init__(self, access: DiskAccess, host: HostTier, slot_bytes: int, block_size: int) -> None:
        self._access, self._host, self._slot_bytes = access, host, slot_bytes
        self.counters, self.is_off = DiskCounters(), False
        self.damaged: list[Record] = []
        self._index = DiskIndex(block_size)
        self._queue: deque[Record] = deque()
        self._writing: tuple[Future[Written], list[Record]] | None = None
        self._reading: dict[Record, tuple[Future[float], StoredRecord]] = {}
        self._scanned_at = _now()
        self._take(access.scan().result())
        self._scanning: Future[Scanned] | None = None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of the records."""
        return self._index.num_bytes

    @property
    def is_writer(self) -> bool:
        """Whether this process writes; otherwise it reads what another one writes."""
        return self._access.is_writer

    @property
    def has_orders(self) -> bool:
        """See ``DiskAccess``."""
        return self._access.has_orders

    def take_orders(self) -> DiskOrders | None:
        """See ``DiskAccess``."""
        return self._access.take_orders()

    @property
    def num_reads(self) -> int:
        """Number of records that are being read."""
        return len(self._reading)

    @property
    def num_writes(self) -> int:
        """Number of records that are being written."""
        return 0 if (writing := self._writing) is None else len(writing[1])

    @property
    def futures(self) -> list[Future[object]]:
        """Work of threads whose end ``poll`` has not seen."""
        found: list[Future[object]] = [future for future, _ in self._reading.values()]  # type: ignore[misc]
        return found if self._writing is None else [*found, self._writing[0]]  # type: ignore[list-item]

    def get(self, key: RecordKey) -> StoredRecord | None:
        """Return a record."""
        return self._index.get(key)

    def partial_blocks(self, digest: bytes) -> Iterable[StoredRecord]:
        """Return the records of partial blocks, or of their snapshots, behind a prefix of full blocks."""
        return self._index.partial_blocks(digest)

    def offer(self, record: Record) -> None:
        """Write a record that has landed on the host, unless it leaves it before."""
        if self.is_off or not self.is_writer or self._index.get(record.key) is not None:
            return
        self._queue.append(record)
        self._drop_late()
        self._write_some()

    def _drop_late(self) -> None:
        while self._queue and not self._host.has(self._queue[0]):
            self._queue.popleft()
            self.counters.num_late += 1

    def _write_some(self) -> None:
        if self._writing is not None or self.is_off:
            return
        batch, num_bytes = list[Record](), 0
        self._drop_late()
        while self._queue and num_bytes < _BATCH_BYTES:
            batch.append(record := self._queue.popleft())
            record.num_readers += 1
            num_bytes += len(record.slots) * self._slot_bytes
            self._drop_late()
        if batch:
            self._writing = (self._access.write(batch), batch)

    def read(self, stored: StoredRecord, record: Record) -> bool:
        """Begin to read a record to its slots on the host; whether it can be read.

        Args:
            record: has its slots, and stays until ``poll`` has returned it.
        """
        num_bytes = len(record.slots) * self._slot_bytes
        if self.is_off or self.get(stored.key) != stored or stored.num_bytes != num_bytes:
            return False
        self._reading[record] = (self._access.read(stored, record), stored)
        return True

    def poll(self) -> list[tuple[Record, StoredRecord, float | None]]:
        """Return reads that have ended, with their seconds, or None where the record could not be read."""
        ended: list[tuple[Record, StoredRecord, float | None]] = []
        for record, (future, stored) in list(self._reading.items()) if self._reading else ():
            if not future.done():
                continue
            del self._reading[record]
            ended.append((record, stored, self._seconds(future, stored)))
        if self._writing is not None and self._writing[0].done():
            self._end_writing()
            self._write_some()
        if self._scanning is not None and self._scanning.done():
            self._end_scanning(self._scanning)
        return ended

    def _seconds(self, future: Future[float], stored: StoredRecord) -> float | None:
        try:
            seconds = future.result()
        except DamagedRecord:
            self.counters.num_damaged += 1
            self._index.drop(stored)
        except FileNotFoundError:  # the process that writes has dropped its segment
            self._index.drop(stored)
            if not self._access.path.is_dir():
                self._fail(FileNotFoundError(f"{self._access.path} was removed"))
        except Exception as error:
            self._fail(error)
        else:
            self.counters.num_read += 1
            self.counters.read_bytes += stored.num_bytes
            self.counters.read_s += seconds
            return seconds
        return None

    def _end_writing(self) -> None:
        assert self._writing is not None, "expected records that are written"
        (future, batch), self._writing = self._writing, None
        for record in batch:
            record.num_readers -= 1
        try:
            written = future.result()
        except Exception as error:
            self._fail(error)
            return
        self._index.add(written.stored)
        self.damaged += written.damaged
        self.counters.num_written += len(written.stored)
        self.counters.written_bytes += sum(stored.num_bytes for stored in written.stored)
        self.counters.written_s += written.seconds
        self.counters.num_dropped += self._index.drop_segments(written.dropped)

    def refresh(self) -> None:
        """Look for what another process has written, unless this one writes; at most every two seconds."""
        is_due = _now() - self._scanned_at > _REFRESH_S
        if is_due and not self.is_writer and self._scanning is None and not self.is_off:
            self._scanned_at = _now()
            self._scanning = self._access.scan()

    def _end_scanning(self, future: Future[Scanned]) -> None:
        self._scanning = None
        try:
            scanned = future.result()
        except Exception as error:
            self._fail(error)
            return
        self.counters.num_dropped += self._index.keep_segments(scanned.names)
        self._take(scanned)

    def _take(self, scanned: Scanned) -> None:
        self._index.add(scanned.stored)
        self.counters.num_damaged += scanned.num_damaged
        self.counters.num_foreign = scanned.num_foreign

    def _fail(self, error: Exception) -> None:
        self.counters.num_failures += 1
        if not self.is_off:
            reason = str(error) or repr(error)
            _log.warning("the KV tier on disk is off, because %s failed: %s", self._access.path, reason)
        self.is_off = True
        self._index.clear()
        self._queue.clear()

    def flush(self) -> None:
        """Wait until everything that waits to be written is on disk."""
        while self._writing is not None or self._queue:
            self._write_some()
            if self._writing is not None:
                self._writing[0].exception()
                self._end_writing()

    def drain(self, timeout_s: float = 10.0) -> None:
        """Wait for threads, and forget reads, whose records have no valid bytes.

        Args:
            timeout_s: of a disk, or a rank, that hangs. Then the tier is off, and slots that it may still use
                stay reserved.
        """
        self._access.forget()
        if wait(self.futures, timeout_s).not_done:
            self._fail(TimeoutError(f"a read or write of over {timeout_s:g} s"))
            using = [record for record, (future, _) in self._reading.items() if not future.done()]
            if self._writing is not None and not self._writing[0].done():
                using, self._writing = [*using, *self._writing[1]], None
            for record in filter(self._host.has, using):
                self._host.drop(record, frees=False)
        self._reading.clear()
        if self._writing is not None:
            self._end_writing()
