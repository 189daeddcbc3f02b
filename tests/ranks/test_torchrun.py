"""Ranks that torchrun starts, as on two machines: two launches that meet on the loopback interface."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from hpu_duo.cli.app import app

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
GENERATE = (
    *("generate", "--device", "cpu", "--dtype", "float32", "--temperature", "0", "--json"),
    *("--max-new-tokens", "16", "--num-blocks", "16", "--max-model-len", "256"),
)
PROMPTS = ("--prompt", "The passkey for Joel is loom actor camel.", "--prompt", "Once upon a time")
OF_TWO = ("--tensor-parallel-size", "2", "--rank-launcher", "torchrun")
PATIENCE_S = 300


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment() -> dict[str, str]:
    """That of a user, without what a launcher of the tests may have set."""
    of_torch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in of_torch}


def two_machines(*of_second: str) -> list[tuple[int, str, str]]:
    """Run the command on both; returns exit codes and outputs.

    Args:
        of_second: more options of the second machine.
    """
    port = free_port()
    launches = []
    for node in range(2):
        command = [
            *(*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "hpu_duo.cli"),
            *(*GENERATE, *PROMPTS, *OF_TWO, *(of_second if node else ())),
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        launches.append(subprocess.Popen(command, env=environment(), **pipes))  # type: ignore[call-overload]
    try:
        done = [launch.communicate(timeout=PATIENCE_S) for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    return [(launch.returncode, *each) for launch, each in zip(launches, done)]


def texts(output: str) -> list[object]:
    return [each["text"] for each in json.loads(output)["completions"]]


@pytest.mark.slow
@pytest.mark.long
def test_ranks_of_two_launches_give_the_tokens_of_one() -> None:
    alone = CliRunner().invoke(app, [*GENERATE, *PROMPTS])
    assert alone.exit_code == 0, alone.stderr
    (code, output, told), (other_code, other_output, other_told) = two_machines()
    assert (code, other_code) == (0, 0), told + other_told
    assert texts(output) == texts(alone.stdout)
    assert other_output == "", "rank 0 alone writes"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_machines_with_another_setting_are_refused_by_its_name() -> None:
    (code, _, told), (other_code, _, _) = two_machines("--max-num-seqs", "7")
    assert code != 0
    assert other_code != 0
    assert "expected all ranks to have the same setting max_num_seqs, got '2' on rank 0 and '7'" in told


@pytest.mark.slow
@pytest.mark.exhaustive
def test_torchrun_starts_a_server_again_whose_rank_is_killed() -> None:
    port = free_port()
    command = [
        *(*TORCHRUN, "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-m", "hpu_duo.cli"),
        *("serve", "--port", str(port), "--max-num-seqs", "2", "--max-model-len", "256", "--num-blocks", "8"),
        *("--graphs", "eager", *OF_TWO),
    ]
    asked = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    with (
        subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        try:
            until_ready(http, process)
            expected = http.post("/v1/completions", json=asked).json()["choices"]
            os.kill(rank_of(process.pid, 1), signal.SIGKILL)
            until(lambda: not is_ready(http))
            until_ready(http, process)
            assert http.post("/v1/completions", json=asked).json()["choices"] == expected
            process.send_signal(signal.SIGTERM)
            _, told = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert len(re.findall("serving builtin at", told)) == 2


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank that a launcher has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    wanted = f"RANK={rank}".encode()
    variables = {int(one): Path(f"/proc/{one}/environ").read_bytes().split(b"\0") for one in children}
    [found] = [pid for pid, each in variables.items() if wanted in each]
    return found


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.HTTPError:
        return False


def until_ready(http: httpx.Client, process: subprocess.Popen[str]) -> None:
    def is_over() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read()
        return is_ready(http)

    until(is_over)


def until(is_so: object) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.1)
