"""Rates of copies between host, device and disk, which offloading depends on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpu_duo.device import resolve_device
from hpu_duo.device.runtime import host_memory
from hpu_duo.lab.selftest.facts import Fact
from hpu_duo.startup.offloading import is_in_memory
from hpu_duo.startup.placement import SIZES, disk_rates, link_rates

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
        up, down = link_rates(place, size, pinned=pinned)
        detail = f"{_gb(up)} to the host, {_gb(down)} from there, {'pinned' if pinned else 'not pinned'}"
        yield Fact("offloading", f"{_mib(size)}, {place}", None, detail)
    for size in sizes:
        written, read, is_direct = disk_rates(folder, size)
        source = "from the disk" if is_direct else "from the system's cache: no direct reads there"
        yield Fact(
            "offloading",
            f"{_mib(size)}, {folder}",
            None,
            f"{_gb(written)} written, {_gb(read)} read {source}",
        )
    if is_in_memory(folder):
        yield Fact("offloading", str(folder), False, "in memory (tmpfs): it is no disk")


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:,.2f} GB/s"
