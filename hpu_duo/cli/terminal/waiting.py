"""Word of work that takes more than two seconds, on standard error."""

from __future__ import annotations

import sys
import time
from threading import Event, Lock, Thread
from typing import Any

_SILENT_S, _BLINK_S, _LINE_S = 2.0, 0.5, 10.0


class Waiting:
    """Tell what takes so long: in place in a terminal, and elsewhere on a line of its own now and then.

    Args:
        what: is done, such as "searching buckets".
        silent_s: seconds before the first word, and after each sign of progress.
        line_s: seconds between lines where there is no terminal.
    """

    def __init__(self, what: str, silent_s: float = _SILENT_S, line_s: float = _LINE_S) -> None:
        self._what, self._silent_s, self._line_s = what, silent_s, line_s
        self._lock, self._ended = Lock(), Event()
        self._shown = 0
        self._since = time.monotonic()
        self._next = self._since + silent_s
        self._thread = Thread(target=self._tell, daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        """Tell nothing any more."""
        self._ended.set()
        self._thread.join()
        self.progressed()

    def progressed(self) -> None:
        """Be silent again: something else has been told, or is about to be."""
        with self._lock:
            self._since = time.monotonic()
            self._next = self._since + self._silent_s
            if self._shown:
                print("\r" + " " * self._shown + "\r", end="", file=sys.stderr, flush=True)
                self._shown = 0

    def _tell(self) -> None:
        while not self._ended.wait(min(_BLINK_S, self._silent_s)):
            with self._lock:
                now = time.monotonic()
                if now < self._next:
                    continue
                line = f"hpu-duo: {self._what}: {now - self._since:.0f} s"
                if sys.stderr.isatty():
                    print("\r" + line, end="", file=sys.stderr, flush=True)
                    self._shown, self._next = len(line), now + _BLINK_S
                else:
                    print(line, file=sys.stderr, flush=True)
                    self._next = now + self._line_s
