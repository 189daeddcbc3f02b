"""Heartbeats between ranks, and which rank ended all of them."""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

_WORDS_OF_EXCHANGES = re.compile(
    r"connection|peer|timed? ?out|broken pipe|socket|gloo|nccl|hccl|collective|\bDist\w*Error", re.IGNORECASE
)
_ALIVE_S = 1.5
"""Seconds without a heartbeat after which a rank is considered dead."""
UNKNOWN_S = 1.0
"""Additional seconds for late ranks if it is not known which of them the others wait for."""


@dataclass(frozen=True)
class Report:
    """Error that a rank reported before it ended.

    Attributes:
        rank: number of the rank.
        message, trace: the error in one line, and with its traceback.
        may_follow: whether exchanges raise errors of this type if another rank is lost or late.
    """

    rank: int
    message: str
    trace: str
    may_follow: bool

    @property
    def names_an_exchange(self) -> bool:
        """Whether its message is that of an exchange without other participants."""
        return self.may_follow and _WORDS_OF_EXCHANGES.search(self.message) is not None

    @property
    def failure(self) -> str:
        """The error as that of a rank that has failed by itself."""
        return f"failed: {self.message}\n{self.trace}".rstrip()


@dataclass(frozen=True)
class Signs:
    """The knowledge that rank 0 has of all ranks.

    Attributes:
        size: number of ranks.
        reports: errors, in order of arrival.
        gone: ranks that ended without an announcement.
        silent_s: seconds since each rank's last sign of life.
        num_done: executed orders of each rank, as reported.
        late_s: seconds that each rank has been at the same order, of those that have a limit.
        waiting: ranks that were last inside an exchange with others.
    """

    size: int
    reports: tuple[Report, ...] = ()
    gone: frozenset[int] = frozenset()
    silent_s: Mapping[int, float] = field(default_factory=dict)
    num_done: Mapping[int, int] = field(default_factory=dict)
    late_s: Mapping[int, float] = field(default_factory=dict)
    waiting: frozenset[int] = frozenset()

    def with_report(self, report: Report | None) -> Signs:
        """Return the signs with one more report."""
        if report is None:
            return self
        return replace(self, reports=(*self.reports, report))

    def are_bad(self, timeout_s: float) -> bool:
        """Whether ranks cannot continue.

        Args:
            timeout_s: most seconds of silence, and of an order.
        """
        longest_s = max((*self.silent_s.values(), *self.late_s.values()), default=0.0)
        return bool(self.reports or self.gone or longest_s > timeout_s)


class Blamed(NamedTuple):
    """The rank that failed first.

    Attributes:
        rank: number of the rank.
        report: its error, or why it is considered hung; None if its process has ended without a word.
    """

    rank: int
    report: str | None


def blamed(signs: Signs, timeout_s: float, *, is_all: bool) -> Blamed | None:
    """Return the rank that failed first, once known.

    An error of its own comes first, then a process that has ended without a word, then silence, then an order
    that does not end: of the ranks that are late, the one that does not wait for others. Where there are only
    errors that may follow from another rank's end or delay, the first one that is not in the words of an
    exchange is a rank's own. If all have errors of exchanges, the one without a report hangs: rank 0, or the
    one with the fewest executed orders.

    Args:
        timeout_s: most seconds of silence, and of an order.
        is_all: whether every rank that fails has had the time to report it.
    """
    own = next((each for each in signs.reports if not each.may_follow), None)
    if own is not None:
        return Blamed(own.rank, own.failure)
    reported = {each.rank for each in signs.reports}
    without_word = sorted(signs.gone - reported)
    if without_word:
        return Blamed(without_word[0], None)
    silent = {rank: silence for rank, silence in signs.silent_s.items() if silence > timeout_s}
    waited_for = {rank: silence for rank, silence in silent.items() if rank not in reported} or silent
    if waited_for:
        rank = max(waited_for, key=waited_for.__getitem__)
        return Blamed(rank, f"sent no heartbeat for {waited_for[rank]:.0f} s")
    if not reported:
        return _late(signs, timeout_s)
    if not is_all:
        return None
    likely = next((each for each in signs.reports if not each.names_an_exchange), None)
    if likely is not None:
        return Blamed(likely.rank, likely.failure)
    first, others = signs.reports[0], [each for each in range(signs.size) if each not in reported]
    if others:
        hung = min(others, key=lambda each: (each in signs.waiting, each > 0, signs.num_done.get(each, 0)))
        return Blamed(
            hung, f"hangs: rank {first.rank} waited for it in vain ({first.message})\n{first.trace}".rstrip()
        )
    return Blamed(first.rank, first.failure)


