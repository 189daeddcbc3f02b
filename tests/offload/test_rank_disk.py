"""The folders of two ranks, which are threads: what one of them has not done, none of them has."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hpu_duo.cli.app import app
from hpu_duo.kv.tiers.disk import DiskTier, Written
from hpu_duo.kv.tiers.disk_index import DiskIndex
from hpu_duo.kv.tiers.eviction import LeastRecentlyUsed
from hpu_duo.kv.tiers.host import HostTier, Record, RecordKey
from hpu_duo.kv.tiers.rank_disk import LeadingDisk, OwnFolder, RankDisk
from hpu_duo.kv.tiers.records import RecordMemory
from hpu_duo.kv.tiers.segments import PAGE, FolderLock, models_of, rank_folder, record_bytes, segments_of

SLOT_BYTES = 5000
LIMIT = 8 * (PAGE + 4 * record_bytes(SLOT_BYTES))


class Pair:
    """The folders of rank 0 and rank 1, and the exchange between them."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self._given, self._barrier = folder, [[0], [0]], threading.Barrier(2, timeout=20)
        kinds = LeadingDisk, RankDisk
        self.slots = [np.zeros((8, SLOT_BYTES), np.uint8) for _ in kinds]
        self.memories = [RecordMemory(slots, (SLOT_BYTES, 0)) for slots in self.slots]
        self.disks = [
            kind(OwnFolder(folder, rank, 2, limit, SLOT_BYTES, 4), self.memories[rank], self._exchange(rank))
            for rank, kind in enumerate(kinds)
        ]
        with ThreadPoolExecutor(2) as threads:
            self.opened = list(threads.map(lambda disk: disk.open(bytes(32)), self.disks))
        self.leader: LeadingDisk = self.disks[0]  # type: ignore[assignment]

    def _exchange(self, rank: int) -> Any:
        def exchange(own: Sequence[int]) -> list[list[int]]:
            self._given[rank] = list(own)
            self._barrier.wait()
            found = list(self._given)
            self._barrier.wait()
            return found

        return exchange

    def begin(self, ranks: Sequence[int] = (0, 1)) -> None:
        orders = self.leader.take_orders()
        assert orders is not None
        for rank in ranks:
            self.disks[rank].begin(orders)

    def write(self, number: int) -> Written:
        future = self.leader.write([record(number)])
        self.begin()
        return future.result(20)

    def read(self, future: Future[float]) -> float:
        self.begin()
        return future.result(20)

    def give_up(self) -> None:
        self._barrier.abort()

    def close(self) -> None:
        for disk in self.disks:
            disk.close()
            disk.folder.release()


def record(number: int) -> Record:
    return Record(RecordKey(number.to_bytes(32, "big"), is_row=False), bytes(32), 4, 4, (0,), is_present=True)


def lock_of(rank: int, folder: Path) -> FolderLock:
    own = rank_folder(folder, rank, 2)
    return FolderLock(own, models_of(own)[0])


def test_what_one_rank_may_not_write_is_not_stored(tmp_path: Path) -> None:
    Pair(tmp_path).close()
    other = lock_of(1, tmp_path)
    assert other.acquire()
    pair = Pair(tmp_path)
    assert pair.opened == [None, None]
    assert not pair.write(1).stored
    other.release()
    written = pair.write(2)
    assert len(written.stored) == 1
    assert pair.read(pair.leader.read(written.stored[0], record(2))) >= 0
    pair.close()


