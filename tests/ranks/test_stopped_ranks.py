"""Ranks that are stopped, or started by a thread that ends, and rank 0's end: no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpu_duo.device.processes import Family
from hpu_duo.startup.ranks import OwnLaunch
from tests.device.test_processes import is_alive, wait_for
from tests.ranks.work import lead

ROOT = Path(__file__).parents[2]


class Stuck:
    """A process that ends only when it is killed, and writes down what is done to it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def terminate(self) -> None:
        self._calls.append(f"terminate {self._name}")

    def kill(self) -> None:
        self._calls.append(f"kill {self._name}")

    def join(self, seconds: float) -> None:
        self._calls.append(f"join {self._name}")


def test_all_processes_are_killed_before_any_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with Family() as family:
        family.processes = [Stuck("a", calls), Stuck("b", calls)]  # type: ignore[list-item]
    steps = ("terminate", "join", "kill", "join")
    assert calls == [f"{step} {name}" for step in steps for name in "ab"]
    calls.clear()
    with family:
        family.kill()
    assert calls == [f"{step} {name}" for step in ("kill", "kill", "join") for name in "ab"]


@pytest.mark.slow
def test_stopped_ranks_are_gone_when_rank_0_has_stopped_them() -> None:
    ranks = lead(2, 60.0)
    assert isinstance(ranks.launch, OwnLaunch)
    pids = [process.pid for process in ranks.launch.processes if process.pid is not None]
    [stopped] = pids
    os.kill(stopped, signal.SIGSTOP)
    ranks.stop()
    assert not any(map(is_alive, pids))


def test_a_stopped_rank_does_not_outlive_rank_0(tmp_path: Path) -> None:
    script = (
        "import time, signal\n"
        "from tests.ranks.work import lead\n"
        "if __name__ == '__main__':\n"
        "    ranks = lead(2, 60.0)\n"
        "    print(ranks.launch.processes[0].pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    (tmp_path / "lead.py").write_text(script)
    command = [sys.executable, str(tmp_path / "lead.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as leader:
        assert leader.stdout is not None
        follower = int(leader.stdout.readline())
        os.kill(follower, signal.SIGSTOP)
        leader.kill()
    wait_for(lambda: not is_alive(follower))


def test_ranks_outlive_the_thread_that_asked_for_them() -> None:
    found = []
    asking = threading.Thread(target=lambda: found.append(lead(2, 60.0)))
    asking.start()
    asking.join()
    [ranks] = found
    assert isinstance(ranks.launch, OwnLaunch)
    [process] = ranks.launch.processes
    process.join(0.5)
    assert process.is_alive()
    ranks.stop()
    assert process.exitcode == 0
