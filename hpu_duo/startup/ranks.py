"""Ranks of an engine, from their start to their end."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from hpu_duo.device import Member, process_environments, usable_name
from hpu_duo.device.heartbeats import Heartbeat, Heartbeats, Report, Signs, blamed, may_follow
from hpu_duo.device.processes import (
    HOST,
    Family,
    become,
    bind,
    bound,
    cores_by_device,
    first_failure,
    store_in,
)
from hpu_duo.device.ranks import MEETING_S, Launched, Membership, RankError, Ranks, Sent, joined
from hpu_duo.engine.orders import WARM_UP_ORDERS, Order, Stop

_END_S = 3.0
"""Timeout in seconds for ranks that have announced their end."""
_LOOK_S = 0.02


class EarlyEnd(NamedTuple):
    """The end of a rank that had not connected to rank 0 yet.

    Attributes:
        rank: number of the rank.
        report: what it reported.
    """

    rank: int
    report: str


class Launch(Protocol):
    """The processes of the worker ranks, on rank 0."""

    @property
    def store(self) -> dist.Store:
        """The rendezvous store of the ranks."""
        ...

    @property
    def host(self) -> str:
        """Name of rank 0's machine, as the others reach it."""
        ...

    def early_end(self) -> EarlyEnd | None:
        """Return a rank that has ended, if known here."""
        ...

    def end_of(self, rank: int) -> str:
        """Describe how the process of a rank has ended."""
        ...

    def kill(self) -> None:
        """Kill the processes, if they are children of this one."""
        ...

    def close(self) -> None:
        """Release the resources of the launch, after the ranks have ended."""
        ...


class OwnLaunch:
    """Ranks of one machine, started by rank 0.

    Linux kills them when this process ends, however it ends; elsewhere each of them notices that and ends.

    Args:
        device: configured name of the device.
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
            # The caller may have been interrupted while ranks start; no more are started.
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
        device: configured name of the device.
        launched: this rank.
        timeout_s: of the rendezvous.

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
        """Do nothing: ranks end when rank 0's heartbeats do, and the launcher sees to it."""

    def close(self) -> None:
        """Do nothing: the launcher owns the resources."""


