"""Ranks: the processes that serve one model together, their messages, and their places by a launcher."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from hpu_duo.device.loopback import on_loopback
from hpu_duo.device.plain import decode, encode


@dataclass(frozen=True)
class Ranks:
    """One rank among all.

    Attributes:
        rank: number of this one.
        size: of all.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"expected a rank in [0, {self.size}), got {self.rank}")

    @property
    def is_alone(self) -> bool:
        """Whether there is no other."""
        return self.size == 1


class RankError(RuntimeError):
    """Ranks no longer run the same steps: one died, hung, or failed while others continued.

    Nothing can be computed any more; the process has to be started again.
    """


class Sent(NamedTuple):
    """Counts of the messages of rank 0 to the others.

    Attributes:
        num_messages: orders.
        num_broadcasts: as many, and one more for each message that is longer than any before.
        num_bytes: of all broadcasts, padding included.
    """

    num_messages: int = 0
    num_broadcasts: int = 0
    num_bytes: int = 0


class WorkerRanks(Protocol):
    """The interface of the worker ranks, which execute the orders of rank 0."""

    @property
    def sent(self) -> Sent:
        """Counts of what they have been sent."""
        ...

    def tell(self, order: Any) -> None:
        """Send an order to all of them; returns at once.

        Raises:
            RankError: they can no longer follow.
        """
        ...

    def failed(self, error: BaseException) -> RankError:
        """Record that an order failed here, so that no more orders are sent; returns the error to raise."""
        ...

    def when_lost(self, callback: Callable[[RankError], None]) -> None:
        """Register a callback, called in any thread, for the loss of worker ranks, before or after this call.

        They may be lost between two orders, or while an order waits for one of them and does not end.
        """
        ...

    def kill(self) -> None:
        """End their processes at once, as far as they are this one's; an order under way here fails."""
        ...


_FIRST_BYTES = 1 << 16
_HEADER_BYTES = 8
_PATIENCE = timedelta(days=3650)
MEETING_S = 1800.0
"""Seconds that ranks wait for each other at their start."""


class Link:
    """Messages from rank 0 to all others, on the host: one broadcast each.

    A message is padded to the size of the longest one so far; one that is longer is announced by a broadcast
    of its own.

    Args:
        ranks: this rank among all.
        group: process group of all ranks that exchanges tensors of the host.

    Attributes:
        sent: what has been sent, or received.
    """

    def __init__(self, ranks: Ranks, group: Any) -> None:
        self._ranks, self._group = ranks, group
        self._buffer = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        self._lock = threading.Lock()
        self.sent = Sent()

    @property
    def num_bytes(self) -> int:
        """Bytes of a broadcast now."""
        return len(self._buffer)

    def reserve(self, num_bytes: int) -> None:
        """Grow the buffer of messages to a number of bytes, on all ranks at the same time."""
        needed = _HEADER_BYTES + num_bytes
        if needed > len(self._buffer):
            self._grow(needed)

    def send(self, message: Any) -> None:
        """Send a plain value from rank 0.

        Raises:
            TypeError: it is not plain, see ``encode``.
        """
        data = encode(message)
        with self._lock:
            needed = _HEADER_BYTES + len(data)
            if needed > len(self._buffer):
                self._write_header(-needed)
                self._broadcast()
                self._grow(needed)
            self.sent = self.sent._replace(num_messages=self.sent.num_messages + 1)
            self._write_header(len(data))
            self._buffer[_HEADER_BYTES:needed] = torch.frombuffer(data, dtype=torch.uint8)
            self._broadcast()

    def receive(self) -> Any:
        """Wait for the next value, on any rank but 0."""
        while True:
            self._broadcast()
            size = int(self._buffer[:_HEADER_BYTES].view(torch.int64))
            if size >= 0:
                return decode(self._buffer[_HEADER_BYTES : _HEADER_BYTES + size].numpy().data)
            self._grow(-size)

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Write the tensor of rank 0 over that of every rank, the way messages go; it is not counted."""
        dist.broadcast(tensor, 0, group=self._group)
        return tensor

    def _write_header(self, size: int) -> None:
        self._buffer[:_HEADER_BYTES].view(torch.int64)[0] = size

    def _grow(self, needed: int) -> None:
        self._buffer = torch.zeros(1 << (needed - 1).bit_length(), dtype=torch.uint8)

    def _broadcast(self) -> None:
        num_messages, num_broadcasts, num_bytes = self.sent
        self.sent = Sent(num_messages, num_broadcasts + 1, num_bytes + len(self._buffer))
        dist.broadcast(self._buffer, 0, group=self._group)


@dataclass(frozen=True)
class Membership:
    """A rank that has joined the others.

    Attributes:
        ranks: this rank among all.
        group: name of the process group that exchanges tensors of devices inside steps.
        link: messages of rank 0.
        host_group: process group that exchanges tensors of the host.
        store: rendezvous store of all ranks.
    """

    ranks: Ranks
    group: str
    link: Link
    host_group: Any
    store: dist.Store

    def exchange_aside(self, timeout_s: float) -> Callable[[Sequence[int]], list[list[int]]]:
        """Create exchanges of equally many integers of each rank, for a thread beside steps.

        All ranks create them at the same time.

        Args:
            timeout_s: of an exchange.
        """
        with _near(self.store):
            in_time = timedelta(seconds=timeout_s)
            group = dist.new_group(range(self.ranks.size), backend="gloo", timeout=in_time)

        def exchange(own: Sequence[int]) -> list[list[int]]:
            given = torch.tensor(own, dtype=torch.int64)
            found = [torch.empty_like(given) for _ in range(self.ranks.size)]
            dist.all_gather(found, given, group=group)
            return [each.tolist() for each in found]

        return exchange

    def compare(self, what: str, value: Any) -> None:
        """Check that all ranks have equal values; see ``compare_all``."""
        self.compare_all({what: value})

    def compare_all(self, facts: Mapping[str, Any]) -> None:
        """Check that all ranks have equal values, each under a name.

        Raises:
            RankError: they differ; the message names what differs, the ranks, and what they have.
        """
        told = first_difference(self.collect(dict(facts)))
        if told is not None:
            raise RankError(told)

    def collect(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks, on each of them.

        Raises:
            TypeError: a value is not plain, see ``encode``.
        """
        own = torch.frombuffer(encode(value), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.size)]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=self.host_group)
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.host_group)
        return [decode(each[: int(size)].numpy().data) for each, size in zip(gathered, sizes)]


