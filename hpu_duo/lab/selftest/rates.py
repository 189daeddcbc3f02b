"""Rates of copies between host, device and disk, which offloading depends on."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hpu_duo.device import resolve_device
from hpu_duo.device.runtime import host_memory
from hpu_duo.lab.selftest.facts import Fact
from hpu_duo.startup.offloading import is_in_memory

SIZES = (8 << 20, 256 << 20)
"""Bytes of the copies that are measured: about a block, and a whole context."""
_NODES = Path("/sys/devices/system/node")


def offload_facts(device: str, folder: Path, sizes: tuple[int, ...] = SIZES) -> Iterator[Fact]:
    """Measure copies of some sizes, the fastest of three.

    Args:
        device: a name of ``hpu_duo.device``.
        folder: of files that are written and read; they are removed.

    Raises:
        OSError: the folder cannot be written.
    """
    memory = host_memory()
    nodes = len(list(_NODES.glob("node[0-9]*"))) or 1
    free = f"{memory.free / 2**30:,.1f} of {memory.total / 2**30:,.1f} GiB free"
    yield Fact("offloading", "host memory", None, f"{free}, {nodes} NUMA node{'s' * (nodes > 1)}")
    place = str(resolve_device(device))
    pinned = place.startswith("cuda")
    for size in sizes:
        up, down = _link(place, size, pinned=pinned)
        detail = f"{up} to the host, {down} from there, {'pinned' if pinned else 'not pinned'}"
        yield Fact("offloading", f"{_mib(size)}, {place}", None, detail)
    for size in sizes:
        written, read, is_direct = _disk(folder, size)
        source = "from the disk" if is_direct else "from the system's cache: no direct reads there"
        yield Fact("offloading", f"{_mib(size)}, {folder}", None, f"{written} written, {read} read {source}")
    if is_in_memory(folder):
        yield Fact("offloading", str(folder), False, "in memory (tmpfs): it is no disk")


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


def _rate(size: int, move: Callable[[], None]) -> str:
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        move()
        best = min(best, time.perf_counter() - began)
    return f"{size / best / 1e9:,.2f} GB/s"


def _link(device: str, size: int, *, pinned: bool) -> tuple[str, str]:
    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    on_host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)

    def up() -> None:
        on_host.copy_(on_device)

    def down() -> None:
        on_device.copy_(on_host)
        on_device[:1].cpu()  # waits for the copy

    return _rate(size, up), _rate(size, down)


def _disk(folder: Path, size: int) -> tuple[str, str, bool]:
    """Write and read a file; the last value is whether reads are direct."""
    with mmap.mmap(-1, size) as memory, tempfile.NamedTemporaryFile(dir=folder) as file:
        memory.write(os.urandom(1 << 20) * (size >> 20))

        def write() -> None:
            os.pwrite(file.fileno(), memory, 0)
            os.fsync(file.fileno())

        written = _rate(size, write)
        try:
            source, is_direct = os.open(file.name, os.O_RDONLY | getattr(os, "O_DIRECT", 0)), True
        except OSError:
            source, is_direct = os.open(file.name, os.O_RDONLY), False
        try:

            def read() -> None:
                os.preadv(source, [memory], 0)

            return written, _rate(size, read), is_direct
        finally:
            os.close(source)
