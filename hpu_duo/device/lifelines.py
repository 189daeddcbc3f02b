"""Connections over which rank 0 notices which other rank has died, hangs or failed, on any machine.

Every other rank keeps a connection to rank 0, and sends a line twice a second. The system closes it when
the process ends, however it ends, so that rank 0 knows at once; and a rank that loses rank 0 ends itself,
wherever its main thread may wait.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hpu_duo.device.blame import Report, Signs
from hpu_duo.device.lateness import Lateness, waits_for_others

BEAT_S = 0.5
_LOOK_S = 0.1
_OWN_END_S = 2.0
"""Seconds that a rank without rank 0 has to end by an error of its own."""
_MOST_TRACE = 1 << 14
_MOST_LINE = 1 << 18
_ADDRESS = "hpu-duo/lifelines"
"""Key of the address in the store that ranks meet at."""


@dataclass
class _Line:
    """One connection, as rank 0 has it."""

    connection: socket.socket
    rank: int | None = None
    unread: bytes = b""
    silent_s: float = 0.0
    num_done: int = 0
    is_waiting: bool = False


class Lifelines:
    """The connections of all other ranks, on rank 0; one thread uses them.

    Args:
        host: name or address of this machine that the others reach it by.
        size: number of ranks.
        store: that ranks meet at.

    Attributes:
        lateness: of the other ranks; gets the orders sent to them.
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
        """Ranks that have not come yet."""
        return [rank for rank in range(1, self._size) if rank not in self._lines]

    @property
    def have_ended(self) -> bool:
        """Whether all other ranks are gone, or have said that they end."""
        return len(self._ended | self._gone) == self._size - 1

    def look(self) -> None:
        """Take what has come, for a tenth of a second at most, and give a sign of life."""
        for key, _ in self._selector.select(_LOOK_S):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        # Only while this process runs: one that was stopped and goes on has not seen what the others did.
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
        """Return what is known of the other ranks."""
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
        """Take one line; returns False for that of a stranger."""
        try:
            told = json.loads(text)
        except ValueError:
            return False
        if not isinstance(told, dict):
            return False
        if line.rank is None:
            rank = told.get("rank")
            if told.get("token") != self._token or rank not in self.missing:
                return False
            line.rank = rank
            self._lines[rank] = line
        elif "error" in told:
            self._reports.append(Report(line.rank, told["error"], told["trace"], told["may_follow"]))
        elif "ended" in told:
            self._ended.add(line.rank)
        else:
            line.num_done, line.is_waiting = told["done"], bool(told.get("waits"))
        return True


class Lifeline:
    """The connection of one rank to rank 0: signs of life until it is closed.

    Args:
        rank: of this process.
        store: that ranks meet at.
        timeout_s: most seconds without a sign of rank 0, before this process ends.

    Attributes:
        num_done: orders that this rank has carried out, which it tells.
    """

    def __init__(self, rank: int, store: dist.Store, timeout_s: float) -> None:
        host, port, token = json.loads(store.get(_ADDRESS))
        self._connection = socket.create_connection((host, port), timeout=timeout_s)
        self._connection.settimeout(BEAT_S)
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._is_closed = self._has_reported = False
        self.num_done = 0
        # Who connects is who carries out orders.
        self._thread_id = threading.get_ident()
        self._tell({"rank": rank, "token": token})
        for work in (self._beat, self._follow_rank_0):
            threading.Thread(target=work, name="hpu-duo-life", daemon=True).start()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell rank 0 of an error that leaves the context; of the first one only."""
        try:
            yield
        except BaseException as error:
            if not self._has_reported:
                self._has_reported = True
                self._tell(_words(error))
            raise

    def count(self) -> None:
        """Note that an order has been carried out."""
        self.num_done += 1

    def close(self) -> None:
        """Say that this rank ends as it should."""
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
            why = "has ended" if is_gone else f"gave no sign of life for {silent_s:.0f} s"
            print(f"hpu-duo: rank 0 {why}; this rank ends, too", file=sys.stderr, flush=True)
            os._exit(1)


def may_follow(error: BaseException) -> bool:
    """Whether an error may come of another rank's end: exchanges raise it where a peer is gone or late."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _words(error: BaseException) -> dict[str, Any]:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    message = lines[-1].strip().splitlines()[0]
    return {"error": message, "trace": "".join(lines)[-_MOST_TRACE:], "may_follow": may_follow(error)}
