"""Several processes of one machine, each with a device of its own.

Processes are started afresh (*spawn*) and never forked. A fork inherits the state of the driver and of
thread pools without the threads behind it: torch refuses CUDA in one, GNU's OpenMP waits for ever in one,
and on Gaudi forked workers were seen to hang at exit and spawned ones not, which is why vllm-gaudi spawns.

Sources: PyTorch documentation, "Multiprocessing best practices"; GCC bug 52303; vllm-project/vllm, pull
request 11030; README of vllm-gaudi, "Distributed Executor Backend and Worker Start Method".
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_HOST = "127.0.0.1"
_GRACE_S = 20.0
"""How long a process that was told to stop may go on, to save what it has."""

_starting = threading.Lock()
Result = TypeVar("Result")


class Refused(Exception):
    """What the user asked for cannot be done.

    A worker raises it instead of a ``ValueError``; ``run_processes`` raises it again in the same words.
    """


class WorkerError(RuntimeError):
    """A process failed, and the others were stopped; the message holds its traceback.

    Attributes:
        rank: number of the process that failed first.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Member:
    """One process of several, as it knows itself.

    Attributes:
        rank, size: number of this process, and of processes.
        port: of this machine, where the parent process keeps the store they meet at.
        directory: where a process leaves its result, or why it has none.
    """

    rank: int
    size: int
    port: int
    directory: Path

    @contextmanager
    def joined(
        self, backend: str, device: torch.device | None = None, timeout_s: float | None = None
    ) -> Iterator[None]:
        """``torch.distributed`` among all processes, inside the context; once in the life of a process.

        Args:
            backend: a name that ``torch.distributed`` knows, see ``DeviceRuntime.collectives``.
            device: what the process exchanges from, if that is a CUDA device.
            timeout_s: how long an exchange may take; None = what torch allows.
        """
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        is_cuda = device is not None and device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=dist.TCPStore(_HOST, self.port, self.size, is_master=False),
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
        """Leave word of what ended this process; the first one counts."""
        path = self.directory / f"{self.rank}.failure"
        if not path.exists():
            _write(path, _Failure(self.rank, time.time_ns(), isinstance(error, Refused), *_words(error)))


@dataclass(frozen=True)
class _Failure:
    rank: int
    when_ns: int
    is_refusal: bool
    message: str
    trace: str


def run_processes(
    work: Callable[..., Result],
    args: tuple[Any, ...],
    environments: Sequence[Mapping[str, str]],
    deadline_s: float | None = None,
) -> list[Result]:
    """Run ``work(member, *args)`` in new processes of this machine, one for each environment.

    A process has its variables before it imports anything, torch included: what the vendor's packages
    read at import is there, also where ``import torch`` loads them. These are ``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``, a fair share of the CPUs as
    ``OMP_NUM_THREADS`` unless that is set, and then the process's own. For as long as a process takes to
    start, they are variables of this one too.

    When one process fails, the others are interrupted, and killed if that does not help. An interrupted
    process sees a ``KeyboardInterrupt`` and has a while to save what it has. Ctrl-C interrupts this process,
    which interrupts the others; they also end by themselves when this one dies.

    Args:
        work: a function of a module, and ``args``: both can be pickled. A program that calls this has
            its main part under ``if __name__ == "__main__"``, since new processes import the program.
        environments: variables of each process.
        deadline_s: how long all of it may take; None = as long as it takes.

    Returns:
        What ``work`` returned in each process, by rank.

    Raises:
        Refused: as the process that failed first did.
        WorkerError: a process failed in any other way, or time ran out.
        KeyboardInterrupt: this process was interrupted; no other is left.
    """
    size = len(environments)
    # The store lives here, on a port that is taken from the moment that it is known.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _num_cpus() // size))),
    }
    with tempfile.TemporaryDirectory(prefix="hpu-duo-") as name, _Family() as family:
        for rank, own in enumerate(environments):
            member = Member(rank, size, store.port, Path(name))
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with _environment({**common, **ranks, **own}):
                family.start(_member, (member, work, args))
        _join(family, Path(name), deadline_s)
        return [_read(_result_path(Path(name), rank)) for rank in range(size)]


class _Family:
    """Processes that were started, none of which outlives the context."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._error_files: list[str] = []

    def __enter__(self) -> _Family:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _stop(self.processes)
        finally:
            for process in self.processes:
                process.kill()
                process.join()
            for file in self._error_files:
                Path(file).unlink(missing_ok=True)

    def start(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        """One more process."""
        context = mp.start_processes(function, args, nprocs=1, join=False, start_method="spawn")
        self.processes += context.processes
        self._error_files += context.error_files

    def context(self) -> mp.ProcessContext:
        """All of them as torch's own launcher would have them."""
        return mp.ProcessContext(self.processes, self._error_files)


def _join(family: _Family, directory: Path, deadline_s: float | None) -> None:
    context = family.context()
    end = None if deadline_s is None else time.monotonic() + deadline_s
    try:
        while not context.join(None if end is None else max(0.0, end - time.monotonic())):
            late = [rank for rank, process in enumerate(family.processes) if process.is_alive()]
            if end is not None and time.monotonic() >= end and late:
                names = ("process " if len(late) == 1 else "processes ") + ", ".join(map(str, late))
                raise WorkerError(late[0], f"{names} had not ended after {deadline_s:g} s")
    except mp.ProcessExitedException as error:
        # It left no word of its own: killed from outside, or it never came as far as our code.
        raise WorkerError(error.error_index, f"{error}; see above for what it printed") from None
    except mp.ProcessRaisedException as error:
        raise _first_failure(directory, error.error_index, str(error)) from None
    for rank in range(len(family.processes)):
        if not _result_path(directory, rank).exists():
            # Interrupted from outside, which is no error to torch's launcher, or ended by its own code.
            raise _first_failure(directory, rank, f"process {rank} ended before its work was done")


def _first_failure(directory: Path, rank: int, told: str) -> Exception:
    failures = [_read(path) for path in directory.glob("*.failure")]
    if not failures:
        return WorkerError(rank, told)
    first = min(failures, key=lambda failure: failure.when_ns)
    if first.is_refusal:
        return Refused(first.message)
    return WorkerError(first.rank, f"process {first.rank} failed: {first.message}\n{first.trace}")


def _member(_: int, member: Member, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """What a new process does: torch's launcher gives it a number among those started at once, here 0."""
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        _write(_result_path(member.directory, member.rank), work(member, *args))
    except BaseException as error:
        member.report(error)
        raise


def _interrupt(number: int, frame: object) -> None:
    # Once: what is saved now is not to be torn by a second signal.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _follow_parent() -> None:
    """End soon after the parent has, also when the main thread waits for a peer and sees no signal."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process that was started has a parent"
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)


def _stop(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    end = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that a process started inside finds, and no SIGINT: Ctrl-C is for the parent to pass on."""
    # Starting the tracker would let signals through again.
    resource_tracker.ensure_running()
    with _starting:
        before = {name: os.environ.get(name) for name in values}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _words(error: BaseException) -> tuple[str, str]:
    """A failure in one line, and all of it."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    if isinstance(error, Refused):
        return str(error), ""
    return lines[-1].strip().splitlines()[0], "".join(lines)


def _result_path(directory: Path, rank: int) -> Path:
    return directory / f"{rank}.result"


def _write(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        pickle.dump(value, file)


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)
