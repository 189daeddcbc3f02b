"""``hpu-duo serve --replicas 2`` as a user starts it; a replica is killed or hangs within a stream."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.replicas.streams import texts_and_ends

PROMPT = "The passkey for Joel is loom actor camel."
PATIENCE_S = 120


@pytest.mark.slow
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_replica_that_is_lost_takes_no_answer_for_complete_and_comes_back(harm: signal.Signals) -> None:
    command = [sys.executable, "-m", "hpu_duo.cli", "serve", "--port", "0", "--replicas", "2"]
    limits = ["--max-num-seqs", "2", "--max-model-len", "2048", "--num-blocks", "40", "--graphs", "eager"]
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 1000, "ignore_eos": True}
    with subprocess.Popen([*command, *limits], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        while not (found := re.search(r"behind (http://\S+),", told)):
            told += (line := process.stderr.readline())
            assert line, told
        with httpx.Client(base_url=found[1], timeout=PATIENCE_S) as http:

            def replicas() -> list[dict[str, object]]:
                return list(http.get("/stats").json()["replicas"])

            def all_ready() -> None:
                deadline = time.monotonic() + PATIENCE_S
                while any(each["state"] != "ready" for each in replicas()):
                    assert time.monotonic() < deadline
                    time.sleep(0.1)

            all_ready()
            whole = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
                lines = answer.iter_lines()
                seen = [next(lines) for _ in range(6)]
                with httpx.Client(base_url=found[1], timeout=PATIENCE_S) as other:
                    stats = other.get("/stats").json()["replicas"]
                (busy,) = (each for each in stats if each["stats"]["num_open"])
                os.kill(busy["pid"], harm)
                # One that hangs leaves health checks without an answer, and is killed for that.
                seen += lines
            text, ends = texts_and_ends(seen)
            assert ends == ["replica_lost"]
            assert whole.startswith(text)
            assert len(text) < len(whole)
            # The other one serves, and answers the same.
            assert http.post("/v1/completions", json=asked).json()["choices"][0]["text"] == whole
            all_ready()
            assert sorted(each["num_restarts"] for each in replicas()) == [0, 1]
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0, rest
    assert "Traceback" not in rest
