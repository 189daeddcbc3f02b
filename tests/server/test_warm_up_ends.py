"""A server that is told to end in its warm-up ends, and without an abort."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from tests.server.conftest import TinyChat
from tests.server.live import Live, wait_until

LEFT_BEHIND = """
import signal, threading, time
from hpu_duo.cli.serving.serve import exit_as
from hpu_duo.server.http.listening import Ending
threading.Thread(target=time.sleep, args=(600,)).start()
exit_as(Ending(signal.SIGTERM, True), "failed", is_left_behind=True)
"""

LATE = """
import atexit, signal
from hpu_duo.cli.serving.serve import exit_as
from hpu_duo.server.http.listening import Ending
class Late:
    def __del__(self): print("torn down", flush=True)
late = Late()
atexit.register(print, "exit functions")
exit_as(Ending(signal.{name}, True), "failed")
"""


def test_a_warm_up_stops_between_two_graphs(tiny: TinyChat, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.load(graphs="replay", attention="sdpa")

    def endless(progress: Any) -> None:
        for number in range(10**6):
            progress(number, 10**6, None)
            time.sleep(0.01)

    monkeypatch.setattr(model, "warmup", endless)
    server = Live(model, warm_up=True)
    wait_until(lambda: server.service.warm_up_progress is not None)
    server.signal()
    assert server.join()
    assert not server.service.is_left_behind
    assert server.server.ending.is_drained


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_a_process_ends_without_being_torn_down(name: str, code: int) -> None:
    source = LATE.format(name=name)
    done = subprocess.run([sys.executable, "-c", source], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "exit functions\n", "")


def test_a_process_ends_though_a_thread_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_BEHIND], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
