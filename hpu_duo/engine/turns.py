"""Threads that share an engine take turns."""

from __future__ import annotations

from threading import Lock, get_ident


class Turns:
    """A lock that its thread may take again, and that no thread gets twice while another one waits.

    One thread waits for the lock itself, the others wait to be the next. Whoever gives the lock back and
    wants it again is behind them.

    Ctrl-C must not come while it is taken or given back: hold it within ``interrupts_deferred``.
    """

    def __init__(self) -> None:
        self._next, self._lock = Lock(), Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner != get_ident():
            with self._next:
                self._lock.acquire()
            self._owner = get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()
