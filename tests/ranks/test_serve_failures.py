"""``hpu-duo serve`` by two ranks, one of which is killed or hangs: one error, and nothing half."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

PROMPT = "The passkey for Joel is loom actor camel."
ASKED = {"prompt": PROMPT, "temperature": 0, "max_tokens": 400, "ignore_eos": True, "stream": True}
PATIENCE_S = 120.0
OPTIONS = (
    "serve --port 0 --tensor-parallel-size 2 --max-num-seqs 2 --max-model-len 512 --num-blocks 16 "
    "--graphs eager --rank-timeout-seconds 4"
)


class Server:
    """A server that runs.

    Attributes:
        process: rank 0.
        url: of the server.
        follower: process of rank 1.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        told = ""
        while not (found := re.search(r"serving \S+ at (http://[^\s,]+)", told)):
            told += (line := process.stderr.readline())
            assert line, told
        self.url = found[1]
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        [self.follower] = (
            child for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()
        )
        with httpx.Client(base_url=self.url) as http:
            end = time.monotonic() + PATIENCE_S
            while http.get("/ready").status_code != 200:
                assert time.monotonic() < end
                time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and the rest of what was told."""
        _, told = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, told


@contextmanager
def server(*options: str) -> Iterator[Server]:
    """A server for as long as the context lasts."""
    command = [sys.executable, "-m", "hpu_duo.cli", *OPTIONS.split(), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def stream_until(one: Server, number: signal.Signals) -> list[str]:
    """Send rank 1 a signal in the middle of a stream; returns the data of all events."""
    with (
        httpx.Client(base_url=one.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json=ASKED) as answer,
    ):
        lines = answer.iter_lines()
        seen = [next(lines) for _ in range(6)]
        os.kill(one.follower, number)
        seen += lines
    return [line.removeprefix("data: ") for line in seen if line.startswith("data: ")]


def is_there(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def ends_with_an_error(events: list[str], named: str) -> None:
    """Check that a stream is cut short by an error, and that nothing in it says that it were whole."""
    *texts, last = (json.loads(event) for event in events)
    assert re.search(named, last["error"]["message"]), last
    assert all(choice["finish_reason"] is None for event in texts for choice in event["choices"])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "named"),
    [
        (signal.SIGKILL, r"rank 1 ended with exit code -9; all ranks have ended"),
        (signal.SIGSTOP, r"rank 1 sent no heartbeat for \d s; all ranks have ended"),
    ],
)
def test_a_stream_ends_with_an_error_that_names_the_rank_and_the_server_with_it(
    number: signal.Signals, named: str
) -> None:
    with server() as one:
        ends_with_an_error(stream_until(one, number), named)
        code, told = one.end()
        assert code == 1
        assert re.search(named, told)
        assert not is_there(one.follower)


@pytest.mark.slow
def test_a_server_notices_the_loss_of_a_rank_between_calls() -> None:
    with server() as one, httpx.Client(base_url=one.url, timeout=PATIENCE_S) as http:
        assert http.get("/health").status_code == 200
        os.kill(one.follower, signal.SIGKILL)
        code, told = one.end()
        assert code == 1
        assert "rank 1 ended with exit code -9" in told


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_rank_notices_the_loss_of_the_server() -> None:
    with server() as one:
        one.process.kill()
        one.process.wait()
        end = time.monotonic() + PATIENCE_S
        while is_there(one.follower):
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.slow
def test_calls_end_before_ranks_do_where_all_processes_are_told_to_stop() -> None:
    with server() as one:
        with (
            httpx.Client(base_url=one.url, timeout=PATIENCE_S) as http,
            http.stream("POST", "/v1/completions", json={**ASKED, "max_tokens": 60}) as answer,
        ):
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(6)]
            for pid in (one.follower, one.process.pid):
                os.kill(pid, signal.SIGTERM)
            seen += lines
        assert seen[-2] == "data: [DONE]"
        assert one.end()[0] == 0
        assert not is_there(one.follower)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_server_that_is_told_to_stop_leaves_no_stopped_rank_behind() -> None:
    with server("--rank-timeout-seconds", "60", "--drain-seconds", "1") as one:
        with (
            httpx.Client(base_url=one.url, timeout=PATIENCE_S) as http,
            http.stream("POST", "/v1/completions", json=ASKED) as answer,
        ):
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(6)]
            os.kill(one.follower, signal.SIGSTOP)
            one.process.send_signal(signal.SIGTERM)
            seen += lines
        assert "error" in seen[-2]
        # The rank has the other end of the pipe that this reads to its end.
        code, told = one.end()
        assert code == 0
        assert "the engine was stopped in a step: other ranks were killed" in told
        assert "stopping without it" not in told
        assert not is_there(one.follower)
