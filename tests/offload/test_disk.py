"""The tier on disk: what it writes is found again, by later runs and by other processes, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hpu_duo import HPUDuoModel
from hpu_duo.cli.app import app
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.kv.tiers import disk as disk_module
from hpu_duo.kv.tiers.disk import DiskTier, SegmentFolder
from hpu_duo.kv.tiers.host import HostTier, Record, RecordKey
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.kv.tiers.records import RecordMemory
from hpu_duo.kv.tiers.segments import PAGE, FolderLock, record_bytes, scan, segments_of
from hpu_duo.startup.offloading import is_in_memory
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BLOCK
from tests.offload.disk_child import SLOT_BYTES, fill, payload, tier
from tests.offload.test_offloading import GREEDY, HOST, SMALL, TEXTS
from tests.tiers import further

LIMIT = 8 * (PAGE + 4 * record_bytes(SLOT_BYTES))


@pytest.fixture(autouse=True)
def load_whatever_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadPolicy, "loads", lambda *_: True)


def write(disk: DiskTier, host: HostTier, memory: RecordMemory, numbers: range) -> None:
    """Offer records, whose payload is a function of their number."""
    for number in numbers:
        key = RecordKey(number.to_bytes(32, "big"), is_row=False)
        record = host.reserve(key, bytes(32), 4, 4, 1)
        assert record is not None
        fill(memory, record, number)
        disk.offer(record)
        disk.flush()


def read(disk: DiskTier, host: HostTier, memory: RecordMemory, number: int) -> bool:
    """Whether a record can be read; checks its bytes."""
    stored = disk.get(RecordKey(number.to_bytes(32, "big"), is_row=False))
    if stored is None:
        return False
    record = Record(stored.key, stored.parent, stored.num_own_tokens, 4, (host.num_slots - 1,))
    memory.slots[-1] = 0
    if not disk.read(stored, record):
        return False
    while not (ended := disk.poll()):
        disk.futures and disk.futures[0].exception()
    [(_, _, seconds)] = ended
    assert seconds is None or np.array_equal(memory.slots[-1], payload(number))
    assert seconds is None or memory.is_sound(record.slots, is_row=False)
    return seconds is not None


def test_records_survive_a_restart_and_take_turns_within_their_bytes(tmp_path: Path) -> None:
    disk, host, memory = tier(tmp_path, LIMIT)
    write(disk, host, memory, range(100))
    assert disk.counters.num_written == 100
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= LIMIT
    there = [number for number in range(100) if read(disk, host, memory, number)]
    assert there == list(range(there[0], 100))
    assert 0 < len(there) == len(disk) == 100 - disk.counters.num_dropped
    del disk
    again, host, memory = tier(tmp_path, LIMIT)
    assert [number for number in range(100) if read(again, host, memory, number)] == there
    write(again, host, memory, range(100, 110))
    assert read(again, host, memory, 105)


def test_files_are_the_owners_and_reveal_nothing(tmp_path: Path) -> None:
    disk, host, memory = tier(tmp_path / "new", LIMIT)
    write(disk, host, memory, range(3))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    for path in (tmp_path / "new").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.name.startswith(bytes(32).hex()[:16])


@pytest.mark.parametrize("where", ["header", "payload", "file"])
def test_flipped_bits_and_torn_writes_lose_a_record_only(tmp_path: Path, where: str) -> None:
    disk, host, memory = tier(tmp_path, LIMIT)
    write(disk, host, memory, range(4))
    [segment] = segments_of(tmp_path)
    third = [each for each in scan(tmp_path, segment.name) if each is not None][2]
    damage = {"header": third.offset + 9, "payload": third.offset + 200, "file": 12}[where]
    with (tmp_path / segment.name).open("r+b") as file:
        file.seek(damage)
        [byte] = file.read(1)
        file.seek(damage)
        file.write(bytes([byte ^ 4]))
    if where == "payload":
        assert not read(disk, host, memory, 2)
        assert disk.counters.num_damaged == 1
    del disk
    again, host, memory = tier(tmp_path, LIMIT)
    expected = {"header": [0, 1, 3], "payload": [0, 1, 3], "file": []}[where]
    assert [number for number in range(4) if read(again, host, memory, number)] == expected
    assert not again.is_off


def test_what_is_damaged_on_the_host_is_not_written(tmp_path: Path) -> None:
    disk, host, memory = tier(tmp_path, LIMIT)
    record = host.reserve(RecordKey(bytes(32), is_row=False), bytes(32), 4, 4, 1)
    assert record is not None
    fill(memory, record, 0)
    memory.slots[record.slots[0], 4999] ^= 64
    disk.offer(record)
    disk.flush()
    assert disk.damaged == [record]
    assert (len(disk), disk.counters.num_written, record.num_readers) == (0, 0, 0)


def test_a_second_process_reads_what_the_first_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(0, 10**6, 10))
    monkeypatch.setattr(disk_module, "_now", lambda: next(times))
    writer, host, memory = tier(tmp_path, LIMIT)
    reader, other, others = tier(tmp_path, LIMIT)
    write(writer, host, memory, range(5))
    assert not read(reader, other, others, 3)
    reader.refresh()
    while not read(reader, other, others, 3):
        reader.poll()
    write(reader, other, others, range(20, 22))
    assert reader.counters.num_written == 0
    write(writer, host, memory, range(5, 100))
    assert not read(reader, other, others, 0)  # its segment was dropped
    assert not reader.is_off
    del writer
    reader.refresh()
    while not reader.is_writer:
        reader.poll()
    write(reader, other, others, range(30, 32))
    assert read(reader, other, others, 31)


def test_a_reader_that_becomes_writer_frees_what_a_killed_process_has_not_filled(tmp_path: Path) -> None:
    killed, reader = (SegmentFolder(tmp_path, bytes(32), LIMIT, SLOT_BYTES) for _ in range(2))
    killed.write([(RecordKey(bytes(32), is_row=False), bytes(32), 4, bytes(SLOT_BYTES))])
    assert len(reader.scan().stored) == 1
    allocated = reader.num_bytes
    killed.lock.release()
    reader.scan()
    assert reader.is_writer
    assert allocated > reader.num_bytes == PAGE + record_bytes(SLOT_BYTES)


@pytest.mark.parametrize("failure", ["full", "reading", "removed"])
def test_a_failure_of_the_disk_switches_the_tier_off_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    disk, host, memory = tier(tmp_path / "folder", LIMIT)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC if failure == "full" else errno.EIO, "no")

    if failure == "full":
        monkeypatch.setattr(os, "posix_fallocate", fail)
        write(disk, host, memory, range(2))
    else:
        write(disk, host, memory, range(2))
        if failure == "reading":
            monkeypatch.setattr(os, "pread", fail)
        else:
            for path in (tmp_path / "folder").iterdir():
                path.unlink()
            (tmp_path / "folder").rmdir()
        assert not read(disk, host, memory, 1)
    assert disk.is_off
    assert disk.counters.num_failures == 1
    assert caplog.text.count("the KV tier on disk is off") == 1
    write(disk, host, memory, range(2, 4))
    assert not read(disk, host, memory, 3)


def test_the_command_lists_verifies_and_purges_a_folder(tmp_path: Path) -> None:
    def call(command: str) -> Any:
        return CliRunner().invoke(app, ["kv-cache", command, str(tmp_path)])

    disk, host, memory = tier(tmp_path, LIMIT)
    write(disk, host, memory, range(4))
    assert "0000000000000000" in call("list").output
    assert call("verify").exit_code == 0
    assert "removed 0 files, kept 1 of models that are served" in call("purge").output
    [segment] = segments_of(tmp_path)
    with (tmp_path / segment.name).open("r+b") as file:
        file.seek(PAGE + 500)
        file.write(b"damage")
    assert call("verify").exit_code == 1
    del disk
    assert "removed 1 files" in call("purge").output
    assert not list(tmp_path.iterdir())


def test_purge_removes_segments_without_a_lock_and_nothing_else(tmp_path: Path) -> None:
    disk, host, memory = tier(tmp_path, LIMIT)
    write(disk, host, memory, range(4))
    del disk
    for path in tmp_path.glob("*.lock"):
        path.unlink()
    for name in ("uv.lock", "notes.kv"):
        (tmp_path / name).write_text("somebody else's")
    assert "removed 1 files" in CliRunner().invoke(app, ["kv-cache", "purge", str(tmp_path)]).output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.kv", "uv.lock"]


def test_a_lock_whose_file_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process purges the folder between opening the file and locking it."""
    lock, flock = FolderLock(tmp_path, "0" * 16), fcntl.flock

    def purged_before(*given: Any) -> None:
        monkeypatch.undo()
        (tmp_path / f"{'0' * 16}.lock").unlink()
        flock(*given)

    monkeypatch.setattr(fcntl, "flock", purged_before)
    assert not lock.acquire()
    assert lock.acquire()
    assert not FolderLock(tmp_path, "0" * 16).acquire()


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_thread_that_fails_for_lack_of_memory_ends_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    disk, host, memory = tier(tmp_path, LIMIT)
    write(disk, host, memory, range(2))

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(disk_module, f"{what}_record", fail)
    if what == "write":
        write(disk, host, memory, range(2, 3))
    assert not read(disk, host, memory, 1)
    assert disk.is_off
    assert all(record.num_readers == 0 for record in host)


