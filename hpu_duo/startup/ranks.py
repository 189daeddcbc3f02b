"""Ranks of an engine: the processes that follow rank 0, from their start to their end.

Rank 0 is the process that the engine was asked for in; it has requests and scheduler. The others are
processes of their own, each with a device of its own, and do what rank 0 tells them (``engine/orders.py``).
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpu_duo.device import Member, process_environments, usable_name
from hpu_duo.device.cores import bound, cores_by_device
from hpu_duo.device.member import HOST
from hpu_duo.device.processes import Family, become, first_failure, new_store
from hpu_duo.device.ranks import Membership, RankError, Ranks, joined
from hpu_duo.engine.orders import Stop

_BEAT_S = 0.5
_LOOK_S = 0.05
_NAMING_S = 3.0
"""Seconds in which a rank whose peers notice its end reports its error."""


class RankProcesses:
    """The processes of all ranks but 0, started; see ``Followers``.

    A rank that ends, or gives no sign of life, ends the others, and every order from then on is refused with
    an error that names it.

    Args:
        device: name of the device, as the user gave it.
        size: number of ranks.
        timeout_s: most seconds of an exchange inside a step, and of a rank without a sign of life.
        work: what the others run, a function of a module, and ``args`` for it: both can be pickled.

    Raises:
        ValueError: there are fewer devices, or one was named for all.
    """

    def __init__(
        self, device: str, size: int, timeout_s: float, work: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        kind, _, index = usable_name(device).partition(":")
        if index:
            raise ValueError(
                f"ranks take devices in order: expected {kind!r} without a number, got {device!r}"
            )
        environments = process_environments(kind, size)
        cores = cores_by_device(kind, size)
        self.size, self._timeout_s = size, timeout_s
        self._broken: RankError | None = None
        self._is_stopped = False
        self._stack = ExitStack()
        self.membership: Membership | None = None
        try:
            self._store = new_store()
            self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hpu-duo-")))
            self._family = self._stack.enter_context(Family())
            members = [
                Member(rank, size, self._store.port, self._directory, tuple(sorted(own)))
                for rank, own in enumerate(cores)
            ]
            for member in members[1:]:
                self._family.start(member, work, args, environments[member.rank])
            # Threads that are started from now on run there too, the engine's among them.
            self._stack.enter_context(bound(members[0].cores))
            if environments[0]:
                become(members[0], environments[0])
        except BaseException:
            self._stack.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="hpu-duo-ranks", daemon=True)
        self._watcher.start()

    @property
    def processes(self) -> tuple[BaseProcess, ...]:
        """Those of ranks 1, 2, ..."""
        return tuple(self._family.processes)

    def join(self, backend: str, device: torch.device) -> Membership:
        """Join the others as rank 0."""
        self._await_others()
        try:
            self.membership = self._stack.enter_context(
                joined(Ranks(0, self.size), backend, self._store, device, self._timeout_s)
            )
        except BaseException as error:
            raise self.failed(error) from error
        return self.membership

    def _await_others(self) -> None:
        """Wait until all ranks have started, or one has failed."""
        keys = [_ready(rank) for rank in range(1, self.size)]
        while not self._store.check(keys):
            if self._broken is not None:
                raise self._broken
            time.sleep(_LOOK_S)

    def tell(self, order: Any) -> None:
        """See ``Followers``."""
        if self._broken is not None:
            raise self._broken
        assert self.membership is not None, "ranks have joined"
        try:
            self.membership.link.send(order)
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: BaseException) -> RankError:
        """See ``Followers``."""
        if isinstance(error, RankError):
            return error
        # Who fails first leaves a report, while others see only that its connection is closed.
        end = time.monotonic() + _NAMING_S
        while self._broken is None and time.monotonic() < end and self._is_exchange(error):
            time.sleep(0.02)
        return self._break(f"rank 0 failed: {type(error).__name__}: {error}")

    def cause(self, error: BaseException) -> BaseException:
        """Return the error of the rank that failed first, if an error of this one follows from it."""
        is_exchange = isinstance(error, RuntimeError) and not isinstance(error, RankError)
        return self._broken if is_exchange and self._broken is not None else error

    def stop(self) -> None:
        """End the other ranks, and leave; does nothing the second time."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._broken is None and self.membership is not None:
            with suppress(Exception):
                self.membership.link.send(Stop())
                wait([process.sentinel for process in self._family.processes], timeout=_NAMING_S)
        for process in self._family.processes:
            process.kill()
        self._stack.close()

    def _break(self, message: str) -> RankError:
        if self._broken is None:
            self._broken = RankError(f"{message}; all ranks have ended, start the process again")
            for process in self._family.processes:
                process.kill()
        return self._broken

    def _watch(self) -> None:
        """Notice a rank that ends or hangs."""
        processes = self._family.processes
        while not self._is_stopped and self._broken is None:
            ended = wait([process.sentinel for process in processes], timeout=_BEAT_S)
            if self._is_stopped:
                return
            if ended:
                self._break(self._end_of(next(p for p in processes if p.sentinel in ended)))
            for rank in range(1, self.size):
                silence = _silence_s(self._directory, rank)
                if silence > self._timeout_s:
                    self._break(f"rank {rank} gave no sign of life for {silence:.0f} s")

    def _end_of(self, process: BaseProcess) -> str:
        rank = self._family.processes.index(process) + 1
        time.sleep(0.2)  # until others that failed before it have reported, too
        process.join(1.0)
        told = f"rank {rank} ended with exit code {process.exitcode}"
        error = first_failure(self._directory, rank, told)
        words = str(error).strip()
        return words if words.startswith("rank") else f"rank {getattr(error, 'rank', rank)}: {words}"

    @staticmethod
    def _is_exchange(error: BaseException) -> bool:
        return isinstance(error, RuntimeError)


@contextmanager
def joined_member(
    member: Member, backend: str, device: torch.device, timeout_s: float
) -> Iterator[Membership]:
    """Join the others as any rank but 0, with signs of life from now on."""
    store = dist.TCPStore(HOST, member.port, is_master=False)
    store.set(_ready(member.rank), "")
    try:
        with joined(Ranks(member.rank, member.size), backend, store, device, timeout_s) as membership:
            yield membership
    except BaseException as error:
        member.report(error)
        raise


def give_signs_of_life(member: Member) -> None:
    """Say from time to time, until the process ends, that it runs."""
    path = _sign(member.directory, member.rank)
    path.touch()

    def beat() -> None:
        while True:
            time.sleep(_BEAT_S)
            with suppress(OSError):
                os.utime(path)

    threading.Thread(target=beat, name="hpu-duo-life", daemon=True).start()


def _ready(rank: int) -> str:
    return f"hpu-duo/{rank}/ready"


def _sign(directory: Path, rank: int) -> Path:
    return directory / f"{rank}.alive"


def _silence_s(directory: Path, rank: int) -> float:
    """Seconds since a rank's last sign of life; 0 before its first one."""
    try:
        return max(0.0, time.time() - _sign(directory, rank).stat().st_mtime)
    except OSError:
        return 0.0
