"""Processes that are started: what they find, what they give back, and that none is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpu_duo.device import WorkerError, own_device, process_environments, run_processes
from tests.device import work

ROOT = Path(__file__).parents[2]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has asked for its exit code does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_each_process_has_its_environment_before_it_imports_and_gives_its_result_back() -> None:
    before = dict(os.environ)
    first, second = run_processes(work.look_around, ("hello",), [{"OWN": "a"}, {"OWN": "b"}])
    for rank, found in enumerate((first, second)):
        now = found["now"]
        assert isinstance(now, dict)
        assert found["argument"] == "hello"
        assert found["sum"] == [3, 3, 3]
        assert found["at import"] == {"RANK": str(rank), "OWN": "ab"[rank]}
        assert (now["LOCAL_RANK"], now["WORLD_SIZE"], now["LOCAL_WORLD_SIZE"]) == (str(rank), "2", "2")
    assert dict(os.environ) == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_no_environment_is_refused_since_it_means_no_process() -> None:
    with pytest.raises(ValueError, match=r"^expected the environment of at least 1 process, got an empty"):
        run_processes(work.look_around, ("hello",), [])


@pytest.mark.parametrize(
    ("how", "told", "shown"),
    [
        ("unhashable", r"(?s)^process 1 failed: TypeError: .*in fail\n.*unhashable type: 'list'", ""),
        (
            "abort",
            r"^process 1 terminated with signal SIGABRT",
            r"(?s)Fatal Python error: Aborted.* in fail\n",
        ),
    ],
)
def test_a_process_that_fails_takes_the_others_down_and_is_the_one_named(
    how: str, told: str, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerError, match=told) as raised:
        run_processes(work.fail, (how,), [{}, {}])
    assert raised.value.rank == 1
    assert re.search(shown, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("interrupt", "^process 0 failed: KeyboardInterrupt"),
        ("leave", "^process 0 ended before its work was done$"),
    ],
)
def test_a_process_that_ends_well_without_a_result_has_failed(how: str, told: str) -> None:
    with pytest.raises(WorkerError, match=told):
        run_processes(work.fail, (how,), [{}])


def test_processes_that_take_too_long_are_ended() -> None:
    with pytest.raises(WorkerError, match=r"^processes 0, 1 had not ended after 0\.01 s$"):
        run_processes(work.fail, ("none",), [{}, {}], deadline_s=0.01)


def test_arguments_that_cannot_be_sent_are_an_error_and_start_nothing() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        run_processes(work.look_around, (threading.Lock(),), [{}])


def written(folder: Path) -> list[str]:
    """Process numbers that are in files; a file is empty before its number is written."""
    return [text for path in folder.glob("*.pid") if (text := path.read_text())]


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_process_outlives_the_one_that_started_it(sent: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, which is passed on, and a death that leaves no time to pass anything on."""
    command = [sys.executable, "-m", "tests.device.work", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(written(tmp_path)) == 2 or parent.poll() is not None)
        pids = [int(text) for text in written(tmp_path)]
        parent.send_signal(sent)
        _, told = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert parent.returncode == (130 if sent == signal.SIGINT else -sent), told
    wait_for(lambda: not any(map(is_alive, pids)))
    assert len(pids) == 2
    assert {path.name for path in tmp_path.glob("*.saved")} == {"0.saved", "1.saved"}
    assert "Traceback" not in told


def test_devices_are_given_out_by_rank_and_not_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert process_environments("cpu", 3) == [{}, {}, {}]
    with pytest.raises(ValueError, match="expected at least 1 process, got 0"):
        process_environments("cpu", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert process_environments("cuda", 2) == [{}, {}]
    with pytest.raises(ValueError, match="at most 2 processes, one for each cuda device, got 3"):
        process_environments("cuda", 3)
    assert process_environments("cuda:1", 3) == [{}, {}, {}], "one device for all was asked for"
    assert own_device(torch.device("cuda"), 1) == torch.device("cuda", 1)
    assert own_device(torch.device("cuda", 0), 1) == torch.device("cuda", 0)
    assert own_device(torch.device("cpu"), 1) == torch.device("cpu")
    assert own_device(torch.device("hpu"), 1) == torch.device("hpu"), "an HPU process has one device"
