"""CPU cores for the processes of a machine: each its own, on one NUMA node."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def shares(cores: Collection[int], nodes: Sequence[Collection[int]], num_processes: int) -> list[set[int]]:
    """Deal cores out to processes, so that none has cores of two nodes and all have equally many.

    Processes go to nodes in order, as the cards of a Gaudi server do: the first half of eight to the first of
    two nodes. Where a process would have no core, every process may use all of them.

    Args:
        cores: that may be used.
        nodes: the cores of each NUMA node; cores of no node are left out.
        num_processes: how many.
    Returns:
        The cores of each process.
    """
    usable = [sorted(set(node) & set(cores)) for node in nodes]
    usable = [node for node in usable if node] or [sorted(cores)]
    per_node = -(-num_processes // len(usable))
    size = min(len(node) for node in usable[: -(-num_processes // per_node)]) // per_node
    if size < 1:
        return [set(cores)] * num_processes
    found = []
    for rank in range(num_processes):
        node, place = divmod(rank, per_node)
        found.append(set(usable[node][place * size : (place + 1) * size]))
    return found


def shares_of_this_machine(num_processes: int) -> list[set[int]]:
    """The shares of the cores that this process may use; where affinity is unknown, empty sets."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * num_processes
    nodes = [
        read_list((path / "cpulist").read_text(encoding="utf-8"))
        for path in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    ]
    return shares(os.sched_getaffinity(0), nodes, num_processes)


def cores_by_device(kind: str, num_processes: int) -> list[set[int]]:
    """Return the cores of processes that have a device each; empty sets leave it to the system.

    A process that drives a card wants cores near it, and not those of the others.
    """
    return shares_of_this_machine(num_processes) if kind == "hpu" else [set()] * num_processes


def read_list(text: str) -> list[int]:
    """The numbers of a list as the kernel writes it, such as ``0-3,8``."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def bind_process(pid: int, cores: Collection[int]) -> None:
    """Run a process that was just started on these cores only; on none given, wherever the system likes."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, set(cores))


def bind(cores: Collection[int]) -> None:
    """Run this process on these cores only; on none given, wherever the system likes."""
    if cores:
        os.sched_setaffinity(0, set(cores))


@contextmanager
def bound(cores: Collection[int]) -> Iterator[None]:
    """Bind this thread, and those that it starts, for a while; see ``bind``."""
    before = os.sched_getaffinity(0) if cores else set()
    bind(cores)
    try:
        yield
    finally:
        bind(before)
