"""Rates of copies between host, device and disk, which offloading depends on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hpu_duo.device import resolve_device
from hpu_duo.device.runtime import host_memory
from hpu_duo.lab.selftest.facts import Fact
from hpu_duo.startup.offloading import is_in_memory
from hpu_duo.startup.placement import SIZES, disk_rates, link_rates

_NODES = "sys/devices/system/node"


def offload_facts(device: str, folder: Path, sizes: tuple[int, ...] = SIZES) -> Iterator[Fact]:
    """Measure copies of some sizes, the fastest of three.

    Args:
        device: a name of ``hpu_duo.device``.
        folder: of files that are written and read; they are removed.

    Raises:
        OSError: the folder cannot be written.
    """
    memory = host_memory()
    nodes = len(list(Path("/", _NODES).glob("node[0-9]*"))) or 1
    free = f"{memory.free / 2**30:,.1f} of {memory.total / 2**30:,.1f} GiB free"
    place = str(resolve_device(device))
    pinned = place.startswith("cuda")
    rates = [link_rates(place, size, pinned=pinned) for size in sizes]  # opens the device
    near = "" if (node := numa_node(place)) is None else f", {place} on node {node}"
    yield Fact("offloading", "host memory", None, f"{free}, {nodes} NUMA node{'s' * (nodes > 1)}{near}")
    for size, (up, down) in zip(sizes, rates):
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


def numa_node(device: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node that a device is on; None for CPUs, and where the system does not say.

    Args:
        device: a torch device. Of HPUs, the card that this process has opened.
        root: of the file system.
    """
    kind, _, number = device.partition(":")
    if kind == "cuda":
        properties: Any = torch.cuda.get_device_properties(int(number or torch.cuda.current_device()))
        ids = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        if None in ids:
            return None
        domain, *others = (f"{each:x}" for each in ids)
        places = [f"sys/bus/pci/devices/{domain.zfill(4)}:{':'.join(each.zfill(2) for each in others)}.0"]
    elif kind == "hpu":
        opened = (_target(file) for file in (root / "proc/self/fd").iterdir())
        cards = (re.fullmatch(r"/dev/accel/(accel\d+)", path) for path in opened)
        places = [f"sys/class/accel/{card[1]}/device" for card in cards if card is not None]
    else:
        return None
    for place in places:
        try:
            node = int((root / place / "numa_node").read_text())
        except (OSError, ValueError):
            continue
        if node >= 0:
            return node
    return None


def _target(file: Path) -> str:
    """The target of a link; "" for a file that is none, or that another thread has closed."""
    try:
        return os.readlink(file)
    except OSError:
        return ""


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:,.2f} GB/s"