def first_difference(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe the first difference between named values of rank 0 and another rank; None if nothing."""
    for rank, of_rank in enumerate(facts):
        for what in (*facts[0], *of_rank):
            own, other = facts[0].get(what), of_rank.get(what)
            if own != other:
                return (
                    f"expected all ranks to have the same {what}, got {own!r} on rank 0 and {other!r} on "
                    f"rank {rank}"
                )
    return None


def _near(store: dist.Store) -> AbstractContextManager[None]:
    """Context in which ranks connect: with a file store all are on one machine, so by its loopback."""
    return on_loopback(store) if isinstance(store, dist.FileStore) else nullcontext()


@contextmanager
def joined(
    ranks: Ranks,
    backend: str,
    store: dist.Store,
    device: torch.device,
    timeout_s: float,
) -> Iterator[Membership]:
    """Join ``torch.distributed`` among all ranks inside the context; once at a time in a process.

    Args:
        backend: of tensors of devices, see ``DeviceRuntime.collectives``.
        store: rendezvous store of all ranks; with a file, host messages use the loopback interface.
        timeout_s: of an exchange, and of the delivery of a message.

    Raises:
        ValueError: this process is a member already.
    """
    if dist.is_initialized():
        raise ValueError(
            "expected a process that is in no process group of torch.distributed, got one that is"
        )
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    try:
        with _near(store):
            dist.init_process_group(
                backend,
                store=store,
                rank=ranks.rank,
                world_size=ranks.size,
                timeout=timedelta(seconds=MEETING_S),
                device_id=device if is_cuda else None,
            )
            everybody, in_time = range(ranks.size), timedelta(seconds=timeout_s)
            host_group = dist.new_group(everybody, backend="gloo", timeout=_PATIENCE)
            # Receiving a message may take long, sending must not.
            orders = dist.new_group(everybody, backend="gloo", timeout=_PATIENCE if ranks.rank else in_time)
            group: Any = dist.new_group(everybody, timeout=in_time)
        yield Membership(ranks, group.group_name, Link(ranks, orders), host_group, store)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


TORCHRUN = "torchrun"
"""Name of the launcher in ``ParallelConfig``."""
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """One rank, by torch's environment variables of a launcher.

    Attributes:
        rank, size: number of this rank, and of ranks on all machines.
        local_rank, local_size: the same on this machine.
        host, port: of the rendezvous store, and of rank 0's machine.
        has_store: whether the launcher runs that store; otherwise rank 0 does.
        attempt: how often the launcher has started all ranks anew.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    has_store: bool = False
    attempt: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str], size: int) -> Launched:
        """Read the variables of a process.

        Args:
            size: configured number of ranks.

        Raises:
            ValueError: variables are missing or no numbers, or there is another number of ranks.
        """
        missing = [name for name in _NEEDED if not environment.get(name)]
        if missing:
            raise ValueError(
                "rank_launcher='torchrun' needs the variables that torchrun sets: expected "
                f"{', '.join(_NEEDED)}, missing: {', '.join(missing)}"
            )
        numbers = {name: environment[name] for name in _NEEDED if name != "MASTER_ADDR"}
        numbers["TORCHELASTIC_RESTART_COUNT"] = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        for name, text in numbers.items():
            if not (text.isascii() and text.isdigit()):
                raise ValueError(f"expected {name} to be a number, got {text!r}")
        found = cls(
            rank=int(numbers["RANK"]),
            size=int(numbers["WORLD_SIZE"]),
            local_rank=int(numbers["LOCAL_RANK"]),
            local_size=int(numbers["LOCAL_WORLD_SIZE"]),
            host=environment["MASTER_ADDR"],
            port=int(numbers["MASTER_PORT"]),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
            attempt=int(numbers["TORCHELASTIC_RESTART_COUNT"]),
        )
        if found.size != size:
            raise ValueError(
                f"expected torchrun to start tensor_parallel_size={size} ranks, got WORLD_SIZE={found.size}"
            )
        return found

    @classmethod
    def here(cls, size: int) -> Launched:
        """Read the variables of this process; see ``of``."""
        return cls.of(os.environ, size)

    def take_card(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Set the environment variables of this process, before it acquires a device."""
        os.environ.update(environments[self.local_rank])

    def store(self, timeout_s: float) -> dist.Store:
        """Return the rendezvous store of all ranks, separate for each attempt.

        Args:
            timeout_s: most seconds to wait for it.
        """
        is_master = self.rank == 0 and not self.has_store
        wait = timedelta(seconds=timeout_s)
        store = dist.TCPStore(self.host, self.port, is_master=is_master, timeout=wait, wait_for_workers=False)
        return dist.PrefixStore(f"hpu-duo/{self.attempt}", store)


def follows_another() -> bool:
    """Whether a launcher has started this process as another rank than the first."""
    return os.environ.get("RANK", "0") != "0"
