"""``hpu-duo serve --replicas 2`` as a user starts it; a replica is killed or hangs within a stream."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import serve, tokens_of
from tests.replicas.streams import texts_and_ends

PROMPT = "The passkey for Joel is loom actor camel."
PATIENCE_S = 240
LIMITS = "--max-num-seqs 2 --max-model-len 2048 --num-blocks 40 --graphs eager"
ASKED = {"prompt": PROMPT, "temperature": 0, "max_tokens": 200, "ignore_eos": True}


class Served:
    """Two replicas behind one address.

    Attributes:
        http: a client of the address.
    """

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def replicas(self) -> list[dict[str, Any]]:
        """Statistics of each."""
        return list(self.http.get("/stats").json()["replicas"])

    def wait_until_ready(self) -> None:
        """Wait for all replicas."""
        deadline = time.monotonic() + PATIENCE_S
        while any(each["state"] != "ready" for each in self.replicas()):
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def answer(self) -> str:
        """The text of an answer."""
        return str(self.http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"])

    def stream_until(self, harm: Any) -> tuple[str, list[str]]:
        """Text and ends of a stream; ``harm`` is called with the process of its replica."""
        with self.http.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as answer:
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(6)]
            (busy,) = (each for each in self.replicas() if each["stats"]["num_open"])
            harm(busy["pid"])
            seen += lines
        return texts_and_ends(seen)


@contextmanager
def two_replicas(options: str = "", *, tells_errors: bool = False) -> Iterator[Served]:
    """Two replicas that are ready, and end well; what they tell has no traceback unless one is expected."""
    command = [sys.executable, "-m", "hpu_duo.cli", "serve", "--port", "0", "--replicas", "2"]
    asked = [*command, *LIMITS.split(), *options.split()]
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        while not (found := re.search(r"behind (http://\S+),", told)):
            told += (line := process.stderr.readline())
            assert line, told
        served = Served(found[1])
        try:
            with served.http:
                served.wait_until_ready()
                yield served
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0, rest
    assert tells_errors or "Traceback" not in rest


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="hung", marks=pytest.mark.exhaustive),
    ],
)
def test_a_replica_that_is_lost_takes_no_answer_for_complete_and_comes_back(harm: signal.Signals) -> None:
    with two_replicas() as served:
        whole = served.answer()
        # One that hangs leaves health checks without an answer, and is killed for that.
        text, ends = served.stream_until(lambda pid: os.kill(pid, harm))
        assert ends == ["replica_lost"]
        assert whole.startswith(text)
        assert len(text) < len(whole)
        # The other one serves, and answers the same.
        assert served.answer() == whole
        served.wait_until_ready()
        assert sorted(each["num_restarts"] for each in served.replicas()) == [0, 1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_replica_of_two_ranks_that_loses_one_ends_and_comes_back_with_both() -> None:
    options = "--tensor-parallel-size 2 --rank-timeout-seconds 20"
    expected = answer_of_one_rank()
    # The replica tells of the step that its lost rank has failed.
    with two_replicas(options, tells_errors=True) as served:
        pids = [each["pid"] for each in served.replicas()]
        assert all(len(ranks_of(pid)) == 1 for pid in pids)
        whole = served.answer()
        assert whole == expected
        text, ends = served.stream_until(lambda pid: os.kill(ranks_of(pid)[0], signal.SIGKILL))
        assert not {"length", "stop"}.intersection(ends)
        assert len(ends) == 1
        assert whole.startswith(text)
        assert len(text) < len(whole)
        assert served.answer() == whole
        deadline = time.monotonic() + PATIENCE_S
        while sum(each["num_restarts"] for each in served.replicas()) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        served.wait_until_ready()
        assert served.answer() == whole
        now = [each["pid"] for each in served.replicas()]
        assert len({*pids} & {*now}) == 1
        assert all(len(ranks_of(pid)) == 1 for pid in now)


def answer_of_one_rank() -> str:
    """The answer of one engine of one rank."""
    model = HPUDuoModel.from_pretrained(MODEL_DIR, max_num_seqs=2, max_model_len=2048, num_blocks=40)
    assert model.tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=ASKED["max_tokens"], ignore_eos=True)
    [[tokens]] = tokens_of(serve(model, [model.tokenizer(PROMPT).input_ids], [params]))
    return str(model.tokenizer.decode(tokens, skip_special_tokens=True))


def ranks_of(pid: int) -> list[int]:
    """Processes of the other ranks of a replica."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    return [each for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
