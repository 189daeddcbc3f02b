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
from hpu_duo.planning.offload import OffloadMachine
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
        detail = f"{_gb(up)} to the host, {_gb(down)} from there, {'pinned' if pinned else 'not pinned'}"
        yield Fact("offloading", f"{_mib(size)}, {place}", None, detail)
    for size in sizes:
        written, read, is_direct = _disk(folder, size)
        source = "from the disk" if is_direct else "from the system's cache: no direct reads there"
        yield Fact(
            "offloading",
            f"{_mib(size)}, {folder}",
            None,
            f"{_gb(written)} written, {_gb(read)} read {source}",
        )
    if is_in_memory(folder):
        yield Fact("offloading", str(folder), False, "in memory (tmpfs): it is no disk")


def offload_machine(
    device: str, folder: Path, *, device_memory: float, host_memory: float, disk: float, size: int = SIZES[1]
) -> OffloadMachine:
    """Measure the rates that the placement of weights depends on; each is the fastest of three.

    Products of matrices in bfloat16, of many rows and of few, attention of decodes in float32 on device and
    host, and copies of ``size`` bytes.

    Args:
        device: a name of ``hpu_duo.device``.
        folder: of files that are written and read; they are removed.
        device_memory, host_memory, disk: bytes that may be used.

    Raises:
        OSError: the folder cannot be written.
    """
    place = str(resolve_device(device))
    down, up = _link(place, size, pinned=place.startswith("cuda"))
    written, read, _ = _disk(folder, size)
    few, many, side = 32, 1024, 2048
    rates = {rows: _matrix_rate(place, rows, side) for rows in (few, many)}
    return OffloadMachine(
        device_memory=device_memory,
        host_memory=host_memory,
        disk=disk,
        up=up,
        down=down,
        down_kv=down,
        disk_read=read,
        disk_read_weights=read,
        disk_write=written,
        disk_write_kv=written,
        prefill_matrix=rates[many],
        prefill_attention=rates[many],
        decode_matrix=rates[few],
        decode_attention=_attention_rate(place),
        host_attention=_attention_rate("cpu"),
    )


def _matrix_rate(device: str, rows: int, side: int) -> float:
    """Operations a second of a product [rows, side] x [side, side] in bfloat16."""
    left, right = (torch.ones(size, side, dtype=torch.bfloat16, device=device) for size in (rows, side))

    def multiply() -> None:
        (left @ right)[:1, :1].cpu()

    return _rate(2 * rows * side * side, multiply)


def _attention_rate(device: str, rows: int = 8, heads: int = 8, keys: int = 2048, dim: int = 128) -> float:
    """Operations a second of decodes that attend to their own keys, in float32."""
    query = torch.ones(rows, heads, 1, dim, device=device)
    stored = torch.ones(rows, heads, keys, dim, device=device)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, stored, stored)[:1, :1].cpu()

    return _rate(4 * rows * heads * keys * dim, attend)


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


def _rate(size: int, move: Callable[[], None]) -> float:
    """Bytes, or operations, a second: the fastest of three."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        move()
        best = min(best, time.perf_counter() - began)
    return size / best


def _gb(rate: float) -> str:
    return f"{rate / 1e9:,.2f} GB/s"


def _link(device: str, size: int, *, pinned: bool) -> tuple[float, float]:
    """Bytes a second to the host and from there."""
    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    on_host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)

    def up() -> None:
        on_host.copy_(on_device)

    def down() -> None:
        on_device.copy_(on_host)
        on_device[:1].cpu()  # waits for the copy

    return _rate(size, up), _rate(size, down)


def _disk(folder: Path, size: int) -> tuple[float, float, bool]:
    """Bytes a second written to a file and read from it, and whether reads are direct."""
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
