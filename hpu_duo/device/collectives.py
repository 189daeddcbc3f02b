"""Exchanges of tensors between ranks inside a step, and checks of them before anything runs on several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed
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
from hpu_duo.device.processes import cores_by_device
from hpu_duo.device.ranks import Membership, RankError, Ranks
from hpu_duo.device.runtime import DeviceRuntime

assert torch.distributed.is_available(), "its import defines the operators"
_OPERATORS = torch.ops._c10d_functional


def sum_over_ranks(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of a tensor over all ranks, of the same shape, on each of them.

    Args:
        group: name of the ranks' process group.
    """
    return _OPERATORS.wait_tensor(_OPERATORS.all_reduce(tensor.contiguous(), "sum", group))


def send_to_ranks(tensor: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Send entry ``r`` of a tensor ``[num_ranks, ...]`` to rank ``r``; returns what all sent here, alike."""
    one_each = [1] * num_ranks
    sent = _OPERATORS.all_to_all_single(tensor.contiguous(), one_each, one_each, group)
    return _OPERATORS.wait_tensor(sent)


def gather_from_ranks(tensor: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Return the tensors ``[A, ...]`` of all ranks one after the other, ``[num_ranks * A, ...]``."""
    gathered = _OPERATORS.all_gather_into_tensor(tensor.contiguous(), num_ranks, group)
    return _OPERATORS.wait_tensor(gathered)


_NUM_VALUES = 251
"""A prime, so that no two chunks of a ring are alike."""
_MOST = 255
"""Integers up to here are exact in every type, and so are sums of all ranks that stay below."""


class ExchangeTrial(NamedTuple):
    """One exchange, and the values that a rank has to get.

    Attributes:
        what: name of the exchange.
        run: exchanges; returns the values ``[count]`` on any device.
        expected: ``[count]`` on the host.
    """

    what: str
    run: Callable[[], torch.Tensor]
    expected: torch.Tensor

    def fault(self) -> str | None:
        """Run the exchanges, and describe wrong values; None if nothing.

        Raises:
            RuntimeError: the exchange failed, or a rank did not participate in time; the message names it.
        """
        try:
            got = self.run()
        except RuntimeError as error:
            raise RuntimeError(f"{self.what} failed: {error}") from error
        return fault_of(self.what, got, self.expected)


def fault_of(what: str, got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Compare received values with the expected ones, both ``[count]``; returns what is wrong, or None."""
    host = got.cpu()
    wrong = host != expected
    if not wrong.any():
        return None
    first = int(wrong.nonzero()[0])
    return (
        f"{what} left {int(wrong.sum())} of {len(host)} values wrong: "
        f"expected {float(expected[first])} at {first}, got {float(host[first])}"
    )


def check_exchanges(
    membership: Membership, device: torch.device, dtype: torch.dtype, *, sends_to_each: bool
) -> None:
    """Check all exchanges of an engine with a few kilobytes; called by all ranks.

    Args:
        device: of this rank's steps.
        dtype: of the model; some exchanges are in float32 whatever it is.
        sends_to_each: whether steps exchange all to all.

    Raises:
        RankError: a value was wrong on some rank, the same error on all; it names rank and exchange.
        RuntimeError: see ``ExchangeTrial.fault``.
    """
    ranks = membership.ranks
    trials = [_message_trial(membership)]
    for each in dict.fromkeys((dtype, torch.float32)):
        trials += step_trials(ranks, membership.group, device, each, sends_to_each=sends_to_each)
    # A rank that stopped at its first fault would leave the others in the middle of the next exchange.
    faults = [fault for trial in trials if (fault := trial.fault()) is not None]
    for rank, found in enumerate(membership.collect(faults)):
        if found:
            raise RankError(
                f"expected ranks to exchange data correctly, got a fault on rank {rank}: {found[0]} "
                f"(hpu-duo doctor --collectives {ranks.size} tries exchanges alone)"
            )


def step_trials(
    ranks: Ranks, group: str, device: torch.device, dtype: torch.dtype, *, sends_to_each: bool = True
) -> list[ExchangeTrial]:
    """Return the exchanges inside steps, in one type.

    Args:
        group: name of the ranks' process group.
        device: of this rank.
        sends_to_each: whether steps exchange all to all.
    """
    rank, size = ranks.rank, ranks.size
    parts = [_exchanged_values(each, dtype) for each in range(size)]
    partial_sums = [_exchanged_values(each, dtype, _MOST // size) for each in range(size)]
    # Rank r sends rank q the values of number r * size + q.
    sent = torch.stack([_exchanged_values(rank * size + each, dtype) for each in range(size)]).to(device)
    due = torch.cat([_exchanged_values(each * size + rank, dtype) for each in range(size)])
    own, partial_sum = parts[rank].to(device), partial_sums[rank].to(device)
    total = torch.stack(partial_sums).sum(dim=0).to(dtype)
    suffix = f"in {str(dtype).removeprefix('torch.')}"
    trials = [
        ExchangeTrial(f"all_reduce {suffix}", lambda: sum_over_ranks(partial_sum, group), total),
        ExchangeTrial(f"all_gather {suffix}", lambda: gather_from_ranks(own, size, group), torch.cat(parts)),
    ]
    if sends_to_each:
        trials.append(
            ExchangeTrial(f"all_to_all {suffix}", lambda: send_to_ranks(sent, size, group).flatten(), due)
        )
    return trials


def _message_trial(membership: Membership) -> ExchangeTrial:
    expected = _exchanged_values(0, torch.uint8)
    own = expected.clone() if membership.ranks.rank == 0 else torch.zeros_like(expected)
    return ExchangeTrial("broadcast of rank 0", lambda: membership.link.spread(own), expected)


def _exchanged_values(number: int, dtype: torch.dtype, most: int = _MOST) -> torch.Tensor:
    """Integers ``[251]`` from 0 to ``most`` on the host, others for each number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(most + 1, (_NUM_VALUES,), generator=generator).to(dtype)


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
