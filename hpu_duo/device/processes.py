"""Several processes of one machine, each with a device of its own.

Processes are started afresh (*spawn*) and never forked. A fork inherits the state of the driver and of
thread pools without the threads behind it: torch refuses CUDA in one, GNU's OpenMP waits for ever in one,
and on Gaudi forked workers were seen to hang at exit and spawned ones not, which is why vllm-gaudi spawns.

Sources: PyTorch documentation, "Multiprocessing best practices"; GCC bug 52303; vllm-project/vllm, pull
request 11030; README of vllm-gaudi, "Distributed Executor Backend and Worker Start Method".
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.multiprocessing as mp

from hpu_duo.device.member import GRACE_S, Member, Refused, read, result_path, run_member

_KILLED_S = 2.0
"""Seconds in which the system ends killed processes; one that a driver keeps longer is not waited for."""
_starting = threading.Lock()
Result = TypeVar("Result")


class WorkerError(RuntimeError):
    """A process failed, and the others were stopped; the message holds its traceback.

    Attributes:
        rank: number of the process that failed first.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_processes(
    work: Callable[..., Result],
    args: tuple[Any, ...],
    environments: Sequence[Mapping[str, str]],
    deadline_s: float | None = None,
    cores: Sequence[Collection[int]] | None = None,
) -> list[Result]:
    """Run ``work(member, *args)`` in new processes of this machine, one for each environment.

    A process has its variables before it imports anything, torch included, so that the vendor's packages find
    them at import. These are ``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, a fair share of the CPUs as
    ``OMP_NUM_THREADS`` unless that is set, and then the process's own. While a process
    starts, they are variables of this one too.

    When one process fails, the others are interrupted, and killed if that does not help. An interrupted
    process sees a ``KeyboardInterrupt`` and has some seconds to save its state. Ctrl-C interrupts this
    process, which interrupts the others; they also end by themselves when this one dies.

    Args:
        work: a function of a module, and ``args``: both can be pickled. Its result is plain, see
            ``hpu_duo.device.plain``. A program that calls this has
            its main part under ``if __name__ == "__main__"``, since new processes import the program.
        environments: variables of each process.
        deadline_s: most seconds in all; None = no limit.
        cores: of each process, see ``hpu_duo.device.cores``; None = wherever the system likes.

    Returns:
        The results of ``work``, by rank.

    Raises:
        ValueError: there is no environment, so no process.
        Refused: as the process that failed first did.
        WorkerError: a process failed in any other way, or time ran out.
        KeyboardInterrupt: this process was interrupted; no other is left.
    """
    size = len(environments)
    if size == 0:
        raise ValueError("expected the environment of at least 1 process, got an empty sequence")
    with tempfile.TemporaryDirectory(prefix="hpu-duo-") as name, Family() as family:
        for rank, own in enumerate(environments):
            own_cores = () if cores is None else tuple(sorted(cores[rank]))
            family.start(Member(rank, size, Path(name), own_cores), work, args, own)
        _join(family, Path(name), deadline_s)
        return [read(result_path(Path(name), rank)) for rank in range(size)]


