"""Starts of the ranks of an engine: by rank 0 itself, or by a launcher from outside, on several machines."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from hpu_duo.device import Member, process_environments, usable_name
from hpu_duo.device.cores import bind, bound, cores_by_device
from hpu_duo.device.launched import Launched
from hpu_duo.device.member import HOST, store_in
from hpu_duo.device.processes import Family, become, first_failure

_END_S = 3.0
"""Seconds in which ranks that have said that they end do so."""
_LOOK_S = 0.02


class EarlyEnd(NamedTuple):
    """The end of a rank that had not come to rank 0 yet.

    Attributes:
        rank: number of the rank.
        told: what it has left.
    """

    rank: int
    told: str


class Launch(Protocol):
    """The processes of all ranks but 0, as rank 0 knows them."""

    @property
    def store(self) -> dist.Store:
        """The store that ranks meet at."""
        ...

    @property
    def host(self) -> str:
        """Name of rank 0's machine, as the others reach it."""
        ...

    def early_end(self) -> EarlyEnd | None:
        """A rank that has ended, as far as that is known here."""
        ...

    def end_of(self, rank: int) -> str:
        """Say how the process of a rank has ended, which it has."""
        ...

    def kill(self) -> None:
        """End the processes at once, if they are this one's."""
        ...

    def close(self) -> None:
        """Let go of what the launch holds; the ranks have ended."""
        ...


class OwnLaunch:
    """Ranks of one machine, started by rank 0.

    Linux kills them when this process ends, however it ends; elsewhere each of them notices that and ends.

    Args:
        device: name of the device, as the user gave it.
        size: number of ranks.
        work: what the others run, a function of a module, and ``args`` for it: both can be pickled.

    Raises:
        ValueError: there are fewer devices, or one was named for all.
    """

    host = HOST

    def __init__(self, device: str, size: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        kind = _kind(device)
        environments = process_environments(kind, size)
        cores = cores_by_device(kind, size)
        self._stack = ExitStack()
        self._is_closed = threading.Event()
        try:
            self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hpu-duo-")))
            self.store = store_in(self._directory)
            self._family = self._stack.enter_context(Family())
            members = [
                Member(rank, size, self._directory, tuple(sorted(own)), signal.SIGKILL)
                for rank, own in enumerate(cores)
            ]

            def start() -> None:
                for member in members[1:]:
                    self._family.start(member, work, args, environments[member.rank])

            self._start_in_lasting_thread(start)
            # Threads that are started from now on run there too, the engine's among them.
            self._stack.enter_context(bound(members[0].cores))
            if environments[0]:
                become(members[0], environments[0])
        except BaseException:
            self._is_closed.set()
            self._stack.close()
            raise

    def _start_in_lasting_thread(self, start: Callable[[], None]) -> None:
        """Start ranks in a thread that lasts until the launch is closed; see ``Member.death_signal``."""
        started: Future[None] = Future()

        def work() -> None:
            try:
                start()
            except BaseException as error:
                started.set_exception(error)
            else:
                started.set_result(None)
            self._is_closed.wait()

        thread = threading.Thread(target=work, name="hpu-duo-starts-ranks", daemon=True)
        thread.start()
        try:
            started.result()
        except BaseException:
            # The caller may have been interrupted while ranks start; no more are to come.
            self._is_closed.set()
            thread.join()
            raise

    @property
    def processes(self) -> tuple[BaseProcess, ...]:
        """Those of ranks 1, 2, ..."""
        return tuple(self._family.processes)

    def early_end(self) -> EarlyEnd | None:
        """See ``Launch``."""
        for rank, process in enumerate(self._family.processes, 1):
            if not process.is_alive():
                error = first_failure(self._directory, rank, self.end_of(rank))
                words = str(error).strip()
                first = getattr(error, "rank", rank)
                return EarlyEnd(first, words.removeprefix(f"process {first} "))
        return None

    def end_of(self, rank: int) -> str:
        """See ``Launch``."""
        process = self._family.processes[rank - 1]
        process.join(1.0)
        return f"ended with exit code {process.exitcode}"

    def kill(self) -> None:
        """See ``Launch``."""
        self._family.kill()

    def close(self) -> None:
        """See ``Launch``."""
        self._family.join(_END_S)
        self._family.kill()
        self._stack.close()
        self._is_closed.set()


class TorchrunLaunch:
    """Ranks of one or several machines, started by torchrun, this one among them.

    Args:
        device: name of the device, as the user gave it.
        launched: this rank.
        timeout_s: most seconds until ranks meet.

    Raises:
        ValueError: there are fewer devices than ranks on this machine, or one was named for all.
    """

    def __init__(self, device: str, launched: Launched, timeout_s: float) -> None:
        kind = _kind(device)
        environments = process_environments(kind, launched.local_size)
        bind(tuple(sorted(cores_by_device(kind, launched.local_size)[launched.local_rank])))
        launched.take_card(environments)
        self.host = launched.host
        self.store = launched.store(timeout_s)

    def early_end(self) -> None:
        """Return None: the launcher ends the others."""

    def end_of(self, rank: int) -> str:
        """See ``Launch``."""
        return "has ended, or its machine is out of reach"

    def kill(self) -> None:
        """Do nothing: ranks end when rank 0's lifelines do, and the launcher sees to it."""

    def close(self) -> None:
        """Do nothing: the launcher keeps what there is."""


def until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Wait for something that another thread does; says whether it has come."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True


def _kind(device: str) -> str:
    kind, _, index = usable_name(device).partition(":")
    if index:
        raise ValueError(f"ranks take devices in order: expected {kind!r} without a number, got {device!r}")
    return kind
