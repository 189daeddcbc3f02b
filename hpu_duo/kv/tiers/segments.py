"""Files with records of blocks and snapshots, with checksums: segments of a folder, and saved contexts."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hpu_duo.kv.tiers.host import RecordKey
from hpu_duo.kv.tiers.link import DamagedRecord

SEGMENT_BYTES = 64 << 20
"""Bytes of a segment, unless four records are larger or the folder is small."""

PAGE = 4096
"""Records begin at multiples of so many bytes, the first one after the header of the file."""
_FILE = struct.Struct("<8s32sI")
_FILE_MAGIC = b"HPUDUOK1"
_RECORD = struct.Struct("<4s?3xIIQ32s32sI")
_RECORD_MAGIC = b"REC1"
_CHECKSUM = struct.Struct("<I")
RECORD_START = _RECORD.size + _CHECKSUM.size
"""Bytes of a record before its payload."""
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})\.kv")
_LOCK = re.compile(r"([0-9a-f]{16})\.lock")
_RANK = re.compile(r"rank-\d+-of-\d+")


class StoredRecord(NamedTuple):
    """A record in a segment.

    Attributes:
        key: of the record.
        parent: digest of the prefix that is one block shorter.
        num_own_tokens: tokens of the last block.
        num_bytes: of the payload.
        checksum: CRC-32 of the payload.
        segment: name of the file.
        offset: of the record in it.
    """

    key: RecordKey
    parent: bytes
    num_own_tokens: int
    num_bytes: int
    checksum: int
    segment: str
    offset: int

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.offset + record_bytes(self.num_bytes)


class Segment(NamedTuple):
    """A file with records.

    Attributes:
        name: of the file.
        fingerprint: SHA-256 of all that its records depend on, as bytes; None = the file has no valid header;
            empty = it cannot be read.
        num_bytes: of the file.
    """

    name: str
    fingerprint: bytes | None
    num_bytes: int


def record_bytes(num_bytes: int) -> int:
    """Return the bytes of a record in a segment, by those of its payload: whole pages."""
    return -(-(RECORD_START + num_bytes) // PAGE) * PAGE


def segment_bytes(limit: int, largest: int) -> int:
    """Return the size of a segment.

    Args:
        limit: bytes of all segments.
        largest: payload of the largest record.

    Raises:
        ValueError: not even one record fits.
    """
    one = PAGE + record_bytes(largest)
    if limit < one:
        raise ValueError(
            f"expected kv_offloading_disk_size of one record or more, {one:,} bytes, got {limit:,} bytes"
        )
    return min(max(SEGMENT_BYTES, PAGE + 4 * record_bytes(largest)), max(limit // 8, one))


def rank_folder(folder: Path, rank: int, size: int) -> Path:
    """Return the folder of one of several ranks, which another number of ranks does not read."""
    return folder / f"rank-{rank}-of-{size}"


def folders_of(folder: Path) -> list[Path]:
    """Return a folder of segments, and those of ranks in it."""
    return [folder, *(path for path in sorted(folder.iterdir()) if _RANK.fullmatch(path.name))]


def segments_of(folder: Path) -> list[Segment]:
    """Return the segments of a folder, those of a model from the oldest on."""
    found = []
    for path in sorted(folder.iterdir()):
        if _NAME.fullmatch(path.name) is None:
            continue
        try:
            with path.open("rb", buffering=0) as file:
                found.append(Segment(path.name, read_start(file.read(PAGE)), path.stat().st_size))
        except FileNotFoundError:  # the process that writes has dropped it
            continue
        except OSError:  # of another user, for instance
            found.append(Segment(path.name, b"", 0))
    return found


def file_start(fingerprint: bytes) -> bytes:
    """Return the header of a file with records.

    Args:
        fingerprint: SHA-256 of all that the records depend on.
    """
    start = _FILE.pack(_FILE_MAGIC, fingerprint, 0)[:-4]
    return start + _CHECKSUM.pack(zlib.crc32(start))


def has_records(start: bytes) -> bool:
    """Whether a file begins like one with records."""
    return start.startswith(_FILE_MAGIC)


def read_start(page: bytes | memoryview) -> bytes | None:
    """Return the fingerprint of a file with records by its first bytes; None without a valid header."""
    if len(page) < _FILE.size:
        return None
    magic, fingerprint, checksum = _FILE.unpack_from(page)
    is_valid = magic == _FILE_MAGIC and checksum == zlib.crc32(page[: _FILE.size - 4])
    return bytes(fingerprint) if is_valid else None


def create_segment(folder: Path, number: int, fingerprint: bytes, num_bytes: int) -> str:
    """Create a segment and allocate its bytes, for its owner only; returns its name.

    Raises:
        OSError: it cannot be created, for lack of space for instance.
    """
    name = f"{model_name(fingerprint)}-{number:08x}.kv"
    file = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
        os.pwrite(file, file_start(fingerprint), 0)
    except OSError:
        (folder / name).unlink()
        raise
    finally:
        os.close(file)
    return name


def model_name(fingerprint: bytes) -> str:
    """Return the first digits of a fingerprint, with which names of segments begin."""
    return fingerprint.hex()[:16]


def models_of(folder: Path) -> list[str]:
    """Return the models of the segments and locks of a folder, see ``model_name``."""
    names = [path.name for path in folder.iterdir()]
    found = (_NAME.fullmatch(name) or _LOCK.fullmatch(name) for name in names)
    return sorted({match[1] for match in found if match is not None})


def number_of(name: str) -> int:
    """Return the number of a segment by its name: later ones have larger ones."""
    match = _NAME.fullmatch(name)
    assert match is not None, f"expected the name of a segment, got {name}"
    return int(match[2], 16)


def write_record(
    file: int,
    segment: str,
    offset: int,
    key: RecordKey,
    parent: bytes,
    num_own_tokens: int,
    parts: Iterable[bytes | memoryview],
) -> StoredRecord:
    """Write a record: its payload first, so that a header without it does not occur.

    Args:
        file: descriptor of the segment.
        segment: name of the file, or of its kind.
        parts: the payload, in pieces of bytes.

    Raises:
        OSError: it cannot be written.
    """
    num_bytes = checksum = 0
    for part in parts:
        _write_all(file, part, offset + RECORD_START + num_bytes)
        num_bytes, checksum = num_bytes + len(part), zlib.crc32(part, checksum)
    stored = StoredRecord(key, parent, num_own_tokens, num_bytes, checksum, segment, offset)
    start = _RECORD.pack(
        _RECORD_MAGIC,
        key.is_row,
        num_own_tokens,
        zlib.crc32(segment.encode()),
        num_bytes,
        key.digest,
        parent,
        checksum,
    )
    _write_all(file, start + _CHECKSUM.pack(zlib.crc32(start)), offset)
    return stored


def _write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def read_record(folder: Path, stored: StoredRecord) -> bytes:
    """Return the payload of a record.

    Raises:
        FileNotFoundError: its segment was dropped.
        DamagedRecord: header or payload are not those that were written.
        OSError: it cannot be read.
    """
    file = os.open(folder / stored.segment, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        data = _read_all(file, stored.end - stored.offset, stored.offset)
    finally:
        os.close(file)
    if parse_record(data, stored.segment, stored.offset) != stored:
        raise DamagedRecord(f"{stored.segment}: the record at {stored.offset:,} is damaged")
    return bytes(payload_of(memoryview(data), stored))


def payload_of(data: memoryview, stored: StoredRecord) -> memoryview:
    """Return the payload in the bytes of a record.

    Raises:
        DamagedRecord: its checksum is another one, or bytes are missing.
    """
    payload = data[RECORD_START : RECORD_START + stored.num_bytes]
    if len(payload) < stored.num_bytes:
        raise DamagedRecord(f"expected {stored.num_bytes:,} bytes, got {len(payload):,}")
    if (got := zlib.crc32(payload)) != stored.checksum:
        raise DamagedRecord(f"expected checksum {stored.checksum:08x}, got {got:08x}")
    return payload


def _read_all(file: int, num_bytes: int, offset: int) -> bytes:
    parts: list[bytes] = []
    while num_bytes:
        part = os.pread(file, num_bytes, offset)
        if not part:
            break
        parts.append(part)
        num_bytes, offset = num_bytes - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_record(start: bytes | memoryview, segment: str, offset: int) -> StoredRecord | None:
    """Return the record that begins with some bytes; None without a valid header.

    Args:
        segment: see ``write_record``.
        offset: of the record in the file.
    """
    if len(start) < RECORD_START:
        return None
    magic, is_row, num_own, name, num_bytes, digest, parent, checksum = _RECORD.unpack_from(start)
    [own] = _CHECKSUM.unpack_from(start, _RECORD.size)
    # The name, so that a page that another segment's bytes are still on is no record of this one.
    is_valid = magic == _RECORD_MAGIC and name == zlib.crc32(segment.encode())
    if not is_valid or own != zlib.crc32(start[: _RECORD.size]):
        return None
    return StoredRecord(
        RecordKey(bytes(digest), is_row), bytes(parent), num_own, num_bytes, checksum, segment, offset
    )


def scan(folder: Path, segment: str, offset: int = PAGE) -> Iterator[StoredRecord | None]:
    """Yield the records of a segment by their headers, and None for pages without one between them.

    It ends where nothing was written yet.

    Args:
        offset: of the first record; later ones to go on where an earlier scan has ended.

    Raises:
        OSError: it cannot be read.
    """
    file = os.open(folder / segment, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        end, was_valid = os.fstat(file).st_size, True
        while offset + RECORD_START <= end:
            start = os.pread(file, RECORD_START, offset)
            stored = parse_record(start, segment, offset)
            if stored is not None and stored.end <= end:
                yield stored
                offset, was_valid = stored.end, True
            elif not any(start):
                return
            else:
                if was_valid:
                    yield None
                offset, was_valid = offset + PAGE, False
    finally:
        os.close(file)


class FolderLock:
    """The right to write the segments of one model in a folder, which one process has at a time.

    Args:
        folder: of the segments.
        model: with which names of its segments begin, see ``model_name``.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._path = folder / f"{model}.lock"
        self._file: int | None = None

    def acquire(self) -> bool:
        """Whether this process has the right now.

        Raises:
            OSError: the file of the lock cannot be written.
        """
        if self._file is not None:
            return True
        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        if not self._is_there(file):  # removed by a process that had the right until now
            os.close(file)
            return False
        self._file = file
        return True

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Return the right."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
