"""Memory of the host as a process sees it that is limited by control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpu_duo.device import CpuRuntime
from hpu_duo.device.runtime import HostMemory, host_memory

MIB = 1 << 20
TOTAL, AVAILABLE = 8000 * MIB, 6000 * MIB
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path / "proc/meminfo",
        f"MemTotal: {TOTAL >> 10} kB\nMemFree: 1 kB\nMemAvailable: {AVAILABLE >> 10} kB\n",
    )
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


def belong(root: Path, *lines: str) -> None:
    write(root / "proc/self/cgroup", "".join(f"{line}\n" for line in lines))


def group_v1(directory: Path, limit: int, usage: int, cache: int = 0) -> None:
    write(directory / "memory.limit_in_bytes", limit)
    write(directory / "memory.usage_in_bytes", usage)
    write(directory / "memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\n")


def group_v2(directory: Path, limit: int | str, usage: int, cache: int = 0) -> None:
    write(directory / "memory.max", limit)
    write(directory / "memory.current", usage)
    write(directory / "memory.stat", f"anon 1\ninactive_file {cache}\n")


def test_without_groups_it_is_the_machines(root: Path) -> None:
    assert host_memory(root) == HostMemory(TOTAL, AVAILABLE)
    belong(root, "4:memory:/", "0::/")
    assert host_memory(root) == HostMemory(TOTAL, AVAILABLE)


def test_a_group_of_version_1_limits_it(root: Path) -> None:
    belong(root, "9:name=systemd:/", "4:cpu,memory:/jobs/mine", "0::/")
    group_v1(root / V1, NO_LIMIT_V1, 7000 * MIB)
    group_v1(root / V1 / "jobs/mine", 1000 * MIB, 600 * MIB, cache=100 * MIB)
    assert host_memory(root) == HostMemory(1000 * MIB, 500 * MIB)


def test_a_group_of_version_2_limits_it(root: Path) -> None:
    belong(root, "0::/user.slice/mine.scope")
    group_v2(root / V2 / "user.slice/mine.scope", 2000 * MIB, 600 * MIB, cache=100 * MIB)
    assert host_memory(root) == HostMemory(2000 * MIB, 1500 * MIB)


def test_parents_limit_it_as_well(root: Path) -> None:
    belong(root, "0::/outer/inner")
    group_v2(root / V2 / "outer", 900 * MIB, 800 * MIB)
    group_v2(root / V2 / "outer/inner", "max", 100 * MIB)
    assert host_memory(root) == HostMemory(900 * MIB, 100 * MIB)


@pytest.mark.parametrize(("line", "mount"), [("4:memory:/docker/abc", V1), ("0::/", V2)])
def test_inside_of_a_container_the_mount_is_its_own_group(root: Path, line: str, mount: str) -> None:
    belong(root, line)
    make = group_v1 if mount == V1 else group_v2
    make(root / mount, 700 * MIB, 200 * MIB)
    assert host_memory(root) == HostMemory(700 * MIB, 500 * MIB)


def test_a_limit_above_the_machines_memory_changes_nothing(root: Path) -> None:
    belong(root, "4:memory:/", "0::/mine")
    group_v1(root / V1, NO_LIMIT_V1, 100 * MIB)
    group_v2(root / V2 / "mine", 9000 * MIB, 100 * MIB)
    assert host_memory(root) == HostMemory(TOTAL, AVAILABLE)


def test_nothing_is_free_in_a_full_group(root: Path) -> None:
    belong(root, "0::/mine")
    group_v2(root / V2 / "mine", 500 * MIB, 501 * MIB)
    assert host_memory(root).free == 0


def test_a_group_that_cannot_be_read_is_none(root: Path) -> None:
    belong(root, "0::/mine")
    write(root / V2 / "mine/memory.max", 500 * MIB)
    assert host_memory(root) == HostMemory(TOTAL, AVAILABLE)


def test_the_cpu_runtime_answers_with_the_memory_of_its_group() -> None:
    runtime, host = CpuRuntime(), host_memory()
    assert runtime.total_bytes() == host.total
    assert 0 < runtime.free_bytes() <= runtime.total_bytes()
    assert runtime.total_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