def test_what_is_damaged_on_the_host_of_one_rank_is_not_stored(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.slots[1][0, 7] = 1
    assert not pair.write(1).stored
    pair.memories[1].seal((0,), is_row=False)
    assert pair.write(2).stored
    pair.close()


def test_a_rank_writes_only_beside_a_rank_0_that_does(tmp_path: Path) -> None:
    Pair(tmp_path).close()
    other = lock_of(0, tmp_path)
    assert other.acquire()
    follower = Pair(tmp_path)
    assert follower.opened == [None, None]
    assert lock_of(1, tmp_path).acquire()
    follower.close()


def test_records_of_a_served_model_are_not_purged_on_any_rank(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.write(1)
    pair.close()
    pair = Pair(tmp_path)
    purged = CliRunner().invoke(app, ["kv-cache", "purge", str(tmp_path)]).output
    assert "removed 0 files, kept 2 of models that are served" in purged
    follower = Pair(tmp_path)
    assert [disk.folder.is_writer for disk in follower.disks] == [False, False]
    pair.close()


def test_each_rank_frees_what_a_killed_server_has_not_filled(tmp_path: Path) -> None:
    killed = Pair(tmp_path)
    killed.write(1)
    for disk in killed.disks:
        disk.folder.lock.release()
    pair = Pair(tmp_path)
    pair.leader.scan().result(20)
    for rank in range(2):
        [segment] = segments_of(rank_folder(tmp_path, rank, 2))
        assert segment.num_bytes == PAGE + record_bytes(SLOT_BYTES)
    pair.close()


def test_ranks_on_one_disk_share_its_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2 * LIMIT - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused = Pair(tmp_path).opened
    assert refused[0] == refused[1]
    assert f"within the free space of {tmp_path}: {2 * LIMIT - 1:,} bytes" in str(refused[0])
    assert f"got {2 * LIMIT:,} bytes" in str(refused[0])
    usage = usage._replace(free=2 * LIMIT)
    again = Pair(tmp_path)  # the locks are free
    assert again.opened == [None, None]
    assert again.leader.is_writer
    again.close()


def test_only_the_other_ranks_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, inode = shutil.disk_usage, Path.stat
    few = usage(tmp_path)._replace(free=LIMIT - 1)

    def stat(path: Path, **more: Any) -> os.stat_result:
        found = inode(path, **more)
        is_other = path.name == "rank-1-of-2"
        return os.stat_result((*found[:2], -1, *found[3:])) if is_other else found

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: few if path.name == "rank-1-of-2" else usage(path))
    assert f"{LIMIT - 1:,} bytes for rank 1 and those on the same disk, got {LIMIT:,}" in str(
        Pair(tmp_path).opened[0]
    )


@pytest.mark.parametrize("what", ["read", "write"])
def test_an_unexpected_error_of_a_worker_rank_is_answered_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    pair = Pair(tmp_path)
    [stored] = pair.write(1).stored

    def fail(*_: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(pair.disks[1], "_index", type("Broken", (), {"get": fail, "drop_segments": fail})())
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match=f"rank 1: {os.strerror(errno.EIO)}"):
        pair.write(2) if what == "write" else pair.read(pair.leader.read(stored, record(1)))
    assert "the KV tier on disk of rank 1: RuntimeError('unexpected')" in caplog.text
    pair.close()


def test_a_rank_that_does_not_answer_delays_neither_the_end_nor_a_reset(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    host = HostTier(8, 4, LeastRecentlyUsed())
    tier = DiskTier(pair.leader, host, SLOT_BYTES, 4)
    kept = host.reserve(RecordKey(bytes(32), is_row=False), bytes(32), 4, 4, 1)
    assert kept is not None
    kept.is_present = True
    tier.offer(kept)
    pair.begin([0])
    began = time.perf_counter()
    tier.drain(0.05)
    pair.leader.close(0.05)
    assert time.perf_counter() - began < 5
    assert tier.is_off
    # The bytes of the record may still be read: nobody else gets its slot.
    assert (len(host), host.num_used_slots) == (0, 1)
    pair.give_up()


def test_rank_0_reads_by_the_index_of_its_tier_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed, add = list[DiskIndex](), DiskIndex.add
    monkeypatch.setattr(DiskIndex, "add", lambda index, found: indexed.append(index) or add(index, found))
    pair = Pair(tmp_path)
    [stored] = pair.write(1).stored
    pair.slots[0][:] = pair.slots[1][:] = 7
    assert pair.read(pair.leader.read(stored, record(1))) >= 0
    assert all(not each[0].any() for each in pair.slots)
    assert {*map(id, indexed)} == {id(pair.disks[1]._index)}
    pair.close()


HANGS = """
import sys, time
from pathlib import Path
from hpu_duo.kv.tiers.link import DiskOrders
from hpu_duo.kv.tiers.rank_disk import OwnFolder, RankDisk
disk = RankDisk(OwnFolder(Path(sys.argv[1]), 1, 2, 1 << 20, 5000, 4), None, lambda own: time.sleep(3600))
disk._write = lambda wanted: (None, 0)
disk.begin(DiskOrders(1, (), (None,)))
time.sleep(0.2)
"""


def test_the_interpreter_exits_while_a_rank_does_not_answer(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HANGS, str(tmp_path)], check=True, timeout=120)
