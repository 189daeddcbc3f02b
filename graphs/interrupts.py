"""Ctrl-C waits for work that must not be torn."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred(*, only_first: bool = False) -> Iterator[None]:
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
        yield
        return
    came: tuple[int, FrameType | None] | None = None

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        is_second, came = came is not None, (number, frame)
        if only_first and is_second:
            handler(number, frame)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came is not None:
            handler(*came)
