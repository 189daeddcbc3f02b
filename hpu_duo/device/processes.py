"""Several processes of one machine, each with a device and CPU cores of its own."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hpu_duo.device.loopback import on_loopback
from hpu_duo.device.plain import decode, encode

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

    A process of a card should run on cores near it, and not on those of the others.
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
    """Pin a started process to cores; empty = no pinning."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, set(cores))


def bind(cores: Collection[int]) -> None:
    """Pin this process to cores; empty = no pinning."""
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


def leave(code: int, *, calls_exit_functions: bool = True) -> NoReturn:
    """End this process now, without tearing the interpreter down.

    With a model that takes seconds, which block all requests.

    Args:
        code: exit code.
        calls_exit_functions: whether what is registered with ``atexit`` is called.
    """
    if calls_exit_functions:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


HOST = "127.0.0.1"
GRACE_S = 20.0
"""Seconds between SIGTERM and SIGKILL, to save state."""


_PR_SET_PDEATHSIG = 1


class Refused(Exception):
    """The request of the user is invalid.

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
            at its process's end. ``SIGCONT`` lets a stopped process detect that its parent has ended, and
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
            backend: a registered name of ``torch.distributed``, see ``DeviceRuntime.collectives``.
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
            # Before the others can detect it: the user has to see the first failure.
            self.report(error)
            raise
        finally:
            dist.destroy_process_group()

    def report(self, error: BaseException) -> None:
        """Write the error that ended this process; only the first one is stored."""
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
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # A crash of native code prints the Python stacks.
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
    """Return the store of processes of one machine: a file, protected by the permissions of its directory."""
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


_KILLED_S = 2.0
"""Timeout in seconds for killed processes; one that hangs in a driver is not waited for."""
_starting = threading.Lock()
Result = TypeVar("Result")


class WorkerError(RuntimeError):
    """A process failed, and the others were stopped; the message has its traceback.

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
        cores: of each process, see ``hpu_duo.device.processes``; None = wherever the system likes.

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
    """Return the environment variables of one process among several; see ``run_processes``."""
    return {
        "RANK": str(member.rank),
        "LOCAL_RANK": str(member.rank),
        "WORLD_SIZE": str(member.size),
        "LOCAL_WORLD_SIZE": str(member.size),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _num_cpus() // member.size))),
    }


def helper_environment() -> dict[str, str]:
    """Return the environment variables of a process of one thread with the same packages as this one."""
    home = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def become(member: Member, own: Mapping[str, str]) -> None:
    """Set the variables of a member in this process, before it acquires a device.

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
        """Kill all processes, stopped ones included, without waiting."""
        self._is_killed = True
        for process in self.processes:
            process.kill()

    def join(self, seconds: float) -> None:
        """Wait for the end of all processes, with a total timeout in seconds."""
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
        # It left no report: killed from outside, or it failed before our code.
        raise WorkerError(error.error_index, f"{error}; see its output above") from None
    except mp.ProcessRaisedException as error:
        raise first_failure(directory, error.error_index, str(error)) from None
    for rank in range(len(family.processes)):
        if not result_path(directory, rank).exists():
            # Interrupted from outside, which is no error to torch's launcher, or ended by its own code.
            raise first_failure(directory, rank, f"process {rank} ended before its work was done")


def first_failure(directory: Path, rank: int, end: str) -> Exception:
    """Return the error that a process has reported first.

    Args:
        directory: of the processes' results and errors.
        rank, end: the process and its end, if none has reported an error.
    """
    failures = [read(path) for path in directory.glob("*.failure")]
    if not failures:
        return WorkerError(rank, end)
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
