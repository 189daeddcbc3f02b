"""One process of several, from inside: it joins the others, and leaves its result or error behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpu_duo.device.cores import bind
from hpu_duo.device.leaving import leave
from hpu_duo.device.loopback import on_loopback
from hpu_duo.device.plain import decode, encode

HOST = "127.0.0.1"
GRACE_S = 20.0
"""Seconds that a process may go on after SIGTERM, to save its state."""


_PR_SET_PDEATHSIG = 1


class Refused(Exception):
    """The user's request cannot be carried out.

    A worker raises it instead of a ``ValueError``; ``run_processes`` raises it again in the same words.
    """


@dataclass(frozen=True)
class Member:
    """One process of several.

    Attributes:
        rank, size: number of this process, and of processes.
        directory: of the processes' results and errors, and of the file through which they find each other;
            no other user may read it.
        cores: CPU cores that the process runs on; empty = any.
        death_signal: what Linux sends this process when the thread that started it ends, as every thread does
            at its process's end. ``SIGCONT`` lets a stopped process see that its parent has ended, and
            ``SIGKILL`` ends it.
    """

    rank: int
    size: int
    directory: Path
    cores: tuple[int, ...] = ()
    death_signal: int = signal.SIGCONT

    def store(self) -> dist.FileStore:
        """Return the store through which the processes find each other."""
        return store_in(self.directory)

    @contextmanager
    def joined(
        self, backend: str, device: torch.device | None = None, timeout_s: float | None = None
    ) -> Iterator[None]:
        """Join ``torch.distributed`` among all processes inside the context; once in the life of a process.

        Args:
            backend: a name that ``torch.distributed`` knows, see ``DeviceRuntime.collectives``.
            device: the process's device, if that is a CUDA device.
            timeout_s: most seconds of an exchange; None = torch's default.
        """
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        is_cuda = device is not None and device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(device)
        with on_loopback(store := self.store()):
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
                device_id=device if is_cuda else None,
            )
        try:
            yield
        except BaseException as error:
            # Before the others can notice: who fails first is what the user has to know.
            self.report(error)
            raise
        finally:
            dist.destroy_process_group()

    def report(self, error: BaseException) -> None:
        """Write down the error that ended this process; only the first one is kept."""
        path = self.directory / f"{self.rank}.failure"
        if not path.exists():
            write(path, Failure(self.rank, time.time_ns(), isinstance(error, Refused), *_words(error)))


@dataclass(frozen=True)
class Failure:
    """Error that a process has reported.

    Attributes:
        rank: number of the process.
        when_ns: time, on a clock that all processes of a machine share.
        is_refusal: whether it was a ``Refused``.
        message, trace: the error in one line, and with its traceback.
    """

    rank: int
    when_ns: int
    is_refusal: bool
    message: str
    trace: str


def run_member(_: int, member: Member, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Main function of a new process, in which signals are as ``run_processes`` left them.

    Args:
        _: number of the process, which torch's launcher passes.
        member: the process.
        work, args: see ``run_processes``.
    """
    bind(member.cores)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(member.death_signal))
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        write(result_path(member.directory, member.rank), work(member, *args))
    except BaseException as error:
        member.report(error)
        raise
    leave(0)


def _interrupt(number: int, frame: object) -> None:
    # Once: what is saved now is not to be torn by a second signal.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _follow_parent() -> None:
    """End soon after the parent has ended, also when the main thread waits for a peer and sees no signal."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process that was started has a parent"
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def _words(error: BaseException) -> tuple[str, str]:
    """An error in one line, and with its traceback."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    if isinstance(error, Refused):
        return str(error), ""
    return lines[-1].strip().splitlines()[0], "".join(lines)


def store_in(directory: Path) -> dist.FileStore:
    """Return the store of the processes of one machine: a file, for whoever may write in the directory."""
    return dist.FileStore(str(directory / "store"))


def result_path(directory: Path, rank: int) -> Path:
    """Path of the result of a process."""
    return directory / f"{rank}.result"


def write(path: Path, value: Any) -> None:
    """Write a plain value for another process: whole, or, if interrupted, not at all.

    Raises:
        TypeError: it is not plain, see ``encode``.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(encode(value))
    partial.replace(path)


def read(path: Path) -> Any:
    """Read the value of another process."""
    return decode(path.read_bytes())