def _late(signs: Signs, timeout_s: float) -> Blamed | None:
    """Return the rank with an order that does not end, once known or without further reports."""
    late = {
        rank: late_s
        for rank, late_s in signs.late_s.items()
        # Of one that is silent as well, silence is reported in a moment.
        if late_s > timeout_s and signs.silent_s.get(rank, 0.0) <= _ALIVE_S
    }
    busy = sorted(late.keys() - signs.waiting)
    if len(busy) != 1 and max(late.values(), default=0.0) <= timeout_s + UNKNOWN_S:
        return None
    first, *others = sorted(busy or late, key=lambda rank: (signs.num_done.get(rank, 0), rank))
    like = f", as has rank {', '.join(map(str, others))}" if others else ""
    return Blamed(first, f"hangs: it has been at an order for {late[first]:.0f} s{like}")


_EXCHANGES = (str(Path("hpu_duo", "device", "collectives.py")), str(Path("torch", "distributed")))
"""Parts of the paths of code that waits for other ranks."""


class Lateness:
    """The orders that were sent to ranks, and for how long each has been at the one it has not carried out.

    Orders of a warm-up have no limit: they compile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limited: set[int] = set()
        self._num_reported = 0
        self._num_done: dict[int, int] = {}
        self._late_s: dict[int, float] = {}

    def tell(self, *, is_limited: bool) -> None:
        """Note that the next order is sent."""
        with self._lock:
            if is_limited:
                self._limited.add(self._num_reported)
            self._num_reported += 1

    def look(self, num_done: Mapping[int, int], passed_s: float) -> dict[int, float]:
        """Return the seconds of each rank that is at an order with a limit.

        Args:
            num_done: executed orders of each rank.
            passed_s: seconds since the last look.
        """
        with self._lock:
            for rank, done in num_done.items():
                is_same = self._num_done.get(rank) == done and done in self._limited
                self._late_s[rank] = self._late_s.get(rank, 0.0) + passed_s if is_same else 0.0
                self._num_done[rank] = done
            first = min(num_done.values(), default=0)
            self._limited = {number for number in self._limited if number >= first}
            return {rank: late_s for rank, late_s in self._late_s.items() if rank in num_done}


def waits_for_others(thread_id: int) -> bool:
    """Whether a thread of this process is inside an exchange between ranks, as far as Python shows it."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _EXCHANGES):
            return True
        frame = frame.f_back
    return False


BEAT_S = 0.5
_LOOK_S = 0.1
_OWN_END_S = 2.0
"""Seconds that a rank without rank 0 has to end by an error of its own."""
_MOST_TRACE = 1 << 14
_MOST_LINE = 1 << 18
_ADDRESS = "hpu-duo/heartbeats"
"""Key of the address in the rendezvous store."""


@dataclass
class _Line:
    """One connection, as rank 0 has it."""

    connection: socket.socket
    rank: int | None = None
    unread: bytes = b""
    silent_s: float = 0.0
    num_done: int = 0
    is_waiting: bool = False


