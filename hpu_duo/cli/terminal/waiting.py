"""Word of work that takes more than two seconds, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

_SILENT_S, _BLINK_S, _LINE_S = 2.0, 0.5, 10.0


@contextmanager
def waiting(what: str, silent_s: float = _SILENT_S) -> Iterator[None]:
    """Tell what takes so long: in place in a terminal, and elsewhere on a line of its own now and then.

    Args:
        what: is done, such as "searching buckets".
        silent_s: seconds before the first word.
    """
    ended = Event()
    thread = Thread(target=_tell, args=(what, silent_s, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell(what: str, silent_s: float, ended: Event) -> None:
    began = time.monotonic()
    if ended.wait(silent_s):
        return
    is_terminal = sys.stderr.isatty()
    begin, end = ("\r", "") if is_terminal else ("", "\n")
    while True:
        line = f"{begin}hpu-duo: {what}: {time.monotonic() - began:.0f} s{end}"
        print(line, end="", file=sys.stderr, flush=True)
        if ended.wait(_BLINK_S if is_terminal else _LINE_S):
            break
    if is_terminal:
        print("\r" + " " * len(line) + "\r", end="", file=sys.stderr, flush=True)
