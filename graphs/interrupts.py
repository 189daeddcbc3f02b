"""Ctrl-C waits for work that must not be torn."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Deferral:
    """A stretch of work that an interrupt (SIGINT) does not tear; made by ``interrupts_deferred``.

    Args:
        handler: what handles the signal otherwise; None where nothing has to wait.
        only_first: a second interrupt takes effect at once.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | None, only_first: bool) -> None:
        self._handler, self._only_first = handler, only_first
        self._came: tuple[int, FrameType | None] | None = None

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let interrupts take effect inside, at once; one that has come already does so before."""
        if self._handler is None:
            yield
            return
        try:
            signal.signal(signal.SIGINT, self._handler)
            self.let_through()
            yield
        finally:
            signal.signal(signal.SIGINT, self.remember)

    def remember(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: later."""
        assert self._handler is not None
        is_second, self._came = self._came is not None, (number, frame)
        if self._only_first and is_second:
            self._handler(number, frame)

    def let_through(self) -> None:
        """Handle the interrupt that has come, if one has."""
        came, self._came = self._came, None
        if came is not None and self._handler is not None:
            self._handler(*came)


@contextmanager
def interrupts_deferred(*, only_first: bool = False) -> Iterator[Deferral]:
    """Let an interrupt (SIGINT) that comes inside take effect at the end.

    For short work on the host that is done whole or not at all, and for compiled code, which makes
    another exception of what is raised in a Python function that it calls. Only the main thread is ever
    interrupted, so in another one this does nothing; nor where no Python function handles the signal.

    Args:
        only_first: a second interrupt takes effect at once. For work that may take long, and that may be
            torn if need be.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield Deferral(None, only_first)
        return
    deferral = Deferral(handler, only_first)
    signal.signal(signal.SIGINT, deferral.remember)
    try:
        yield deferral
    finally:
        signal.signal(signal.SIGINT, handler)
        deferral.let_through()
