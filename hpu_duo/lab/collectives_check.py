"""Exchanges of tensors between processes with devices of their own, checked and timed without a model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpu_duo.device import (
    Member,
    own_device,
    process_environments,
    resolve_device,
    run_processes,
    runtime_for,
    usable_name,
)
from hpu_duo.device.collectives import fault_of, step_trials
from hpu_duo.device.processes import cores_by_device
from hpu_duo.device.ranks import Ranks
from hpu_duo.device.runtime import DeviceRuntime

_PATTERN = 251
"""Period of the values. They are small integers, with exact sums in float32. The period is a prime, so that
no two chunks of a ring are alike."""
_ITEM_BYTES = torch.float32.itemsize
_NUM_TIMED = 3


@dataclass(frozen=True)
class Exchange:
    """Result of a successful check.

    Attributes:
        backend: its name in ``torch.distributed``.
        devices: the device of each process; of HPUs, the module.
        num_bytes: size of the tensor that every device contributed to a sum.
        seconds: the shortest time of an all-reduce, in the slowest process.
    """

    backend: str
    devices: tuple[str, ...]
    num_bytes: int
    seconds: float

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each device sends in a ring all-reduce; 0 for one device.

        Of each byte, ``2 (n - 1) / n`` have to leave a device. Source: nccl-tests, ``PERFORMANCE.md``.
        """
        size = len(self.devices)
        return self.num_bytes / self.seconds * 2 * (size - 1) / size


def check_collectives(
    name: str, num_processes: int, num_bytes: int = 1 << 25, deadline_s: float = 300.0
) -> Exchange:
    """Start processes, each with a device of its own, that exchange tensors by the device's backend.

    They broadcast, sum, gather and send all to all, and every process checks every value that it receives.

    Args:
        name: of the device; "auto" as in ``resolve_device``.
        num_processes: number of processes, hence of devices.
        num_bytes: of the tensor that is summed; a positive multiple of 4, the bytes of a float32.
        deadline_s: most seconds in all, the start of processes included.

    Raises:
        ValueError: the device is not usable, there are too few of it, or a number is set for all; or no
            tensor has that many bytes.
        WorkerError: a process failed, a value was wrong, or time ran out.
    """
    if num_bytes <= 0 or num_bytes % _ITEM_BYTES:
        raise ValueError(f"expected num_bytes to be a positive multiple of {_ITEM_BYTES}, got {num_bytes}")
    kind, _, index = usable_name(name).partition(":")
    if index:
        raise ValueError(f"processes take devices in order: expected {kind!r} without a number, got {name!r}")
    environments = process_environments(kind, num_processes)
    cores = cores_by_device(kind, num_processes)
    work = (kind, num_bytes // _ITEM_BYTES, deadline_s)
    found = run_processes(_exchange, work, environments, deadline_s, cores)
    return Exchange(
        found[0].backend,
        tuple(_label(one.device, environment) for one, environment in zip(found, environments)),
        num_bytes,
        max(one.seconds for one in found),
    )


@dataclass(frozen=True)
class _Found:
    backend: str
    device: str
    seconds: float


def _label(device: str, environment: Mapping[str, str]) -> str:
    module = environment.get("HLS_MODULE_ID")
    return device if module is None else f"{device} (module {module})"


def _exchange(member: Member, kind: str, num_values: int, timeout_s: float) -> _Found:
    device = own_device(resolve_device(kind), member.rank)
    runtime = runtime_for(device)
    backend = runtime.collectives()
    with member.joined(backend, device, timeout_s):
        for sender in range(member.size):
            _check_broadcast(member, device, sender)
        values = _values(num_values, member.rank).to(device)
        dist.all_reduce(values)
        # 1 + 2 + ... + size times what process 0 contributes
        check_values("all_reduce", values, _values(num_values, member.size * (member.size + 1) // 2 - 1))
        _check_operators_of_steps(member, device)
        seconds = min(_timed_sum(values, runtime) for _ in range(_NUM_TIMED))
    return _Found(backend, str(device), seconds)


def _check_broadcast(member: Member, device: torch.device, sender: int) -> None:
    values = _values(_PATTERN, member.rank).to(device)
    dist.broadcast(values, sender)
    check_values("broadcast", values, _values(_PATTERN, sender))


def _check_operators_of_steps(member: Member, device: torch.device) -> None:
    """Check the exchanges inside steps, by the operators that steps use."""
    assert dist.group.WORLD is not None, "the process has joined"
    ranks, group = Ranks(member.rank, member.size), dist.group.WORLD.group_name
    for trial in step_trials(ranks, group, device, torch.float32):
        if (fault := trial.fault()) is not None:
            raise RuntimeError(fault)


def _timed_sum(values: torch.Tensor, runtime: DeviceRuntime) -> float:
    runtime.synchronize()
    start = time.perf_counter()
    dist.all_reduce(values)
    runtime.synchronize()
    return time.perf_counter() - start


def _values(count: int, rank: int) -> torch.Tensor:
    """The contribution of a process, on the host: float32 ``[count]``, ``rank + 1`` times a pattern."""
    pattern = torch.arange(_PATTERN, dtype=torch.float32) * (rank + 1)
    return pattern.repeat(count // _PATTERN + 1)[:count]


def check_values(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare received values with the expected ones, both ``[count]``.

    Raises:
        RuntimeError: a value differs; the message has the number of such values, and the first of them.
    """
    if (fault := fault_of(what, got, expected)) is not None:
        raise RuntimeError(fault)