def replica_environments(num_replicas: int, num_devices: int) -> list[dict[str, str]]:
    """Return the variables of processes that each serve a model of their own.

    Each sees the devices of its share alone, of those that ``HABANA_VISIBLE_MODULES`` and
    ``CUDA_VISIBLE_DEVICES`` list, or else of the first ones of the machine; and it has a fair share of the
    CPUs as ``OMP_NUM_THREADS`` unless that is set.

    Args:
        num_devices: of each process; 0 leaves these variables as they are.

    Raises:
        ValueError: there are fewer devices than that.
    """
    wanted = num_replicas * num_devices
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, _num_cpus() // num_replicas)))
    shares: dict[str, list[str]] = {}
    if not num_devices:
        return [{**os.environ, "OMP_NUM_THREADS": threads} for _ in range(num_replicas)]
    for name in ("HABANA_VISIBLE_MODULES", "CUDA_VISIBLE_DEVICES"):
        listed = [each.strip() for each in os.environ.get(name, "").split(",") if each.strip()]
        if listed and len(listed) < wanted:
            raise ValueError(f"expected {name} to list {wanted} devices, got {','.join(listed)}")
        shares[name] = listed or list(map(str, range(wanted)))
    found = torch.cuda.device_count() if torch.cuda.is_available() else wanted
    if found < wanted:
        raise ValueError(f"expected {wanted} CUDA devices for {num_replicas} replicas, found {found}")
    return [
        {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            **{
                name: ",".join(devices[rank * num_devices : (rank + 1) * num_devices])
                for name, devices in shares.items()
            },
        }
        for rank in range(num_replicas)
    ]


def member_environment(member: Member) -> dict[str, str]:
    """Return the variables of one process that tell it its place among all; see ``run_processes``."""
    return {
        "RANK": str(member.rank),
        "LOCAL_RANK": str(member.rank),
        "WORLD_SIZE": str(member.size),
        "LOCAL_WORLD_SIZE": str(member.size),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _num_cpus() // member.size))),
    }


def become(member: Member, own: Mapping[str, str]) -> None:
    """Give this process the variables of a member, before it takes a device.

    Args:
        own: variables of this process besides ``member_environment``.
    """
    os.environ.update({**member_environment(member), **own})


class Family:
    """Processes that were started, none of which outlives the context.

    Attributes:
        processes: in order of their start.
    """

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._error_files: list[str] = []
        self._is_killed = False

    def __enter__(self) -> Family:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self._is_killed:
                for process in self.processes:
                    process.terminate()
                self.join(GRACE_S)
        finally:
            self.kill()
            self.join(_KILLED_S)
            for file in self._error_files:
                Path(file).unlink(missing_ok=True)

    def start(
        self, member: Member, work: Callable[..., Any], args: tuple[Any, ...], own: Mapping[str, str]
    ) -> None:
        """Start one more process, which runs ``work(member, *args)``; see ``run_processes``.

        Args:
            own: variables of this process besides ``member_environment``.
        """
        with _environment({**member_environment(member), **own}):
            context = mp.start_processes(
                run_member, (member, work, args), nprocs=1, join=False, start_method="spawn"
            )
        self.processes += context.processes
        self._error_files += context.error_files

    def kill(self) -> None:
        """End all processes at once, stopped ones included, and wait for none."""
        self._is_killed = True
        for process in self.processes:
            process.kill()

    def join(self, seconds: float) -> None:
        """Wait for the end of all processes, for so many seconds in all."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))

    def context(self) -> mp.ProcessContext:
        """The processes as a context of torch's own launcher."""
        return mp.ProcessContext(self.processes, self._error_files)


def _join(family: Family, directory: Path, deadline_s: float | None) -> None:
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
        raise first_failure(directory, error.error_index, str(error)) from None
    for rank in range(len(family.processes)):
        if not result_path(directory, rank).exists():
            # Interrupted from outside, which is no error to torch's launcher, or ended by its own code.
            raise first_failure(directory, rank, f"process {rank} ended before its work was done")


def first_failure(directory: Path, rank: int, told: str) -> Exception:
    """Return the error that a process has reported first.

    Args:
        directory: of the processes' results and errors.
        rank, told: the process and its end, if none has reported any.
    """
    failures = [read(path) for path in directory.glob("*.failure")]
    if not failures:
        return WorkerError(rank, told)
    first = min(failures, key=lambda failure: failure.when_ns)
    if first.is_refusal:
        return Refused(first.message)
    return WorkerError(first.rank, f"process {first.rank} failed: {first.message}\n{first.trace}")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set the variables of processes started inside, and ignore SIGINT there: the parent passes Ctrl-C on."""
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