class Heartbeats:
    """The connections of all other ranks, on rank 0; one thread uses them.

    Args:
        host: name or address of this machine that the others reach it by.
        size: number of ranks.
        store: rendezvous store of the ranks.

    Attributes:
        lateness: of the other ranks; notified of orders.
    """

    def __init__(self, host: str, size: int, store: dist.Store) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=size)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._token = secrets.token_hex(16)
        self._size = size
        self._lines: dict[int, _Line] = {}
        self._reports: list[Report] = []
        self._gone: set[int] = set()
        self._ended: set[int] = set()
        self._looked_at, self._beat_at = time.monotonic(), 0.0
        self.lateness = Lateness()
        self._late_s: dict[int, float] = {}
        port = self._listener.getsockname()[1]
        store.set(_ADDRESS, json.dumps([host, port, self._token]))

    @property
    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return [rank for rank in range(1, self._size) if rank not in self._lines]

    @property
    def have_ended(self) -> bool:
        """Whether all other ranks have ended, or announced it."""
        return len(self._ended | self._gone) == self._size - 1

    @property
    def has_silent(self) -> bool:
        """Whether a rank that has not ended sends no heartbeat now."""
        return any(silent_s > _ALIVE_S for silent_s in self.signs().silent_s.values())

    def look(self) -> None:
        """Receive reports, for at most a tenth of a second, and send a heartbeat."""
        for key, _ in self._selector.select(_LOOK_S):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        # Only while this process runs: one that was stopped and continued has missed heartbeats.
        passed, self._looked_at = min(now - self._looked_at, 2 * BEAT_S), now
        for line in self._lines.values():
            line.silent_s += passed
        num_done = {rank: line.num_done for rank, line in self._lines.items() if rank not in self._ended}
        self._late_s = self.lateness.look(num_done, passed)
        if now - self._beat_at > BEAT_S:
            self._beat_at = now
            for line in self._lines.values():
                with suppress(OSError):
                    line.connection.send(b"\n")

    def signs(self) -> Signs:
        """Return the signs of the other ranks."""
        silent = {rank: line.silent_s for rank, line in self._lines.items() if rank not in self._ended}
        num_done = {rank: line.num_done for rank, line in self._lines.items()}
        waiting = frozenset(rank for rank, line in self._lines.items() if line.is_waiting)
        gone = frozenset(self._gone)
        return Signs(self._size, tuple(self._reports), gone, silent, num_done, self._late_s, waiting)

    def close(self) -> None:
        """End: ranks that are still there end themselves."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, _Line(connection))

    def _read(self, line: _Line) -> None:
        try:
            data = line.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        line.silent_s = 0.0
        *whole, line.unread = (line.unread + data).split(b"\n")
        is_known = all(self._take(line, each) for each in whole if each)
        if not data or not is_known or len(line.unread) > _MOST_LINE:
            self._selector.unregister(line.connection)
            line.connection.close()
            if line.rank is not None and line.rank not in self._ended:
                self._gone.add(line.rank)

    def _take(self, line: _Line, text: bytes) -> bool:
        """Process one line; returns False for one of another peer."""
        try:
            message = json.loads(text)
        except ValueError:
            return False
        if not isinstance(message, dict):
            return False
        if line.rank is None:
            rank = message.get("rank")
            if message.get("token") != self._token or rank not in self.missing:
                return False
            line.rank = rank
            self._lines[rank] = line
        elif "error" in message:
            self._reports.append(Report(line.rank, message["error"], message["trace"], message["may_follow"]))
        elif "ended" in message:
            self._ended.add(line.rank)
        else:
            line.num_done, line.is_waiting = message["done"], bool(message.get("waits"))
        return True


class Heartbeat:
    """The connection of one rank to rank 0: signs of life until it is closed.

    Args:
        rank: of this process.
        store: rendezvous store of the ranks.
        timeout_s: most seconds without a sign of rank 0, before this process ends.

    Attributes:
        num_done: executed orders of this rank, to report.
    """

    def __init__(self, rank: int, store: dist.Store, timeout_s: float) -> None:
        host, port, token = json.loads(store.get(_ADDRESS))
        self._connection = socket.create_connection((host, port), timeout=timeout_s)
        self._connection.settimeout(BEAT_S)
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._is_closed = self._has_reported = False
        self.num_done = 0
        # The connecting thread is the one that executes orders.
        self._thread_id = threading.get_ident()
        self._tell({"rank": rank, "token": token})
        for work in (self._beat, self._follow_rank_0):
            threading.Thread(target=work, name="hpu-duo-life", daemon=True).start()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Context manager that reports an error to rank 0; only the first one."""
        try:
            yield
        except BaseException as error:
            if not self._has_reported:
                self._has_reported = True
                self._tell(_words(error))
            raise

    def count(self) -> None:
        """Count an executed order."""
        self.num_done += 1

    def close(self) -> None:
        """Announce that this rank ends normally."""
        self._tell({"ended": True})
        self._is_closed = True
        self._connection.close()

    def _tell(self, words: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):
            self._connection.sendall(json.dumps(words).encode() + b"\n")

    def _beat(self) -> None:
        while not self._is_closed:
            self._tell({"done": self.num_done, "waits": waits_for_others(self._thread_id)})
            time.sleep(BEAT_S)

    def _follow_rank_0(self) -> None:
        silent_s = 0.0
        while silent_s < self._timeout_s:
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                silent_s += BEAT_S
                continue
            except OSError:
                data = b""
            if not data:
                break
            silent_s = 0.0
        if self._is_closed:
            return
        time.sleep(_OWN_END_S)
        if not self._is_closed:
            is_gone = silent_s < self._timeout_s
            why = "has ended" if is_gone else f"sent no heartbeat for {silent_s:.0f} s"
            print(f"hpu-duo: rank 0 {why}; this rank ends, too", file=sys.stderr, flush=True)
            os._exit(1)


def may_follow(error: BaseException) -> bool:
    """Whether an error may be caused by another rank's end: exchanges raise it if a peer is lost or late."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _words(error: BaseException) -> dict[str, Any]:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    message = lines[-1].strip().splitlines()[0]
    return {"error": message, "trace": "".join(lines)[-_MOST_TRACE:], "may_follow": may_follow(error)}
