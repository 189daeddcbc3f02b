"""``hpu-duo serve``: what it refuses before it loads, and its life as a process."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import Result

MESSAGES = [
    {
        "role": "user",
        "content": "It was a quiet night. The passkey for Joel is loom actor camel. Remember it. "
        "The passkey for Nina is vase oats copper. Remember it. What is the passkey for Joel?",
    }
]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_the_built_in_model_until_a_signal_comes(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "hpu_duo.cli", "serve", "--port", "0", "--max-num-seqs", "2"]
    limits = ["--max-model-len", "512", "--num-blocks", "8", "--graphs", "eager", "--api-key", "secret"]
    with subprocess.Popen([*command, *limits], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        while not (found := re.search(r"serving builtin at (\S+)", "".join(lines))):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        with httpx.Client(base_url=found[1].rstrip(","), timeout=30) as http:
            assert http.get("/live").status_code == 200
            while http.get("/health").status_code != 200:
                time.sleep(0.05)
            asked = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20}
            assert http.post("/v1/chat/completions", json=asked).status_code == 401
            headers = {"Authorization": "Bearer secret"}
            done = http.post("/v1/chat/completions", json=asked, headers=headers).json()
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(30) == {signal.SIGTERM: 0, signal.SIGINT: 130}[number], rest
    assert done["choices"][0]["message"]["content"] == " loom actor camel."
    assert done["choices"][0]["finish_reason"] == "stop"
    assert "Traceback" not in rest


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(hpu_duo: Callable[..., Result]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = hpu_duo("serve", "--port", str(port), "--model", "/nowhere")
    assert refused.exit_code == 2
    assert str(port) in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-queue", "-1"), "max_queue"),
        (("--drain-seconds", "-1"), "drain_seconds"),
        (("--flush-seconds", "-1"), "flush_seconds"),
        (("--answer-memory", "1MiB"), "answer_memory_bytes"),
        (("--max-body-size", "lots"), "lots"),
        (("--generation-config", "mine"), "generation-config"),
        (("--tool-call-parser", "mine"), "hermes"),
        (("--api-key", ""), "API key"),
        (("--api-key-file", "/nowhere"), "/nowhere"),
        (("--chat-template", "/nowhere"), "/nowhere"),
        (("--ssl-keyfile", "/nowhere"), "/nowhere"),
        (("--metrics-namespace", "my app"), "metrics_namespace"),
        (("--metrics-namespace", ""), "metrics_namespace"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--port", "99999"), "99999"),
        (("--profile-steps", "3"), "--profile-dir"),
        (("--model", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_options_end_with_a_sentence(
    hpu_duo: Callable[..., Result], arguments: tuple[str, str], said: str
) -> None:
    refused = hpu_duo("serve", "--port", "0", "--max-model-len", "512", *arguments)
    assert refused.exit_code == 2, refused.output
    assert said in refused.stderr


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    from hpu_duo.cli.serving.options import ListeningOptions

    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n  second \n")
    assert ListeningOptions(api_key=["zeroth"], api_key_file=file).keys == ("zeroth", "first", "second")
    file.write_text("\n")
    with pytest.raises(ValueError, match="found none"):
        _ = ListeningOptions(api_key_file=file).keys


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_page_can_be_left_out(is_wanted: bool) -> None:
    from hpu_duo.cli.serving.options import CallOptions, ListeningOptions

    config = CallOptions().config(None, {"has_page": is_wanted}, ListeningOptions())
    assert config.has_page is is_wanted


def test_a_model_of_the_hub_is_served_under_its_id(tmp_path: Path) -> None:
    from hpu_duo.cli.serving.options import CallOptions, ListeningOptions

    snapshot = tmp_path / "models--some-org--tiny.llama" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    for path, name in ((snapshot, "some-org/tiny.llama"), (tmp_path / "mine", "mine"), (None, "builtin")):
        served = CallOptions().config(path, {}, ListeningOptions())
        assert served.model_names == (name,)