def test_files_that_cannot_be_opened_are_of_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, opened = tmp_path / f"{'1' * 16}-00000001.kv", Path.open
    other.write_bytes(b"of another user")

    def refused(path: Path, *given: Any, **more: Any) -> Any:
        if path == other:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *given, **more)

    monkeypatch.setattr(Path, "open", refused)
    disk, host, memory = tier(tmp_path, LIMIT)
    write(disk, host, memory, range(2))
    assert not disk.is_off
    assert disk.counters.num_foreign == 1
    assert read(disk, host, memory, 1)


def test_files_of_another_model_are_ignored_and_counted(tmp_path: Path) -> None:
    disk, host, memory = tier(tmp_path, LIMIT)
    write(disk, host, memory, range(2))
    other, host, memory = tier(tmp_path, LIMIT, model=1)
    assert other.counters.num_foreign == 1
    assert not read(other, host, memory, 0)
    write(other, host, memory, range(2))
    assert read(other, host, memory, 1)


def killed(folder: Path, seconds: float) -> None:
    """Run a process that writes, and kill it."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.offload.disk_child", str(folder), str(LIMIT)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL


def check_after_kills(folder: Path, seconds: Iterator[float]) -> None:
    """Each record that is found after a kill has its bytes, and the next process goes on."""
    for each in seconds:
        killed(folder, each)
        disk, host, memory = tier(folder, LIMIT)
        found = [number for number in range(4000) if read(disk, host, memory, number)]
        assert found, "expected records of a process that was killed"
        assert not disk.is_off
        assert disk.counters.num_damaged == 0
        assert sum(path.stat().st_size for path in folder.glob("*.kv")) <= LIMIT
        del disk


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_whole_records(tmp_path: Path) -> None:
    check_after_kills(tmp_path, iter(np.random.default_rng(1).uniform(0.01, 0.2, 5)))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_200_processes_that_are_killed_leave_whole_records(tmp_path: Path) -> None:
    check_after_kills(tmp_path, iter(np.random.default_rng(2).uniform(0.0, 0.2, 200)))


@pytest.mark.parametrize("kind", [*further({}), {"pattern": PATTERN}], ids=["full", "duo"])
def test_texts_of_an_earlier_run_come_back_from_the_disk(
    tiny: Tiny, tmp_path: Path, kind: dict[str, Any]
) -> None:
    def load(**more: Any) -> HPUDuoModel:
        on_disk = {"kv_offloading_disk": tmp_path, "kv_offloading_disk_size": 0.01}
        return tiny.load(**HOST, **kind, kv_offloading_write_policy="write_through", **on_disk, **more)

    def run(served: HPUDuoModel) -> list[list[int]]:
        return [tokens_of(serve(served, [text], GREEDY))[0] for text in (*TEXTS, *TEXTS)]

    first = load()
    expected = run(tiny.load(**SMALL, **kind))
    assert run(first) == expected
    while first.engine.settle_idle():
        pass
    del first
    second = load()
    serve(second, [TEXTS[0]], replace(GREEDY, cache_salt="another"))
    offload = second.stats().offload
    assert offload is not None
    assert offload.disk is not None
    assert offload.disk.counters.num_read == 0
    assert run(second) == expected
    offload = second.stats().offload
    assert offload is not None
    assert offload.disk is not None
    counters = offload.disk.counters
    assert counters.num_read > 0
    assert counters.num_failures == counters.num_damaged == 0
    assert offload.num_hit_tokens >= counters.num_hit_tokens > 0


def test_an_idle_engine_writes_all_that_was_cached(tiny: Tiny, tmp_path: Path) -> None:
    """Also what found no free unit for its copy, and what the last step has cached."""
    more = {"kv_offloading_write_policy": "write_through", "kv_offloading_blocks_per_step": 1}
    on_disk = {"kv_offloading_disk": tmp_path, "kv_offloading_disk_size": 0.01}
    text, hits = TEXTS[2], []
    for _ in range(2):
        served = tiny.load(**HOST, **more, **on_disk)
        serve(served, [text], GREEDY)
        while served.engine.settle_idle():
            pass
        offload = served.stats().offload
        assert offload is not None
        hits.append(offload.num_hit_tokens)
        del served
    assert hits == [0, (len(text) - 1) // BLOCK * BLOCK]


def test_records_of_other_heads_of_a_kv_plan_are_another_models(tiny: Tiny, tmp_path: Path) -> None:
    """Two plans under one name, which differ in the heads that have a budget."""
    path, found = tmp_path / "plan.yaml", set[str]()
    for mask in ([True, False], [False, True]):
        path.unlink(missing_ok=True)
        KVPlan.of_mask([mask] * 2, Keep("h2o", budget=16)).save(path)
        tiny.load(
            **HOST, kv_plan=path, kv_chunk=8, kv_offloading_disk=tmp_path / "kv", kv_offloading_disk_size=0.01
        )
        found |= {lock.name for lock in (tmp_path / "kv").glob("*.lock")}
    assert len(found) == 2


def test_a_folder_whose_size_is_refused_can_be_written_by_the_next_model(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="within the free space of"):
        tiny.load(**HOST, kv_offloading_disk=tmp_path, kv_offloading_disk_size=1e9)
    served = tiny.load(**HOST, kv_offloading_disk=tmp_path, kv_offloading_disk_size=0.01)
    assert (offload := served.stats().offload) is not None
    assert offload.disk is not None
    assert offload.disk.is_writer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_offloading_disk": "/tmp"},
            "expected kv_offloading_disk and kv_offloading_disk_size or neither",
        ),
        ({"kv_offloading_disk_size": -1}, "kv_offloading_disk and kv_offloading_disk_size or neither"),
        ({"kv_offloading_disk_size": 0}, "to be GiB above 0"),
        ({"kv_offloading_disk_size": 1e-9}, "of one record or more, .* got 1 bytes"),
        ({"kv_offloading_disk_size": 1e9}, "within the free space of"),
        ({"kv_offloading_disk": "/proc/nothing"}, "kv_offloading_disk to be a directory that can be written"),
        ({"kv_offloading_size": None}, "kv_offloading_disk=.* needs kv_offloading_size, got None"),
    ],
)
def test_what_cannot_be_on_disk_is_one_sentence(
    tiny: Tiny, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    both = {} if len(options) == 1 and "neither" in message else {"kv_offloading_disk_size": 0.01}
    folder = {} if "neither" in message else {"kv_offloading_disk": tmp_path}
    with pytest.raises(ValueError, match=message):
        tiny.load(**{**HOST, **folder, **both, **options})


def test_a_folder_in_memory_is_known(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n")
    assert is_in_memory(Path("/dev/shm/cache"), mounts)
    assert not is_in_memory(Path("/var/cache"), mounts)
