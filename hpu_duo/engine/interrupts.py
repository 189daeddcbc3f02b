"""Ctrl-C waits while books are being kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let an interrupt (SIGINT) that comes inside take effect at the end.

    For short work on the host that must be done whole or not at all. Only the main thread is ever
    interrupted, so in another one this does nothing; nor where no Python function handles the signal.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: tuple[int, FrameType | None] | None = None

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = number, frame

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came is not None:
            handler(*came)
