"""Deferred interrupts (Ctrl-C), for work that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Deferral:
    """A context in which interrupts (SIGINT) are deferred; created by ``interrupts_deferred``.

    Args:
        handler: the signal's handler outside; None if nothing is deferred.
        only_first: a second interrupt is not deferred.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | None, only_first: bool) -> None:
        self._handler, self._only_first = handler, only_first
        self._is_lifted = False
        self._came: tuple[int, FrameType | None] | None = None

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Context manager in which interrupts are not deferred; a deferred one is raised at its start."""
        self._is_lifted = True
        try:
            self.let_through()
            yield
        finally:
            self._is_lifted = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler of the outermost deferral: pass the signal to the innermost one."""
        (_active[-1] if _active else self).remember(number, frame)

    def remember(self, number: int, frame: FrameType | None) -> None:
        """Store the signal for later, or handle it if it is not deferred."""
        assert self._handler is not None
        if self._is_lifted:
            self._handler(number, frame)
            return
        is_second, self._came = self._came is not None, (number, frame)
        if self._only_first and is_second:
            self._handler(number, frame)

    def let_through(self) -> None:
        """Handle the interrupt that was deferred, if any."""
        came, self._came = self._came, None
        if came is not None and self._handler is not None:
            self._handler(*came)


_active: list[Deferral] = []
"""Deferrals of the main thread, the innermost one last. Only the outermost one sets the signal's handler,
which takes up to 10 microseconds."""


@contextmanager
def interrupts_deferred(*, only_first: bool = False) -> Iterator[Deferral]:
    """Context manager that defers interrupts (SIGINT) to its end.

    For short work on the host that must be done whole, and for compiled code, which replaces exceptions of
    Python functions that it calls. Only the main thread is interrupted, so in other threads this does
    nothing; nor if no Python function handles the signal.

    Args:
        only_first: a second interrupt is not deferred. For long work that may be interrupted if need
            be.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Deferral(None, only_first)
        return
    before = None if _active else signal.getsignal(signal.SIGINT)
    handler = _active[-1].remember if _active else before
    if not callable(handler):
        yield Deferral(None, only_first)
        return
    deferral = Deferral(handler, only_first)
    try:
        _active.append(deferral)
        if before is not None:
            signal.signal(signal.SIGINT, deferral.receive)
        yield deferral
    finally:
        if deferral in _active:
            del _active[_active.index(deferral) :]
        if before is not None:
            signal.signal(signal.SIGINT, before)
        deferral.let_through()