def until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition set by another thread; returns whether it is set."""
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


_SETTLE_S = 0.3
_NAMING_S = 3.0
"""Seconds to collect the errors of ranks after the end of one."""
_MARGIN_S = 5.0
"""Seconds by which the timeout of an exchange exceeds that of a silent rank, so that silence is detected
first."""


class LedRanks:
    """The worker ranks, on rank 0; see ``WorkerRanks``.

    If a rank ends, or sends no heartbeat, the others are stopped, and every later order raises an error that
    names it.

    Args:
        launch: of their processes.
        size: number of ranks.
        timeout_s: most seconds of a rank without a sign of life, of an order that does not compile, and, with
            some more, of an exchange between ranks.

    Attributes:
        membership: of rank 0, once it has joined.
        is_led: whether all ranks are built, and wait for orders.
    """

    def __init__(self, launch: Launch, size: int, timeout_s: float) -> None:
        self.size, self._launch, self._timeout_s = size, launch, timeout_s
        self._broken: RankError | None = None
        self._own: Report | None = None
        self._callbacks: list[Callable[[RankError], None]] = []
        self._lock = threading.Lock()
        self._is_stopped = self._is_over = False
        self._stack = ExitStack()
        self.membership: Membership | None = None
        self.is_led = False
        self._stack.callback(launch.close)
        try:
            self._heartbeats = Heartbeats(launch.host, size, launch.store)
        except BaseException:
            self._stack.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="hpu-duo-ranks", daemon=True)
        self._watcher.start()

    @property
    def launch(self) -> Launch:
        """The launch of their processes."""
        return self._launch

    def join(self, backend: str, device: torch.device) -> Membership:
        """Join the process group as rank 0, once all ranks are connected.

        Raises:
            RankError: a rank has failed, or has not connected in time.
        """
        if not until(lambda: not self._heartbeats.missing or self._broken is not None, MEETING_S):
            names = ", ".join(map(str, self._heartbeats.missing))
            raise self._break(f"expected rank(s) {names} to connect within {MEETING_S:.0f} s, got none")
        if self._broken is not None:
            raise self._broken
        try:
            self.membership = self._stack.enter_context(
                joined_as(Ranks(0, self.size), backend, self._launch.store, device, self._timeout_s)
            )
        except BaseException as error:
            raise self.failed(error) from error
        return self.membership

    @property
    def sent(self) -> Sent:
        """See ``WorkerRanks``."""
        return Sent() if self.membership is None else self.membership.link.sent

    def tell(self, order: Order) -> None:
        """See ``WorkerRanks``."""
        if self._broken is not None:
            raise self._broken
        assert self.membership is not None, "ranks have joined"
        try:
            self._heartbeats.lateness.tell(is_limited=not isinstance(order, WARM_UP_ORDERS))
            self.membership.link.send(order)
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: BaseException) -> RankError:
        """See ``WorkerRanks``."""
        if isinstance(error, RankError):
            return error
        words = f"{type(error).__name__}: {error}"
        if may_follow(error):
            # The first rank to fail reports its error, while others see a closed connection.
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._own = Report(0, words, trace, may_follow=True)
            until(lambda: self._broken is not None, 2 * _NAMING_S)
        return self._break(f"rank 0 failed: {words}")

    def when_lost(self, callback: Callable[[RankError], None]) -> None:
        """See ``WorkerRanks``."""
        with self._lock:
            if self._broken is None:
                self._callbacks.append(callback)
                return
        callback(self._broken)

    def cause(self, error: BaseException) -> BaseException:
        """Return the error of the rank that failed first, if an error of this one follows from it."""
        return self.failed(error) if may_follow(error) else error

    def kill(self) -> None:
        """See ``WorkerRanks``."""
        with self._lock:
            self._callbacks = []
        self._break("other ranks were killed")

    def stop(self) -> None:
        """End the other ranks, and leave; does nothing the second time."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._broken is None and self.is_led and self.membership is not None:
            with suppress(Exception):
                self.membership.link.send(Stop())
            until(lambda: self._heartbeats.have_ended or self._heartbeats.has_silent, _NAMING_S)
            if not self._heartbeats.have_ended:
                # Leaving the group must not wait for ranks that are stopped or hang.
                self._launch.kill()
        else:
            self._launch.kill()
        self._is_over = True
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_NAMING_S)
        self._stack.close()

    def _break(self, message: str) -> RankError:
        with self._lock:
            if self._broken is not None:
                return self._broken
            self._broken = RankError(f"{message}; all ranks have ended, start the process again")
            callbacks, self._callbacks = self._callbacks, []
        self._launch.kill()
        for each in callbacks:
            each(self._broken)
        return self._broken

    def _watch(self) -> None:
        """Notice a rank that ends, fails or hangs; ranks that are still there end with this loop."""
        bad_since: float | None = None
        try:
            while not self._is_over and self._broken is None:
                self._heartbeats.look()
                if self._is_stopped:
                    continue
                early = self._launch.early_end() if self._heartbeats.missing else None
                if early is not None:
                    self._break(f"rank {early.rank} {early.report}")
                    return
                signs = self._heartbeats.signs().with_report(self._own)
                if not signs.are_bad(self._timeout_s):
                    bad_since = None
                    continue
                now = time.monotonic()
                bad_since = now if bad_since is None else bad_since
                self._judge(signs, now - bad_since)
        finally:
            self._heartbeats.close()

    def _judge(self, signs: Signs, seconds: float) -> None:
        """Return the error of the rank that failed first, some seconds after a failure."""
        if seconds < _SETTLE_S:
            return
        found = blamed(signs, self._timeout_s, is_all=seconds > _NAMING_S)
        if found is not None:
            report = self._launch.end_of(found.rank) if found.report is None else found.report
            self._break(f"rank {found.rank} {report}")


@contextmanager
def joined_as(
    ranks: Ranks, backend: str, store: dist.Store, device: torch.device, timeout_s: float
) -> Iterator[Membership]:
    """Join the process group; the timeout of exchanges exceeds that of a silent rank."""
    with joined(ranks, backend, store, device, timeout_s + _MARGIN_S) as membership:
        yield membership


@contextmanager
def heartbeat_to_rank_0(rank: int, store: dist.Store, timeout_s: float) -> Iterator[Heartbeat]:
    """Context manager that sends heartbeats of a worker rank, and reports errors to rank 0."""
    heartbeat = Heartbeat(rank, store, timeout_s)
    # Rank 0 decides when to end: a signal to all processes must let running calls end first.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    with heartbeat.reporting():
        yield heartbeat
    heartbeat.close()
