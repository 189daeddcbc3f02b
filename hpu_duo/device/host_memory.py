"""Memory of the host and of this process on it; a simulated device has the same.

Containers and service managers limit memory by control groups, which ``/proc/meminfo`` does not show. Both
versions are read where systems mount them. Source: kernel documentation, ``cgroup-v2.rst`` and
``cgroup-v1/memory.rst``.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class HostMemory:
    """Bytes that this process may have in all, and bytes that it can have now."""

    total: int
    free: int


def resident_bytes() -> int:
    """Host memory of this process, as the system counts it; its peak where only that is known."""
    if _STATM.is_file():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Memory of the machine, caches that can be freed included, within the limits of our control groups.

    Args:
        root: directory that ``proc`` and ``sys`` lie in.
    """
    limits = [_machine(root / "proc/meminfo"), *_groups(root)]
    return HostMemory(min(each.total for each in limits), max(0, min(each.free for each in limits)))


@dataclass(frozen=True)
class _Controller:
    """The files of one version of the memory controller; ``cache`` is the entry that is given back first."""

    mount: str
    limit: str
    usage: str
    cache: str


_V1 = _Controller(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2 = _Controller("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def _machine(meminfo: Path) -> HostMemory:
    if meminfo.is_file():
        entries = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return HostMemory(*(int(entries[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    # macOS does not tell what is free.
    is_told = "SC_AVPHYS_PAGES" in os.sysconf_names
    return HostMemory(total, os.sysconf("SC_AVPHYS_PAGES") * page if is_told else total)


def _groups(root: Path) -> Iterator[HostMemory]:
    """Limits of the groups that this process is in, and of their parents: all of them apply."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        controller = _V2 if number == "0" else _V1
        mount = root / controller.mount
        group = mount / path.lstrip("/")
        # Inside of a container the path may be the host's, and the mount the container's own group.
        for directory in (group, *group.parents):
            if (limit := _limit(directory, controller)) is not None:
                yield limit
            if directory == mount:
                break


def _limit(group: Path, controller: _Controller) -> HostMemory | None:
    """The limit of one group; None if it has none."""
    try:
        limit = (group / controller.limit).read_text().strip()
        usage = int((group / controller.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return HostMemory(int(limit), int(limit) - usage + int(stat.get(controller.cache, 0)))
