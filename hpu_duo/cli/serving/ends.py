"""Ends of servers: what makes them stop, and the exit codes they leave."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

import typer

from hpu_duo.cli.terminal.errors import INTERRUPTED

if TYPE_CHECKING:
    from hpu_duo.server.http.listening import Ending

_FAILED = 1


def end_with_stdin() -> None:
    """Stop this process as SIGTERM does when standard input ends, because whoever started it is gone."""

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="ends-with-stdin", daemon=True).start()


def exit_as(ending: Ending, failure: str, *, is_left_behind: bool = False) -> NoReturn:
    """Tell of the end of a server, and end the process with a code that is not 0 unless a signal ended it.

    Args:
        failure: tells why it has ended by itself.
        is_left_behind: whether a thread computes that could not be stopped. Exit functions, such as those
            that wait for ranks, might wait for it.
    """
    from hpu_duo.device.leaving import leave

    leave(_code_of(ending, failure), calls_exit_functions=not is_left_behind)


def _code_of(ending: Ending, failure: str) -> int:
    from hpu_duo.server.http.listening import is_interrupt

    if ending.signal_number is None:
        typer.echo(f"hpu-duo: {failure}", err=True)
        return _FAILED
    if is_interrupt(ending):
        return INTERRUPTED
    if not ending.is_drained:
        typer.echo("hpu-duo: stopped before every call had ended", err=True)
    return 0
